"""What every way in shares: the tokenizer, the template, admission, and the engine. HTTP handlers and the offline `LLM` call this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..bus import Bus
from ..config import Config
from ..errors import ContextLengthError, NotFoundError, RequestError, UnavailableError
from ..host import PluginHost
from ..messages import EngineInfo
from ..models.resolve import ResolvedModel
from .admission import Admission, Admitter, ParsedRequest
from .chat import ChatOptions, ChatPrompt, ChatTemplate, check_messages, load_template
from .client import EngineClient
from .events import RequestAdmitted
from .feed import Feed
from .generation import Generation
from .prepare import PreparePool
from .reader import make_readers
from .tokenizer import Tokenizer, load_tokenizer
from .tools import check_tools

MAX_ADMISSIONS = 3
"""Times that a request is admitted anew because switches changed while plugins prepared it."""


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
    ) -> None:
        self.config = config
        self.host = host
        self.client = client
        self.bus = bus
        self.model_name = model_name
        """The name clients use."""
        self.feed = Feed(client, bus, lambda: config.scheduler)
        self.tokenizer = tokenizer
        self.template = template
        self._admitter = Admitter(
            config,
            host,
            switches=lambda: client.switches,
            info=lambda: client.info,
            tokenize=lambda text: tokenizer.encode_now(text, add_special_tokens=False),
            vocabulary=tokenizer.vocabulary,
        )
        self._pool = PreparePool(config.scheduler.max_waiting)

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

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatPrompt:
        """RequestError when the model has no chat template, or its template refuses the messages."""
        checked = check_messages(messages, self.config.limits.max_messages)
        options = replace(options, tools=check_tools(options.tools, self.config.limits))
        if self.template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start with --chat-template", param="messages"
            )
        self._check_chars(sum(len(message["content"]) for message in checked), "messages")
        return await self.template.encode(checked, options)

    async def start(self, parsed: ParsedRequest) -> Generation:
        """Admit a request and hand it to the engine. Raises what `Admitter.admit`, `PreparePool.run`, `make_readers` and
        `EngineClient.submit` raise."""
        admission = await self._admit(parsed)
        readers = make_readers(admission, self.tokenizer, self.template)
        streams = self.client.submit(admission.requests)
        for request in admission.requests:
            self.bus.publish(RequestAdmitted(request.request_id))
        return Generation(admission, streams, self.tokenizer, self.bus, readers)

    async def _admit(self, parsed: ParsedRequest) -> Admission:
        """Admission, with what plugins prepare on a pool thread; from the beginning again when switches changed meanwhile."""
        for _ in range(MAX_ADMISSIONS):
            switches = self.client.switches
            admission = self._admitter.admit(parsed)
            if not admission.table.prepare_fields:
                return admission
            admission = await self._pool.run(self._admitter.prepare, admission)
            if self.client.switches is switches:
                return admission
        raise UnavailableError("the switches kept changing while the request was prepared: send it again", retry_after=1.0)


def load_text_parts(model: ResolvedModel, config: Config) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and template of a model. Blocking; ModelError or ConfigError when they can't be had."""
    tokenizer = load_tokenizer(model)
    return tokenizer, load_template(model, tokenizer, config.model.chat_template)
