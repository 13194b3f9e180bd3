"""The self test's stand with the front's own admission before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..core.bus import Bus
from ..core.config import Config
from ..core.contexts import FrontContext
from ..core.front.admission import Admission, Admitter, ParsedRequest, Prompt
from ..core.front.plugins import FrontPlugins
from ..core.host import PluginHost, Switches
from ..core.messages import PROTOCOL_VERSION, EngineInfo
from ..core.plugin import Plugin, Role
from ..core.request import AdmittedRequest
from ..core.selftest.stand import Ask, Stand


@dataclass
class FeatureAsk(Ask):
    features: dict[str, bool] = field(default_factory=dict)
    """Switches for this request alone."""


class AdmittingStand(Stand):
    def __init__(self, config: Config, enable: tuple[str, ...], disable: tuple[str, ...], **options: Any) -> None:
        self.hosts: dict[Role, PluginHost] = {}
        """The newest of each role."""
        self.admissions: dict[int, Admission] = {}
        """By the identity of the Ask."""
        super().__init__(config, enable, disable, **options)
        self._serial = 0
        self.switches: Switches = self.front.host.start_switches(enable=enable, disable=disable)
        self.bus = Bus()
        self.front_plugins = FrontPlugins(self.front.host, FrontContext(bus=self.bus, config=config, info=self._engine_info))
        self.front_plugins.start(self.switches.on)

    def host(self, role: Role, config: Config, plugins: tuple[type[Plugin], ...] = ()) -> PluginHost:
        made = self.hosts[role] = super().host(role, config, plugins)
        return made

    def _engine_info(self) -> EngineInfo:
        told, size = self.info, self.config.cache.block_size
        return EngineInfo(
            version=PROTOCOL_VERSION, model=told.model, architecture=told.architecture, dtype=told.dtype, vocab_size=told.vocab_size,
            max_model_len=self.max_model_len, block_size=size, num_blocks=-(-self.max_model_len // size),
            weights_bytes=told.weights_bytes, kv_bytes_per_token=told.kv_bytes_per_token, eos_token_ids=told.eos_token_ids,
            lossless=told.lossless, lossless_reason=told.lossless_reason,
        )  # fmt: skip

    def admit(self, ask: Ask, features: tuple[str, ...]) -> AdmittedRequest:
        """Through every check of a real request: implied fields, `check_fields`, `prepare_fields`, switches of its own."""
        self._serial += 1
        on = frozenset(features).intersection(self.front.host.catalogue)
        strangers = set(features) - on
        self.front_plugins.prepare(on)
        self.front_plugins.settle(on, on)
        reasons = {} if on == self.switches.on else dict.fromkeys(self.switches.on - on, "switched off for this run")
        state = Switches(on, self.switches.reasons | reasons)
        vocabulary = self.runner.vocabulary
        admitter = Admitter(
            self.config,
            self.front.host,
            switches=lambda: state,
            info=self._engine_info,
            tokenize=lambda text: vocabulary().tokenize(text),
            vocabulary=lambda _size, _end: vocabulary(),
        )
        parsed = ParsedRequest(
            endpoint="completion", prompts=[Prompt(ask.prompt)], max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed,
            fields=ask.fields, features=getattr(ask, "features", {}), own_features=True, group=f"r{self._serial}",
            arrival=float(self._serial),
        )  # fmt: skip
        admission = self.admissions[id(ask)] = admitter.prepare(admitter.admit(parsed))
        request = admission.requests[0]
        return msgspec.structs.replace(request, deadline=None, features=tuple(sorted({*request.features, *strangers})))
