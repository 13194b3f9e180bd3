"""`[experiments.NAME]` of `tokenbus.toml`: what an experiment is. Checked by shape here, against plugins and their switches in plan.py.

[experiments.cache]
split = "user"
[experiments.cache.arms.on]
[experiments.cache.arms.off]
features = { prefix_cache = false }
[experiments.cache.guard]
max_p99_ttft = 2.0
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import ConfigError

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$"
"""Names stand in headers, metric labels and paths."""
Name = Annotated[str, Meta(pattern=NAME)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(gt=0)]

EXCLUDED = "excluded"
"""What stands for the arm of a request that an experiment left out; no arm may be called so."""
MAX_ARMS = 8
MAX_BLOCK = 64
"""Slices of one block, at most: the sum of the weights."""
STICKY = ("user", "key")
HEADER = "header:"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ArmConfig(Part, frozen=True):
    weight: Seconds = 1.0
    """Share of the experiment's traffic, relative to the other arms'; for slices a whole number: slices in each block."""
    features: dict[str, bool] = {}
    """Switches. One that only another arm names is as the server has it when the experiment starts."""
    settings: dict[str, Any] = {}
    """Live settings by name, such as "scheduler.token_budget", for slices only; with engines of their own also what an engine starts with
    ("model.dtype", "model.kernels", "model.worker", "cache.block_size", all of the scheduler's and the plugins'). One that only another arm
    names is as it is when the experiment starts."""


class GuardConfig(Part, frozen=True):
    """An arm (the control excepted) that passes a limit is switched off by itself: its traffic gets the control's switches."""

    max_error_rate: Share | None = None
    """Share of requests that end with an error of the server's (5xx, 429)."""
    max_p99_ttft: Seconds | None = None
    """Seconds."""
    max_p99_inter_token: Seconds | None = None
    """Seconds."""
    max_p99_ttft_ratio: Annotated[float, Meta(gt=1)] | None = None
    """Times the control's in the same window."""
    max_p99_inter_token_ratio: Annotated[float, Meta(gt=1)] | None = None
    """Times the control's in the same window."""
    min_samples: Annotated[int, Meta(ge=1, le=100_000)] = 100
    """Ended requests of the arm (for a ratio, of the control, too) in the window below which nothing is judged."""
    window: Seconds = 300.0
    """Seconds that are looked at."""


class ExperimentConfig(Part, frozen=True):
    arms: dict[Name, ArmConfig]
    """At least two. Arms without switches compare the server with itself (A/A)."""
    control: str = ""
    """The arm that the others are compared with; default: the first."""
    split: str = "request"
    """What is assigned: each request; "user" (the body's field), "key" (the API key) or "header:NAME", always the same arm for the same
    value; or "slice", all of a time slice's requests."""
    engines: Literal["shared", "own"] = "shared"
    """own: each arm has an engine process for itself, with an equal part of the cores and of the K/V memory, from the server's start to its
    end; for split = "request". Arms may then differ in what an engine is started with."""
    traffic: Share = 1.0
    """Share of units (requests, users ...) that take part when it starts; can be ramped live."""
    salt: str = ""
    """Another salt deals the units anew."""
    slice_seconds: Annotated[float, Meta(ge=0.05)] = 60.0
    """With engines of their own: seconds of a time window, all arms' requests of which are compared with each other."""
    washout_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """At the begin of each slice: requests that arrive then are marked and not compared."""
    guard: GuardConfig = GuardConfig()
    autostart: bool = False
    """Start with the server, unless the state on disk says that it was stopped."""
    max_megabytes: Annotated[float, Meta(gt=0)] = 1024.0
    """MiB of rows; an experiment that has written so many stops by itself."""

    @property
    def control_arm(self) -> str:
        return self.control or next(iter(self.arms))

    @property
    def header(self) -> str | None:
        """The header that it goes by, in small letters; None for other splits."""
        return self.split.removeprefix(HEADER).lower() if self.split.startswith(HEADER) else None

    @property
    def sliced(self) -> bool:
        return self.split == "slice"

    @property
    def own_engines(self) -> bool:
        return self.engines == "own"

    def shares(self) -> dict[str, float]:
        """Each arm's share, in order; they sum to 1."""
        total = sum(arm.weight for arm in self.arms.values())
        return {name: arm.weight / total for name, arm in self.arms.items()}


def check_shape(name: str, config: ExperimentConfig) -> None:
    """ConfigError naming the setting when an experiment contradicts itself."""
    if not re.match(NAME, name):
        raise ConfigError(f"experiments: {name!r} can't be a name: letters, digits, '_', '.' and '-', 40 at most")
    for setting, problem in _problems(config):
        raise ConfigError(f"experiments.{name}.{setting}: {problem}")


def _problems(config: ExperimentConfig) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if not 2 <= len(config.arms) <= MAX_ARMS:
        return [("arms", f"there must be 2 to {MAX_ARMS} arms, not {len(config.arms)}")]
    if EXCLUDED in config.arms:
        found.append((f"arms.{EXCLUDED}", "this name stands for requests that no arm has"))
    if config.control and config.control not in config.arms:
        found.append(("control", f"there is no arm {config.control!r}; there are: {', '.join(config.arms)}"))
    if config.header is not None:
        if not _TOKEN.fullmatch(config.header):
            found.append(("split", f"{config.header!r} can't be the name of a header"))
        elif config.header in {"authorization", "cookie", "proxy-authorization"}:
            found.append(("split", f'the header {config.header!r} holds secrets: use "key", or a header of its own'))
    elif config.split not in {"request", "slice", *STICKY}:
        found.append(("split", f'must be "request", "user", "key", "header:NAME" or "slice", not {config.split!r}'))
    if config.own_engines:
        if config.split != "request":
            found.append(
                ("engines", 'engines of their own go with split = "request": the arms run at the same time, each by itself')
            )
        if config.traffic != 1:
            found.append(("traffic", "who is in no arm would be the control's engine's to serve: use weights"))
    if config.sliced:
        weights = [arm.weight for arm in config.arms.values()]
        if any(weight != int(weight) for weight in weights) or sum(weights) > MAX_BLOCK:
            found.append(("arms", f"weights of slices must be whole numbers, {MAX_BLOCK} together at most"))
        if config.traffic != 1:
            found.append(("traffic", "a time slice is everybody's: use weights, or another split"))
        if config.washout_seconds >= config.slice_seconds:
            found.append(("washout_seconds", "must be less than slice_seconds: nothing would be left to compare"))
    return found
