"""What the client has asked the engine and waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio

from ..errors import TokenbusError
from ..host import Switches


@dataclass(frozen=True, slots=True)
class Change:
    """A switch change on its way to the engine and back. It counts whether or not whoever asked for it still waits."""

    changes: dict[str, bool]
    who: str
    target: Switches
    """What will be on if the engine agrees."""


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
