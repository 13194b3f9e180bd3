"""The engine's record of a request, from admission to its one end."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from .media import MediaItem
from .plugin import Stash

if TYPE_CHECKING:
    from .host import HookTable
    from .plan import Drafts


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request stood when the engine that ran it died: another one goes on from here."""

    tokens: list[int] = []
    """New tokens that were emitted; a token computed and not emitted is drawn again, and is the same."""
    prompt_logprobs: int = 0
    """Entries for prompt positions that were emitted: they are not sent again."""
    cached_tokens: int | None = None
    """As in `Request`; None: its first scheduling is not known to have taken place."""
    preemptions: int = 0
    notes: dict[str, str] = {}
    """As in `Request`."""
    until: int | None = None
    """New tokens, those above included, at which it ends with "length" for now, to be resumed once more; None: it runs to its end."""


class AdmittedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the front process hands to the engine: everything that decides the answer, validated, with the seed drawn."""

    request_id: str
    """Unique in this server's life; made by the front, never the client's own."""
    prompt: list[int]
    """Token ids, at least one, all inside the vocabulary."""
    max_tokens: int
    """New tokens at most; 0 scores the prompt only. prompt + max_tokens never passes the context limit."""
    temperature: float = 1.0
    seed: int = 0
    choice: int = 0
    """Index among the n choices of one API request; part of the random key."""
    media: tuple[MediaItem, ...] = ()
    """Pictures and sounds among the prompt's tokens, in order. The prompt's ids at their places are placeholders."""
    fields: dict[str, Any] = {}
    """Plugin-claimed fields that ask for something, normalised by the claiming plugin's `check_fields`."""
    features: tuple[str, ...] = ()
    """Names of all plugins in force for this request, sorted."""
    pinned: dict[str, bool] = {}
    """Request-scope plugins that the client itself, or an experiment's arm, decided about: live switches leave these alone."""
    tenant: str = ""
    """Who asks: a hash of the API key, or "". Caches and quotas may separate by it."""
    arm: str = ""
    arrival: float = 0.0
    """Unix seconds."""
    deadline: float | None = None
    """Unix seconds; past it the request ends with a DeadlineError."""
    group: str = ""
    """The API request's id, shared by its choices."""
    resumed: Resumed | None = None
    """Set when an engine that has died ran it before. Its `features` are then those it had at that moment."""


class Status(enum.IntEnum):
    WAITING = 0
    """Not yet run, or preempted: holds no blocks."""
    RUNNING = 1
    FINISHED = 2


class StopRule(msgspec.Struct, frozen=True):
    """When generation ends by itself: on one of `token_ids`, but not before `min_tokens` new tokens."""

    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


class Request:
    """Scheduler-owned state. Plugins read it freely, write only `stash` and `notes`.

    Invariants: computed <= len(tokens); len(blocks) * block_size >= computed (while RUNNING); WAITING holds no blocks.
    `tokens` is prompt then output. A request is prefilling while computed < len(tokens) - 1, else it decodes.
    """

    __slots__ = (
        "accepted_tokens", "admitted", "arrival", "blocks", "cached_tokens", "capacity", "choice", "computed", "deadline",
        "draft_tokens", "features", "fields", "finish", "hooks", "kernels", "limit", "notes", "num_prompt", "pinned",
        "preemptions", "prompt_logits", "prompt_logprobs_sent", "proposed", "request_id", "stash", "status", "stop_ids", "stop_min_len",
        "tokens", "worker_knows",
    )  # fmt: skip

    def __init__(self, admitted: AdmittedRequest, hooks: HookTable) -> None:
        self.admitted = admitted
        self.request_id = admitted.request_id
        self.tokens: list[int] = list(admitted.prompt)
        self.num_prompt = len(admitted.prompt)
        self.limit = self.num_prompt + admitted.max_tokens
        """Length of prompt plus output at which it ends with "length"."""
        self.computed = 0
        """Tokens whose K/V is written; the next step runs tokens[computed:computed+n]."""
        self.blocks: list[int] = []
        self.capacity = 0
        """len(blocks) * block_size."""
        self.status = Status.WAITING
        self.fields = admitted.fields
        self.features = frozenset(admitted.features)
        self.pinned = admitted.pinned
        self.hooks = hooks
        """Hook implementations of its features, resolved."""
        self.kernels = ""
        """Plugins that hold the slots which decide K/V, bit by bit: K/V of one such set never serves a request of another."""
        self.arrival = admitted.arrival
        self.deadline = admitted.deadline
        self.choice = admitted.choice
        self.prompt_logits = False
        """Needs logits at every prompt position: no prefix-cache reads."""
        self.prompt_logprobs_sent = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.stop_min_len = 0
        """Length (prompt plus output) below which stop ids are ignored."""
        self.cached_tokens: int | None = None
        """Prompt tokens taken from a cache at its first scheduling; None before."""
        self.preemptions = 0
        self.draft_tokens = 0
        """Drafts verified for it."""
        self.accepted_tokens = 0
        """Drafts among them that were accepted."""
        self.notes: dict[str, str] = {}
        """What really applied and why not, by plugin name; part of the response's `tokenbus` object."""
        self.stash = Stash()
        self.proposed: tuple[int, Drafts] | None = None
        """What the worker proposed, and the length of `tokens` that it follows."""
        self.worker_knows = False
        self.finish: str | None = None
        if admitted.resumed is not None:
            self._resume(admitted.resumed)

    def _resume(self, before: Resumed) -> None:
        """What was generated is there already, as after a preemption."""
        self.tokens += before.tokens
        if before.until is not None:
            self.limit = min(self.limit, self.num_prompt + before.until)
        self.prompt_logprobs_sent = before.prompt_logprobs
        self.cached_tokens = before.cached_tokens
        self.preemptions = before.preemptions
        self.notes |= before.notes

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Known tokens still to run; the last one of them yields a new token."""
        return len(self.tokens) - self.computed

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.computed}/{len(self.tokens)} of {self.limit})"
