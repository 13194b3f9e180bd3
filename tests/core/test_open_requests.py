"""Who keeps what when switches move while a request is open: `PluginHost.leaving` and `after_switch`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.core.host import PluginHost
from tokenbus.core.plugin import Plugin, PluginInfo


def host(**plugins: dict) -> PluginHost:
    made = PluginHost("engine")
    for name, info in plugins.items():
        made.add(
            type(
                name,
                (Plugin,),
                {"info": PluginInfo(**({"name": name, "summary": "", "scope": "request", "lossless": True} | info))},
            )
        )
    return made


HOST = host(
    base={}, top={"requires": ["base"]}, claims={"claims": ["x"]}, on_claims={"requires": ["claims"]}, enemy={"conflicts": ["claims"]},
    needs_claims={"requires": ["base"], "claims": ["y"]}, lossy={"lossless": False},
)  # fmt: skip


def after(features: str, old: str, new: str, *, pinned: str = "", fields: str = "") -> set[str]:
    moved = HOST.after_switch(
        frozenset(features.split()), old.split(), new.split(), pinned=pinned.split(), fields=fields.split()
    )
    return set(moved)


@pytest.mark.parametrize(
    ("features", "old", "new", "options", "then"),
    [
        ("base", "base", "", {}, ""),
        ("base", "base", "", {"pinned": "base"}, "base"),
        ("", "", "base", {}, "base"),
        ("", "", "base", {"pinned": "base"}, ""),
        ("lossy", "lossy", "", {}, "lossy"),
        ("", "", "lossy", {}, ""),
        ("claims", "claims", "", {}, ""),
        ("claims", "claims", "", {"fields": "x"}, "claims"),
        # the client switched off what it requires
        ("", "base", "base top", {"pinned": "base"}, ""),
        ("", "", "base top", {"pinned": "base"}, ""),
        ("base", "base", "base top", {}, "base top"),
        ("", "", "base top", {}, "base top"),
        # what stays keeps what it requires
        ("base needs_claims", "base needs_claims", "", {"fields": "y"}, "base needs_claims"),
        ("base needs_claims", "base needs_claims", "", {}, ""),
        # what stays keeps out what it conflicts with
        ("claims", "claims", "enemy", {"fields": "x"}, "claims"),
        ("claims", "claims", "enemy", {}, "enemy"),
    ],
)
def test_moves(features, old, new, options, then):
    assert after(features, old, new, **options) == set(then.split())


NAMES = st.frozensets(st.sampled_from(sorted(HOST.catalogue)))


@given(NAMES, NAMES, NAMES, st.frozensets(st.sampled_from(["x", "y"])))
def test_a_request_never_lacks_what_one_of_its_plugins_requires(old, new, pinned, fields):
    def closed(names):
        while lacking := {n for n in names if not HOST.info(n).requires <= names}:
            names = names - lacking
        return names - ({"enemy"} if "claims" in names else set())

    old, new = closed(old), closed(new)
    features = closed(old - pinned)
    then = HOST.after_switch(features, old, new, pinned=pinned, fields=fields)
    assert all(HOST.info(name).requires <= then for name in then)
    assert not {"claims", "enemy"} <= then
    assert then & pinned <= features
    gone = features - new
    assert HOST.leaving(features, gone, pinned=pinned, fields=fields) == features - then
