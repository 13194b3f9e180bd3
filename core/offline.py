"""The engine without HTTP: `LLM(model).generate(prompts, SamplingParams(...))`. Everything below the API is the server's own.

An event loop on a thread of its own runs the front (tokenizer, admission, detokeniser, supervision); the engine is a process beside it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import anyio
import anyio.from_thread
import msgspec
import structlog

from . import logs
from .bus import Bus
from .config import Config, from_mapping, merge
from .errors import ConfigError, FieldError, TokenbusError
from .front.admission import ParsedRequest, Prompt, new_id
from .front.chat import ChatOptions
from .front.client import EngineClient
from .front.generation import Choice, Delta
from .front.media import own_prompt
from .front.service import Service, load_text_parts
from .front.startup import check_pool
from .front.values import check_depth
from .host import make_host
from .messages import EngineInfo
from .models.resolve import resolve
from .params import MAX_NAME_CHARS, SamplingParams, asks_for_nothing
from .plan import TokenLogprobs
from .settings_cli import sections

CORE_PARAMS = frozenset({"n", "max_tokens", "temperature", "seed", "timeout", "features", "extra", "skip_special_tokens"})

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text with the model's marker for each of them, "images": [...], "audio": [...]}."""


class Completion(msgspec.Struct, kw_only=True):
    """One of the n answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    """"stop" or "length"."""
    stop_reason: str | int | None = None
    """The stop string or named stop token that ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if asked for."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """A prompt and its answers."""

    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None
    """From the second prompt token on, if asked for."""
    seed: int = 0
    cached_tokens: int = 0
    """Prompt tokens that a cache gave."""
    features: tuple[str, ...] = ()
    notes: dict[str, str] = {}


def _close_at_exit(llm: LLM) -> None:
    """For a program that ends without `close`, with an error maybe: Python joins the portal's thread before it calls what `atexit`
    knows, and would wait for ever. What `threading` itself calls comes first; concurrent.futures uses the same."""
    left = weakref.ref(llm)

    def close() -> None:
        if (one := left()) is not None:
            one.close()

    register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(close)


class LLM:
    """A model, ready to generate. Use it as a context manager, or call `close`.

    model: as for `--model`. Keyword arguments are settings by name, whatever section they stand in (`dtype="float32"`,
    `token_budget=512`, `enable=("scheduling.priority",)`); `config` is a whole Config, or nested plain data, that they go over.
    Raises ConfigError, ModelError, PluginLoadError.
    """

    def __init__(self, model: str = "demo", *, config: Config | Mapping[str, Any] | None = None, **settings: Any) -> None:
        self.config = _config(model, config, settings)
        if not structlog.is_configured():
            logs.configure_logs(self.config.server.log_format, self.config.server.log_level)
        self._stack = ExitStack()
        try:
            self._portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal())
            self._service = self._start()
            self._limit = self._portal.call(anyio.Semaphore, self._service.client.capacity)
        except BaseException:
            self._stack.close()
            raise
        _close_at_exit(self)

    def _start(self) -> Service:
        config = self.config
        host = make_host("front", config)
        switches = host.start_switches(config.features.enable, config.features.disable)
        check_pool(config, host, switches)
        bus = Bus()
        client = EngineClient(config, bus, host, switches)
        running, _ = self._portal.start_task(client.run)
        self._stack.callback(self._stop, client, running)
        model = resolve(config.model.model)
        tokenizer, template = load_text_parts(model, config)
        self._portal.call(client.wait_ready)
        name = config.model.served_model_name or model.name
        service = Service(config, host, client, bus, model_name=name, tokenizer=tokenizer, template=template)
        self._stack.callback(service.close)
        return service

    def _stop(self, client: EngineClient, running: Future[Any]) -> None:
        self._portal.call(client.close)
        running.result()

    def close(self) -> None:
        """End the engine process. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        return self._service.info

    def switch(self, **features: bool) -> None:
        """Switch plugins live; in names, write two underscores for a dot. ConflictError says why a change is refused."""
        changes = {name.replace("__", "."): wish for name, wish in features.items()}
        self._portal.call(self._service.client.set_features, changes, "offline")

    # ---- generating -------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (see `PromptLike`); outputs in the order of the prompts.

        One SamplingParams for all, or one for each. Raises the RequestError of the first prompt that is refused, the error of the
        first that fails; the others are cancelled.
        """
        listed = _as_prompts(prompts)
        each = [SamplingParams()] * len(listed) if params is None else _each(params, len(listed))
        if len(each) != len(listed):
            raise FieldError("params", f"{len(each)} SamplingParams for {len(listed)} prompts")
        return self._run_all(list(zip(listed, each, strict=True)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        use_tqdm: bool = False,
        **options: Any,
    ) -> RequestOutput:
        """Answer a conversation, through the model's chat template. options: fields of `front.chat.ChatOptions`.

        Contents may have the parts of the HTTP API, and {"type": "image", "image": ...} (a PIL image, an array [height, width, 3] of uint8,
        a path, or a file's bytes) and {"type": "audio", "audio": ...} (a path, a file's bytes, or (samples, sampling rate))."""
        return self._run_all([(self._chat_prompt(messages, options), params or SamplingParams())], use_tqdm)[0]

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Prompt ids of a conversation."""
        return self._chat_prompt(messages, options).token_ids

    def _chat_prompt(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Prompt:
        encode = partial(self._service.encode_chat, messages, ChatOptions(**options), own=True)
        made = self._portal.call(encode)
        return Prompt(made.token_ids, media=made.media, media_seconds=made.media_seconds)

    def stream(self, prompt: PromptLike, params: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of one answer's text as they come. Leaving the iteration cancels the request."""
        params = params or SamplingParams()
        if params.n != 1:
            raise FieldError("n", "a stream has one choice")
        send, receive = self._portal.call(_pipe)
        future = self._portal.start_task_soon(self._stream_into, prompt, params, send)
        try:
            while (piece := self._portal.call(_next_piece, receive)) is not None:
                yield piece
            future.result()
        finally:
            future.cancel()
            self._portal.call(receive.aclose)

    async def _stream_into(self, prompt: PromptLike, params: SamplingParams, send: Any) -> None:
        async def show(batch: list[tuple[Choice, Delta]]) -> None:
            for _, delta in batch:
                if delta.text:
                    await send.send(delta.text)

        async with send:
            await self._one(prompt, params, show)

    def _run_all(self, work: list[tuple[PromptLike | Prompt, SamplingParams]], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        bar = tqdm(total=len(work), desc="prompts", disable=not use_tqdm, dynamic_ncols=True)
        tokens = 0

        def done(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(choice.token_ids) for choice in output.outputs)
            bar.set_postfix_str(f"{tokens / max(1e-9, time.monotonic() - began):.1f} tok/s")
            bar.update()

        began = time.monotonic()
        future = self._portal.start_task_soon(self._gather, work, done)
        with bar:
            try:
                return future.result()
            except BaseException:
                future.cancel()
                raise

    async def _gather(self, work: list[tuple[PromptLike | Prompt, SamplingParams]], done: Any) -> list[RequestOutput]:
        outputs: list[RequestOutput | None] = [None] * len(work)
        failures: list[TokenbusError] = []

        async def one(index: int) -> None:
            try:
                outputs[index] = output = await self._one(*work[index])
            except TokenbusError as error:
                failures.append(error)
                tasks.cancel_scope.cancel()
            else:
                done(output)

        async with anyio.create_task_group() as tasks:
            for index, (_, params) in enumerate(work):
                for _ in range(params.n):
                    await self._limit.acquire()
                tasks.start_soon(self._limited, one, index, params.n)
        if failures:
            raise failures[0]
        return [output for output in outputs if output is not None]

    async def _limited(self, call: Any, index: int, permits: int) -> None:
        try:
            await call(index)
        finally:
            for _ in range(permits):
                self._limit.release()

    async def _prompt(self, prompt: PromptLike | Prompt) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return Prompt(await self._service.encode_text(prompt, add_special_tokens=True), prompt)
        if isinstance(prompt, Mapping):
            return await self._service.encode_with_media(*own_prompt(prompt))
        return Prompt(_ids(prompt))

    async def _one(self, prompt: PromptLike | Prompt, params: SamplingParams, show: Any = None) -> RequestOutput:
        arrival, before = time.time(), time.perf_counter()
        parsed_prompt = await self._prompt(prompt)
        parsed = ParsedRequest(
            endpoint="generate",
            prompts=[parsed_prompt],
            n=params.n,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=params.seed,
            timeout=params.timeout,
            skip_special_tokens=params.skip_special_tokens,
            fields=_fields(params),
            features=dict(params.features),
            own_features=True,
            group=new_id("gen"),
            arrival=arrival,
            tokenize_seconds=max(0.0, time.perf_counter() - before - parsed_prompt.media_seconds),
        )
        generation = await self._service.start(parsed)
        answers = [Completion(index=choice.index, token_ids=[]) for choice in generation.choices]
        prompt_logprobs: list[TokenLogprobs] = []

        async def collect(batch: list[tuple[Choice, Delta]]) -> None:
            for choice, delta in batch:
                answer = answers[choice.index]
                answer.text += delta.text
                answer.token_ids += delta.tokens
                if delta.logprobs is not None:
                    answer.logprobs = (answer.logprobs or []) + delta.logprobs
                if choice.index == 0:
                    prompt_logprobs.extend(delta.prompt_logprobs or ())
            if show is not None:
                await show(batch)

        with generation:
            await generation.run(collect)
        for choice, answer in zip(generation.choices, answers, strict=True):
            answer.finish_reason, answer.stop_reason = choice.finish_reason, choice.stop_reason
        finish = generation.choices[0].finish
        return RequestOutput(
            prompt=parsed_prompt.text,
            prompt_token_ids=parsed_prompt.token_ids,
            outputs=answers,
            prompt_logprobs=prompt_logprobs or None,
            seed=generation.admission.seeds[0],
            cached_tokens=finish.cached_tokens if finish else 0,
            features=finish.features if finish else generation.admission.features,
            notes=finish.notes if finish else {},
        )


def _config(model: str, config: Config | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Config:
    base = msgspec.to_builtins(config) if isinstance(config, Config) else dict(config or {"server": {"log_level": "warning"}})
    homes = {field.name: section for section, struct in sections().items() for field in msgspec.structs.fields(struct)}
    over: dict[str, Any] = {"model": {"model": model}} if config is None or model != "demo" else {}
    for name, value in settings.items():
        if name == "plugins":
            over["plugins"] = value
        elif name in homes:
            over.setdefault(homes[name], {})[name] = list(value) if isinstance(value, (tuple, set)) else value
        else:
            raise ConfigError(f"there is no setting {name!r}")
    return from_mapping(merge(base, over), "LLM(...)")


def _as_prompts(prompts: PromptLike | Iterable[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, str):
        return [prompts]
    given: Any = prompts
    if isinstance(given, Mapping):
        return [given]
    listed: list[Any] = list(given)
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed


def _each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    return [params] * count if isinstance(params, SamplingParams) else list(params)


def _fields(params: SamplingParams) -> dict[str, Any]:
    """What the plugins must honour."""
    given = {name: value for name, value in msgspec.structs.asdict(params).items() if name not in CORE_PARAMS}
    fields = {name: value for name, value in (given | params.extra).items() if not asks_for_nothing(name, value)}
    for name, value in fields.items():
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
            raise FieldError(str(name), "unknown field")
        check_depth(name, value)
    return fields


def _ids(prompt: Any) -> list[int]:
    """FieldError unless the prompt is a sequence of ints."""
    if not isinstance(prompt, Sequence) or any(type(token_id) is not int for token_id in prompt):
        raise FieldError("prompt", "must be a string, a list of token ids, or a dict with prompt and images or audio")
    return list(prompt)


async def _pipe() -> Any:
    return anyio.create_memory_object_stream[str](64)


async def _next_piece(receive: Any) -> str | None:
    try:
        return await receive.receive()
    except anyio.EndOfStream:
        return None
