"""Which plugins one request runs with. Three may say so, and for each plugin one of them decides:

    server    what is on here                         for all that nobody else names
    client    the body's `tokenbus.features`          those that the operator lists in `client_features`
    arm:NAME  an experiment's arm (`Overrides`)       any plugin of scope "request"; a client's own wish goes before it

A client's wish is met or refused with the reason. An arm is applied as a whole or not at all: a request that can't have all of its flags,
or whose client contradicts one, isn't in the arm, and `Decision.arm_refused` says why.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import msgspec

from ..errors import FeatureOffError, FieldError, NotAllowedError
from ..host import SHARED_SLOTS, PluginHost, Switches


class Overrides(msgspec.Struct, frozen=True):
    """What an experiment decides for a request."""

    arm: str
    """Its name, as shown in `x-tokenbus-arm`, records and logs."""
    features: dict[str, bool] = {}
    engine: str = ""
    """The arm whose own engine it goes to; "": the server's."""


class FeatureState(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided about one plugin that the client or the arm named."""

    on: bool
    source: str
    """server, client, or "arm:NAME": who decided."""
    because: str | None = None
    """Why it isn't what was asked for, or why it is off."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    features: frozenset[str]
    """All plugins in force."""
    pinned: dict[str, bool] = {}
    """Those that client or arm decided: live switches leave them alone."""
    states: dict[str, FeatureState] = {}
    """Of every plugin that client or arm named."""
    arm: str = ""
    """The arm whose flags are in force, or of which there are none to apply."""
    arm_refused: str | None = None
    """Why the request isn't in the arm it was given to."""


def decide(
    host: PluginHost,
    switches: Switches,
    wishes: Mapping[str, bool],
    *,
    allowed: Iterable[str],
    own: bool = False,
    overrides: Overrides | None = None,
) -> Decision:
    """Raises FieldError, FeatureOffError or NotAllowedError, naming the wish of the client's that can't be met.

    allowed: plugins that clients may switch. own: the caller is the operator, who may switch any. Loads nothing.
    """
    if not wishes and overrides is None:
        return Decision(features=switches.on)
    for name, wish in wishes.items():
        _check_wish(host, switches, name, wish, allowed=allowed, own=own)
    features = _with(switches.on, wishes)
    if (problem := _problem(host, features, wishes)) is not None:
        raise FieldError(feature_field(problem[0]), problem[1])
    states = {name: _asked(name, wish, "client", switches) for name, wish in wishes.items()}
    if overrides is None:
        return Decision(features=features, pinned=dict(wishes), states=states)
    refused = _arm_problem(host, switches, features, wishes, overrides.features)
    others = {name: wish for name, wish in overrides.features.items() if name not in wishes}
    if refused is not None:
        return leave_arm(Decision(features=features, pinned=dict(wishes), states=states), switches, overrides, refused)
    states |= {name: _asked(name, wish, f"arm:{overrides.arm}", switches) for name, wish in others.items()}
    return Decision(features=_with(features, others), pinned={**wishes, **others}, states=states, arm=overrides.arm)


def leave_arm(decision: Decision, switches: Switches, overrides: Overrides, reason: str) -> Decision:
    """`decision`, made without the arm, with the note that the arm could not be applied."""
    because = f"arm {overrides.arm!r} could not be applied: {reason}"
    states = {
        name: FeatureState(on=name in switches.on, source="server", because=because)
        for name in overrides.features
        if name not in decision.states
    }
    return msgspec.structs.replace(decision, states=decision.states | states, arm_refused=reason)


def check_overrides(host: PluginHost, switches: Switches, overrides: Overrides) -> str | None:
    """Why an arm could not be applied to a request that asks for nothing itself; None: it could. For whoever starts an experiment."""
    return _arm_problem(host, switches, switches.on, {}, overrides.features)


def shared_reason(host: PluginHost, name: str) -> str | None:
    """Why a plugin can't differ between requests; None: it can."""
    info = host.info(name)
    if info.scope != "request":
        return f"can't differ between requests (scope {info.scope})"
    if info.slot in SHARED_SLOTS:
        return f"can't differ between requests: the slot {info.slot!r} serves all of them"
    return None


def feature_field(name: str) -> str:
    return f"tokenbus.features.{name}"


def _check_wish(host: PluginHost, switches: Switches, name: str, wish: bool, *, allowed: Iterable[str], own: bool) -> None:
    field = feature_field(name)
    if name not in host.catalogue:
        close = difflib.get_close_matches(name, host.catalogue, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise FieldError(field, f"no plugin is called so{hint}")
    if (reason := shared_reason(host, name)) is not None:
        raise FieldError(field, reason)
    if not own and name not in (allowed := tuple(allowed)):
        raise NotAllowedError(
            f"clients may not switch {name!r} here; those they may: {', '.join(allowed) or 'none'}", param=field
        )
    if wish and (reason := host.no_memory(name, switches.on)) is not None:
        raise FeatureOffError(field, reason, plugin=name)
    if wish and name in switches.failed:
        why = switches.reasons.get(name, "it failed")
        raise FeatureOffError(field, f"is off on this server ({why}): only the operator can bring it back", plugin=name)


def _arm_problem(
    host: PluginHost, switches: Switches, features: frozenset[str], wishes: Mapping[str, bool], flags: Mapping[str, bool]
) -> str | None:
    for name, wish in flags.items():
        if name not in host.catalogue:
            return f"no plugin is called {name!r}"
        if (reason := shared_reason(host, name)) is not None:
            return f"{name!r} {reason}"
        if wish and (reason := host.no_memory(name, switches.on)) is not None:
            return f"{name!r} {reason}"
        if wish and name in switches.failed:
            return f"{name!r} has failed and is off"
        if wishes.get(name, wish) != wish:
            return f"the client switched {name!r} {'off' if wish else 'on'}"
    problem = _problem(host, _with(features, flags), flags)
    return None if problem is None else f"{problem[0]!r} {problem[1]}"


def _with(features: frozenset[str], wishes: Mapping[str, bool]) -> frozenset[str]:
    on = {name for name, wish in wishes.items() if wish}
    return (features - {name for name, wish in wishes.items() if not wish}) | on


def _problem(host: PluginHost, features: frozenset[str], named: Iterable[str]) -> tuple[str, str] | None:
    """A plugin that can't be in force with the others, and why; one that was named, if there is a choice."""
    for name in (*sorted(features.intersection(named)), *sorted(features.difference(named))):
        if missing := host.info(name).requires - features:
            return name, f"needs {min(missing)!r}, which is off for this request: switch both, or neither"
        if reason := host.obstacle(name, sorted(features - {name})):
            return name, f"can't be on for this request: {reason}, and only one of them can be on"
    return None


def _asked(name: str, wish: bool, source: str, switches: Switches) -> FeatureState:
    """A wish that is met."""
    if wish or name in switches.on:
        return FeatureState(on=wish, source=source, because=None if wish else f"switched off by the {source.partition(':')[0]}")
    return FeatureState(on=False, source=source, because=switches.reasons.get(name, "not enabled"))
