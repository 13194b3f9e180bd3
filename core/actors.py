"""What actors are made of: a bounded, closable mailbox.

An actor owns its state and is one task; everybody else reaches it through its mailbox only. Overflow is the sender's decision, taken
by the method it calls, and never silent:

    put      waits for room                  back-pressure: whoever can wait (a reader of a socket) stops reading
    offer    returns False when it is full   load shedding: whoever can't wait (admission) refuses its own caller

Closing (`close`) lets the owner take what is already in it; then `receive` raises `anyio.EndOfStream` and senders get
`anyio.ClosedResourceError`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Mailbox(Generic[T]):
    """First in, first out; holds at most `capacity` messages. One receiver, any number of senders, all on one event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.refused = 0
        """Messages that `offer` had no room for."""
        self._send, self._receive = anyio.create_memory_object_stream[T](capacity)

    async def put(self, message: T) -> None:
        """Hand over a message; waits while the mailbox is full."""
        await self._send.send(message)

    def offer(self, message: T) -> bool:
        """Hand over a message now. False, and `refused` counts it, when the mailbox is full."""
        try:
            self._send.send_nowait(message)
        except anyio.WouldBlock:
            self.refused += 1
            return False
        return True

    async def receive(self) -> T:
        """The oldest message; waits for one. Raises EndOfStream once the mailbox is closed and empty."""
        return await self._receive.receive()

    def take(self) -> T | None:
        """The oldest message, or None when there is none now. Raises EndOfStream once the mailbox is closed and empty."""
        try:
            return self._receive.receive_nowait()
        except anyio.WouldBlock:
            return None

    def close(self) -> None:
        """Take no more messages. Idempotent."""
        self._send.close()

    def destroy(self) -> None:
        """Close both ends; what is still inside is lost and waiting senders get BrokenResourceError. Idempotent."""
        self._send.close()
        self._receive.close()

    def __len__(self) -> int:
        return self._receive.statistics().current_buffer_used
