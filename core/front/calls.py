"""What the front asks its engine and waits for: each question has an id, and one answer, which may be that the engine is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from ..errors import RequestError, TokenbusError, UnavailableError, from_wire
from ..ipc import FrameError
from ..messages import Query, Reply, SetFeatures


class Call:
    """A question on its way."""

    def __init__(self) -> None:
        self._done = anyio.Event()
        self._value: Any = None
        self._error: TokenbusError | None = None

    def answer(self, value: Any, error: TokenbusError | None) -> None:
        """The first answer counts."""
        if not self._done.is_set():
            self._value, self._error = value, error
            self._done.set()

    async def wait(self) -> Any:
        """The value; raises the error."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Calls:
    def __init__(self, post: Callable[[Query | SetFeatures], bool], refusal: Callable[[], UnavailableError]) -> None:
        """post: False when no engine takes questions, FrameError when this one can't be sent. refusal: what is raised without an engine."""
        self._post = post
        self._refusal = refusal
        self._open: dict[int, Call] = {}
        self._last_id = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def ask(self, message: Query | SetFeatures) -> Call:
        """Send it. Raises UnavailableError when no engine can answer, RequestError when it can't be sent."""
        try:
            sent = self._post(message)
        except FrameError as error:
            raise RequestError(f"the engine can't be asked: {error}") from error
        if not sent:
            raise self._refusal()
        call = self._open[message.call_id] = Call()
        return call

    async def answer(self, call_id: int, call: Call) -> Any:
        """Wait for it; raises the error that was answered."""
        try:
            return await call.wait()
        finally:
            self._open.pop(call_id, None)

    def reply(self, message: Reply) -> None:
        """The engine's answer; nobody may wait for it any more."""
        if (call := self._open.get(message.call_id)) is not None:
            value = message.value if message.switches is None else message.switches
            call.answer(value, None if message.error is None else from_wire(message.error))

    def end(self, error: UnavailableError) -> None:
        """There will be no answers: the engine is gone."""
        for call in tuple(self._open.values()):
            call.answer(None, error)
