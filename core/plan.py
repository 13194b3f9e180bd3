"""What one step is: the plan the scheduler makes, the work order the worker gets, the result it gives back.

All of it is plain, serialisable data (msgspec structs), so that the worker may be a thread or a process, and so that a recording
of plans explains a run. Token counts are in tokens, times in seconds, block ids are indices into the KV pool.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from .errors import ErrorInfo
from .media import MediaItem


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step's decision, as published on the bus. Decode is n=1, a prompt chunk is n=k, drafts to verify are n=1+k."""

    step_id: int
    num_tokens: dict[str, int]
    """`{request_id: tokens to run in this step}`; every n >= 1, in the order in which the worker runs them. Empty only when the step does
    nothing but encode (`encodes_for`)."""
    budget: int
    """The token budget that was in force (a whole, unchunked prompt may pass it when it runs alone among prompts)."""
    free_blocks: int
    """Blocks that could still be handed out after this plan took its own (free and evictable)."""
    preempted: tuple[str, ...] = ()
    """Requests that lost their blocks while this plan was made."""
    num_prompt_tokens: int = 0
    """How many of the planned tokens belong to prompts (or to recomputation after preemption)."""
    num_draft_tokens: int = 0
    """How many are drafts, which the step verifies."""
    num_media_tokens: int = 0
    """Tokens, all in all, of the pictures and sounds that begin in this step: it encodes those that are not known yet."""
    encodes_for: str | None = None
    """A request that waits for a picture or sound, which this step encodes further: beside the tokens, for a bounded time."""
    waiting: int = 0
    running: int = 0

    @property
    def concerns(self) -> AbstractSet[str]:
        """The requests that it runs tokens of or encodes for: should it never end, it is one of theirs."""
        return self.num_tokens.keys() if self.encodes_for is None else self.num_tokens.keys() | {self.encodes_for}


class EncodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Encode an item piece by piece: so much of it in this step."""

    digest: str
    item: MediaItem | None
    """None: the worker has begun it. Whatever else it had begun it gives up."""
    seconds: float


class WorkerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the worker first sees it, or sees it again after preemption (then `tokens` includes what was generated)."""

    request_id: str
    tokens: list[int]
    """Prompt, then tokens generated so far."""
    num_prompt_tokens: int
    num_computed: int
    """Tokens whose K/V is already in `blocks` (prefix hits)."""
    blocks: list[int]
    """The block table's beginning; grows by `StepInput.new_blocks`."""
    temperature: float
    seed: int
    choice: int
    features: tuple[str, ...]
    fields: dict[str, Any]
    pinned: tuple[str, ...] = ()
    """Plugins that live switches leave alone in this request: the client switched them itself."""
    prompt_logits: bool = False
    """`token_logprobs` must see every prompt position of it."""
    media: tuple[MediaItem, ...] = ()
    """In order. Sent again after preemption: nobody keeps them on the worker for that."""


class StepInput(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's order for one step. Messages are applied in step order; the worker keeps each request's tokens, its count of
    computed tokens and its block table from one step to the next.

    After running n tokens of a request the worker samples exactly when computed + n reaches the number of tokens it knows, and
    appends the sampled token itself: the next plan may already count on it.

    Drafts are run behind a request's known tokens (n counts them), and a token is sampled behind the last known token and behind each
    draft. The first that differs from the draft at its place ends what is appended; K/V behind it counts as not computed, and both
    sides take blocks that the request's tokens do not need out of its table.
    """

    step_id: int
    num_tokens: dict[str, int]
    new: list[WorkerRequest] = []
    new_blocks: dict[str, list[int]] = {}
    drafts: dict[str, list[int]] = {}
    """Token ids to verify, of requests whose known tokens all run in this step; never empty."""
    dropped: list[str] = []
    """Finished, cancelled or preempted since the last step: forget them before anything else."""
    features: tuple[str, ...] | None = None
    """The switches in force from this step on, when they changed."""
    settings: dict[str, dict[str, Any]] = {}
    """Settings of plugins, as written, that are in force from this step on, when they changed."""
    encode: EncodeOrder | None = None
    ahead: bool = False
    """Made before the result of the step before it was known, and counts on it. If that one fails as a whole, nothing of this one may
    run: requests, blocks and drops are taken over, no token is run (`StepResult.void`)."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of one position: the token that stands there and the most likely alternatives (natural log)."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """What computes attention, and what that means for the determinism contract."""

    attention: str
    """The backend's name."""
    lossless: bool
    reason: str = ""
    """Why not."""
    error: ErrorInfo | None = None
    """The slot's holder could not give a backend: core's computes in its place."""


class Drafts(msgspec.Struct, frozen=True):
    """What a plugin in the worker proposes for a request's next step."""

    plugin: str
    tokens: list[int]


class StepResult(msgspec.Struct, kw_only=True):
    """What a step gave. A request appears in at most one of `sampled` and `errors`."""

    step_id: int
    void: bool = False
    """No token was run: the step counted on one that failed as a whole (`StepInput.ahead`)."""
    sampled: dict[str, list[int]]
    """New token ids by request: one per request that sampled (more when drafts were accepted); absent for partial chunks."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """As many entries as `sampled` has tokens, for requests that asked."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    """For prompt positions run in this step: position i of the step predicts prompt token i+1; the first token has no entry."""
    errors: dict[str, ErrorInfo] = {}
    """Requests that failed alone (a plugin raised on them)."""
    drafts: dict[str, Drafts] = {}
    """What `drafts_after_step` proposes behind the tokens in `sampled`, for the next plan."""
    phases: dict[str, float] = {}
    """Seconds by phase: "encode" (of models that read media), "prepare", "forward", "logits", "sample", "draft"; plus "cpu" (the worker's
    process or thread CPU time) and "idle" (since the worker's last step ended), which the engine takes out for `StepReport.gap`. On a GPU
    the first ones are the times to start the work, and "wait" is how long the host waited for its end."""
    bytes_moved: int = 0
    """Weights plus K/V read and written, as the model's arithmetic says (not a hardware counter)."""
    flops: int = 0
    """Floating-point operations of linears and causal attention, counted like `bytes_moved`."""
    counters: dict[str, float] = {}
    """Plugin-owned counters, by `plugin.name`."""
    encoded: list[str] = []
    """Digests of items whose rows are kept from now on, or that nothing is left to do for before the step that runs their tokens
    (`StepInput.encode`)."""
    forgotten: list[str] = []
    """Digests of items whose rows are kept no longer."""
    kernels: Kernels | None = None
    """Set when another backend computes attention from this step on."""
