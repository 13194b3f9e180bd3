"""What front and engine say to each other: typed, versioned, plain data over one Unix socket pair (see ipc.py).

A peer's bytes are decoded strictly against these types; nothing is unpickled. The wire's preamble and the first message each way carry
PROTOCOL_VERSION.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .config import Config
from .errors import ErrorInfo
from .host import Switches
from .plan import Kernels, StepPlan, TokenLogprobs
from .request import AdmittedRequest

PROTOCOL_VERSION = 4


# ---- front -> engine ------------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message to a new engine process: start with this configuration and these switches."""

    version: int
    config: Config
    switches: Switches
    spawned: float = 0.0
    """Unix seconds at which the front started the process; 0 when unknown."""


class Add(msgspec.Struct, frozen=True, tag=True):
    requests: list[AdmittedRequest]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End these requests if they are still open; unknown ids are ignored (they may just have ended)."""

    request_ids: list[str]
    reason: Literal["cancelled", "stop", "deadline"] = "cancelled"


class SetFeatures(msgspec.Struct, frozen=True, tag=True):
    """Switch plugins between two steps, all or none; answered by a Reply with `switches`, or an error."""

    call_id: int
    changes: dict[str, bool]


class SetSettings(msgspec.Struct, frozen=True, tag=True):
    """Change live settings between two steps, all or none; answered by a Reply without a value, or an error."""

    call_id: int
    values: dict[str, Any]
    """By name (core/live_settings.py), checked."""


class Query(msgspec.Struct, frozen=True, tag=True):
    """Ask the engine something; answered by a Reply. what: "plans" (args: last), "integrity", "stats", "watch" (args:
    slow)."""

    call_id: int
    what: str
    args: dict[str, Any] = {}


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop after the current step; open requests get no further output."""


FrontMessage = Hello | Add | Cancel | SetFeatures | SetSettings | Query | Shutdown


# ---- engine -> front ------------------------------------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine found out while it started; limits that admission upholds."""

    version: int
    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    """Longest sequence in tokens that the model, the setting and the KV pool allow."""
    block_size: int
    num_blocks: int
    weights_bytes: int
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...]
    lossless: bool
    """Whether the kernels in force hold the determinism contract."""
    lossless_reason: str = ""
    phases: dict[str, float] = {}
    """Seconds of each start-up phase, in order."""
    read_bytes_per_second: float = 0.0
    """The machine's measured limits, as in WorkerInfo."""
    flops_per_second: float = 0.0
    ahead: bool = False
    """Whether a step is planned and sent while the one before it computes (`scheduler.ahead`)."""
    encodes_in_pieces: bool = False
    """As in WorkerInfo."""
    pid: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine can't start, or can't go on; it exits after this."""

    error: ErrorInfo


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent about every second from the engine's event loop, also while a step computes and while it loads."""

    step_id: int
    step_age: float
    """Seconds since the step that computes now began; 0 when none does."""
    loop_lag: float
    """How late the engine's event loop woke, in seconds."""
    phase: str = ""
    """What start-up is doing; "" once ready."""
    cpu_seconds: float = 0.0
    """CPU time of the engine process since it started."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """A request's one end."""

    reason: Literal["stop", "length", "cancelled", "error"]
    stop_token: int | None = None
    """The stop token id that ended it (not among the tokens to show)."""
    error: ErrorInfo | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    """Drafts that this engine verified for it."""
    accepted_tokens: int = 0
    """Drafts among them that were accepted."""
    notes: dict[str, str] = {}
    features: tuple[str, ...] = ()
    """Plugins in force at the end."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step in numbers, for metrics and logs. Times in seconds."""

    step_id: int
    started: float
    """Unix seconds."""
    duration: float
    """From the moment the step was sent, or the result of the step before it was there, whichever came later, to its result: durations of
    steps never overlap."""
    phases: dict[str, float]
    num_requests: int
    """That it ran tokens of; 0: it only encoded, or no step `ran`."""
    prompt_tokens: int
    decode_tokens: int
    """Known tokens of requests that decode; drafts beside them are counted apart."""
    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    preempted: int
    allocation_failures: int
    bytes_moved: int
    flops: int
    counters: dict[str, float] = {}
    draft_tokens: int = 0
    cpu_seconds: float = 0.0
    """CPU time of the engine process since it started."""
    gap: float = 0.0
    """How long the worker had nothing to do before this step although work was open, by the worker's own clock."""
    ahead: bool = False
    """It was planned while the step before it computed."""
    waited: str = ""
    """Why it was not, where `scheduler.ahead` would have it so: "drafts", "blocks" ... (`scheduling/ahead.py`)."""
    ahead_discarded: int = 0
    """Tokens that it ran in vain: of requests that had ended, in a way nobody could foresee, before it began."""
    ran: bool = True
    """False: no step did, but requests ended, or one failed."""


class StepBegins(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Which requests the engine runs, or is about to: those of all steps in flight. Sent before the newest of them, `step_id`, begins. Left
    out when they are those of the last such message, none of them runs prompt tokens in the newest step, and none is preempted. Should
    the engine die, it died with these."""

    step_id: int
    runs: dict[str, tuple[int, int]]
    """`{request_id: (first, last)}`: the steps run tokens[first:last] of it, prompt and output counted together, or encode what stands
    there."""
    taken: int
    """Requests taken in since the engine began."""
    cached: dict[str, int] = {}
    """Of requests that begin with this step: prompt tokens that a cache gave."""
    preempted: tuple[str, ...] = ()
    """Requests that have lost their blocks to this step."""
    steps: int = 1
    """How many steps may be in flight from here on, and so how many tokens a request may be ahead of its last output."""


class StepOutput(msgspec.Struct, kw_only=True, tag=True):
    """All that one step (or the intake before it) gave to clients; one message a step."""

    step_id: int
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    finished: dict[str, Finish] = {}
    report: StepReport | None = None
    kernels: Kernels | None = None
    """Set when another backend computes attention from this step on."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    value: Any = None
    error: ErrorInfo | None = None
    switches: Switches | None = None
    """To SetFeatures: what is on in the engine from here on. Whoever reads the wire in order always knows."""


class PluginDisabled(msgspec.Struct, frozen=True, tag=True):
    """A plugin failed outside any one request and was switched off, or must refuse new requests because it enforces something."""

    name: str
    error: ErrorInfo
    refuses_new: bool
    switches: Switches
    """What is on in the engine from here on."""


EngineMessage = Ready | Failed | Heartbeat | StepBegins | StepOutput | Reply | PluginDisabled


class PlansReply(msgspec.Struct, frozen=True):
    """Value of the reply to Query("plans")."""

    plans: list[StepPlan]


class WatchedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, request by request; requests are places in `WatchReply.ids`."""

    step_id: int
    started: float
    """Unix seconds."""
    duration: float
    """Seconds from plan, or the result of the step before, to its own result, as in StepReport."""
    prefill: dict[int, int]
    """Prompt tokens run, also when they are run anew after a preemption."""
    verify: dict[int, tuple[int, int]]
    """Drafts proposed, and how many of them were accepted."""
    decode: list[int] | None
    """Those that ran one token and no drafts; None: the same as in the step before."""
    num_decodes: int
    prompt_tokens: int
    draft_tokens: int
    sampled: int
    """New tokens."""
    preempted: list[int]
    budget: int
    running: int
    waiting: int
    phases: dict[str, float]
    bytes_moved: int
    flops: int
    media_tokens: int = 0
    """Of the pictures and sounds that begin in it, all in all."""


class WatchedRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An open request. On the wire, and for viewers, a list in this order."""

    request_id: str
    running: bool
    prompt: int
    """Tokens, as the counts below."""
    computed: int
    output: int
    max_output: int
    arrival: float
    """Unix seconds."""
    blocks: int
    cached: int
    preemptions: int
    arm: str


class WatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the reply to Query("watch"): steps since the last one, and how things stand (engine/watch.py)."""

    steps: list[WatchedStep]
    lost: int
    """Steps since the last look that there was no room for."""
    ids: list[str]
    open: int
    running: int
    waiting: int
    free_blocks: int
    """Neither used nor retained."""
    retained_blocks: int
    num_blocks: int
    allocation_failures: int
    """Since the engine began."""
    requests: list[WatchedRequest] | None
    """Open ones, those that run first; as many as fit. None when they were not asked for, as with `blocks`."""
    blocks: list[tuple[int, int, int]] | None
    """The pool in parts, in order of block ids: blocks used, retained and free in each."""
