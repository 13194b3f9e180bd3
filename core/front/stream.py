"""A request's output as its reader sees it: an async iterator of token chunks with exactly one end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

import anyio
import msgspec

from ..errors import TokenbusError, from_wire
from ..messages import Finish
from ..plan import TokenLogprobs

CancelReason = Literal["cancelled", "stop", "deadline"]


class TokenChunk(msgspec.Struct, kw_only=True):
    """What came since the last chunk. A reader that is slow gets fewer, longer chunks."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `tokens`, if asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For prompt positions, in order, if asked for; the chunk may then have no tokens."""


class TokenStream:
    """Yields TokenChunk, then ends once: normally with `finish` set, or by raising the TokenbusError that ended the request.

    Bounded by construction: what waits unread is merged into one chunk, and a request has at most `max_tokens` tokens.
    As a context manager it cancels the request on the way out, if it is still open. One reader.
    """

    def __init__(self, request_id: str, cancel: Callable[[str, CancelReason], None]) -> None:
        self.request_id = request_id
        self.finish: Finish | None = None
        """How it ended; None while it is open."""
        self.resumptions = 0
        """Engines that died while they had the request."""
        self._cancel = cancel
        self._waiting: TokenChunk | None = None
        self._wake: anyio.Event | None = None

    def cancel(self, reason: CancelReason = "cancelled") -> None:
        """Ask the engine to end the request. Idempotent; the stream still ends by itself, within a step or two."""
        if self.finish is None:
            self._cancel(self.request_id, reason)

    def push(
        self, tokens: list[int], logprobs: list[TokenLogprobs] | None, prompt_logprobs: list[TokenLogprobs] | None
    ) -> None:
        """The owner's: more output, in order. Takes over the lists."""
        chunk = self._waiting
        if chunk is None:
            self._waiting = TokenChunk(tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        else:
            chunk.tokens.extend(tokens)
            chunk.logprobs = _joined(chunk.logprobs, logprobs)
            chunk.prompt_logprobs = _joined(chunk.prompt_logprobs, prompt_logprobs)
        self._notify()

    def end(self, finish: Finish) -> None:
        """The owner's: nothing comes after this. RuntimeError when it has ended before."""
        if self.finish is not None:
            raise RuntimeError(f"request {self.request_id!r} ended twice")
        self.finish = finish
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        while self._waiting is None and self.finish is None:
            self._wake = anyio.Event()
            await self._wake.wait()
        if self._waiting is not None:
            chunk, self._waiting = self._waiting, None
            return chunk
        assert self.finish is not None
        if self.finish.error is not None:
            raise from_wire(self.finish.error)
        raise StopAsyncIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()


def failed(error: TokenbusError) -> Finish:
    """The end of a request that `error` ended."""
    return Finish(reason="error", error=error.to_wire())


def _joined(old: list[TokenLogprobs] | None, new: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    return (old or []) + new if new else old
