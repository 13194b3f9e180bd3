"""What the engine's loop notes for the writer: references to what never changes, and copies of what does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...core.messages import Finish
    from ...core.plan import StepInput, StepPlan, StepResult, WorkerRequest
    from ...core.request import AdmittedRequest


@dataclass(frozen=True, slots=True)
class Joined:
    """A request was taken in, or was open when recording began."""

    at: float
    admitted: AdmittedRequest
    features: frozenset[str]
    known: int
    worker: WorkerRequest | None


@dataclass(frozen=True, slots=True)
class Ran:
    """A step; without a result it failed as a whole."""

    at: float
    seconds: float
    plan: StepPlan
    order: StepInput
    result: StepResult | None


@dataclass(frozen=True, slots=True)
class Ended:
    at: float
    request_id: str
    finish: Finish
    tokens: list[int] | None
    """Prompt and output; None when the recorder did not know the request."""


@dataclass(frozen=True, slots=True)
class Configured:
    """Live settings were changed."""

    at: float
    values: dict[str, Any]


Note = Joined | Ran | Ended | Configured
