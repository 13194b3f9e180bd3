"""What `tokenbus top` shows, as lines of text: the dashboard for a terminal. Made from frames of the feed; nothing here prints.

In the timeline a column is a step: P runs a piece of a prompt, = decodes, V verifies drafts, ! lost its K/V.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

from .facts import Facts

COLOURS = {"P": "33", "=": "34", "V": "32", "!": "31", "head": "1", "quiet": "2", "good": "32", "wrong": "31"}
"""SGR codes."""
RATE_SECONDS = 5.0
KEPT_COLUMNS = 300
ID_WIDTH = 16
LEFT = ID_WIDTH + 32
"""Columns before the timeline."""
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Screen:
    def __init__(self, *, colour: bool = False) -> None:
        self.facts = Facts()
        self.features: Mapping[str, Any] = {}
        """The answer of GET /v1/tokenbus/features, if there is one."""
        self.problem = ""
        """Why nothing new comes."""
        self._colour = colour
        self._steps: deque[dict[str, str]] = deque(maxlen=KEPT_COLUMNS)
        """Of each step: what it did for which request."""

    def take(self, frame: Mapping[str, Any]) -> None:
        self.facts.take(frame)
        decode: list[int] = []
        for step in frame.get("steps", ()):
            decode = decode if step["decode"] is None else step["decode"]
            ids = frame["ids"]
            marks = dict.fromkeys((ids[row] for row in decode), "=")
            marks |= dict.fromkeys((ids[int(row)] for row in step["prefill"]), "P")
            marks |= dict.fromkeys((ids[int(row)] for row in step["verify"]), "V")
            marks |= dict.fromkeys((ids[row] for row in step["preempted"]), "!")
            self._steps.append(marks)

    def lines(self, width: int, height: int) -> list[str]:
        """At most `height` lines of at most `width` columns."""
        head = [self._title(), *self._numbers(), self._pool(width), *self._latency(), ""]
        tail = self._plugins(width) + self._events()
        room = max(3, height - len(head) - len(tail) - 2)
        return [_cut(line, width) for line in head + self._requests(width, room) + [""] + tail][:height]

    def _paint(self, text: str, name: str) -> str:
        return f"\x1b[{COLOURS[name]}m{text}\x1b[0m" if self._colour else text

    def _title(self) -> str:
        info, server = self.facts.info, self.facts.server
        state = self.problem or server.get("doubt") or server.get("state", "connecting")
        good = not self.problem and server.get("state") == "ready" and not server.get("doubt")
        model = f"{info['model']}, {info['dtype']}" if info else ""
        restarts = f"  restarts {server['restarts']}" if server.get("restarts") else ""
        return f"{self._paint('Tokenbus', 'head')}  {_plain(model)}  {self._paint(_plain(state), 'good' if good else 'wrong')}{restarts}"

    def _numbers(self) -> list[str]:
        engine, limits, rates = self.facts.engine, self.facts.limits, self.facts.rates(RATE_SECONDS)
        if not engine:
            return ["the engine has not answered yet"]
        waits = f" (longest {_seconds(self.facts.oldest_wait)})" if engine["waiting"] else ""
        most = f"/{limits['max_running']}" if limits else ""
        step = f"step {_seconds(rates['step'])} with {rates['requests']:.1f} requests" if rates["steps"] else "no step lately"
        load = f"running {engine['running']}{most}  waiting {engine['waiting']}{waits}"
        media = f"  media {rates['media']:.0f}/s, encoder {100 * rates['encode']:.0f} %" if rates["media"] else ""
        return [f"{load}  new tokens {rates['tokens']:.0f}/s  prompt {rates['prompt']:.0f}/s{media}  {step}"]

    def _pool(self, width: int) -> str:
        engine, used = self.facts.engine, self.facts.kv_used
        if used is None:
            return "KV"
        retained = engine["retained_blocks"] / engine["num_blocks"]
        size = max(10, min(50, width - 50))
        full, kept = round(used * size), round(retained * size)
        bar = "#" * full + "+" * min(kept, size - full)
        failures = f"  too few {engine['allocation_failures']} times" if engine["allocation_failures"] else ""
        return f"KV [{bar:.<{size}}] {100 * used:.0f} % used (#), {100 * retained:.0f} % retained (+){failures}"

    def _latency(self) -> list[str]:
        lines = []
        for name, key in (("first token", "ttft"), ("inter-token", "inter_token")):
            found = self.facts.slow.get("latency", {}).get(key, {"count": 0})
            if found["count"]:
                shown = "  ".join(
                    f"{rank} {_seconds(found[key])}" for rank, key in (("50 %", "p50"), ("95 %", "p95"), ("99 %", "p99"))
                )
                lines.append(f"{name}  {shown}  of {found['count']}")
        return lines

    def _requests(self, width: int, room: int) -> list[str]:
        requests = sorted(self.facts.requests, key=lambda one: (not one[1], one[6]))
        columns = max(0, width - LEFT - 1)
        title = f"{'REQUEST':<{ID_WIDTH}} {'STATE':<9}{'PROMPT':>8}{'OUTPUT':>12}  "
        lines = [self._paint(title + "LAST STEPS  P prompt  = decode  V verify  ! preempted", "head")]
        shown = requests[: room - 1 if len(requests) < room else room - 2]
        steps = list(self._steps)[-columns:] if columns else []
        for one in shown:
            request_id, running, prompt, computed, output, most = one[:6]
            state = ("prefill" if computed < prompt else "decode") if running else "preempted" if one[9] else "waiting"
            lines.append(
                f"{_short(request_id):<{ID_WIDTH}} {state:<9}{prompt:>8}{f'{output}/{most}':>12}  {self._marks(request_id, steps)}"
            )
        if more := max(len(requests), self.facts.engine.get("open", 0)) - len(shown):
            lines.append(self._paint(f"and {more} more", "quiet"))
        return lines

    def _marks(self, request_id: str, steps: list[dict[str, str]]) -> str:
        text = "".join(step.get(request_id, " ") for step in steps)
        if not self._colour:
            return text
        return re.sub(r"(\S)\1*", lambda run: self._paint(run[0], run[1]), text)

    def _plugins(self, width: int) -> list[str]:
        table = self.features.get("features", {})
        lines = []
        for title, wish in (("on ", True), ("off", False)):
            names = [name + (" (failed)" if one.get("failed") else "") for name, one in table.items() if one["on"] is wish]
            if names:
                lines += _wrapped(title, names, width)
        return lines

    def _events(self) -> list[str]:
        refused = self.facts.slow.get("refused", {})
        lines = [f"refused lately: {', '.join(f'{n} x {kind}' for kind, n in sorted(refused.items()))}"] if refused else []
        return lines + [_plain(event["text"]) for event in self.facts.slow.get("events", [])[-3:]]


def _wrapped(title: str, names: list[str], width: int) -> list[str]:
    lines = [title]
    for name in names:
        if len(lines[-1]) + len(name) + 1 > width and lines[-1].strip() != title.strip():
            lines.append(" " * len(title))
        lines[-1] += f" {name}"
    return lines


def _plain(text: str) -> str:
    """Without control characters: what a terminal is sent is only ever our own escape sequences."""
    return CONTROLS.sub(" ", text)


def _short(request_id: str) -> str:
    return request_id if len(request_id) <= ID_WIDTH - 1 else f"{request_id[: request_id.find('-') + 1]}..{request_id[-8:]}"


def _seconds(value: float) -> str:
    if value < 0.01:
        return f"{1e3 * value:.1f} ms"
    return f"{1e3 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _cut(line: str, width: int) -> str:
    """To so many columns; escape sequences take none, and colours end with the line."""
    shown, out = 0, []
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if part.startswith("\x1b"):
            out.append(part)
        else:
            out.append(part[: max(0, width - shown)])
            shown += len(part)
    return "".join(out).rstrip() if "\x1b" not in line else "".join(out)
