"""`--set`: which questions a recording can answer, and the configuration that asks them.

    token_budget=512  max_running=16  max_drafts=4  encoder_budget=4096  num_blocks=400  kv_memory_mb=64
    block_size=32      a multiple of the recorded one
    PLUGIN=on|off      plugins that decide who runs when: chunked_prefill, prefix_cache, scheduling.*; proposers of drafts: off only
    PLUGIN.NAME=VALUE  their settings

All else is refused, with the reason: a setting is applied or refused, never ignored.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..config import Config, from_mapping, merge
from ..errors import TokenbusError
from ..host import PluginHost, Switches
from ..settings_cli import sections
from .file import RecordingError
from .frames import Header
from .stories import DRAFTS, LOGITS

DECIDING = ("scheduling_policy", "limit_chunk", "match_prefix", "blocks_filled")
"""Hooks that decide who runs when: plugins that implement one of them run in the simulation as they do in the engine."""
ANSWERED = {
    "scheduler": ("token_budget", "max_running", "max_drafts", "encoder_budget"),
    "cache": ("num_blocks", "kv_memory_mb", "block_size"),
}
REFUSED = {
    "model": "it changes what a step takes, of which the recording says nothing",
    "cache": "it depends on the machine's free memory: set num_blocks or kv_memory_mb",
    "scheduler": "it is applied before requests reach the engine, and the recording begins there",
    "server": "it has no part in scheduling",
    "supervision": "it has no part in scheduling",
    "limits": "it is applied before requests reach the engine, and the recording begins there",
    "features": "write PLUGIN=on or PLUGIN=off",
}
MIB = 1024 * 1024


@dataclass
class WhatIf:
    """A configuration to simulate, and the switches that differ from the recorded ones."""

    config: Config
    changes: dict[str, bool] = field(default_factory=dict)
    drafts: bool = True
    """Whether the recorded drafts are proposed."""
    asked: frozenset[str] = frozenset()
    """Settings that are as asked for, whatever live change the recording has of them ("scheduler.token_budget")."""


class Questions:
    """What can be asked of the recording with this header, with the plugins of this host."""

    def __init__(self, header: Header, host: PluginHost) -> None:
        self.header = header
        self.host = host
        for name in header.features:
            if name not in host.catalogue:
                raise RecordingError(
                    f"plugin {name!r} was on when this was recorded and is not installed here: what it decides can't be simulated"
                )
        self.simulated = {name for name in host.catalogue if self._implements(name, DECIDING)}
        self.proposers = {name for name in host.catalogue if self._implements(name, ("propose_drafts",))}

    def _implements(self, name: str, hooks: Sequence[str]) -> bool:
        cls = self.host.catalogue[name]
        return any(hasattr(getattr(cls, hook, None), "tokenbus_impl") for hook in hooks)

    def as_recorded(self) -> WhatIf:
        header = self.header
        data = {section: header.config.get(section, {}) for section in ("cache", "scheduler", "plugins")}
        sizes = {"num_blocks": header.num_blocks, "block_size": header.block_size, "kv_memory_mb": None}
        return WhatIf(from_mapping(merge(data, {"cache": sizes}), "the recording's settings"))

    def ask(self, wishes: Sequence[str]) -> WhatIf:
        """Raises RecordingError naming the wish that can't be met, and why."""
        base = self.as_recorded()
        data: dict[str, Any] = msgspec.to_builtins(base.config)
        changes: dict[str, bool] = {}
        asked: set[str] = set()
        for wish in wishes:
            key, equals, text = (part.strip() for part in wish.partition("="))
            if not (key and equals and text):
                raise RecordingError(f"--set {wish}: must be NAME=VALUE")
            section = self._section(key)
            if section:
                name = key.rpartition(".")[2]
                data = merge(data, {section: self._size(wish, section, name, text)})
                asked.add(f"{section}.{name}")
            elif key in self.host.catalogue:
                changes[key] = self._switch(wish, key, text)
            else:
                plugin, _, name = key.rpartition(".")
                data = merge(data, {"plugins": {plugin: {name: self._setting(wish, plugin, name, text)}}})
                asked.add(f"plugins.{key}")
        config = from_mapping(data, "--set")
        drafts = self._drafts(changes)
        return WhatIf(config, {name: on for name, on in changes.items() if name in self.simulated}, drafts, frozenset(asked))

    def _section(self, key: str) -> str:
        """Of the configuration, when it is one of core's settings."""
        section, dot, name = key.rpartition(".")
        if dot:
            return section if section in sections() else ""
        found = [one for one, struct in sections().items() if name in {f.name for f in msgspec.structs.fields(struct)}]
        return found[0] if found else ""

    def _size(self, wish: str, section: str, name: str, text: str) -> dict[str, Any]:
        if name not in ANSWERED.get(section, ()):
            raise RecordingError(f"--set {wish}: the recording can't answer this: {REFUSED[section]}")
        try:
            value = int(text)
        except ValueError:
            raise RecordingError(f"--set {wish}: must be a whole number") from None
        recorded = self.as_recorded().config
        if name == "max_drafts" and value > recorded.scheduler.max_drafts:
            raise RecordingError(
                f"--set {wish}: the recording can't answer this: max_drafts was {recorded.scheduler.max_drafts}, and what would have been "
                "proposed beyond isn't in it"
            )
        if name == "block_size" and (value < 1 or value % self.header.block_size):
            raise RecordingError(
                f"--set {wish}: the recording can't answer this: prompts were compared in blocks of {self.header.block_size} tokens, so it "
                "must be a multiple of that"
            )
        if name == "block_size":
            return {name: value, "num_blocks": max(1, self.header.num_blocks * self.header.block_size // value)}
        if name == "kv_memory_mb":
            block = self.header.kv_bytes_per_token * self.header.block_size
            if not block:
                raise RecordingError(f"--set {wish}: the recording does not say how large a block is: set num_blocks")
            return {"num_blocks": value * MIB // block}
        return {name: value}

    def _switch(self, wish: str, name: str, text: str) -> bool:
        if text not in {"on", "off"}:
            raise RecordingError(f"--set {wish}: must be {name}=on or {name}=off")
        on = text == "on"
        if name in self.proposers and on and name not in self.header.features:
            raise RecordingError(
                f"--set {wish}: the recording can't answer this: {name!r} was not on, so how good its drafts would be isn't in it"
            )
        if name not in self.simulated | self.proposers and on != (name in self.header.features):
            raise RecordingError(
                f"--set {wish}: the recording can't answer this: {name!r} does not decide who runs when, and what steps take with it "
                f"{'on' if on else 'off'} isn't in it"
            )
        return on

    def _setting(self, wish: str, plugin: str, name: str, text: str) -> Any:
        if plugin not in self.host.catalogue:
            raise RecordingError(f"--set {wish}: no setting and no plugin is called so")
        if plugin not in self.simulated:
            why = "what it would have proposed isn't in it" if plugin in self.proposers else "it does not decide who runs when"
            raise RecordingError(f"--set {wish}: the recording can't answer this: {why}")
        if name not in {f.name for f in msgspec.structs.fields(self.host.catalogue[plugin].Settings)}:
            raise RecordingError(f"--set {wish}: plugin {plugin!r} has no setting {name!r}")
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            return text

    def _drafts(self, changes: dict[str, bool]) -> bool:
        on = [name for name in self.header.features if name in self.proposers]
        off = [name for name in on if changes.get(name) is False]
        if off and len(off) < len(on):
            raise RecordingError(
                f"--set {off[0]}=off: the recording does not say whose drafts were whose; switch off all of {', '.join(on)} or none"
            )
        return not off

    # ---- what runs in a simulation ----------------------------------------------------------------------------------------------

    def switches(self, recorded: Sequence[str], ask: WhatIf) -> Switches:
        """What is on in the simulation where `recorded` was on. RecordingError when the wishes contradict each other."""
        base = Switches(frozenset(recorded) & self.simulated)
        try:
            changed = self.host.change_switches(base, ask.changes) if ask.changes else base
        except TokenbusError as error:
            raise RecordingError(f"--set: {error.message}") from None
        extra = {LOGITS} | ({DRAFTS} if ask.drafts and self.proposers.intersection(recorded) else set())
        return Switches(changed.on | extra)

    def features(self, recorded: Sequence[str], pinned: dict[str, bool], on: Switches, ask: WhatIf) -> frozenset[str]:
        """Of a request that had `recorded` in force."""
        had = frozenset(recorded)
        features = {
            name for name in on.on & self.simulated if name in had or (ask.changes.get(name) and pinned.get(name, True))
        }
        slots = {name for name in on.on & self.simulated if self.host.info(name).slot is not None}
        drafts = {DRAFTS} if DRAFTS in on.on and self.proposers & had else set()
        return frozenset(features | slots | drafts | {LOGITS})
