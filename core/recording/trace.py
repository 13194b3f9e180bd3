"""A recording as a timeline for Perfetto or chrome://tracing: the Trace Event format, as JSON.

    process "engine"     a row of steps; counters: running, waiting, free blocks
    process "requests"   a row for each request: queue, prefill, decode, verify

Decodes that follow each other are one span; times are microseconds since the recording began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .history import History, Life, StepRecord
from .step_time import Run

ENGINE, REQUESTS = 1, 2


@dataclass
class _Decoding:
    """A span of decodes that may still grow."""

    begin: float
    end: float
    steps: int
    tokens: int


class _Row:
    """One request's spans."""

    def __init__(self, life: Life, events: list[dict[str, Any]]) -> None:
        self._life = life
        self._events = events
        self._queued: float | None = life.arrival.arrival
        self._decoding: _Decoding | None = None

    def span(self, name: str, begin: float, end: float, **arguments: Any) -> None:
        self._events.append(_span(REQUESTS, self._life.arrival.serial, name, begin, end, arguments))

    def ran(self, step: StepRecord, run: Run) -> None:
        begin, end = step.step.at, step.step.at + step.step.seconds
        if self._queued is not None:
            self.span("queue", self._queued, begin)
            self._queued = None
        if run.prompt or run.drafts:
            self.close_decoding()
        if run.prompt:
            media = {"media_tokens": run.media} if run.media else {}
            self.span("prefill", begin, end, tokens=run.n, computed=run.computed, step=step.step.step_id, **media)
        elif run.drafts:
            accepted = next(a for serial, _, a in step.step.drafts if serial == self._life.arrival.serial)
            self.span("verify", begin, end, proposed=run.drafts, accepted=accepted, step=step.step.step_id)
        elif self._decoding is None:
            self._decoding = _Decoding(begin, end, 1, 1)
        else:
            self._decoding.end, self._decoding.steps = end, self._decoding.steps + 1
            self._decoding.tokens += 1

    def preempted(self, at: float) -> None:
        self.close_decoding()
        self._queued = at

    def close_decoding(self) -> None:
        if (one := self._decoding) is not None:
            self.span("decode", one.begin, one.end, tokens=one.tokens, steps=one.steps)
            self._decoding = None

    def close(self) -> None:
        self.close_decoding()
        end = self._life.end
        if self._queued is not None and end is not None:
            self.span("queue", self._queued, end.at, ended=end.reason)


def trace(history: History) -> dict[str, Any]:
    """The whole document, as plain data."""
    events: list[dict[str, Any]] = [
        _name(ENGINE, "engine", "process_name"),
        _name(REQUESTS, "requests", "process_name"),
        _name(ENGINE, "steps", "thread_name", 1),
    ]
    rows = {serial: _Row(life, events) for serial, life in history.lives.items()}
    for serial, life in history.lives.items():
        label = f"{life.arrival.request_id} ({life.arrival.prompt} + {life.outputs} tokens)"
        events.append(_name(REQUESTS, label, "thread_name", serial))
    for one in history.steps:
        step = one.step
        arguments = {
            "requests": len(one.runs),
            "prompt_tokens": sum(run.n for run in one.runs if run.prompt),
            "drafts": sum(run.drafts for run in one.runs),
            "budget": step.budget,
            **({"encoded": step.encoded} if step.encoded else {}),
        }
        events.append(_span(ENGINE, 1, f"step {step.step_id}", step.at, step.at + step.seconds, arguments))
        for name, value in (("running", step.running), ("waiting", step.waiting), ("free blocks", step.free_blocks)):
            events.append({"name": name, "ph": "C", "ts": _micros(step.at), "pid": ENGINE, "args": {name: value}})
        for serial in step.preempted:
            if serial in rows:
                rows[serial].preempted(step.at)
        for serial, run in zip(one.serials, one.runs, strict=True):
            rows[serial].ran(one, run)
    for row in rows.values():
        row.close()
    header = history.header
    about = {"model": header.model, "tokenbus": header.version, "level": header.level, "features": ", ".join(header.features)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _span(pid: int, tid: int, name: str, begin: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": _micros(begin),
        "dur": max(0.0, _micros(end) - _micros(begin)),
        "pid": pid,
        "tid": tid,
        "args": arguments,
    }


def _name(pid: int, name: str, kind: str, tid: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
