"""One API request in flight: its choices, from the engine's tokens to text that may be shown, and the one end of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec
import structlog

from ..bus import Bus
from ..contexts import OutputContext
from ..errors import RequestCancelledError, ServerFault, TokenbusError, plain_text
from ..hook_answers import filtered_text_problem
from ..hooks import TextFilter
from ..host import Impl
from ..messages import Finish
from ..plan import TokenLogprobs
from ..request import AdmittedRequest
from .admission import Admission
from .detokenizer import make_detokenizer
from .events import RequestRecord
from .reader import CallDelta, OutputReader
from .stream import TokenStream
from .tokenizer import Tokenizer

log = structlog.get_logger("tokenbus.request")


class Delta(msgspec.Struct, kw_only=True):
    """What a choice gained. The last one has `finished`; then the choice's `finish_reason` is set."""

    text: str
    """Content: what is neither reasoning nor a call."""
    tokens: list[int]
    reasoning: str = ""
    calls: list[CallDelta] = []
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `tokens`, if asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For prompt positions from the second on, as they become known."""
    finished: bool = False


class Choice:
    """One answer. `deltas` gives its text in order; afterwards the attributes say how it ended."""

    def __init__(
        self,
        index: int,
        request: AdmittedRequest,
        stream: TokenStream,
        tokenizer: Tokenizer,
        hooks: Sequence[Impl],
        *,
        skip_special: bool,
        reader: OutputReader | None = None,
    ) -> None:
        self.index = index
        """Place in the API's list of choices."""
        self.request = request
        self.stream = stream
        self.output_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.first_token_at: float | None = None
        self.gaps: list[float] = []
        self._hooks = hooks
        self._last_at = 0.0
        self._stopped = False
        self._filters: list[tuple[TextFilter, Impl]] | None = None
        self._reader = reader
        self._detokenizer = make_detokenizer(
            tokenizer,
            skip_special=skip_special,
            context=request.prompt,
            shown=None if reader is None else reader.special_ids(tokenizer.markers),
        )

    @property
    def finish(self) -> Finish | None:
        return self.stream.finish

    async def deltas(self) -> AsyncIterator[Delta]:
        """Ends after the delta that is `finished`. Raises the TokenbusError that ended the request."""
        if self._filters is None:
            self._filters = [pair for impl in self._hooks if (pair := self._make_filter(impl)) is not None]
        prompt_logprobs: list[TokenLogprobs] = []
        async for chunk in self.stream:
            prompt_logprobs += chunk.prompt_logprobs or ()
            if self._stopped or not chunk.tokens:
                continue
            delta = self._take(chunk.tokens, chunk.logprobs)
            delta.prompt_logprobs, prompt_logprobs = prompt_logprobs or None, []
            if self._stopped:
                await self._await_end()
                yield self._end(delta)
                return
            if self.stream.finish is not None and self.stream.finish.error is None:
                yield self._end(delta)
                return
            yield delta
        yield self._end(Delta(text="", tokens=[], prompt_logprobs=prompt_logprobs or None))

    async def _await_end(self) -> None:
        """The text has ended; the engine's last word (counts, notes) is still to come. Its failure no longer matters."""
        self.stream.cancel("stop")
        with contextlib.suppress(TokenbusError):
            async for _ in self.stream:
                pass

    def _make_filter(self, impl: Impl) -> tuple[TextFilter, Impl] | None:
        context = OutputContext(self.request.request_id, self.request.fields, self.request.choice)
        made = impl(request=context)
        return None if made is None else (made, impl)

    def _take(self, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> Delta:
        self._note_time(len(tokens))
        if not (self._filters or self._reader):
            self.output_tokens += len(tokens)
            return Delta(text=self._detokenizer.feed(tokens), tokens=tokens, logprobs=logprobs)
        delta = Delta(text="", tokens=[])
        used = 0
        for token in tokens:
            used += 1
            self._show(self._detokenizer.feed((token,)), delta, final=False)
            if self._stopped:
                break
        self.output_tokens += used
        delta.tokens, delta.logprobs = tokens[:used], None if logprobs is None else logprobs[:used]
        return delta

    def _show(self, text: str, delta: Delta, *, final: bool) -> None:
        """Put new text into `delta`, past the filters and as it is read."""
        if self._filters:
            text = self._filtered(text, final=final)
        if self._reader is None:
            delta.text += text
            return
        read = self._reader.feed(text, final=final or self._stopped)
        delta.text += read.text
        delta.reasoning += read.reasoning
        for call in read.calls:
            if delta.calls and delta.calls[-1].index == call.index:
                delta.calls[-1].arguments += call.arguments
            else:
                delta.calls.append(call)
        self._stopped = self._stopped or read.ended

    def _filtered(self, text: str, *, final: bool) -> str:
        for text_filter, impl in self._filters or ():
            if not (text or final):
                return text
            try:
                answer = text_filter.feed(text, final=final)
            except Exception as error:
                raise impl.failure(f"{type(error).__name__}: {plain_text(error)}") from error
            if (problem := filtered_text_problem(answer)) is not None:
                raise impl.failure(problem)
            text, reason = answer
            if reason is not None and not self._stopped:
                self._stopped, self.stop_reason = True, reason
                final = True
        return text

    def _end(self, delta: Delta) -> Delta:
        finish = self.stream.finish
        assert finish is not None
        if not self._stopped:
            self._show(self._detokenizer.flush(), delta, final=True)
        if self._stopped:
            self.finish_reason = "stop"
        elif finish.reason in ("stop", "length"):
            self.finish_reason = finish.reason
            if finish.stop_token is not None and finish.reason == "stop":
                self.stop_reason = self._named_stop(finish.stop_token)
        else:
            raise RequestCancelledError(f"the request was ended by the server ({finish.reason})")
        if self.finish_reason == "stop" and self._reader is not None and self._reader.made:
            self.finish_reason = "tool_calls"
        delta.finished = True
        return delta

    def _named_stop(self, token_id: int) -> int | None:
        """A stop token that the client named is reported; the model's own end token is not."""
        return token_id if token_id in (self.request.fields.get("stop_token_ids") or ()) else None

    def _note_time(self, count: int) -> None:
        now = time.time()
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.gaps.append((now - self._last_at) / count)
        self._last_at = now


Emit = Callable[[list[tuple[Choice, Delta]]], Awaitable[None]]


class Generation:
    """A context manager: on the way out every choice that is still open is cancelled, every choice is recorded once on the bus, and
    one line goes to the log, without any text."""

    def __init__(
        self,
        admission: Admission,
        streams: Sequence[TokenStream],
        tokenizer: Tokenizer,
        bus: Bus,
        readers: Sequence[OutputReader | None],
    ) -> None:
        self.admission = admission
        self.choices = [
            Choice(
                index,
                request,
                stream,
                tokenizer,
                admission.table.text_filter,
                skip_special=admission.parsed.skip_special_tokens,
                reader=reader,
            )
            for index, (request, stream, reader) in enumerate(zip(admission.requests, streams, readers, strict=True))
        ]
        self.group = admission.parsed.group
        self._bus = bus
        self._error: TokenbusError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(value, TokenbusError):
            self._error = value
        elif isinstance(value, Exception) and not isinstance(value, (ConnectionError, OSError)):
            self._error = ServerFault(f"{type(value).__name__}: {value}")
        now = time.time()
        for choice in self.choices:
            choice.stream.cancel()
            self._bus.publish(self._record(choice, now))
        self._log(now)

    def failed(self, error: TokenbusError) -> None:
        """The request ended with `error`, which was told to the client and is not raised any further."""
        self._error = error

    async def run(self, emit: Emit) -> None:
        """Give everything to `emit`, what is ready at one time in one call. Raises the error of the first choice that fails."""
        if len(self.choices) == 1:
            choice = self.choices[0]
            async for delta in choice.deltas():
                await emit([(choice, delta)])
            return
        ready: list[tuple[Choice, Delta]] = []
        errors: list[Exception] = []
        wake = anyio.Event()

        async def follow(choice: Choice) -> None:
            try:
                async for delta in choice.deltas():
                    ready.append((choice, delta))
                    wake.set()
            except Exception as error:
                errors.append(error)
                wake.set()

        async with anyio.create_task_group() as tasks:
            for choice in self.choices:
                tasks.start_soon(follow, choice)
            open_choices = len(self.choices)
            while open_choices and not errors:
                await wake.wait()
                wake = anyio.Event()
                batch, ready = ready, []
                open_choices -= sum(delta.finished for _, delta in batch)
                try:
                    if batch:
                        await emit(batch)
                except Exception as error:  # as it is, not in the task group's ExceptionGroup
                    errors.insert(0, error)
            tasks.cancel_scope.cancel()
        if errors:
            raise errors[0]

    @property
    def open(self) -> int:
        return sum(choice.finish_reason is None for choice in self.choices)

    def _record(self, choice: Choice, now: float) -> RequestRecord:
        parsed, finish = self.admission.parsed, choice.finish
        reason, error_kind, media = choice.finish_reason or self._end_reason(), "", choice.request.media
        if reason == "error":
            error_kind = type(self._error).__name__ if self._error is not None else ""
        return RequestRecord(
            request_id=choice.request.request_id,
            group=self.group,
            endpoint=parsed.endpoint,
            tenant=parsed.tenant,
            arm=self.admission.arm,
            arrival=parsed.arrival,
            prompt_tokens=len(choice.request.prompt),
            cached_tokens=finish.cached_tokens if finish else 0,
            output_tokens=choice.output_tokens,
            finish_reason=reason,
            error_kind=error_kind,
            ttft=None if choice.first_token_at is None else choice.first_token_at - parsed.arrival,
            e2e=now - parsed.arrival,
            gaps=tuple(choice.gaps),
            tokenize_seconds=parsed.tokenize_seconds,
            template_seconds=parsed.template_seconds,
            preemptions=finish.preemptions if finish else 0,
            draft_tokens=finish.draft_tokens if finish else 0,
            accepted_tokens=finish.accepted_tokens if finish else 0,
            resumptions=choice.stream.resumptions,
            media=len(media),
            media_tokens=sum(item.length for item in media),
            media_bytes=sum(item.size for item in media),
            media_seconds=sum(prompt.media_seconds for prompt in parsed.prompts),
        )

    def _end_reason(self) -> str:
        return "cancelled" if self._error is None or isinstance(self._error, RequestCancelledError) else "error"

    def _log(self, now: float) -> None:
        parsed = self.admission.parsed
        reasons = [choice.finish_reason or self._end_reason() for choice in self.choices]
        first = [choice.first_token_at for choice in self.choices if choice.first_token_at is not None]
        entry: dict[str, Any] = {
            "id": self.group,
            "endpoint": parsed.endpoint,
            "arm": self.admission.arm or "default",
            "prompt_tokens": sum(len(prompt.token_ids) for prompt in parsed.prompts),
            "output_tokens": sum(choice.output_tokens for choice in self.choices),
            "finish_reason": reasons[0] if len(set(reasons)) == 1 else ",".join(reasons),
            "ttft": round(min(first) - parsed.arrival, 4) if first else None,
            "seconds": round(now - parsed.arrival, 4),
        }
        if len(self.choices) > 1:
            entry["choices"] = len(self.choices)
        if media := [item for prompt in parsed.prompts for item in prompt.media]:
            entry["media"] = len(media)
            entry["media_tokens"] = sum(item.length for item in media)
            entry["media_seconds"] = round(sum(prompt.media_seconds for prompt in parsed.prompts), 4)
        if resumed := max((choice.stream.resumptions for choice in self.choices), default=0):
            entry["resumed"] = resumed
        if self._error is not None:
            entry |= {"error_kind": type(self._error).__name__, "error": self._error.message}
        log.info("request_finished", **entry)
