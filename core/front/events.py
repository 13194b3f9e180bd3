"""What the front's bus tells: requests that ended, steps (`messages.StepReport`), switch changes, engine life and death."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..host import Switches
from ..messages import EngineInfo


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One choice's life, published once as it ends, whatever its end. Times in seconds."""

    request_id: str
    group: str
    """The API request it belongs to."""
    endpoint: str
    """One of chat, completion, generate."""
    tenant: str
    arm: str
    arrival: float
    """Unix seconds at which the request was read."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    """One of stop, length, cancelled, error, tool_calls."""
    error_kind: str = ""
    """Class name in the error tree when finish_reason is "error"."""
    ttft: float | None = None
    """From arrival to the first token; None when there was none."""
    e2e: float = 0.0
    """From arrival to the end."""
    gaps: tuple[float, ...] = ()
    """Inter-token latencies: time between successive token messages divided by the tokens in the later one."""
    tokenize_seconds: float = 0.0
    template_seconds: float = 0.0
    preemptions: int = 0
    draft_tokens: int = 0
    """Drafts that its last engine verified for it."""
    accepted_tokens: int = 0
    """Drafts among them that were accepted."""
    resumptions: int = 0
    """Engines that died while they had it."""
    media: int = 0
    """Pictures and sounds in its prompt."""
    media_tokens: int = 0
    """Prompt tokens that stand for them."""
    media_bytes: int = 0
    """Of their tensors, which the front keeps while it is open."""
    media_seconds: float = 0.0
    """Until they were fetched, decoded and processed."""


class RequestAdmitted(msgspec.Struct, frozen=True):
    """A choice was handed to the engine; exactly one RequestRecord follows."""

    request_id: str
    media_bytes: int = 0
    """As in the record."""


class MediaPrepared(msgspec.Struct, frozen=True, kw_only=True):
    """The pictures and sounds of an API request became tensors and placeholders. Those that could not be are in RequestRefused."""

    items: dict[str, int]
    """How many by kind: image, audio."""
    known: dict[str, int]
    """Those of them that had been made before and were found again."""
    tokens: int
    """Placeholders, all in all."""
    seconds: float
    """Wall time, waiting for a turn included."""


class RequestRefused(msgspec.Struct, frozen=True):
    """An API request that was answered with an error before any choice was admitted."""

    endpoint: str
    status: int
    kind: str


class FeatureChange(msgspec.Struct, frozen=True):
    """Switches were changed live; the state is what holds after all rewrites."""

    changes: dict[str, bool]
    state: Switches
    who: str
    when: float
    before: Switches = Switches(frozenset())
    """What held until then."""


class SettingsChange(msgspec.Struct, frozen=True):
    """Settings were changed live."""

    before: dict[str, Any]
    after: dict[str, Any]
    who: str
    when: float


class ChangeRefused(msgspec.Struct, frozen=True):
    """A live change that was asked for and did not come about."""

    what: Literal["features", "settings"]
    asked: dict[str, Any]
    reason: str
    who: str
    when: float


class EngineStarted(msgspec.Struct, frozen=True):
    info: EngineInfo
    restarts: int


class EngineDied(msgspec.Struct, frozen=True):
    reason: str
    open_requests: int
    restart_in: float
    ended_requests: int = 0
    """Those of the open ones that end with it; the others go on in the next engine."""


class LoopLag(msgspec.Struct, frozen=True):
    """How late an event loop woke, sampled about every second."""

    process: str
    """front or engine."""
    seconds: float
    cpu_seconds: float
    """CPU time of that process so far."""
    step_age: float = 0.0
    """Engine: seconds since the step that computes now began; 0 when none does."""
