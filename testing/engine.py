"""An engine small enough for a unit test: everything but processes, HTTP and a model with weights is the real thing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..core.bus import Bus
from ..core.config import from_mapping
from ..core.contexts import OutputContext
from ..core.errors import plain_text
from ..core.front.admission import Admission
from ..core.hook_answers import filtered_text_problem
from ..core.host import HookTable
from ..core.plan import TokenLogprobs
from ..core.plugin import Plugin, Role
from ..core.request import AdmittedRequest
from ..core.selftest.stand import Outcome
from .model import VOCABULARY, detokenize, load_fake, tokenize
from .stand import AdmittingStand, FeatureAsk
from .tracer import HookCall, TracingHost, only

HEAVY = ("attention.cpu", "metrics", "reasoning", "structured", "tools", "tools.auto")
"""Default plugins that are off here unless asked for: they start slowly, or need a server or a real tokenizer."""
BLOCKS = 128


@dataclass
class Request:
    """What a client asks. Texts are printable ASCII, a token a character."""

    prompt: str | Sequence[int]
    max_tokens: int = 8
    temperature: float = 0.0
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, bool] = field(default_factory=dict)
    """Switches for this request alone."""
    at_step: int = 0
    """It arrives before this step."""

    @property
    def tokens(self) -> list[int]:
        return tokenize(self.prompt) if isinstance(self.prompt, str) else list(self.prompt)


@dataclass
class Answer:
    text: str
    """As a client would see it: behind the text filters."""
    tokens: list[int]
    """As generated, those behind a stop of a text filter included: here the whole answer is there before it is filtered."""
    finish_reason: str
    stop_reason: str | None = None
    """What a text filter gave for stopping."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0


class TinyEngine:
    """`plugins` are known to all three roles, and on; each run begins with an empty KV pool."""

    def __init__(
        self,
        *plugins: type[Plugin],
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        enable: Iterable[str] = (),
        disable: Iterable[str] = (),
        block_size: int = 4,
        model: str | None = None,
    ) -> None:
        """settings: by plugin, as in `[plugins.NAME]`. enable, disable: other plugins; of those on by default HEAVY are off.
        model: a directory, or "demo", in place of the fake model (a prompt is then a list of ids, `text` is not given, `metrics` and
        the rest stay off). Raises what starting a server with these plugins raises: PluginLoadError, ConfigError."""
        self.calls: list[HookCall] = []
        """Every hook call since the last `clear_calls`, in order, from all three roles."""
        self.outcome: Outcome | None = None
        """Of the last run: steps, batch sizes, preemptions, counters."""
        self._fake = model is None
        self.block_size = block_size
        self._config = from_mapping(
            {
                "model": {"model": model or "fake", "dtype": "float32", "threads": 1},
                "cache": {"block_size": block_size},
                "plugins": {name: dict(values) for name, values in (settings or {}).items()},
            },
            "settings",
        )
        on = (*(plugin.info.name for plugin in plugins), *enable)
        off = (*(name for name in HEAVY if name not in on), *disable)
        self._stand = AdmittingStand(
            self._config, on, off, plugins=plugins, host_kind=partial(TracingHost, calls=self.calls),
            **({"loader": load_fake(), "vocabulary": lambda: VOCABULARY} if self._fake else {}),
        )  # fmt: skip
        self.switches = self._stand.switches
        """What is on, and why the rest is off."""

    @property
    def bus(self) -> Bus:
        """The front's bus: publish on it what a plugin listens for."""
        return self._stand.bus

    def plugin(self, name: str, role: Role = "engine") -> Plugin:
        """The instance of one role: of the engine, that of the last run."""
        return self._stand.hosts[role].loaded[name]

    def called(self, hook: str | None = None, *, plugin: str | None = None) -> list[HookCall]:
        return only(self.calls, hook=hook, plugin=plugin)

    def clear_calls(self) -> None:
        self.calls.clear()

    def close(self) -> None:
        """`front_stopped` of the plugins that are on."""
        self._stand.front_plugins.stop()

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Answer:
        """One request by itself; `options` are those of `Request`."""
        return self.run([Request(prompt, **options)])[0]

    def run(
        self,
        requests: Sequence[Request],
        *,
        on: tuple[str, ...] = (),
        off: tuple[str, ...] = (),
        chunk: int | None = None,
        blocks: int = BLOCKS,
        token_budget: int = 256,
        max_running: int = 32,
        changes: Mapping[int, Mapping[str, bool]] | None = None,
    ) -> list[Answer]:
        """Run all to their ends. on, off: switches for this run. chunk: prompt tokens a step. blocks: size of the KV pool; few of them
        mean preemptions. changes: live switches, by the number of steps before them.

        Raises what a client would get at admission (FieldError, ...); StandError when a request ends with an error, or the engine is
        left with something that it should not have (lost blocks, say); PluginError when an engine-wide hook raised."""
        asks = [
            FeatureAsk(r.tokens, r.max_tokens, r.temperature, r.seed, 0, dict(r.fields), r.at_step, features=dict(r.features))
            for r in requests
        ]
        self.outcome = self._stand.run(
            list(asks), on=on, off=off, chunk=chunk, blocks=blocks, token_budget=token_budget, max_running=max_running,
            threads=1, changes=changes,
        )  # fmt: skip
        admitted = (self._stand.admissions.pop(id(ask)) for ask in asks)
        return [self._answer(admission, given) for admission, given in zip(admitted, self.outcome.answers, strict=True)]

    def _answer(self, admission: Admission, given: Any) -> Answer:
        answer = Answer(
            text="", tokens=given.tokens, finish_reason=given.reason, logprobs=given.logprobs, cached_tokens=given.cached,
            prompt_logprobs=given.prompt_logprobs, preemptions=given.preemptions,
        )  # fmt: skip
        if self._fake:
            pieces = [detokenize([token]) for token in given.tokens]
            answer.text, answer.stop_reason = filtered(pieces, admission.table, admission.requests[0])
            if answer.stop_reason is not None:
                answer.finish_reason = "stop"
        return answer


def filtered(pieces: Sequence[str], table: HookTable, request: AdmittedRequest) -> tuple[str, str | None]:
    """(text behind the filters, why it ends there or None), as if a token came at a time."""
    context = OutputContext(request.request_id, request.fields, request.choice)
    filters = [(made, impl) for impl in table.text_filter if (made := impl(request=context)) is not None]
    shown, stopped = "", None
    for index, piece in enumerate([*pieces, ""]):
        text, final = piece, index == len(pieces)
        for made, impl in filters:
            if not (text or final):
                break
            try:
                answer = made.feed(text, final=final)
            except Exception as error:
                raise impl.failure(f"{type(error).__name__}: {plain_text(error)}") from error
            if (problem := filtered_text_problem(answer)) is not None:
                raise impl.failure(problem)
            text, reason = answer
            if reason is not None and stopped is None:
                stopped, final = reason, True
        shown += text
        if stopped is not None:
            break
    return shown, stopped
