"""What a recording consists of. Times are seconds since the recording began (`Header.created`); requests go by a serial number.

    shape   Header, then Arrival, Step, End, Configured         lengths, times, plans, keyed hashes; no token id, no text
    full    the same, and Opened, Ordered, Given beside them    everything that a worker needs to run the same steps again, but for
                                                                pictures and sounds: those in Media frames, if it was asked for

Frames other than the header are arrays on the wire, told apart by their first element; new fields are added at the end, with defaults.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..config import PositiveInt
from ..media import TensorBytes
from ..plan import StepInput, WorkerRequest

FORMAT = 1
HASH_BYTES = 8
"""Of a block's keyed hash."""

Level = Literal["shape", "full"]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First frame of each part. Parts of one recording differ in `part`, `features` and what was open when they begin."""

    format: int = FORMAT
    recording: str
    """Random name, the same in all parts."""
    part: int = 0
    level: Level
    created: float
    """Unix seconds at which the recording began: time 0 of all its parts."""
    version: str
    """Of Tokenbus."""
    model: str
    """Name of the served model."""
    model_hash: str = ""
    """SHA-256 of the model's config.json; "" when it could not be read."""
    dtype: str = ""
    architecture: str = ""
    layers: str = ""
    """What the decoder's layers run on (see identity.py)."""
    ahead: bool = False
    """Whether steps were planned ahead (`scheduler.ahead`)."""
    lossless: bool = True
    """Whether the kernels hold the determinism contract: else a replay may differ without a fault."""
    vocab_size: int = 0
    max_model_len: PositiveInt
    block_size: PositiveInt
    num_blocks: PositiveInt
    kv_bytes_per_token: int = 0
    features: tuple[str, ...] = ()
    """Plugins that are on when the part begins."""
    config: dict[str, Any] = {}
    """Sections cache, scheduler and plugins (settings of those that are on) of the configuration; of full recordings model, too."""


class Arrival(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request joins the line; or it is open when the part begins (`again`)."""

    serial: int
    request_id: str
    """The server's own, never the client's."""
    at: float
    """When the engine took it in."""
    arrival: float
    """When the front read it."""
    prompt: int
    """Tokens."""
    max_tokens: int
    hashes: bytes
    """HASH_BYTES for each full block of the prompt, each over all tokens up to its end: equal beginnings have equal hashes."""
    features: tuple[str, ...]
    known: int = 0
    """Output tokens it has already: of requests that an engine's death or the beginning of the part interrupts."""
    tenant: bytes = b""
    """Keyed hash; b"": none."""
    salt: bytes | None = None
    """Keyed hash of `cache_salt`."""
    fields: dict[str, int | float | bool | None] = {}
    """Claimed fields: numbers and booleans as they are, None for all others."""
    pinned: dict[str, bool] = {}
    again: bool = False
    spans: list[tuple[int, int, bool]] = []
    """Of pictures and sounds in the prompt: (first token, tokens, attends in both directions)."""
    media: bytes = b""
    """Keyed hashes of their contents, HASH_BYTES for each of `spans`."""


class Step(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """One step, once its result is there."""

    step_id: int
    at: float
    """When its plan was published, or the step before it was over, whichever came later."""
    seconds: float
    """From then to its result."""
    runs: list[int]
    """serial, tokens, serial, tokens ... in the order in which they ran."""
    sampled: list[int]
    """Serials of requests that got a token (or several, see `drafts`)."""
    started: list[tuple[int, int, bool]] = []
    """Requests new to the worker, or back after preemption: (serial, tokens that a cache gave, prompt logprobs are wanted)."""
    drafts: list[tuple[int, int, int]] = []
    """(serial, proposed, accepted)."""
    preempted: list[int] = []
    budget: int = 0
    free_blocks: int = 0
    waiting: int = 0
    running: int = 0
    features: tuple[str, ...] | None = None
    """The switches from this step on, when they changed."""
    failed: bool = False
    """The step failed as a whole."""
    encoded: int | None = None
    """Pictures and sounds that were encoded to their end in it; None: not known."""
    encode_us: int | None = None
    """Microseconds of it that went into encoding, also of items whose tokens run later; None: not known."""


class End(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A request's one end."""

    serial: int
    at: float
    reason: str
    output: int | None
    """Output tokens; None: not known, count those that were sampled."""
    hashes: bytes = b""
    """Of the full blocks of prompt and output, behind those that its Arrival has."""
    stop_token: bool = False
    """A token that is not part of the output ended it."""
    cached: int = 0
    preemptions: int = 0


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """full: what the worker knows when the part begins. `num_computed` tokens have their K/V in the blocks. Media as in Ordered."""

    requests: list[WorkerRequest]


class Ordered(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """full: the worker's order for a step; its Given follows unless the step failed as a whole. Media of its requests are without their
    tensors, and nothing is encoded before the step that needs it: that changes no result."""

    order: StepInput


class Given(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """full: what the worker gave."""

    step_id: int
    sampled: dict[str, list[int]]
    errors: list[str] = []
    """Requests that failed alone."""


class Configured(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Live settings were changed: of the scheduler and of plugins, by name ("scheduler.token_budget")."""

    at: float
    values: dict[str, Any]


class Media(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """full, where it was asked for: what a picture or sound became, before the part's first frame that has its digest."""

    digest: str
    tensors: dict[str, TensorBytes]


Frame = Arrival | Step | End | Opened | Ordered | Given | Configured | Media
