"""The feed: what viewers of a running server are shown (/dashboard, `tokenbus top`, `tokenbus doctor`), as frames of plain data.

    engine/watch.py ──query──> one task while anybody views ──frame, encoded once──> a bounded queue for each viewer

Without a viewer the engine is asked nothing; then a request costs an entry in three bounded queues as it ends, and a step nothing. A viewer
that is slow misses frames and is told how many. docs/dashboard.md describes a frame.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import anyio
import msgspec

from ..bus import Bus
from ..config import SchedulerConfig
from ..errors import OverloadedError, TokenbusError, plain_text
from .client import EngineClient
from .events import (
    ChangeRefused,
    EngineDied,
    EngineStarted,
    FeatureChange,
    LoopLag,
    RequestRecord,
    RequestRefused,
    SettingsChange,
)

PERIOD = 0.25
"""Seconds between two frames."""
SLOW_PERIOD = 1.0
"""Seconds between two frames that have the slow part."""
WINDOW = 300.0
"""Seconds of ended requests that percentiles and counts are made of."""
MOST_VIEWERS = 32
QUEUE = 8
"""Frames that wait for a viewer."""
MOST_EVENTS = 50
LIMITS = ("max_running", "max_waiting", "token_budget")
GAPS_PER_REQUEST = 32
"""Inter-token latencies kept of one request, evenly spread over its output."""

_encode = msgspec.json.Encoder().encode


class Viewer:
    """An async iterator of frames, encoded. It ends when the server does."""

    def __init__(self) -> None:
        self.dropped = 0
        """Frames there was no room for since the last that was delivered."""
        self._queue: deque[msgspec.Raw] = deque()
        self._wake = anyio.Event()
        self._closed = False

    def offer(self, frame: msgspec.Raw) -> None:
        if len(self._queue) >= QUEUE:
            self.dropped += 1
            return
        self._queue.append(frame)
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[msgspec.Raw]:
        while True:
            while self._queue:
                if self.dropped:
                    missed, self.dropped = self.dropped, 0
                    yield msgspec.Raw(_encode({"missed_frames": missed}))
                yield self._queue.popleft()
            if self._closed:
                return
            self._wake = anyio.Event()
            await self._wake.wait()


class Feed:
    """One for each server. Everything runs on the front's event loop."""

    def __init__(self, client: EngineClient, bus: Bus, limits: Callable[[], SchedulerConfig]) -> None:
        """limits: what holds now."""
        self._client = client
        self._limits = limits
        self._history = History(bus)
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[dict[str, Any] | None] | None = None
        self._slow_at = 0.0

    def join(self) -> Viewer:
        """A new viewer; its first frame has the slow part. OverloadedError when there are too many. The caller calls `leave`."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise OverloadedError(f"{MOST_VIEWERS} viewers watch already: close one", retry_after=10.0)
        viewer = Viewer()
        self._viewers.add(viewer)
        self._slow_at = 0.0
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Idempotent. The last one turns out the light."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _serve(self) -> None:
        try:
            while not self._over():
                began = time.monotonic()
                frame = msgspec.Raw(_encode(await self._frame()))
                for viewer in tuple(self._viewers):
                    viewer.offer(frame)
                await asyncio.sleep(max(0.0, began + PERIOD - time.monotonic()))
        finally:
            if self._asking is not None:
                self._asking.cancel()
                self._asking = None
            if self._task is asyncio.current_task():
                self._task = None
                for viewer in tuple(self._viewers):
                    viewer.close()

    def _over(self) -> bool:
        """The server ends, and nobody waits for an answer any more."""
        state = self._client.state
        return state == "stopped" or (state == "draining" and not self._client.open_requests)

    async def _frame(self) -> dict[str, Any]:
        slow = time.monotonic() - self._slow_at >= SLOW_PERIOD
        frame: dict[str, Any] = {"time": time.time(), "server": self._server()}
        engine = await self._ask(slow=slow)
        if engine is not None:
            requests, blocks = engine.pop("requests"), engine.pop("blocks")
            frame |= {
                "steps": engine.pop("steps"),
                "ids": engine.pop("ids"),
                "lost_steps": engine.pop("lost"),
                "engine": engine,
            }
            if requests is not None:
                frame |= {"requests": requests, "blocks": blocks}
        if slow:
            self._slow_at = time.monotonic()
            frame |= self._history.shown(time.time())
            limits = self._limits()
            frame["limits"] = {name: getattr(limits, name) for name in LIMITS}
            frame["info"] = self._client.info
        return frame

    def _server(self) -> dict[str, Any]:
        client = self._client
        ready, doubt = client.ready()
        return {
            "state": client.state,
            "doubt": "" if ready else doubt,
            "open": client.open_requests,
            "restarts": client.restarts,
            "suspects": client.suspects,
        }

    async def _ask(self, *, slow: bool) -> dict[str, Any] | None:
        """The engine's answer; None when it has none within a frame's time (it answers between two steps) or there is no engine. An answer
        that comes late is in a later frame."""
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._query(slow=slow))
        done, _ = await asyncio.wait((self._asking,), timeout=PERIOD)
        if not done:
            return None
        answered, self._asking = self._asking, None
        return answered.result()

    async def _query(self, *, slow: bool) -> dict[str, Any] | None:
        try:
            return msgspec.to_builtins(await self._client.query("watch", slow=slow))
        except TokenbusError:  # the frame's `server` says what state the engine is in
            return None


class Ended(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a request that has ended: numbers and texts only, so that the garbage collector need not look at them."""

    when: float
    kind: str
    """Its finish reason, or the class of its error."""
    failed: bool
    prompt: int
    cached: int
    output: int
    preemptions: int
    arm: str
    ttft: float | None
    inter_token: float | None
    """Mean time between its tokens."""


class History:
    """What the front's bus has told lately. Bounded, whatever comes."""

    def __init__(self, bus: Bus) -> None:
        self._ended: deque[Ended] = deque(maxlen=2048)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=8192)
        self._refused: deque[tuple[float, str]] = deque(maxlen=2048)
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._lag: dict[str, LoopLag] = {}
        bus.listen(self._on_record, RequestRecord)
        bus.listen(self._on_refused, RequestRefused)
        bus.listen(self._on_lag, LoopLag)
        bus.listen(self._on_change, FeatureChange)
        bus.listen(self._on_settings, SettingsChange)
        bus.listen(self._on_refusal, ChangeRefused)
        bus.listen(self._on_started, EngineStarted)
        bus.listen(self._on_died, EngineDied)

    def shown(self, now: float) -> dict[str, Any]:
        """The part of a frame that is made here."""
        since = now - WINDOW
        ended = [one for one in self._ended if one.when >= since]
        return {
            "window_seconds": WINDOW,
            "latency": {
                "ttft": percentiles(one.ttft for one in ended if one.ttft is not None),
                "inter_token": percentiles(value for when, value in self._gaps if when >= since),
            },
            "finished": dict(Counter(one.kind for one in ended)),
            "ended": {
                "requests": len(ended),
                "prompt_tokens": sum(one.prompt for one in ended),
                "cached_tokens": sum(one.cached for one in ended),
                "output_tokens": sum(one.output for one in ended),
                "preemptions": sum(one.preemptions for one in ended),
            },
            "arms": _by_arm(ended),
            "refused": dict(Counter(kind for when, kind in self._refused if when >= since)),
            "lag": {name: {"seconds": lag.seconds, "step_age": lag.step_age} for name, lag in self._lag.items()},
            "events": list(self._events),
        }

    def _on_record(self, record: RequestRecord) -> None:
        now = record.arrival + record.e2e
        known = record.ttft is not None and record.output_tokens > 1
        self._ended.append(
            Ended(
                when=now,
                kind=record.error_kind or record.finish_reason,
                failed=record.finish_reason == "error",
                prompt=record.prompt_tokens,
                cached=record.cached_tokens,
                output=record.output_tokens,
                preemptions=record.preemptions,
                arm=record.arm,
                ttft=record.ttft,
                inter_token=(record.e2e - (record.ttft or 0.0)) / (record.output_tokens - 1) if known else None,
            )
        )
        stride = max(1, -(-len(record.gaps) // GAPS_PER_REQUEST))
        self._gaps.extend((now, gap) for gap in record.gaps[::stride])

    def _on_refused(self, refused: RequestRefused) -> None:
        self._refused.append((time.time(), f"{refused.status} {refused.kind}"))

    def _on_lag(self, lag: LoopLag) -> None:
        self._lag[lag.process] = lag

    def _on_change(self, change: FeatureChange) -> None:
        text = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in sorted(change.changes.items()))
        self._event(change.when, "switch", f"{text} (by {plain_text(change.who)})")

    def _on_settings(self, change: SettingsChange) -> None:
        text = ", ".join(f"{name} = {value}" for name, value in sorted(change.after.items()))
        self._event(change.when, "setting", f"{text} (by {plain_text(change.who)})")

    def _on_refusal(self, refused: ChangeRefused) -> None:
        asked = ", ".join(f"{name} = {value}" for name, value in sorted(refused.asked.items()))
        self._event(refused.when, "refused", f"refused: {asked} (by {plain_text(refused.who)}): {plain_text(refused.reason)}")

    def _on_started(self, started: EngineStarted) -> None:
        self._event(time.time(), "engine", f"engine ready: {started.info.model}, restarts {started.restarts}")

    def _on_died(self, died: EngineDied) -> None:
        self._event(time.time(), "death", f"engine died: {plain_text(died.reason)}; {died.open_requests} open requests")

    def _event(self, when: float, kind: str, text: str) -> None:
        self._events.append({"when": when, "kind": kind, "text": text})


def _by_arm(ended: Iterable[Ended]) -> dict[str, Any]:
    """Of requests that were in experiments, by arm ("EXPERIMENT/ARM"). inter_token: each request's mean."""
    arms: dict[str, list[Ended]] = {}
    for one in ended:
        for arm in filter(None, one.arm.split(",")):
            arms.setdefault(arm, []).append(one)
    return {
        arm: {
            "requests": len(them),
            "errors": sum(one.failed for one in them),
            "ttft": percentiles(one.ttft for one in them if one.ttft is not None),
            "inter_token": percentiles(one.inter_token for one in them if one.inter_token is not None),
        }
        for arm, them in sorted(arms.items())
    }


def percentiles(values: Iterable[float]) -> dict[str, Any]:
    """Count, and by nearest rank p50, p95, p99 and the largest; only the count when there are none."""
    found = sorted(values)
    if not found:
        return {"count": 0}
    return {
        "count": len(found),
        "p50": _rank(found, 50),
        "p95": _rank(found, 95),
        "p99": _rank(found, 99),
        "max": found[-1],
    }


def _rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
