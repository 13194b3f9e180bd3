"""The front's part of a request, here and now: text to ids, fields checked and prepared, ids to text, past the text filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ..bus import Bus
from ..config import Config
from ..contexts import AdmissionContext, FrontContext, OutputContext
from ..errors import ModelError, RequestError
from ..front.detokenizer import Detokenizer, make_detokenizer
from ..front.media import FIELD as MEDIA
from ..front.tokenizer import Tokenizer, load_tokenizer
from ..hooks import TextFilter
from ..host import HookTable, PluginHost
from ..media import MediaItem, MediaPart, PreparedMedia
from ..models.resolve import resolve
from ..request import AdmittedRequest
from ..worker.base import WorkerInfo


@dataclass
class Ask:
    """A request, as a client would put it."""

    prompt: list[int]
    max_tokens: int = 8
    temperature: float = 0.0
    seed: int = 0
    choice: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    at_step: int = 0
    """It arrives before this step."""
    afterwards: bool = False
    """It arrives when all have ended of which this is not said."""
    without: tuple[str, ...] = ()
    """Plugins that it has switched off for itself."""
    text: str | None = None
    """The prompt as a text, which takes the place of `prompt`."""
    group: str = ""
    """Shared by the choices of one API request."""
    media: tuple[MediaItem, ...] = ()
    """What placeholders in `prompt` stand for."""
    fatal_at: int = 0
    """The engine dies when the answer has this many tokens; once, and not when it has died before while the answer had any. 0: never."""

    def arrived(self, step: int) -> bool:
        return self.at_step <= step and not self.afterwards


class Front:
    def __init__(self, config: Config, names: Sequence[str], info: WorkerInfo, max_model_len: int, host: PluginHost) -> None:
        """names: plugins that may be in force."""
        self.host = host
        self.host.load(frozenset(names))
        self._config, self._info, self._max_model_len = config, info, max_model_len
        self._serial = 0
        self._started: set[str] = set()
        """Plugins that were told so, as only some need it here."""

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None: the model has none that can be loaded."""
        try:
            return load_tokenizer(resolve(self._config.model.model))
        except ModelError:
            return None

    def honours(self, fields: dict[str, Any]) -> bool:
        """Whether some plugin claims each of them."""
        return all(set(self.host.claimers(name)) & self.host.loaded.keys() for name in fields)

    def prepare_media(self, parts: Sequence[MediaPart]) -> list[PreparedMedia]:
        """Raises what plugins raise, RequestError when none of them can."""
        impls = self.host.table(frozenset(self.host.loaded), (MEDIA,)).prepare_media
        for impl in impls:
            if impl.plugin not in self._started:
                self._started.add(impl.plugin)
                self._start(impl.plugin)
            if (prepared := impl(parts=parts)) is not None:
                return list(prepared)
        raise RequestError("no plugin that is on prepares pictures or sounds")

    def _start(self, name: str) -> None:
        context = FrontContext(bus=Bus(), config=self._config, info=lambda: None)
        for impl in self.host.table(frozenset({name})).front_started:
            impl(front=context)

    def admit(self, ask: Ask, features: tuple[str, ...]) -> AdmittedRequest:
        """features: plugins in force for it. Raises what `check_fields` and `prepare_fields` raise, ModelError without a tokenizer."""
        self._serial += 1
        features = tuple(name for name in features if name not in ask.without)
        prompt = ask.prompt if ask.text is None else self._tokenizer().encode_now(ask.text)
        fields = dict(ask.fields)
        context = AdmissionContext(
            prompt_len=len(prompt),
            max_tokens=ask.max_tokens,
            vocab_size=self._info.vocab_size,
            max_model_len=self._max_model_len,
            eos_token_ids=self._info.eos_token_ids,
            temperature=ask.temperature,
            limits=self._config.limits,
            tokenize=lambda text: self._tokenizer().encode_now(text, add_special_tokens=False),
            fields=MappingProxyType(fields),
            endpoint="generate",
            vocabulary=lambda: self._tokenizer().vocabulary(self._info.vocab_size, self._info.eos_token_ids),
        )
        table = self._table(features, fields)
        for impl in (*table.check_fields, *table.prepare_fields):
            mine = {name: value for name, value in fields.items() if name in impl.info.claims}
            instead = impl(fields=mine, request=context)
            if instead is not None:
                for name in mine:
                    del fields[name]
                fields |= instead
        return AdmittedRequest(
            request_id=f"r{self._serial}",
            prompt=prompt,
            media=ask.media,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            choice=ask.choice,
            fields=fields,
            features=features,
            arrival=float(self._serial),
            group=ask.group,
        )

    def reader(self, admitted: AdmittedRequest) -> Reader | None:
        """What makes the answer's text; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        context = OutputContext(admitted.request_id, admitted.fields, admitted.choice)
        made = [impl(request=context) for impl in self._table(admitted.features, admitted.fields).text_filter]
        detokenizer = make_detokenizer(self.tokenizer, skip_special=True, context=admitted.prompt)
        return Reader(detokenizer, [one for one in made if one is not None])

    def close(self) -> None:
        """Plugins end what they have started."""
        for impl in self.host.table(frozenset(self.host.loaded)).front_stopped:
            impl()

    def _table(self, features: Sequence[str], fields: dict[str, Any]) -> HookTable:
        return self.host.table(frozenset(self.host.loaded.keys() & set(features)), fields)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ModelError(f"{self._info.model} has no tokenizer that can be loaded")
        return self.tokenizer


class Reader:
    """One answer's text, as far as it may be shown."""

    def __init__(self, detokenizer: Detokenizer, filters: Sequence[TextFilter]) -> None:
        self.text = ""
        self.stopped: str | None = None
        """Why a filter ended the text."""
        self._detokenizer, self._filters = detokenizer, filters

    def feed(self, tokens: Sequence[int]) -> int:
        """How many of the tokens belong to the answer: all, unless a filter ends it among them."""
        for used, token in enumerate(tokens, 1):
            self._show(self._detokenizer.feed((token,)), final=False)
            if self.stopped is not None:
                return used
        return len(tokens)

    def end(self) -> None:
        """The engine has ended the answer: what is held back comes out."""
        if self.stopped is None:
            self._show(self._detokenizer.flush(), final=True)

    def _show(self, text: str, *, final: bool) -> None:
        for one in self._filters:
            text, reason = one.feed(text, final=final)
            if reason is not None:
                self.stopped, final = reason, True
        self.text += text
