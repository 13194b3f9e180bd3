"""What an experiment decides about the plugins of one request."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..host import PluginHost


class Overrides(msgspec.Struct, frozen=True):
    """An arm is applied as a whole or not at all; a client's own wish goes before it."""

    arm: str
    """Its name, as shown in `x-tokenbus-arm`, records and logs."""
    features: dict[str, bool] = {}


def arm_problem(
    host: PluginHost, features: frozenset[str], wishes: Mapping[str, bool], flags: Mapping[str, bool]
) -> str | None:
    """Why a request can't have an arm's flags; None: it can. features: what it has without them. wishes: its client's."""
    for name, wish in flags.items():
        if wishes.get(name, wish) != wish:
            return f"the client switched {name!r} {'off' if wish else 'on'}"
        if wish and name not in features:
            return f"{name!r} is off"
    target = features - {name for name, wish in flags.items() if not wish}
    for name in sorted(target):
        if missing := host.info(name).requires - target:
            return f"{name!r} needs {min(missing)!r}"
    return None
