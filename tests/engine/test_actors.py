from __future__ import annotations

import anyio
import pytest

from tokenbus.core.actors import Mailbox

pytestmark = pytest.mark.anyio


async def test_offer_refuses_when_full_and_counts_it():
    mailbox: Mailbox[int] = Mailbox(2)
    assert [mailbox.offer(i) for i in range(4)] == [True, True, False, False]
    assert mailbox.refused == 2
    assert len(mailbox) == 2
    assert [mailbox.take(), mailbox.take(), mailbox.take()] == [0, 1, None]
    mailbox.destroy()


async def test_put_waits_for_room():
    mailbox: Mailbox[int] = Mailbox(1)
    done: list[int] = []

    async def fill() -> None:
        for i in range(3):
            await mailbox.put(i)
            done.append(i)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fill)
        await anyio.wait_all_tasks_blocked()
        assert done == [0]
        assert [await mailbox.receive() for _ in range(3)] == [0, 1, 2]
    assert done == [0, 1, 2]
    mailbox.destroy()


async def test_what_is_inside_can_be_taken_after_close():
    mailbox: Mailbox[int] = Mailbox(4)
    mailbox.offer(1)
    mailbox.offer(2)
    mailbox.close()
    with pytest.raises(anyio.ClosedResourceError):
        mailbox.offer(3)
    assert mailbox.take() == 1
    assert await mailbox.receive() == 2
    with pytest.raises(anyio.EndOfStream):
        mailbox.take()
    with pytest.raises(anyio.EndOfStream):
        await mailbox.receive()
    mailbox.destroy()


async def test_close_wakes_the_receiver():
    mailbox: Mailbox[int] = Mailbox(1)
    async with anyio.create_task_group() as tasks:

        async def receive() -> None:
            with pytest.raises(anyio.EndOfStream):
                await mailbox.receive()

        tasks.start_soon(receive)
        await anyio.wait_all_tasks_blocked()
        mailbox.close()
    mailbox.destroy()
