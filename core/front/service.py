"""What every way in shares: the tokenizer, the template, admission, and the engine. HTTP handlers and the offline `LLM` call this."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..bus import Bus
from ..config import Config
from ..errors import ContextLengthError, NotFoundError, RequestError, TokenbusError, UnavailableError
from ..experiments.controller import Experiments
from ..host import PluginHost
from ..media import MediaPart, PreparedMedia
from ..messages import EngineInfo
from ..models.resolve import ResolvedModel
from .admission import Admission, Admitter, ParsedRequest, Prompt
from .audit import AuditTrail
from .chat import ChatOptions, ChatPrompt, ChatTemplate, check_messages, load_template
from .client import EngineClient
from .events import MediaPrepared, RequestAdmitted
from .feed import Feed
from .generation import Generation
from .media import MediaIntake, expand, media_of, place, text_chars
from .prepare import PreparePool
from .reader import make_readers
from .tokenizer import Tokenizer, load_tokenizer
from .tools import check_tools


@dataclass(frozen=True)
class Lane:
    """One engine and how requests get there."""

    client: EngineClient
    admitter: Admitter


class Service:
    """One model, served. Made once; everything runs on the event loop."""

    def __init__(
        self,
        config: Config,
        host: PluginHost,
        client: EngineClient,
        bus: Bus,
        *,
        model_name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        experiments: Experiments | None = None,
        engines: Mapping[str, EngineClient] | None = None,
    ) -> None:
        """client: the server's engine. engines: of the arms that have one for their own, by arm, `client` among them."""
        self.config = config
        self.host = host
        self.client = client
        self.bus = bus
        self.model_name = model_name
        """The name clients use."""
        self.feed = Feed(client, bus, lambda: client.settings.config.scheduler)
        self.tokenizer = tokenizer
        self.template = template
        self.experiments = experiments
        """None: requests are in no experiments (offline use)."""
        self._main = self._lane(client)
        self._lanes = {"": self._main}
        """By the arm whose own engine it is."""
        for arm, engine in (engines or {}).items():
            self._lanes[arm] = self._main if engine is client else self._lane(engine)
        self.audit = AuditTrail(config.server, bus)
        self._pool = PreparePool(self._max_waiting)
        self._media = MediaIntake(client, self._max_waiting)

    def _lane(self, client: EngineClient) -> Lane:
        admitter = Admitter(
            client.config,
            client.host,
            switches=lambda: client.switches,
            info=lambda: client.info,
            tokenize=lambda text: self.tokenizer.encode_now(text, add_special_tokens=False),
            vocabulary=self.tokenizer.vocabulary,
        )
        return Lane(client, admitter)

    def _max_waiting(self) -> int:
        return self.client.settings.config.scheduler.max_waiting

    def ready(self) -> tuple[bool, str]:
        """Whether requests are taken by every engine, and all make progress; and if not, why."""
        for arm, lane in self._lanes.items():
            is_ready, reason = lane.client.ready()
            if not is_ready:
                return False, f"arm {arm!r}: {reason}" if arm else reason
        return True, "ok"

    def close(self) -> None:
        """At the end: what is still to be written is. Idempotent."""
        self.audit.close()

    @property
    def info(self) -> EngineInfo:
        """Raises UnavailableError before the engine was ready for the first time."""
        if self.client.info is None:
            raise UnavailableError("the engine is not ready yet", retry_after=2.0)
        return self.client.info

    def check_model(self, name: str | None) -> None:
        """NotFoundError unless `name` is the served model's name, or what `--model` said, or absent."""
        if name is not None and name not in (self.model_name, self.config.model.model):
            raise NotFoundError(f"the model {name!r} is not served here; this server has {self.model_name!r}", param="model")

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._check_chars(len(text), "prompt")
        return await self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_chars(self, chars: int, field: str) -> None:
        """A text that can't fit is refused before any time is spent on it."""
        limit = self.info.max_model_len
        if chars > 4 * limit and chars > limit * self.tokenizer.max_token_chars:
            raise ContextLengthError(f"{chars} characters can't fit the limit of {limit} tokens", param=field)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, own: bool = False, seconds: float | None = None
    ) -> ChatPrompt:
        """RequestError when the model has no chat template, or its template refuses the messages; for messages with media what
        `MediaIntake.prepare` raises. own: see `check_messages`. seconds: the client's timeout."""
        checked = check_messages(messages, self.config.limits.max_messages, own=own)
        options = replace(options, tools=check_tools(options.tools, self.config.limits))
        if self.template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start with --chat-template", param="messages"
            )
        self._check_chars(text_chars(checked), "messages")
        if not (parts := media_of(checked)):
            return await self.template.encode(checked, options)
        prepared, took = await self._prepare_media(parts, seconds)
        return replace(await self.template.encode(checked, options, prepared), media_seconds=took)

    async def _prepare_media(self, parts: Sequence[MediaPart], seconds: float | None) -> tuple[list[PreparedMedia], float]:
        """And the seconds that it took."""
        began = time.perf_counter()
        most = self.client.settings.config.scheduler.request_timeout
        prepared = await self._media.prepare(parts, min(seconds, most) if seconds and seconds > 0 else most)
        rows, limit = sum(one.rows for one in prepared), self.info.max_model_len
        if rows >= limit:
            raise ContextLengthError(
                f"the pictures and sounds take {rows} tokens; the limit is {limit} tokens for prompt and answer together",
                param="messages",
            )
        took = time.perf_counter() - began
        kinds = Counter(one.item.kind for one in prepared)
        known = Counter(one.item.kind for one in prepared if one.known)
        self.bus.publish(MediaPrepared(items=dict(kinds), known=dict(known), tokens=rows, seconds=took))
        return prepared, took

    async def encode_with_media(self, text: str, parts: Sequence[MediaPart]) -> Prompt:
        """A text in which the model's own marker stands for each of `parts`, in order by kind. Raises what `encode_chat` raises."""
        self._check_chars(len(text), "prompt")
        prepared, took = await self._prepare_media(parts, None)
        ids = await self.tokenizer.encode(expand(text, prepared, "prompt"))
        return Prompt(ids, text, place(ids, prepared, self.tokenizer.token_id), took)

    async def start(self, parsed: ParsedRequest) -> Generation:
        """Admit a request and hand it to the engine. Raises what `Admitter.admit`, `PreparePool.run`, `make_readers` and
        `EngineClient.submit` raise."""
        if self.experiments is not None:
            parsed.overrides = self.experiments.assign(parsed)
        lane = self._main if parsed.overrides is None else self._lanes[parsed.overrides.engine]
        try:
            with lane.client.hold_plugins() as hold:
                admission = lane.admitter.admit(parsed, hold)
                if admission.table.prepare_fields:
                    admission = await self._pool.run(partial(lane.admitter.prepare, admission), _seconds_left(admission))
                readers = make_readers(admission, self.tokenizer, self.template)
                streams = lane.client.submit(admission.requests)
        except BaseException as error:
            self._not_admitted(parsed, error)
            raise
        if admission.decision.arm_refused is not None and self.experiments is not None:
            self.experiments.not_given(parsed.group)
        for request in admission.requests:
            self.bus.publish(RequestAdmitted(request.request_id, sum(item.size for item in request.media)))
        return Generation(admission, streams, self.tokenizer, self.bus, readers)

    def _not_admitted(self, parsed: ParsedRequest, error: BaseException) -> None:
        if self.experiments is None:
            return
        if isinstance(error, TokenbusError):
            self.experiments.refused(parsed, error)
        else:
            self.experiments.dropped(parsed.group)


def _seconds_left(admission: Admission) -> float:
    deadline = admission.requests[0].deadline
    return math.inf if deadline is None else deadline - time.time()


def load_text_parts(model: ResolvedModel, config: Config) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and template of a model. Blocking; ModelError or ConfigError when they can't be had."""
    tokenizer = load_tokenizer(model)
    return tokenizer, load_template(model, tokenizer, config.model.chat_template)
