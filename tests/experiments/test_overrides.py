"""What admission makes of an arm's switches."""

from __future__ import annotations

from tokenbus.core.front.features import arm_problem
from tokenbus.core.host import PluginHost
from tokenbus.core.plugin import Plugin, PluginInfo


def plugin(name, **values):
    info = PluginInfo(name=name, summary="", scope="request", lossless=True, **values)
    return type(name.title(), (Plugin,), {"info": info})


def test_an_arm_is_applied_as_a_whole_or_not_at_all():
    host = PluginHost("front")
    for cls in (plugin("draft"), plugin("tree", requires={"draft"}), plugin("cache")):
        host.add(cls)
    on = frozenset({"draft", "tree", "cache"})
    assert arm_problem(host, on, {}, {"tree": False, "cache": True}) is None
    assert arm_problem(host, on, {}, {"tree": False, "draft": False}) is None
    assert arm_problem(host, on, {"cache": True}, {"cache": True}) is None
    assert arm_problem(host, on, {}, {"draft": False}) == "'tree' needs 'draft'"
    assert arm_problem(host, on - {"cache"}, {}, {"cache": True}) == "'cache' is off"
    assert arm_problem(host, on - {"cache"}, {"cache": False}, {"cache": True}) == "the client switched 'cache' off"
