"""From a parsed API request to what the engine gets: everything checked, nothing ignored, seeds drawn, features decided.

Rules of length, the same with and without streaming: a prompt of L tokens or more (L: the longest sequence that model, setting and KV
pool allow) is refused, and so is prompt + max_tokens > L. Without max_tokens the answer is bounded by the room that is left.
"""

from __future__ import annotations

import difflib
import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from ..config import Config
from ..contexts import AdmissionContext, Vocabulary
from ..errors import ContextLengthError, FeatureOffError, FieldError, PluginLoadError, UnavailableError
from ..hook_answers import plain_data_problem
from ..host import HookTable, Impl, PluginHost, Switches
from ..media import MediaItem, check_spans
from ..messages import EngineInfo
from ..params import asks_for_nothing
from ..request import AdmittedRequest
from .features import Decision, Overrides, decide, feature_field, leave_arm
from .media import FIELD as MEDIA
from .plugins import Hold

WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier"})
"""Accepted in every request and ignored: they ask nothing of an answer."""
CORE_FIELDS = frozenset({
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "n", "stream", "stream_options",
    "echo", "timeout", "tokenbus", "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "logprobs", "top_logprobs", "prompt_logprobs", "skip_special_tokens",
})  # fmt: skip
"""Names to suggest for a misspelt one, beside the plugins' claims."""
SEED_BITS = 48
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**63
MIN_TIMEOUT = 0.001
"""Seconds; with less no request could ever be answered."""


class Prompt(msgspec.Struct):
    token_ids: list[int]
    text: str | None = None
    """As the client wrote it; None when it sent ids, or messages."""
    media: tuple[MediaItem, ...] = ()
    """What its placeholders stand for, in order."""
    media_seconds: float = 0.0
    """Until that was fetched and processed."""


class ParsedRequest(msgspec.Struct, kw_only=True):
    """An API request after its own form was dealt with; the same for every endpoint and for offline use."""

    endpoint: str
    """chat, completion or generate."""
    prompts: list[Prompt]
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    timeout: float | None = None
    """Seconds."""
    skip_special_tokens: bool = True
    fields: dict[str, Any] = {}
    """Everything the endpoint itself doesn't honour, by name."""
    tools: list[dict[str, Any]] = []
    """Chat: what the prompt offers to the model, checked."""
    features: dict[str, bool] = {}
    """Switches the client asks for."""
    own_features: bool = False
    """The caller is the operator: any request-scope plugin may be switched."""
    headers: dict[str, str] = {}
    """Those that experiments go by, names in small letters."""
    overrides: Overrides | None = None
    """The arm of an experiment that it is given to, and the arm's flags."""
    group: str = ""
    """The API request's id; made by `new_id`."""
    tenant: str = ""
    arrival: float = 0.0
    """Unix seconds."""
    tokenize_seconds: float = 0.0
    template_seconds: float = 0.0


class Admission(msgspec.Struct, kw_only=True):
    """What was decided. `requests` holds prompt by prompt, within it choice by choice."""

    parsed: ParsedRequest
    requests: list[AdmittedRequest]
    features: tuple[str, ...]
    decision: Decision
    """Who decided what about them."""
    seeds: list[int]
    """One a prompt."""
    table: HookTable
    """Front hooks of this request."""
    context: AdmissionContext

    @property
    def arm(self) -> str:
        """Of an experiment; "": none."""
        return self.decision.arm


_serial = itertools.count(1)
_process = secrets.token_hex(4)


def new_id(prefix: str) -> str:
    """Unique in this server's life, and hard to guess for others: ids show in logs and plans."""
    return f"{prefix}-{_process}{next(_serial):08x}{secrets.token_hex(4)}"


class Admitter:
    """Stateless but for what it is given: callables that tell the present state."""

    def __init__(
        self,
        config: Config,
        host: PluginHost,
        *,
        switches: Callable[[], Switches],
        info: Callable[[], EngineInfo | None],
        tokenize: Callable[[str], list[int]],
        vocabulary: Callable[[int, tuple[int, ...]], Vocabulary] | None = None,
    ) -> None:
        """vocabulary: gives the tokenizer's, for a number of logits and the end tokens; only `prepare_fields` needs it."""
        self._config = config
        self._host = host
        self._switches = switches
        self._info = info
        self._tokenize = tokenize
        self._vocabulary = vocabulary

    def admit(self, parsed: ParsedRequest, hold: Hold | None = None) -> Admission:
        """Raises RequestError (the client's fault), UnavailableError (no engine yet), PluginError (a `check_fields` failed).

        hold: what keeps the request's plugins loaded until it is submitted; without one, it can't have any that is off."""
        info = self._info()
        if info is None:
            raise UnavailableError("the engine is not ready yet", retry_after=2.0)
        limits = [self._check_prompt(prompt, parsed, info) for prompt in parsed.prompts]
        self._check_counts(parsed)
        self._check_media(parsed)
        self._check_core(parsed)
        decision = self._decide(parsed, hold)
        features = decision.features
        fields, table, context = self._fields(parsed, features, max(limits, default=0), info)
        seeds = [self._seed(parsed) for _ in parsed.prompts]
        names = tuple(sorted(features))
        requests = [
            AdmittedRequest(
                request_id=f"{parsed.group}-{index * parsed.n + choice}",
                prompt=prompt.token_ids,
                media=prompt.media,
                max_tokens=limits[index],
                temperature=1.0 if parsed.temperature is None else float(parsed.temperature),
                seed=seeds[index],
                choice=choice,
                fields=fields,
                features=names,
                pinned=decision.pinned,
                tenant=parsed.tenant,
                arm=decision.arm,
                arrival=parsed.arrival,
                deadline=parsed.arrival + self._timeout(parsed),
                group=parsed.group,
            )
            for index, prompt in enumerate(parsed.prompts)
            for choice in range(parsed.n)
        ]
        return Admission(
            parsed=parsed, requests=requests, features=names, decision=decision, seeds=seeds, table=table, context=context
        )

    def prepare(self, admission: Admission) -> Admission:
        """What `prepare_fields` makes of it. Blocking, on any thread. Raises what `admit` raises, and OverloadedError."""
        fields = dict(admission.context.fields)
        context = replace(admission.context, fields=MappingProxyType(fields))
        for impl in admission.table.prepare_fields:
            _hand_on(impl, fields, context)
        requests = [msgspec.structs.replace(request, fields=fields) for request in admission.requests]
        return msgspec.structs.replace(admission, requests=requests, context=context)

    # ---- lengths and counts -----------------------------------------------------------------------------------------------------

    def _check_prompt(self, prompt: Prompt, parsed: ParsedRequest, info: EngineInfo) -> int:
        """The number of new tokens it may have."""
        field = "messages" if parsed.endpoint == "chat" else "prompt"
        ids, limit = prompt.token_ids, info.max_model_len
        if not ids:
            raise FieldError(field, "has no tokens: there is nothing to start from")
        if max(ids) >= info.vocab_size or min(ids) < 0:
            raise FieldError(field, f"token ids must be between 0 and {info.vocab_size - 1}")
        if len(ids) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; the limit is {limit} tokens for prompt and answer together", param=field
            )
        if parsed.max_tokens is None:
            return limit - len(ids)
        if parsed.max_tokens < 0:
            raise FieldError("max_tokens", f"must be 0 or more, got {parsed.max_tokens}")
        if len(ids) + parsed.max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens and max_tokens is {parsed.max_tokens}: together they pass the limit of "
                f"{limit} tokens; leave max_tokens out to use the room there is",
                param="max_tokens",
            )
        return parsed.max_tokens

    def _check_counts(self, parsed: ParsedRequest) -> None:
        check_counts(parsed.n, len(parsed.prompts), self._config)

    def _check_media(self, parsed: ParsedRequest) -> None:
        size = parsed.n * sum(item.size for prompt in parsed.prompts for item in prompt.media)
        most = self._config.limits.max_media_mb
        if size > most << 20:
            times = f", times n={parsed.n}" if parsed.n > 1 else ""
            raise FieldError(
                "messages",
                f"its pictures and sounds take {size / 2**20:.1f} MiB once they are processed{times}; at most {most} MiB are allowed: send "
                "fewer or smaller ones",
            )
        for prompt in parsed.prompts:
            try:
                check_spans(prompt.media, len(prompt.token_ids))
            except ValueError as error:
                raise FieldError("prompt", str(error)) from None

    def _check_core(self, parsed: ParsedRequest) -> None:
        temperature = parsed.temperature
        if temperature is not None and not 0.0 <= temperature <= MAX_TEMPERATURE:
            raise FieldError("temperature", f"must be between 0 and {MAX_TEMPERATURE:g}, got {temperature}")
        if parsed.seed is not None and not -MAX_SEED <= parsed.seed < MAX_SEED:
            raise FieldError("seed", "must fit 64 bits")

    def _timeout(self, parsed: ParsedRequest) -> float:
        most = self._config.scheduler.request_timeout
        if parsed.timeout is None:
            return most
        if not (math.isfinite(parsed.timeout) and parsed.timeout >= MIN_TIMEOUT):
            raise FieldError("timeout", f"must be a number of seconds, {MIN_TIMEOUT:g} or more, got {parsed.timeout:g}")
        return min(parsed.timeout, most)

    def _seed(self, parsed: ParsedRequest) -> int:
        return secrets.randbits(SEED_BITS) if parsed.seed is None else parsed.seed

    # ---- features ---------------------------------------------------------------------------------------------------------------

    def _decide(self, parsed: ParsedRequest, hold: Hold | None) -> Decision:
        """The features, all loaded in this process."""
        switches, overrides = self._switches(), parsed.overrides
        allowed = self._config.server.client_features
        decision = decide(self._host, switches, parsed.features, allowed=allowed, own=parsed.own_features, overrides=overrides)
        try:
            self._load(decision.features, switches.on, hold)
        except PluginLoadError as error:
            if error.plugin is None or error.plugin in parsed.features or overrides is None:
                name = error.plugin or ""
                raise FeatureOffError(
                    feature_field(name), f"is off on this server and can't be started: {error.message}", plugin=name
                ) from error
            decision = decide(self._host, switches, parsed.features, allowed=allowed, own=parsed.own_features)
            decision = leave_arm(decision, switches, overrides, error.message)
            self._load(decision.features, switches.on, hold)
        return decision

    def _load(self, features: frozenset[str], on: frozenset[str], hold: Hold | None) -> None:
        if hold is not None:
            hold.load(features, on)
        elif missing := features - on - self._host.loaded.keys():
            raise PluginLoadError("nothing keeps it loaded here", plugin=min(missing))

    # ---- fields -----------------------------------------------------------------------------------------------------------------

    def _fields(
        self, parsed: ParsedRequest, features: frozenset[str], max_tokens: int, info: EngineInfo
    ) -> tuple[dict[str, Any], HookTable, AdmissionContext]:
        asked = {
            name: value
            for name, value in parsed.fields.items()
            if name not in WITHOUT_EFFECT and not asks_for_nothing(name, value)
        }
        if MEDIA in asked:
            raise FieldError(MEDIA, "is no field of its own: pictures and sounds are parts of a chat message's content")
        media = [item for prompt in parsed.prompts for item in prompt.media]
        if media:
            asked[MEDIA] = len(media)
        for name in asked:
            self._check_claim(name, features)
        asked |= self._implied(asked, features, parsed.endpoint)
        table = self._host.table(features, asked)
        context = AdmissionContext(
            prompt_len=max((len(prompt.token_ids) for prompt in parsed.prompts), default=0),
            max_tokens=max_tokens,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            temperature=1.0 if parsed.temperature is None else parsed.temperature,
            limits=self._config.limits,
            tokenize=self._tokenize,
            fields=MappingProxyType(asked),
            endpoint=parsed.endpoint,
            media=media,
            **({} if (made := self._vocabulary) is None else {"vocabulary": lambda: made(info.vocab_size, info.eos_token_ids)}),
        )
        for impl in table.check_fields:
            _hand_on(impl, asked, context)
        for name, value in asked.items():  # what a plugin made of one has been looked at when it came back
            if value is parsed.fields.get(name) and (problem := plain_data_problem(value)):
                raise FieldError(name, problem)
        return asked, table, context

    def _implied(self, asked: Mapping[str, Any], features: frozenset[str], endpoint: str) -> dict[str, Any]:
        """What plugins add to the fields that the client sent."""
        added: dict[str, Any] = {}
        for impl in self._host.table(features, asked).implied_fields:
            mine = {name: value for name, value in asked.items() if name in impl.info.claims}
            if (implied := impl(fields=mine, endpoint=endpoint)) is None:
                continue
            for name, value in implied.fields.items():
                if name in asked or name in added:
                    raise FieldError(name, f"can't be combined with this {implied.by}, which implies a value of its own")
                if not features.intersection(self._host.claimers(name)):
                    raise FeatureOffError(
                        implied.by, f"needs the plugin {implied.plugin!r}, which is not on here", plugin=implied.plugin
                    )
                added[name] = value
        return added

    def _check_claim(self, name: str, features: frozenset[str]) -> None:
        claimers = self._host.claimers(name)
        if not claimers:
            raise FieldError(name, "unknown field" + self._hint(name))
        if not features.intersection(claimers):
            reasons = self._switches().reasons
            plugin = claimers[0]
            why = f" ({reasons[plugin]})" if plugin in reasons else ""
            hint = f'; "tokenbus": {{"features": {{"{plugin}": true}}}} switches it on for this request'
            may = plugin in self._config.server.client_features and plugin not in self._switches().failed
            raise FeatureOffError(
                name, f"the plugin that honours it, {plugin!r}, is off{why}{hint if may else ''}", plugin=plugin
            )

    def _hint(self, name: str) -> str:
        claims = {claim for cls in self._host.catalogue.values() for claim in cls.info.claims}
        close = difflib.get_close_matches(name, claims | CORE_FIELDS, n=1)
        return f"; did you mean {close[0]!r}?" if close else ""


def _hand_on(impl: Impl, fields: dict[str, Any], context: AdmissionContext) -> None:
    """Let a plugin look at those of `fields` that it claims; what it gives back takes their place."""
    mine = {name: value for name, value in fields.items() if name in impl.info.claims}
    instead = impl(fields=mine, request=context)
    if instead is not None:
        for name in mine:
            del fields[name]
        fields.update(instead)


def check_counts(n: int, prompts: int, config: Config) -> None:
    """FieldError when one request would become too many; called before anything is tokenised."""
    limits = config.limits
    if not 1 <= n <= limits.max_n:
        raise FieldError("n", f"must be between 1 and {limits.max_n}, got {n}")
    if prompts > limits.max_prompts:
        raise FieldError("prompt", f"{prompts} prompts; at most {limits.max_prompts} are allowed in one request")
    if prompts * n > limits.max_choices:
        raise FieldError(
            "n", f"{prompts} prompts times n={n} is {prompts * n} choices; at most {limits.max_choices} are allowed"
        )


def fields_of(mapping: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """What an endpoint leaves to the plugins: all fields but those it knows itself."""
    known = frozenset(known)
    return {name: value for name, value in mapping.items() if name not in known}
