"""Chunked prefill: long prompts are run in pieces, so that running streams go on and short prompts are not stuck behind long ones.

How much: the allowance
-----------------------
Each step runs at most an allowance of prompt tokens, all prompts together.

    fixed       `chunk_size`
    adaptive    what keeps the step near `slow_down` times the time of a step without prompts, by live measurement:
                (slow_down - 1) * T / c, with T seconds a step of as many decodes as run now (a line through steps without prompts,
                old ones forgotten exponentially) and c seconds a prompt token (smoothed exponentially); `chunk_size` until both are
                known; the whole budget while nothing decodes. Never below `min_chunk`.

Who gets it: shares
-------------------
Prompts are asked oldest first. From the allowance that is left, a prompt leaves as much as the prompts with fewer tokens to go still need,
so the shortest is done first; but the oldest always gets a quarter of the allowance, so a long prompt advances whatever comes after it,
and the head of the waiting line gets at least one token, so that those behind it, for whom room is kept, can be asked at all.
A prompt is counted when it was queued since the last step or was asked about in it: others can't run now and nothing is kept for them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.request import Status

if TYPE_CHECKING:
    from typing import Any

    from ...core.contexts import StepView
    from ...core.plan import StepPlan, StepResult
    from ...core.plugin import Role
    from ...core.request import Request

SMOOTHING = 0.2
"""Weight of the newest measurement."""
FARTHEST = 2.0
"""Times the mean that a step of many more decodes than were seen is thought to take at most."""
MOST_DECODES = 0.6
"""Share of a step with prompts that is put down to its decodes at most (nor is more than was seen without prompts): no guess makes prompt
tokens look free."""
FIRST_SLOPE = 0.2
"""Share of a step's time that is thought to grow with the number of decodes, until steps of different numbers were seen."""
OLDEST_SHARE = 4
"""The oldest prompt gets at least 1/4 of the allowance."""


class ChunkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["adaptive", "fixed"] = "adaptive"
    chunk_size: Annotated[int, msgspec.Meta(ge=1)] = 128
    """Prompt tokens a step runs at most: always in fixed mode, until there are measurements in adaptive mode."""
    slow_down: Annotated[float, msgspec.Meta(gt=1)] = 3.6
    """How many times longer than without prompts a step may take (adaptive mode)."""
    min_chunk: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Prompt tokens a step may always run (adaptive mode)."""


class StepTimes:
    """Smoothed times from live steps, in seconds; None until measured."""

    def __init__(self) -> None:
        self.prompt_token: float | None = None
        self._count = self._seconds = 0.0
        """Smoothed, of steps without prompts."""
        self._spread = self._common = 0.0
        """Smoothed squares of a step's distance from `_count`, and its products with that of its time."""

    def decode_step(self, count: int) -> float | None:
        """Of a step of `count` decodes and no prompt; its slope lies between none and that of a time proportional to the count."""
        if not self._seconds:
            return None
        slope = self._common / self._spread if self._spread > 0.01 * self._count else FIRST_SLOPE * self._seconds / self._count
        slope = min(max(slope, 0.0), self._seconds / self._count)
        found = self._seconds + slope * (count - self._count)
        return min(max(found, 0.5 * self._seconds), FARTHEST * self._seconds)

    def learn(self, num_requests: int, prompt_tokens: int, seconds: float) -> None:
        if not prompt_tokens:
            if not self._seconds:
                self._count, self._seconds = float(num_requests), seconds
                return
            away, longer = num_requests - self._count, seconds - self._seconds
            self._spread += SMOOTHING / 4 * (away * away - self._spread)
            self._common += SMOOTHING / 4 * (away * longer - self._common)
            self._count += SMOOTHING * away
            self._seconds += SMOOTHING * longer
            return
        if num_requests > 1 and (decodes := self.decode_step(num_requests - 1)) is not None:
            seconds -= min(decodes, self._seconds, MOST_DECODES * seconds)
        self.prompt_token = _smooth(self.prompt_token, seconds / prompt_tokens)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)


class ChunkedPrefill(Plugin):
    info = PluginInfo(
        name="chunked_prefill",
        summary="runs long prompts in pieces beside running streams",
        scope="request",
        lossless=True,
        default=True,
        live_settings=("mode", "chunk_size", "slow_down", "min_chunk"),
    )
    Settings = ChunkSettings

    def __init__(self, settings: Any, role: Role) -> None:
        super().__init__(settings, role)
        self.times = StepTimes()
        self.chunks = 0
        """Prompts that were cut short by a step's allowance, counted once a step."""
        self._step_id = -1
        self._allowance = 0
        self._used = 0
        self._unasked: list[int] = []
        """Tokens to go of the prompts that count and were not asked about yet in this step, ascending."""
        self._nobody_asked = True
        self._asked: dict[str, int] = {}
        """Tokens to go of those queued since, or asked about in, this step: what counts in the next one."""
        self._counted: dict[str, int] = {}

    @hookimpl
    def request_added(self, request: Request) -> None:
        if request.status is Status.WAITING or request.remaining > 1:
            self._asked[request.request_id] = request.remaining

    @hookimpl
    def request_removed(self, request: Request) -> None:
        self._asked.pop(request.request_id, None)

    @hookimpl
    def limit_chunk(self, request: Request, wanted: int, step: StepView) -> int:
        if step.step_id != self._step_id:
            self._begin_step(step)
        remaining = request.remaining
        oldest, self._nobody_asked = self._nobody_asked, False
        self._count_asked(request.request_id)
        left = self._allowance - self._used
        reserved = sum(self._unasked[: bisect_left(self._unasked, remaining)]) if left > 0 else 0
        least = -(-self._allowance // OLDEST_SHARE) if oldest else 0
        if left > 0 and request.status is Status.WAITING:
            least = max(least, 1)  # it joins, or everybody behind it would wait with it
        grant = min(wanted, max(left - reserved, least, 0))
        self._used += grant
        if grant < remaining:
            self._asked[request.request_id] = remaining - grant
            self.chunks += 1
        return grant

    def _begin_step(self, step: StepView) -> None:
        self._step_id = step.step_id
        self._allowance = self.allowance(step)
        self._used = 0
        self._nobody_asked = True
        self._counted, self._asked = self._asked, {}
        self._unasked = sorted(self._counted.values())

    def _count_asked(self, request_id: str) -> None:
        counted = self._counted.pop(request_id, None)
        if counted is not None:
            del self._unasked[bisect_left(self._unasked, counted)]

    def allowance(self, step: StepView) -> int:
        """Prompt tokens that this step may run."""
        settings, times = self.settings, self.times
        if settings.mode == "fixed":
            return settings.chunk_size
        if not step.num_decodes:
            return max(step.budget, settings.min_chunk)
        decodes = times.decode_step(step.num_decodes)
        if decodes is None or not times.prompt_token:
            return max(settings.chunk_size, settings.min_chunk)
        return max(settings.min_chunk, int((settings.slow_down - 1.0) * decodes / times.prompt_token))

    @hookimpl
    def step_finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if not plan.num_tokens:
            return
        encoding = result.phases.get("encode", 0.0)  # its cost is the picture's, not the prompt's tokens'
        self.times.learn(len(plan.num_tokens), plan.num_prompt_tokens, max(0.0, seconds - encoding))
