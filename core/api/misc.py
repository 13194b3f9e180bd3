"""Models, tokenising, health, and the admin surface."""

from __future__ import annotations

import time
from typing import Any, get_args

import msgspec
from aiohttp import web

from ..errors import FieldError, NotFoundError, UnavailableError, shorten
from ..front.detokenizer import decode_all
from ..front.service import Service
from ..params import check_switches
from ..plugin import Slot
from .app import Call, Endpoint, Routes, error_response, json_response
from .events import add_event_routes
from .generate import chat, chat_options, check_model, completions
from .logprobs import name_of
from .wire import DetokenizeBody, FeaturesBody, TokenizeBody, convert, decode_object

CORE_DEFAULTS: dict[str, str] = {
    "attention": "core (torch)",
    "scheduling": "core (first come, first served)",
    "quantization": "core (the checkpoint's own weights)",
    "tool_calls": "none",
}
"""What holds a slot that no plugin holds."""
MOST_DIGITS = 18
"""Of a number in a query: Python refuses to read numbers of thousands of digits."""


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
    routes.add("GET", "/v1/tokenbus/features", Endpoint(features, "admin"))
    routes.add("POST", "/v1/tokenbus/features", Endpoint(set_features, "admin"))
    routes.add("GET", "/v1/tokenbus/plans", Endpoint(plans, "admin"))


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
    is_ready, reason = call.service.client.ready()
    if not is_ready:
        return error_response(UnavailableError(reason, retry_after=2.0))
    return json_response({"status": "ready"})


# ---- admin ----------------------------------------------------------------------------------------------------------------------


def feature_state(service: Service) -> dict[str, Any]:
    """Every plugin: on, off, or off because of something, after all rewrites; and who holds each slot."""
    client, info = service.client, service.client.info
    switches = client.switches
    holders = {slot: service.host.holder(slot, switches.on) for slot in get_args(Slot)}
    slots = {slot: holder or CORE_DEFAULTS[slot] for slot, holder in holders.items()}
    table: dict[str, Any] = {}
    for name in sorted(service.host.catalogue):
        plugin = service.host.info(name)
        entry: dict[str, Any] = {"on": name in switches.on, "scope": plugin.scope, "lossless": plugin.lossless}
        if name not in switches.on and name in switches.reasons:
            entry["because"] = switches.reasons[name]
        if plugin.slot is not None:
            entry["slot"] = plugin.slot
            if name not in switches.on and slots[plugin.slot] == CORE_DEFAULTS[plugin.slot]:
                entry["because"] = f"{entry.get('because', 'not on by default')}; its slot is held by {slots[plugin.slot]}"
        if name in client.refusing:
            entry["failed"] = client.refusing[name].message
        table[name] = entry
    lossless: dict[str, Any] = {"lossless": True if info is None else info.lossless}
    if info is not None and not info.lossless:
        lossless["because"] = info.lossless_reason
    clients = list(service.config.server.client_features)
    return {"features": table, "slots": slots, "kernels": lossless, "client_features": clients}


async def features(call: Call) -> web.Response:
    return json_response(feature_state(call.service))


async def set_features(call: Call) -> web.Response:
    body = convert(decode_object(await call.body()), FeaturesBody)
    check_switches(body.features, "features")
    await call.service.client.set_features(body.features, call.who)
    return json_response(feature_state(call.service))


async def plans(call: Call) -> web.Response:
    most = call.service.config.scheduler.plan_history
    text = call.request.query.get("last", "16")
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and 1 <= int(text) <= most):
        raise FieldError("last", f"must be between 1 and {most}")
    reply = msgspec.to_builtins(await call.service.client.query("plans", last=int(text)))
    return json_response({"plans": reply["plans"] if isinstance(reply, dict) else reply})
