"""What a few seconds of a server's feed say, in one object: `tokenbus doctor` judges it, `tokenbus top` shows it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

KEPT_STEPS = 1000


class Facts:
    """Frames go in, in order. Everything is plain data, as it came; `{}` or () where nothing has come."""

    def __init__(self) -> None:
        self.time = 0.0
        """The server's clock, Unix seconds."""
        self.server: Mapping[str, Any] = {}
        self.engine: Mapping[str, Any] = {}
        self.slow: Mapping[str, Any] = {}
        """The newest frame that had the slow part."""
        self.requests: list[list[Any]] = []
        """As in `messages.WatchedRequest`."""
        self.steps: deque[Mapping[str, Any]] = deque(maxlen=KEPT_STEPS)
        self.lost_steps = 0
        self.missed_frames = 0
        self.new_failures = 0
        """KV allocations that failed while the frames came."""

    def take(self, frame: Mapping[str, Any]) -> None:
        if missed := frame.get("missed_frames"):
            self.missed_frames += missed
            return
        self.time = frame["time"]
        self.server = frame["server"]
        if "latency" in frame:
            self.slow = frame
        if "engine" in frame:
            before = self.engine.get("allocation_failures", frame["engine"]["allocation_failures"])
            self.engine = frame["engine"]
            self.new_failures += max(0, self.engine["allocation_failures"] - before)
            self.steps.extend(frame["steps"])
            self.lost_steps += frame["lost_steps"]
        self.requests = frame.get("requests", self.requests)

    @property
    def info(self) -> Mapping[str, Any]:
        return self.slow.get("info") or {}

    @property
    def limits(self) -> Mapping[str, Any]:
        return self.slow.get("limits") or {}

    @property
    def kv_used(self) -> float | None:
        """Share of blocks that requests hold."""
        engine = self.engine
        if not engine or not engine["num_blocks"]:
            return None
        return 1 - (engine["free_blocks"] + engine["retained_blocks"]) / engine["num_blocks"]

    @property
    def oldest_wait(self) -> float:
        """Seconds since the arrival of the request that has waited longest; 0 when nobody waits."""
        return max((self.time - request[6] for request in self.requests if not request[1]), default=0.0)

    @property
    def idle_share(self) -> float | None:
        """Share of the time between two successive steps, of those that left work behind; None when there are too few."""
        idle = busy = 0.0
        for before, step in itertools.pairwise(self.steps):
            if step["step_id"] == before["step_id"] + 1 and before["running"] + before["waiting"] > 1:
                idle += max(0.0, step["started"] - before["started"] - before["duration"])
                busy += before["duration"]
        return idle / (idle + busy) if len(self.steps) >= 10 and idle + busy > 0 else None

    @property
    def machine_share(self) -> float | None:
        """The median step's share of the machine's measured limit: memory bandwidth or arithmetic, whichever it is nearer to."""
        read, flops = self.info.get("read_bytes_per_second"), self.info.get("flops_per_second")
        if not read or not flops or len(self.steps) < 5:
            return None
        shares = sorted(
            max(step["bytes_moved"] / read, step["flops"] / flops) / step["duration"]
            for step in self.steps
            if step["duration"] > 0 and step["bytes_moved"]  # not those that only encoded
        )
        return shares[len(shares) // 2] if shares else None

    @property
    def encode_share(self) -> float | None:
        """Share of the steps' time in which pictures and sounds were encoded; None where no step began any."""
        if not any(step.get("media_tokens") for step in self.steps):
            return None
        return _encoding(self.steps) / max(1e-9, sum(step["duration"] for step in self.steps))

    def rates(self, seconds: float) -> dict[str, float]:
        """Of the steps that ended in the last seconds: tokens, prompt tokens and tokens of media per second, mean step time,
        requests in a step, the encoder's share of the time."""
        since = self.time - seconds
        recent = [step for step in self.steps if step["started"] + step["duration"] >= since]
        if not recent:
            return {"tokens": 0.0, "prompt": 0.0, "steps": 0, "step": 0.0, "requests": 0.0, "media": 0.0, "encode": 0.0}
        span = max(0.001, self.time - max(since, recent[0]["started"]))
        count, busy = len(recent), sum(step["duration"] for step in recent)
        requests = sum(step["num_decodes"] + len(step["prefill"]) + len(step["verify"]) for step in recent)
        return {
            "tokens": sum(step["sampled"] for step in recent) / span,
            "prompt": sum(step["prompt_tokens"] for step in recent) / span,
            "steps": count,
            "step": busy / count,
            "requests": requests / count,
            "media": sum(step.get("media_tokens", 0) for step in recent) / span,
            "encode": _encoding(recent) / max(1e-9, busy),
        }


def _encoding(steps: Iterable[Mapping[str, Any]]) -> float:
    return sum(step["phases"].get("encode", 0.0) for step in steps)
