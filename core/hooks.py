"""All hook specifications: the reference manual for plugin authors. Hook API version: see `plugin.HOOK_API_VERSION`.

How hooks are called
--------------------
A plugin is one class; it implements any of the hooks below as methods marked `@hookimpl`, and may leave out arguments that it does
not need. Implementations are resolved when the set of switches changes, never in a step: a feature that is off costs nothing.

*Scope.* A hook marked "per request" is called for a request only when the plugin is among the features in force for it; and when the
plugin claims fields, only when the request uses at least one of them or the hook says "all its requests". A hook marked "engine-wide"
is called while the plugin is on at all.

*None* means "no opinion" in every hook that returns something, unless the hook says otherwise.

*Switches.* A plugin of scope "request" that is off may come for single requests, whose clients (or an experiment's arm) ask for it: it is
loaded and started for them, and stopped and unloaded after the last of them. A lossless plugin that is switched on live joins the open
requests, and one that is switched off leaves them, except those whose client or arm decided about it, that use a field it claims, or that
have another plugin which requires it; nor does it join a request that lacks what it requires or has what it conflicts with. Any other
plugin stays with the requests that were admitted with it, and is loaded, its hooks called, until the last of them has ended. Hooks that
are called "before the request is queued" are not called for a plugin that joins later, but for `request_added`; `worker_request_added`
is.

*Raising.* In a per-request hook the request ends with an error that names plugin and hook; nobody else notices. `RequestError` raised
from `check_fields` or `prepare_fields` is the client's error and reaches it as it is. In an engine-wide hook of the engine or worker the
plugin is switched off with a loud log, if no open request claims it and it does not enforce anything. Otherwise it stays on, and the
requests that use a field it claims (all its requests, if it claims none and enforces something) end with an error; new ones of that kind
get 503 until it is switched off by hand. What a slot's holder gave (a policy, an attention backend) gives way to core's when it raises, and
the plugin goes off. A plugin that is off and stays for its requests: those that need it end, once, with a loud log. In an engine-wide hook
of the front nothing is switched off: `front_started` that raises means that the plugin can't be switched on (409; at start: the server
does not start), the others say below what then holds; a function that listens to a bus and raises is logged and counted, and goes on being
called.

*An engine that dies.* The next one is given the open requests back, with what they have generated, and the hooks that are called "once" or
"when first seen" in engine and worker are called there anew; those of the front are not. A plugin that can't rebuild its state from that
says `resumable=False`.

*Answers.* Each answer is checked (`hook_answers.py`): one of another type or out of bounds counts as raising. Hooks are plain functions.

*Blocking.* "quick" hooks run on an event loop: below about 1 ms, no I/O. "compute" hooks run on the worker's thread. Hooks that "may
block" run on a pool thread.

Order: `tryfirst` before others before `trylast`, among equals by the plugin's name: the same in every process, however plugins were
switched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .plugin import hookspec

if TYPE_CHECKING:
    import torch

    from .contexts import (
        AdmissionContext,
        EngineContext,
        FrontContext,
        Implied,
        OutputContext,
        ParserContext,
        PrefixMatch,
        Route,
        StepView,
        WorkerContext,
    )
    from .kv.pool import BlockPool
    from .media import MediaPart, PreparedMedia
    from .models.linears import Linears, ModelToLoad, Refusal
    from .models.media import MediaCheckpoint, MediaEncoder
    from .models.sizing import ModelSize
    from .output import OutputParser
    from .plan import StepPlan, StepResult, TokenLogprobs
    from .policy import SchedulingPolicy
    from .request import Request, StopRule
    from .worker.attention import AttentionBackend, KVLayout
    from .worker.side import SideModel, StepRan
    from .worker.state import FusedFilters, SampleRow, WorkerRequestState


class TextFilter(Protocol):
    """What a plugin puts between detokeniser and client; see `text_filter`."""

    def feed(self, text: str, *, final: bool) -> tuple[str, str | None]:
        """Take newly decoded text; return (text that may be shown now, why generation stops here or None).

        Text may be held back until a later call; with `final` everything held that is still to be shown must come out. After a
        reason was returned `feed` is not called again. The reason is reported as `stop_reason`, with finish reason "stop".
        """
        ...


# ================================================ front process ====================================================================


@hookspec
def front_started(front: FrontContext) -> None:
    """Front, engine-wide, quick. Once when the plugin is switched on in the front process (at start or live), or comes for a request.

    The place to subscribe to the front's bus (`front.bus`), which tells of requests that ended, steps and switch changes.
    """


@hookspec
def front_stopped() -> None:
    """Front, engine-wide, quick. Once when the plugin is switched off, goes with the last request it came for, or the server ends: undo
    `front_started`. An error is logged."""


@hookspec
def http_routes() -> Sequence[Route] | None:
    """Front, engine-wide, quick. HTTP routes it adds while it is on (404 while it is off). Once while it is on, when a path that is not
    core's is first asked for; again when it was off meanwhile. Core's paths can't be replaced. An error is logged: then it has no routes.
    """


@hookspec
def implied_fields(fields: dict[str, Any], endpoint: str) -> Implied | None:
    """Front, per request, quick. Once per API request, before any `check_fields`, with those claimed fields that ask for something.
    endpoint: chat, completion or generate.

    Fields of other plugins that these imply: a tool call that is forced implies a grammar, say. They are treated as if the client had sent
    them, by `check_fields` and everything after it. The request is refused when no active plugin claims them, or when the client has
    sent them itself. Raise `FieldError` when a field is wrong.
    """
    ...


@hookspec
def check_fields(fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any] | None:
    """Front, per request, quick. Once per API request, with those claimed fields that ask for something.

    Check them; raise `FieldError` when one is wrong. Return the fields to hand on in their place, None to hand them on as they are. What
    is given back are fields that the plugin claims (some may be left out), as plain data: None, bool, int of 64 bits, float, str, bytes,
    lists, tuples and dicts with str or int keys. They reach the engine and worker as `request.fields`.
    """
    ...


@hookspec
def prepare_fields(fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any] | None:
    """Front, per request, may block. Once per API request, after every `check_fields` was content, with those claimed fields that ask for
    something: as handed on so far. For what takes more than about 1 ms: compiling a grammar, decoding an image.

    Called on a pool thread, for several requests at the same time; other requests go on meanwhile. It must end by itself within seconds,
    whatever it is given: nobody can stop a thread, so work that has no bound belongs into a process that the plugin kills. Raise
    `FieldError` when a field is wrong, `OverloadedError` or `UnavailableError` when the client should come again. Returns what
    `check_fields` returns. Switches that change meanwhile leave the request what it was admitted with; none of its plugins is stopped.
    """
    ...


@hookspec(firstresult=True)
def prepare_media(parts: Sequence[MediaPart]) -> Sequence[PreparedMedia] | None:
    """Front, per request, may block. Once per API request whose messages hold pictures or sounds, before its prompt is made: fetch, decode
    and process all of its `parts`, in order. One answer for each. Only plugins that claim the field "media" are asked; it is no field
    that clients can send, but what such a request uses.

    Called on a pool thread like `prepare_fields`, under the same rules, and raises the same. Errors name `part.where`. What is given
    back is kept as long as the request is open, and travels to engine and worker as `AdmittedRequest.media`.
    """
    ...


@hookspec
def text_filter(request: OutputContext) -> TextFilter | None:
    """Front, per request, quick. Once per choice, before its first token: an object that sees all of the choice's text in order."""
    ...


@hookspec(firstresult=True)
def reasoning_parser(request: ParserContext) -> OutputParser | None:
    """Front, per request, quick. Once per choice of a chat, before the request is queued: an object that sees the choice's text in order,
    behind the text filters, and tells reasoning from content (core/output.py). Reasoning is shown as `reasoning_content`.

    None: this model's answers have no reasoning that could be told apart."""
    ...


@hookspec(firstresult=True)
def tool_parser(request: ParserContext) -> OutputParser | None:
    """Front, per request, quick. Once per choice of a chat that has tools to call, before the request is queued: an object that sees the
    choice's content in order, behind the `reasoning_parser`'s, and finds tool calls in it (core/output.py).

    None: it doesn't know how this model writes calls. When nobody does the request is refused. A plugin that reads one way of writing
    belongs into the slot "tool_calls" and answers always: to switch it on is to choose it. Calls that `tool_choice` forces are JSON held
    to a grammar, whatever the model's way is: those "tools" reads itself, before all others are asked."""
    ...


# ================================================ engine process ===================================================================


@hookspec
def engine_started(engine: EngineContext) -> None:
    """Engine, engine-wide, quick. Once when the plugin is switched on or comes for a request, after the KV pool exists."""


@hookspec
def engine_stopped() -> None:
    """Engine, engine-wide, quick. Once when the plugin is off and no request has it any more, or the engine ends as it was told to: give
    back what it holds (blocks it retained, say)."""


@hookspec(firstresult=True)
def scheduling_policy() -> SchedulingPolicy | None:
    """Engine, slot "scheduling", quick. Once when the plugin takes the slot: a new, empty waiting queue with its order and victim rule
    (core/policy.py). It may also say what shares a step and how much memory a request must find before it joins.

    A policy that raises is replaced by core's first-come-first-served, with a loud log; no request is lost.
    """
    ...


@hookspec
def request_added(request: Request) -> None:
    """Engine, per request, quick. Once: before the request is queued, or when the plugin joins it by a live switch (it may then have run
    for a while). After an engine's death once more, in the next one: `request.tokens` then includes what was generated. All its
    requests."""


@hookspec(firstresult=True)
def stop_rule(request: Request, eos_token_ids: frozenset[int]) -> StopRule | None:
    """Engine, per request, quick. Once, before the request is queued: which tokens end it. None: the model's end tokens do."""
    ...


@hookspec(firstresult=True)
def wants_prompt_logits(request: Request) -> bool | None:
    """Engine, per request, quick. Once, before the request is queued: True when `token_logprobs` must see every prompt position.

    Such a request never reads a prefix cache; its response says so.
    """
    ...


@hookspec(firstresult=True)
def match_prefix(request: Request, pool: BlockPool) -> PrefixMatch | None:
    """Engine, per request, quick. When a request that holds no blocks is tried for a place in the batch (first time, and after
    preemption): in each step again while it waits at the head of the line for blocks, and again when another one made room for it.
    All its requests.

    Return full blocks that hold the K/V of the beginning of `request.tokens`, in order, each in use or retained; never all of its
    tokens: at least one is left to compute. The core takes a reference on each (`pool.share`) in the same transaction; the plugin must not.
    """
    ...


@hookspec
def limit_chunk(request: Request, wanted: int, step: StepView) -> int | None:
    """Engine, per request, quick. Each step, for each request with prompt tokens to run: run at most this many of `wanted` now.

    `wanted` already respects the step's budget. The smallest answer of all plugins counts; 0 leaves the request out of this step.
    A plan has tokens while there is work: when all answers are 0 the first request runs one. None: all of `wanted`. Only requests that wait
    for the encoder of their pictures or sounds run none, whatever the answer is.
    When no plugin answers at all the prompt is run whole, in one step, even past the budget if it is the step's first prompt.
    All its requests.
    """
    ...


@hookspec(firstresult=True)
def propose_drafts(request: Request, most: int) -> Sequence[int] | None:
    """Engine, per request, quick. Each step in which the request decodes and has room for drafts: up to `most` (at least 1) token ids that
    may follow `request.tokens`, the likeliest first step first. All its requests. None, or an empty answer: the next plugin is asked.

    Drafts are run in the same step and verified: a token is sampled at each place as it would be without drafts, and those drafts are
    accepted that are equal to it, up to the first that is not. So answers never change; good drafts give several tokens a step, bad ones
    cost the time of a wider step. `most` respects the step's budget and the request's own end; fewer may be run when blocks are scarce.
    """
    ...


@hookspec
def drafts_verified(request: Request, proposed: int, accepted: int) -> None:
    """Engine, per request, quick. After a step that ran `proposed` drafts of this plugin's, of which the first `accepted` were right;
    `request.tokens` ends with what was accepted and one token more. Not when the request ended in that step."""


@hookspec
def blocks_filled(request: Request, first: int, last: int, pool: BlockPool) -> None:
    """Engine, per request, quick. After a step in which the request's blocks[first:last] became full: their K/V is written and their
    tokens are final. All its requests. At most once per block and stay in the pool."""


@hookspec
def block_evicted(block_id: int) -> None:
    """Engine, engine-wide, quick. The pool is about to hand out a block that was retained (see BlockPool.retain): forget its contents."""


@hookspec
def request_removed(request: Request) -> None:
    """Engine, per request, quick. Once: at the request's one end, whatever it was, or when the plugin leaves it by a live switch; its
    blocks are still in its table. Called also when a plugin's `request_added` raised, its own included. All its requests."""


@hookspec
def step_finished(plan: StepPlan, result: StepResult, seconds: float) -> None:
    """Engine, engine-wide, quick. After each step that gave a result, with the wall time in seconds from plan (or from the result of the
    step before it, where it was planned ahead of that) to result. Not after a step that failed as a whole. In one that
    only encoded `plan.num_tokens` is empty."""


# ================================================ worker ===========================================================================


@hookspec(firstresult=True)
def quantized_checkpoint(model: ModelToLoad) -> Linears | Refusal | None:
    """Worker, engine-wide, compute. Once for each model, before its weights are read (and once in `tokenbus plan-memory`, which reads
    none): whoever knows how the checkpoint is quantised (`model.quantization`, `model.tensors`) gives its matrix products
    (core/models/linears.py), which read the tensors as they are stored. It must not read weights itself. When somebody does, the slot
    "quantization" must be empty: nothing is quantised twice.

    None: it knows nothing of this one, or it is not quantised; when its config says that it is, and nobody answers, the server does not
    start. Refusal: it knows the format, and can't serve this checkpoint of it; the server does not start, with this reason."""
    ...


@hookspec(firstresult=True)
def quantization(model: ModelToLoad) -> Linears | Refusal | None:
    """Worker, slot "quantization", compute. Once, before the weights are read (and once in `tokenbus plan-memory`, which reads none): what
    makes the decoder's matrix products, and from which form of the weights (core/models/linears.py). It must not read weights itself.

    Refusal, or None: it can't serve this model, and the server does not start. Nothing of the model may be read or changed otherwise.
    """
    ...


@hookspec
def kv_layout(layout: KVLayout) -> KVLayout | Refusal | None:
    """Worker, engine-wide, compute. Once, after the weights are read and before the cache is allocated (and once in `tokenbus
    plan-memory`): how K and V are stored. Each plugin is shown what those before it have made of the model's own layout, of which it may
    change `stored`; all else must stay. An attention backend that can't serve the result is not used. Only for plugins of scope "engine".

    Refusal: the server does not start. None: leave it as it is."""
    ...


@hookspec
def side_model(model: str, block_size: int, size_of: Callable[[str], ModelSize]) -> SideModel | Refusal | None:
    """Worker, engine-wide, compute. Once, before the cache is allocated (and once in `tokenbus plan-memory`): another model that the
    plugin runs beside the served one, which is called `model`, with K/V in the same blocks of `block_size` tokens (core/worker/side.py).
    size_of: what a model, by directory, hub id or GGUF file, takes with the server's dtype. No weights are read in here. Only for plugins
    that are `resident`: asked when they are on at start, and loaded from then on, switched on or off.

    Refusal: the server does not start. None: it needs none."""
    ...


@hookspec(firstresult=True)
def media_encoder(checkpoint: MediaCheckpoint) -> MediaEncoder | Refusal | None:
    """Worker, engine-wide, compute. Once, after the decoder's weights are read and before the cache is allocated, for a checkpoint that
    has more than text in it: load its tower, and give what makes rows of embeddings of a picture or sound (core/models/media.py). Only
    for plugins that are `resident`: asked when they are on at start, and kept, switched on or off.

    Refusal: the server does not start. None: it does not know this family; if nobody does, the model reads text only."""
    ...


@hookspec(firstresult=True)
def attention_backend(layout: KVLayout) -> AttentionBackend | None:
    """Worker, slot "attention", compute. Once when the plugin takes the slot, and once for each side model's layout. None: it can't serve
    this layout (and core's is used). A backend that raises in a step ends the requests of that step, and the plugin is switched off."""
    ...


@hookspec
def worker_request_added(request: WorkerRequestState, worker: WorkerContext) -> None:
    """Worker, per request, compute. When the worker first sees the request, again after each preemption and in another engine once
    this one has died (state was dropped; `request.tokens` then includes what was generated), and when the plugin joins the request by a
    live switch. Build state in `request.stash` from `request.tokens` and `request.num_prompt_tokens`. Claimed fields are in
    `request.fields`; `worker` is the same object in every call."""


@hookspec
def adjust_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Worker, per request, compute. Each step before temperature: change `logits` in place. For masks, bias and penalties.

    logits: float32 [len(rows), vocab_size], one row for each of `rows`, which belong to requests that use the plugin. A row's known
    tokens are `row.tokens` (all before the position to be sampled). -inf bans an id; a row with no finite entry is the request's error.
    Rows of different requests must not influence each other.
    """


@hookspec
def filter_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Worker, per request, compute. Each step after temperature was applied: ban ids with -inf, in place (top-k, top-p, ...). Shapes as in
    `adjust_logits`. Not called for greedy rows (temperature 0)."""


@hookspec
def fused_filters(request: WorkerRequestState) -> FusedFilters | None:
    """Worker, per request, compute. On a GPU, once for each request whose rows `filter_logits` or `adjust_logits` of the plugin would be
    shown, and again when a live switch changes its plugins: the same in numbers, for a kernel that filters and samples on the device.

    `filter_logits` is then not called for the request, so both must leave the same tokens. `FusedFilters()` says that the plugin changes
    nothing of this request; of a plugin that has `adjust_logits` that is the only answer with which it isn't called. None, or no such
    hook: the request's logits come to the host, and the plugin is shown them. So they do, too, when two plugins filter, or one looks at
    logits (`token_logprobs`).
    """
    ...


@hookspec
def token_logprobs(
    raw: torch.Tensor, processed: torch.Tensor | None, rows: Sequence[SampleRow], token_ids: Sequence[int]
) -> Sequence[TokenLogprobs | None] | None:
    """Worker, per request, compute. After sampling, and for prompt positions of requests that want them (then `row.is_prompt`).

    raw: float32 [len(rows), vocab_size], the model's logits. processed: what was sampled from (after temperature and filters), None
    for prompt rows. token_ids: the token that stands at each row's position. One entry for each row, None where there is nothing to say.
    """
    ...


@hookspec
def drafts_after_step(step: StepRan) -> Mapping[str, Sequence[int]] | None:
    """Worker, per request, compute. After each step's sampling, with those of its requests that ran in it, prompt chunks included: by
    request id, token ids that may follow `request.tokens`, at most `step.most` and none for a request that sampled nothing.

    For proposers that run a model, or look at hidden states or at what a mask allows. They are verified in the next step like those of
    `propose_drafts`, whose answer takes their place only if it begins with them and is longer. Of several plugins' here the first one's
    count, so a `tryfirst` is for drafts that are all but certain. `drafts_verified` tells the plugin's instance in the engine; here the
    next call shows what became of them.
    """
    ...
