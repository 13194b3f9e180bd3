"""Models, tokenising, health."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ..errors import FieldError, NotFoundError, UnavailableError, shorten
from ..front.detokenizer import decode_all
from ..front.service import Service
from .app import Call, Endpoint, Routes, error_response, json_response
from .events import add_event_routes
from .generate import chat, chat_options, check_model, completions
from .logprobs import name_of
from .wire import DetokenizeBody, TokenizeBody, convert, decode_object


def add_routes(routes: Routes) -> None:
    """Core's own routes. /health and /ready are open: whatever watches the server has no key."""
    created = int(time.time())

    async def models(call: Call) -> web.Response:
        return json_response({"object": "list", "data": [_model(call.service, created)]})

    async def model(call: Call) -> web.Response:
        name = call.request.path.removeprefix("/v1/models/")
        if name != call.service.model_name:
            raise NotFoundError(
                f"the model {shorten(name)!r} is not served here; this server has {call.service.model_name!r}", param="model"
            )
        return json_response(_model(call.service, created))

    routes.add("POST", "/v1/completions", Endpoint(completions, generates="completion"))
    routes.add("POST", "/v1/chat/completions", Endpoint(chat, generates="chat"))
    routes.add("GET", "/v1/models", Endpoint(models))
    routes.add("GET", "/v1/models/*", Endpoint(model))
    add_event_routes(routes)
    routes.add("POST", "/tokenize", Endpoint(tokenize))
    routes.add("POST", "/detokenize", Endpoint(detokenize))
    routes.add("GET", "/health", Endpoint(health, "open"))
    routes.add("GET", "/ready", Endpoint(ready, "open"))


def _model(service: Service, created: int) -> dict[str, Any]:
    info = service.client.info
    return {
        "id": service.model_name,
        "object": "model",
        "created": created,
        "owned_by": "tokenbus",
        "max_model_len": None if info is None else info.max_model_len,
    }


async def tokenize(call: Call) -> web.Response:
    service = call.service
    body = convert(decode_object(await call.body()), TokenizeBody)
    check_model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "give either prompt or messages")
    if body.tools and body.messages is None:
        raise FieldError("tools", "only makes sense with messages: the chat template shows them")
    if body.messages is not None:
        ids = (await service.encode_chat(body.messages, chat_options(body, body.tools))).token_ids
    else:
        ids = await service.encode_text(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [name_of(service.tokenizer, token_id) for token_id in ids]
    return json_response(answer)


async def detokenize(call: Call) -> web.Response:
    service = call.service
    body = convert(decode_object(await call.body()), DetokenizeBody)
    check_model(service, body.model)
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < service.info.vocab_size):
        raise FieldError("tokens", f"token ids must be between 0 and {service.info.vocab_size - 1}")
    return json_response({"prompt": decode_all(service.tokenizer, body.tokens, skip_special=body.skip_special_tokens)})


async def health(_: Call) -> web.Response:
    return json_response({"status": "alive"})


async def ready(call: Call) -> web.Response:
    is_ready, reason = call.service.ready()
    if not is_ready:
        return error_response(UnavailableError(reason, retry_after=2.0))
    return json_response({"status": "ready"})
