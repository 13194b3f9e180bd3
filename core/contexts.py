"""What hooks are given beside core's own objects: narrow, documented views."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import web

    from .bus import Bus
    from .config import Config, LimitsConfig
    from .host import Switches
    from .kv.pool import BlockPool
    from .media import MediaItem
    from .messages import EngineInfo


@dataclass(frozen=True, slots=True)
class Route:
    """An HTTP route of a plugin. `admin` routes need the admin key (or loopback without one).

    page: the frame of a page for whoever may use admin routes. A browser can't send a key with a navigation, so where there is an admin
    key anybody gets it: it must hold nothing that is secret, and ask for the key itself. Without one it is as `admin`.
    """

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    admin: bool = False
    page: bool = False


@dataclass(frozen=True, slots=True)
class FrontContext:
    bus: Bus
    """The front's bus: StepReport, RequestRecord, FeatureChange, EngineStarted, EngineDied (see front/events.py)."""
    config: Config
    info: Callable[[], EngineInfo | None]
    """The running engine's description; None before it is ready."""
    main: bool = True
    """False: beside an engine that an experiment's arm has for its own. Pictures and sounds are processed before a request has an arm, so
    never here."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each token id of the served model stands for."""

    tokens: Sequence[bytes]
    """By id, as many as the model has logits; empty for ids that no token has."""
    special_ids: frozenset[int]
    """Control tokens: their bytes are how they are spelled, and never part of a text."""
    eos_token_ids: tuple[int, ...]
    exact: bool
    """False: the tokenizer is of a kind whose tokens have no fixed bytes; `tokens` is then only a guess."""
    tokenize: Callable[[str], list[int]]
    """Ids of a text, without special tokens."""


def _no_vocabulary() -> Vocabulary:
    raise RuntimeError("there is no tokenizer here")


def _no_switches() -> Switches | None:
    return None


@dataclass(frozen=True, slots=True)
class WorkerContext:
    vocabulary: Callable[[], Vocabulary]
    """Loads the tokenizer when first called (some 0.1 s), then gives the same object. May be called on any thread. ModelError when it
    can't be loaded."""


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    """The API request that `check_fields` and `prepare_fields` look at."""

    prompt_len: int
    """Tokens of the (longest) prompt."""
    max_tokens: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    temperature: float
    limits: LimitsConfig
    tokenize: Callable[[str], list[int]]
    """Ids of a short text, without special tokens."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All claimed fields that ask for something, other plugins' too: as handed on by the plugins asked so far, the rest as sent."""
    endpoint: str = ""
    """chat, completion or generate."""
    media: Sequence[MediaItem] = ()
    """Pictures and sounds in the prompt, in order."""
    vocabulary: Callable[[], Vocabulary] = _no_vocabulary
    """Made when first called, which takes some 0.1 s: for `prepare_fields` only."""


@dataclass(frozen=True, slots=True)
class Implied:
    """Fields that a request's own fields imply; see `implied_fields`."""

    by: str
    """The client's field that implies them: errors name it."""
    fields: Mapping[str, Any]
    plugin: str
    """Who is expected to honour them, for the error when nobody does."""


@dataclass(frozen=True, slots=True)
class OutputContext:
    """The choice whose text a `text_filter` will see."""

    request_id: str
    fields: dict[str, Any]
    choice: int


@dataclass(frozen=True, slots=True)
class ParserContext:
    """The choice of a chat whose text a `reasoning_parser` or `tool_parser` will see."""

    request_id: str
    choice: int
    fields: Mapping[str, Any]
    """As handed on by `check_fields`."""
    tools: Sequence[Mapping[str, Any]]
    """The tools that may be called, as the client defined them: {"type": "function", "function": {"name", "parameters", ...}}."""
    chat_template: str
    """Source of the template that made the prompt."""
    added_tokens: frozenset[str]
    """Tokens beyond the ordinary vocabulary, as they are spelled: control tokens and others."""
    prompt_end: str
    """The prompt's last characters, control tokens included."""


@dataclass(slots=True)
class EngineContext:
    bus: Bus
    """The engine's bus. For each step StepPlan and StepInput before it runs, StepResult and StepOutput after it (of a step that failed as a
    whole only StepOutput); StepOutput also for ends that no step carried. SetSettings once a live change of settings has been made."""
    config: Config
    """With every live change so far."""
    pool: BlockPool
    info: EngineInfo | None = None
    """The engine's description; None where there is no engine process (self test)."""
    switches: Callable[[], Switches | None] = _no_switches
    """What is on now; None as long as the engine starts."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks whose K/V fits the beginning of a request; see `match_prefix`."""

    blocks: Sequence[int]
    num_tokens: int
    """len(blocks) * block_size."""


@dataclass(slots=True)
class StepView:
    """The step that is being planned, as `limit_chunk` sees it. Counts are of what is planned so far."""

    step_id: int
    budget: int
    """Tokens that the step may still take."""
    num_decodes: int
    """Requests that run without a prompt chunk (they are planned first)."""
    prompt_tokens: int
    """Prompt tokens planned so far in this step."""
    waiting: int
