"""An experiment against the plugins that there are: which of its switches a request can have on its own, which are everybody's, and why
one can't be compared so. Pure: nothing is switched here.

A switch of a plugin of scope "request" goes with the request, whatever the split. One of scope "step" is everybody's, and goes with the
time slice; so does a live setting. One of scope "engine" needs an engine of its own; with engines of their own (engines.py) arms may differ
in all of them, and nothing is ever switched: each engine has been started with its arm's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from .. import live_settings
from ..config import Config
from ..errors import ConfigError, ConflictError, NotFoundError, TokenbusError
from ..host import PluginHost, Switches
from .config import ExperimentConfig, check_shape
from .engines import check_settings

SETTING = "setting:"
"""Before a setting's name, where switches and settings stand together."""
MAX_COMBINATIONS = 64
"""Combinations of arms that may run at once: metrics have a label for each."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the arms of a run are, complete: every arm says how each of the experiment's switches stands."""

    arms: dict[str, dict[str, Any]]
    """Switches by the plugin's name, settings by SETTING and their own."""
    live: tuple[str, ...]
    """Those switches that are changed for everybody, at the borders of slices."""
    before: dict[str, Any]
    """How the live ones stood."""
    shares: dict[str, float]
    """Of the arms, in order."""
    engines: bool = False
    """Each arm has an engine of its own, which has the arm's switches and settings."""

    def own(self, arm: str) -> dict[str, bool]:
        """The switches that go with a request."""
        if self.engines:
            return {}
        return {name: wish for name, wish in self.arms[arm].items() if name not in self.live}

    def everybodys(self, arm: str) -> dict[str, Any]:
        return {name: self.arms[arm][name] for name in self.live}

    def config(self, arm: str) -> str:
        """A hash of the arm's switches and settings."""
        return hashlib.blake2b(msgspec.json.encode(sorted(self.arms[arm].items())), digest_size=6).hexdigest()


def check(name: str, config: ExperimentConfig, host: PluginHost, server: Config) -> None:
    """ConfigError when it could never run with these settings of the server's."""
    check_shape(name, config)
    if config.split == "key" and not server.server.api_key:
        raise ConfigError(f"experiments.{name}.split: no API keys are asked for here, so all requests would be of one key")
    if config.own_engines:
        _check_engines(name, config, host, server)
        return
    for arm, settings in config.arms.items():
        if settings.settings and not config.sliced:
            raise ConfigError(f'experiments.{name}.arms.{arm}.settings: settings are everybody\'s: use split = "slice"')
        try:
            live_settings.check(server, host, settings.settings)
        except TokenbusError as error:
            raise ConfigError(f"experiments.{name}.arms.{arm}.settings: {error.message}") from None
        for plugin in settings.features:
            if problem := _never(plugin, config, host):
                raise ConfigError(f"experiments.{name}.arms.{arm}.features: {problem}")


def _check_engines(name: str, config: ExperimentConfig, host: PluginHost, server: Config) -> None:
    for arm, settings in config.arms.items():
        check_settings(name, arm, settings.settings, server, host)
        for plugin in settings.features:
            try:
                host.known(plugin)
            except NotFoundError as error:
                raise ConfigError(f"experiments.{name}.arms.{arm}.features: {error.message}") from None


def _never(plugin: str, config: ExperimentConfig, host: PluginHost) -> str | None:
    try:
        host.known(plugin)
    except NotFoundError as error:
        return error.message
    info = host.info(plugin)
    if info.scope == "engine":
        return (
            f'{plugin!r} is chosen at an engine\'s start (scope engine): give the arms engines of their own (engines = "own")'
        )
    if info.scope == "request":
        return None
    if not config.sliced:
        return (
            f"{plugin!r} is everybody's between two steps (scope step), so requests can't be split by it: use split = \"slice\""
        )
    if info.claims:
        fields = ", ".join(sorted(info.claims))
        return (
            f"{plugin!r} honours request fields ({fields}): while a slice has it off, requests that use them would be refused"
        )
    return None


def make_plan(name: str, config: ExperimentConfig, host: PluginHost, now: Switches, server: Config) -> Plan:
    """The arms as they would run from the present switches and settings on. ConflictError with the reason when one of them can't."""
    targets = {}
    for arm, settings in config.arms.items():
        try:
            targets[arm] = host.change_switches(now, settings.features).on
        except ConflictError as error:
            raise ConflictError(f"experiment {name!r}, arm {arm!r}: {error.message}") from None
        _check_target(name, arm, host, now.on, targets[arm])
    named = {plugin for settings in config.arms.values() for plugin in settings.features}
    affected = sorted(named.union(*(target ^ now.on for target in targets.values())))
    live = tuple(plugin for plugin in affected if host.info(plugin).scope != "request")
    values = live_settings.live_values(server, host)
    before = {SETTING + key: values[key] for arm in config.arms.values() for key in arm.settings}
    arms = {arm: {plugin: plugin in target for plugin in affected} for arm, target in targets.items()}
    return Plan(
        arms={
            arm: {**switches, **before, **{SETTING + key: value for key, value in config.arms[arm].settings.items()}}
            for arm, switches in arms.items()
        },
        live=(*live, *before),
        before={plugin: plugin in now.on for plugin in live} | before,
        shares=config.shares(),
    )


def plan_engines(config: ExperimentConfig, switches: Mapping[str, Switches], values: Mapping[str, Mapping[str, Any]]) -> Plan:
    """The arms as their engines run them. switches and values (settings by name): of each arm's engine."""
    on = {arm: switches[arm].on for arm in config.arms}
    named = {plugin for settings in config.arms.values() for plugin in settings.features}
    affected = sorted(named.union(*(mine ^ theirs for mine in on.values() for theirs in on.values())))
    keys = sorted({key for settings in config.arms.values() for key in settings.settings})
    return Plan(
        arms={
            arm: {plugin: plugin in on[arm] for plugin in affected} | {SETTING + key: values[arm][key] for key in keys}
            for arm in config.arms
        },
        live=(),
        before={},
        shares=config.shares(),
        engines=True,
    )


def _check_target(name: str, arm: str, host: PluginHost, on: frozenset[str], target: frozenset[str]) -> None:
    if host.kernels(target) != host.kernels(on):
        raise ConflictError(
            f"experiment {name!r}, arm {arm!r}: another kernel set is taken only while no request is open: give the arms engines "
            'of their own (engines = "own")'
        )


def check_beside(
    name: str, config: ExperimentConfig, plan: Plan, others: Mapping[str, tuple[ExperimentConfig, Plan]], host: PluginHost
) -> None:
    """ConflictError when it can't run together with those that do. Experiments of different switches deal their units independently, so
    that each sees the others' arms in equal parts."""
    mine = plan.arms[config.control_arm].keys()
    for other, (their_config, theirs) in others.items():
        if config.sliced and their_config.sliced:
            raise ConflictError(f"{name!r} and {other!r} both go by time slices: stop {other!r} first")
        if (config.sliced and their_config.own_engines) or (config.own_engines and their_config.sliced):
            raise ConflictError(
                f"time slices switch one engine only, so {name!r} can't run beside {other!r}: stop {other!r} first"
            )
        for plugin in sorted(mine):
            for their in sorted(theirs.arms[their_config.control_arm]):
                if why := _tied(host, plugin, their):
                    raise ConflictError(f"{name!r} can't run beside {other!r}: {why}; stop {other!r} first")
    combinations = len(config.arms) + 1
    for their_config, _ in others.values():
        combinations *= len(their_config.arms) + 1
    if combinations > MAX_COMBINATIONS:
        raise ConflictError(
            f"with {name!r} there would be {combinations} combinations of arms; at most {MAX_COMBINATIONS} may run"
        )


def _tied(host: PluginHost, one: str, other: str) -> str | None:
    if SETTING in one + other:  # of a sliced one, and there is only one such
        return None
    if one == other:
        return f"both switch {one!r}"
    mine, theirs = host.info(one), host.info(other)
    if mine.slot is not None and mine.slot == theirs.slot:
        return f"{one!r} and {other!r} want the same slot"
    if other in mine.requires | mine.conflicts or one in theirs.requires | theirs.conflicts:
        return f"{one!r} and {other!r} depend on each other"
    return None
