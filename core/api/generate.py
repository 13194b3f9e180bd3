"""/v1/completions and /v1/chat/completions: body to request, request to answer."""

from __future__ import annotations

import re
import time
from typing import Any

import structlog
from aiohttp import web

from ..errors import FeatureOffError, FieldError, RequestError, ServerFault, TokenbusError, shorten
from ..front.admission import ParsedRequest, Prompt, check_counts, new_id
from ..front.chat import ChatOptions, ChatPrompt
from ..front.generation import Choice, Delta, Generation
from ..front.service import Service
from ..front.tools import check_tools
from ..params import check_switches
from .answers import Answer, ChatAnswer, CompletionAnswer, Shape
from .app import Call, error_body, json_response
from .sse import EventStream
from .wire import Body, ChatBody, CompletionBody, Options, StreamOptions, convert, decode_object, leftover

log = structlog.get_logger(__name__)


async def completions(call: Call) -> web.StreamResponse:
    arrival = time.time()
    data = decode_object(await call.body())
    body = convert(data, CompletionBody)
    service = call.service
    check_model(service, body.model)
    prompts, seconds = await _prompts(service, body)
    parsed = _common(call, body, "completion", prompts, arrival)
    parsed.max_tokens = body.max_tokens
    parsed.tokenize_seconds = seconds
    parsed.fields = leftover(data, CompletionBody) | _logprob_fields(body.logprobs, body, echo=bool(body.echo))
    shape = _shape(service, body)
    shape.logprobs, shape.echo = body.logprobs, bool(body.echo)
    return await _generate(call, parsed, shape, CompletionAnswer, stream=bool(body.stream))


async def chat(call: Call) -> web.StreamResponse:
    arrival = time.time()
    data = decode_object(await call.body())
    body = convert(data, ChatBody)
    service = call.service
    check_model(service, body.model)
    check_counts(_n(body), 1, service.config)
    tools = _tools(data, service)
    messages = body.messages if body.messages is not None else []
    prompt = await service.encode_chat(messages, chat_options(body, tools), seconds=body.timeout)
    parsed = _common(call, body, "chat", [_prompt_of(prompt)], arrival)
    parsed.max_tokens, parsed.tools = _chat_max_tokens(body), tools
    parsed.tokenize_seconds, parsed.template_seconds = prompt.tokenize_seconds, prompt.template_seconds
    top = _chat_logprobs(body)
    parsed.fields = leftover(data, ChatBody) | _logprob_fields(top, body, echo=False)
    shape = _shape(service, body)
    shape.logprobs = top
    names = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    if top:
        names["logprobs"] = "top_logprobs"
    if tools and "structured_outputs" not in data:
        names["structured_outputs"] = "tools"  # a forced call implies it
    try:
        return await _generate(call, parsed, shape, ChatAnswer, stream=bool(body.stream))
    except FeatureOffError:
        raise
    except RequestError as error:
        raise _as_sent(error, names) from None


def _prompt_of(prompt: ChatPrompt) -> Prompt:
    return Prompt(prompt.token_ids, media=prompt.media, media_seconds=prompt.media_seconds)


def _as_sent(error: RequestError, names: dict[str, str]) -> RequestError:
    """`error` with fields called what the client calls them."""
    for name, sent in names.items():
        error.message = re.sub(rf"\b{name}\b", sent, error.message)
        if error.param is not None and error.param.split(".")[0] == name:
            error.param = sent + error.param.removeprefix(name)
    return error


def check_model(service: Service, name: str | None) -> None:
    """NotFoundError unless this model is served."""
    known = name is None or name in (service.model_name, service.config.model.model)
    service.check_model(name if known else shorten(name))


# ---- body to request ------------------------------------------------------------------------------------------------------------


def _n(body: Body) -> int:
    return 1 if body.n is None else body.n


def _common(call: Call, body: Body, endpoint: str, prompts: list[Prompt], arrival: float) -> ParsedRequest:
    options = body.tokenbus or Options()
    check_switches(options.features or {}, "tokenbus.features")
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options", "only makes sense with stream: true")
    return ParsedRequest(
        endpoint=endpoint,
        prompts=prompts,
        n=_n(body),
        temperature=body.temperature,
        seed=body.seed,
        timeout=body.timeout,
        skip_special_tokens=body.skip_special_tokens is not False,
        features=options.features or {},
        headers=_split_headers(call),
        group=new_id("chatcmpl" if endpoint == "chat" else "cmpl"),
        tenant=call.who,
        arrival=arrival,
    )


def _split_headers(call: Call) -> dict[str, str]:
    experiments = call.service.experiments
    if experiments is None:
        return {}
    return {name: value for name in experiments.headers if (value := call.request.headers.get(name))}


async def _prompts(service: Service, body: CompletionBody) -> tuple[list[Prompt], float]:
    """The prompts, and the seconds it took to tokenise them."""
    if body.tokenbus is not None and body.tokenbus.trusted_content:
        raise FieldError("tokenbus.trusted_content", "is for chat: a completions prompt is taken as it is")
    given: Any = body.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    check_counts(_n(body), len(given), service.config)
    add = body.add_special_tokens is not False
    started = time.perf_counter()
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append(Prompt(await service.encode_text(prompt, add_special_tokens=add), prompt))
        else:
            prompts.append(Prompt(prompt))
    return prompts, time.perf_counter() - started


def _tools(data: dict[str, Any], service: Service) -> list[dict[str, Any]]:
    """The tools to offer. With tool_choice "none" there are none to call, so the model isn't shown any and `data` loses their fields."""
    tools = check_tools(data.get("tools"), service.config.limits)
    if tools and data.get("tool_choice") == "none":
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            data.pop(name, None)
        return []
    return tools


def chat_options(body: Any, tools: list[Any] | None) -> ChatOptions:
    """Of any body that has the template's fields. FieldError when two of them contradict each other."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise FieldError(
            "continue_final_message", "contradicts add_generation_prompt: a turn is continued or a new one is begun"
        )
    options = getattr(body, "tokenbus", None) or Options()
    return ChatOptions(
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        add_special_tokens=body.add_special_tokens,
        trusted_content=bool(options.trusted_content),
        tools=tools,
        template_kwargs=body.chat_template_kwargs or {},
    )


def _chat_max_tokens(body: ChatBody) -> int | None:
    both = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(both) > 1:
        raise FieldError("max_completion_tokens", "differs from max_tokens: they mean the same")
    return both.pop() if both else None


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise FieldError("top_logprobs", "needs logprobs: true")
    return None


def _logprob_fields(top: int | None, body: Body, *, echo: bool) -> dict[str, int]:
    """What the logprobs plugin is asked for: alternatives for each new token, and for each prompt token."""
    fields = {} if top is None else {"logprobs": top}
    prompt = body.prompt_logprobs
    if echo and top is not None:
        prompt = top if prompt is None else max(top, prompt)
    if prompt is not None:
        fields["prompt_logprobs"] = prompt
    return fields


def _shape(service: Service, body: Body) -> Shape:
    options = body.stream_options or StreamOptions()
    return Shape(
        model=service.model_name,
        prompt_logprobs=body.prompt_logprobs is not None,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )


# ---- request to answer ----------------------------------------------------------------------------------------------------------


async def _generate(call: Call, parsed: ParsedRequest, shape: Shape, kind: type[Answer], *, stream: bool) -> web.StreamResponse:
    with await call.service.start(parsed) as generation:
        call.admitted = True
        answer = kind(shape, generation, call.service.tokenizer)
        headers = _headers(call, generation)
        if stream:
            return await _streamed(call, generation, answer, headers)
        return await _whole(generation, answer, headers)


def _headers(call: Call, generation: Generation) -> dict[str, str]:
    admission = generation.admission
    return {
        "x-request-id": call.request_id,
        "x-tokenbus-features": ",".join(admission.features),
        "x-tokenbus-arm": admission.arm or "default",
    }


async def _whole(generation: Generation, answer: Answer, headers: dict[str, str]) -> web.Response:
    texts: list[list[str]] = [[] for _ in generation.choices]
    deltas: list[list[Delta]] = [[] for _ in generation.choices]

    async def keep(batch: list[tuple[Choice, Delta]]) -> None:
        for choice, delta in batch:
            texts[choice.index].append(delta.text)
            deltas[choice.index].append(delta)

    await generation.run(keep)
    return json_response(answer.whole(["".join(parts) for parts in texts], deltas), headers=headers)


async def _streamed(call: Call, generation: Generation, answer: Answer, headers: dict[str, str]) -> web.StreamResponse:
    """An error before the first event is an ordinary error answer; one after it is an event, then the terminator."""
    stream = EventStream(call.request, headers, call.service.config.server.stream_comment_seconds)

    async def show(batch: list[tuple[Choice, Delta]]) -> None:
        await stream.send(answer.chunks(batch))

    try:
        with stream:
            await generation.run(show)
    except TokenbusError as error:
        if not stream.started:
            raise
        generation.failed(error)
        return await stream.end([error_body(error)])
    except ConnectionError:
        raise
    except Exception as error:
        if not stream.started:
            raise
        log.exception("request_failed", id=generation.group)
        fault = ServerFault(f"{type(error).__name__} while the answer was made")
        generation.failed(fault)
        return await stream.end([error_body(fault)])
    return await stream.end([answer.usage_chunk()] if answer.shape.include_usage else [])
