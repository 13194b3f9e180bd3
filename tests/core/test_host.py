"""The plugin host: finding, switching, loading, resolving."""

from __future__ import annotations

import pytest

from tokenbus import Plugin, PluginInfo, hookimpl
from tokenbus.core.errors import ConfigError, ConflictError, FieldError, NotFoundError, PluginError, PluginLoadError
from tokenbus.core.host import HOOK_NAMES, PluginHost
from tokenbus.core.plugin import HOOK_API_VERSION


def make(name, *, hooks=None, **info):
    info = {"summary": "test", "scope": "step", "lossless": True} | info
    members = {"info": PluginInfo(name=name, **info)}
    members |= {hook: hookimpl(function) for hook, function in (hooks or {}).items()}
    return type(name.title().replace(".", ""), (Plugin,), members)


def host_with(*classes, settings=None):
    host = PluginHost("engine", settings)
    for cls in classes:
        host.add(cls)
    return host


def test_every_hook_of_the_manual_is_known_and_documented():
    from tokenbus.core import hooks

    assert len(HOOK_NAMES) >= 22
    for name in HOOK_NAMES:
        text = getattr(hooks, name).__doc__ or ""
        actor = text.split(",")[0]
        assert actor in {"Front", "Engine", "Worker"}, f"{name} does not say which actor calls it"
        assert any(word in text for word in ("quick", "compute", "may block")), f"{name} does not say whether it may block"


def test_defaults_are_on_and_disable_gives_the_reason():
    host = host_with(make("a", default=True), make("b"), make("c", default=True))
    switches = host.start_switches(disable=["c"])
    assert switches.on == {"a"}
    assert switches.reasons == {"c": "switched off at start"}
    assert host.start_switches(enable=["b"]).on == {"a", "b", "c"}


def test_unknown_name_suggests_the_closest():
    host = host_with(make("prefix_cache"))
    with pytest.raises(ConfigError, match="did you mean 'prefix_cache'"):
        host.start_switches(enable=["prefix_cahce"])


def test_requirement_that_is_off_refuses_a_wish_and_switches_a_default_off_with_the_reason():
    host = host_with(make("base"), make("top", requires=["base"]), make("quiet", requires=["base"], default=True))
    with pytest.raises(ConfigError, match=r"can't enable 'top': it needs 'base'"):
        host.start_switches(enable=["top"])
    switches = host.start_switches()
    assert "quiet" not in switches.on
    assert switches.reasons["quiet"] == "needs 'base', which is off"
    assert host.start_switches(enable=["base", "top"]).on == {"base", "top", "quiet"}


def test_conflicts_refuse_two_wishes_and_push_out_a_default():
    host = host_with(make("x", conflicts=["y"]), make("y", default=True))
    with pytest.raises(ConfigError, match="conflicts"):
        host.start_switches(enable=["x", "y"])
    switches = host.start_switches(enable=["x"])
    assert switches.on == {"x"}
    assert "conflicts with 'x'" in switches.reasons["y"]


def test_a_slot_has_one_holder_and_swaps_at_once():
    host = host_with(make("s.one", slot="scheduling", default=True), make("s.two", slot="scheduling"))
    start = host.start_switches()
    assert host.holder("scheduling", start.on) == "s.one"
    swapped = host.change_switches(start, {"s.two": True})
    assert swapped.on == {"s.two"}
    assert "held by 's.two'" in swapped.reasons["s.one"]
    assert host.change_switches(swapped, {"s.two": False}).on == set()
    with pytest.raises(ConfigError, match="slot"):
        host.start_switches(enable=["s.one", "s.two"])


def test_live_change_is_all_or_none_and_says_why():
    host = host_with(make("base"), make("top", requires=["base"]), make("fixed", scope="engine"), make("other"))
    now = host.start_switches(enable=["base", "top"])
    with pytest.raises(ConflictError, match="'top' needs 'base'"):
        host.change_switches(now, {"other": True, "base": False})
    with pytest.raises(ConflictError, match="scope engine"):
        host.change_switches(now, {"fixed": True})
    with pytest.raises(NotFoundError):
        host.change_switches(now, {"nobody": True})
    assert host.change_switches(now, {"base": False, "top": False, "other": True}).on == {"other"}
    assert now.on == {"base", "top"}


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        (HOOK_API_VERSION, True),
        ((HOOK_API_VERSION[0] + 1, 0), False),
        ((HOOK_API_VERSION[0], HOOK_API_VERSION[1] + 1), False),
    ],
)
def test_hook_api_version_is_checked_with_both_named(version, ok):
    cls = make("v", api_version=version)
    host = PluginHost("engine")
    if ok:
        host.add(cls)
        assert "v" in host.catalogue
        return
    with pytest.raises(PluginLoadError) as caught:
        host.add(cls)
    assert f"{version[0]}.{version[1]}" in str(caught.value)
    assert f"{HOOK_API_VERSION[0]}.{HOOK_API_VERSION[1]}" in str(caught.value)


def test_not_a_plugin_and_two_of_one_name_are_refused():
    host = host_with(make("twice"))
    with pytest.raises(PluginLoadError, match="two plugins"):
        host.add(make("twice"))
    with pytest.raises(PluginLoadError, match="not a subclass"):
        host.add(int)


def test_a_hook_that_does_not_exist_or_has_wrong_arguments_is_refused():
    typo = make("typo", hooks={"limit_chunks": lambda self, request: None})
    wrong = make("wrong", hooks={"limit_chunk": lambda self, request, tokens: None})
    host = host_with(typo, wrong)
    for name in ("typo", "wrong"):
        with pytest.raises(PluginLoadError, match=name):
            host.load([name])
        assert name not in host.loaded
    with pytest.raises(PluginLoadError):
        host.load(["wrong"])


def test_loading_is_all_or_none():
    def explode(self, settings, role):
        raise ValueError("no luck")

    bad = make("zz")
    bad.__init__ = explode
    host = host_with(make("aa"), bad)
    with pytest.raises(PluginLoadError, match="no luck"):
        host.load(["aa", "zz"])
    assert host.loaded == {}


def test_settings_are_typed():
    import msgspec

    class Knobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        size: int = 3

    cls = make("knobs")
    cls.Settings = Knobs
    host = host_with(cls, settings={"knobs": {"size": 7}})
    host.load(["knobs"])
    assert host.loaded["knobs"].settings.size == 7
    for bad in ({"size": "big"}, {"sise": 1}):
        host = host_with(cls, settings={"knobs": bad})
        with pytest.raises(ConfigError, match=r"\[plugins.knobs\]"):
            host.load(["knobs"])
    with pytest.raises(ConfigError, match="no plugin"):
        host_with(settings={"nobody": {}}).check_settings()


def test_hooks_are_resolved_for_features_and_fields():
    seen = []
    always = make("always", scope="request", hooks={"limit_chunk": lambda self, wanted: seen.append("always") or wanted - 1})
    claims = make(
        "claims",
        scope="request",
        claims=["salt"],
        hooks={
            "limit_chunk": lambda self, wanted: seen.append("claims") or 1,
            "text_filter": lambda self, request: "filter",
        },
    )
    host = host_with(always, claims)
    host.load(["always", "claims"])
    both = frozenset({"always", "claims"})
    table = host.table(both, {"salt"})
    assert {impl.plugin for impl in table.limit_chunk} == both
    assert [impl(request=None, wanted=5, step=None) for impl in table.limit_chunk if impl.plugin == "always"] == [4]
    assert seen == ["always"]
    # a hook that is only for requests which use a claimed field, and one that is for all its requests
    assert host.table(both, set()).text_filter == ()
    assert len(host.table(both, {"salt"}).text_filter) == 1
    assert len(host.table(both, set()).limit_chunk) == 2
    assert [i.plugin for i in host.table(frozenset({"always"}), set()).limit_chunk] == ["always"]
    assert host.table(both, {"salt"}) is table


def test_what_a_plugin_raises_names_plugin_and_hook_and_a_clients_error_passes():
    def boom(self):
        raise ValueError("inside")

    def refuse(self, fields):
        raise FieldError("salt", "too salty")

    host = host_with(make("p", claims=["salt"], hooks={"block_evicted": boom, "check_fields": refuse}))
    host.load(["p"])
    table = host.table(frozenset({"p"}))
    with pytest.raises(PluginError) as caught:
        table.block_evicted[0](block_id=1)
    assert (caught.value.plugin, caught.value.hook) == ("p", "block_evicted")
    assert "inside" in str(caught.value)
    with pytest.raises(FieldError) as refused:
        table.check_fields[0](fields={}, request=None)
    assert (refused.value.plugin, refused.value.hook, refused.value.param) == ("p", "check_fields", "salt")


def test_hook_order_is_by_mark_then_name_however_plugins_were_switched():
    def mark(name, **options):
        cls = make(name)
        cls.block_evicted = hookimpl(**options)(lambda self, name=name: name)
        return cls

    host = host_with(mark("b"), mark("a"), mark("z", tryfirst=True), mark("c", trylast=True), mark("d"))
    on = frozenset("abcdz")
    for order in ("abcdz", "zdcba", "cabzd"):
        host.release_unused(())
        for name in order:
            host.load([name])
        assert [impl.plugin for impl in host.table(on).block_evicted] == ["z", "a", "b", "d", "c"]


def test_which_plugins_of_an_open_request_move_with_the_switches():
    host = host_with(make("cache"), make("chunk"), make("logprobs", claims=["logprobs"]), make("lossy", lossless=False))
    features = frozenset({"cache", "logprobs", "lossy"})
    every = {"cache", "logprobs", "lossy"}
    off = host.after_switch(features, every, set(), pinned=(), fields=())
    assert off == {"lossy"}, "lossless ones go, others stay until the request ends"
    assert host.after_switch(features, every, set(), pinned=("cache",), fields=("logprobs",)) == features
    assert host.after_switch(features, every, every | {"chunk"}, pinned=(), fields=()) == features | {"chunk"}
    assert host.after_switch(features, every, every | {"chunk"}, pinned=("chunk",), fields=()) == features


def test_unloading_after_the_last_user():
    host = host_with(make("a", hooks={"block_evicted": lambda self: None}), make("b"))
    host.load(["a", "b"])
    assert len(host.table(frozenset({"a"})).block_evicted) == 1
    assert host.release_unused({"b"}) == ["a"]
    assert host.table(frozenset({"a"})).block_evicted == ()
    assert host.load(["a"]) == ["a"]
    assert len(host.table(frozenset({"a"})).block_evicted) == 1


def test_built_in_plugins_are_found_by_entry_point_and_load_without_torch():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from tokenbus.core.host import PluginHost\n"
        "host = PluginHost('front')\n"
        "host.discover()\n"
        "assert not host.broken, host.broken\n"
        "switches = host.start_switches()\n"
        "host.load(switches.on)\n"
        "assert 'torch' not in sys.modules, 'a plugin module imports torch'\n"
        "print(*switches.names())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(
        [
            "attention.cpu",
            "chunked_prefill",
            "dashboard",
            "metrics",
            "multimodal",
            "prefix_cache",
            "quantization.checkpoint",
            "reasoning",
            "sampling.bias",
            "sampling.logprobs",
            "sampling.penalties",
            "sampling.stops",
            "sampling.truncation",
            "scheduling.unified",
            "structured",
            "structured.jump_forward",
            "tools",
            "tools.auto",
        ]
    )
