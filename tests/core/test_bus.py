from __future__ import annotations

import pytest

from tokenbus.core.bus import Bus

pytestmark = pytest.mark.anyio


async def test_events_reach_those_who_asked_for_their_type_in_order():
    bus = Bus()
    ints = bus.subscribe(int)
    heard = []
    bus.listen(heard.append, str)
    for event in (1, "a", 2, "b", 3.0):
        bus.publish(event)
    ints.close()
    assert [event async for event in ints] == [1, 2]
    assert heard == ["a", "b"]


async def test_a_slow_subscriber_drops_and_counts_and_delays_nobody():
    bus = Bus()
    slow = bus.subscribe(int, maxsize=3)
    for i in range(10):
        bus.publish(i)
    assert slow.dropped == 7
    slow.close()
    assert [event async for event in slow] == [0, 1, 2]


async def test_a_listener_that_raises_is_counted_and_the_others_still_hear():
    bus = Bus()
    heard = []
    bad = bus.listen(lambda event: 1 / 0, int)
    bus.listen(heard.append, int)
    bus.publish(5)
    assert bad.failures == 1
    assert heard == [5]


async def test_closing_is_idempotent_and_wants_tells_whether_anybody_listens():
    bus = Bus()
    assert not bus.wants(int)
    listener = bus.listen(lambda event: None, int)
    assert bus.wants(int)
    listener.close()
    listener.close()
    assert not bus.wants(int)
