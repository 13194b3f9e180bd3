"""An experiment's settings against plugins; guard rails; rows on disk."""

from __future__ import annotations

import errno

import msgspec
import pytest

from tokenbus.core.config import Config, from_mapping
from tokenbus.core.errors import ConfigError, ConflictError
from tokenbus.core.experiments.config import GuardConfig
from tokenbus.core.experiments.guard import Window, percentile
from tokenbus.core.experiments.plan import MAX_COMBINATIONS, check, check_beside, make_plan
from tokenbus.core.experiments.records import Row, read_rows, record_files
from tokenbus.core.experiments.writer import RowWriter
from tokenbus.core.host import PluginHost, Switches
from tokenbus.core.plugin import Plugin, PluginInfo


def plugin(name, scope="request", **values):
    info = PluginInfo(name=name, summary="", scope=scope, lossless=values.pop("lossless", True), **values)
    return type(name.title(), (Plugin,), {"info": info})


def host_of(*plugins):
    host = PluginHost("front")
    for cls in plugins:
        host.add(cls)
    return host


HOST = host_of(
    plugin("draft"),
    plugin("tree", requires={"draft"}),
    plugin("cache", claims={"salt"}),
    plugin("fair", "step", slot="scheduling"),
    plugin("greedy", "step", slot="scheduling"),
    plugin("mask", "step", claims={"schema"}),
    plugin("int3", "engine", lossless=False, slot="quantization"),
    plugin("fast", "step", lossless=False, slot="attention"),
)
ALL = Switches(frozenset({"draft", "tree", "cache", "fair", "mask"}))


def experiment(**values):
    arms = values.pop("arms", {"a": {}, "b": {}})
    return from_mapping({"experiments": {"x": {"arms": arms, **values}}}, "test").experiments["x"]


def off(*names):
    return {"a": {}, "b": {"features": dict.fromkeys(names, False)}}


# ---- settings -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"arms": {"a": {}}}, r"x\.arms: there must be 2 to 8 arms, not 1"),
        ({"arms": {"a": {}, "excluded": {}}}, r"x\.arms\.excluded"),
        ({"control": "c"}, r"x\.control: there is no arm 'c'; there are: a, b"),
        ({"split": "ip"}, r"x\.split: must be"),
        ({"split": "header:"}, r"x\.split: '' can't be the name"),
        ({"split": "header:Authorization"}, "holds secrets"),
        ({"split": "key"}, "no API keys are asked for"),
        ({"split": "slice", "arms": {"a": {"weight": 1.5}, "b": {}}}, "whole numbers"),
        ({"split": "slice", "traffic": 0.5}, r"x\.traffic: a time slice is everybody's"),
        ({"split": "slice", "slice_seconds": 5, "washout_seconds": 5}, "nothing would be left"),
        ({"arms": off("drafd")}, r"x\.arms\.b\.features: no plugin is called 'drafd'; did you mean 'draft'"),
        ({"arms": off("int3")}, r"scope engine\): give the arms engines of their own"),
        ({"arms": off("fair")}, r'scope step\), so requests can\'t be split by it: use split = "slice"'),
        ({"arms": off("mask"), "split": "slice"}, r"honours request fields \(schema\)"),
    ],
)
def test_what_can_never_run_is_refused_with_the_setting(values, says):
    with pytest.raises(ConfigError, match=says):
        check("x", experiment(**values), HOST, Config())


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", "x" * 41])
def test_names_stand_in_paths_and_headers(name):
    with pytest.raises(ConfigError, match="name"):
        check(name, experiment(), HOST, Config())
    with pytest.raises(ConfigError):
        experiment(arms={"a": {}, name: {}})


@pytest.mark.parametrize(
    "values",
    [{"split": "sometimes", "arms": {"a": {"wieght": 1}, "b": {}}}, {"traffic": 1.5}, {"guard": {"max_error_rate": 2}}],
)
def test_malformed_settings_are_errors(values):
    with pytest.raises(ConfigError):
        experiment(**values)


@pytest.mark.parametrize("split", ["request", "user", "key", "header:X-Team", "slice"])
def test_good_ones_pass(split):
    arms = off("fair") if split == "slice" else off("draft", "tree", "cache")
    check("x", experiment(split=split, arms=arms), HOST, from_mapping({"server": {"api_key": ["k"]}}, "test"))


# ---- plans ----------------------------------------------------------------------------------------------------------------------


def test_every_arm_says_how_each_switch_stands():
    config = experiment(arms={"a": {"weight": 3}, "b": {"features": {"cache": False}}, "c": {"features": {"tree": False}}})
    plan = make_plan("x", config, HOST, ALL, Config())
    assert plan.arms == {
        "a": {"cache": True, "tree": True},
        "b": {"cache": False, "tree": True},
        "c": {"cache": True, "tree": False},
    }
    assert plan.live == ()
    assert plan.before == {}
    assert plan.shares == {"a": 0.6, "b": 0.2, "c": 0.2}
    assert plan.own("b") == plan.arms["b"]
    assert plan.config("b") != plan.config("c")


def test_what_a_slot_displaces_is_part_of_the_arm():
    config = experiment(split="slice", arms={"a": {}, "b": {"features": {"greedy": True, "cache": False}}})
    plan = make_plan("x", config, HOST, ALL, Config())
    assert plan.live == ("fair", "greedy")
    assert plan.before == {"fair": True, "greedy": False}
    assert plan.everybodys("b") == {"fair": False, "greedy": True}
    assert plan.own("b") == {"cache": False}


@pytest.mark.parametrize(
    ("arms", "on", "says"),
    [
        (off("draft"), ALL.on, "'tree' needs 'draft'"),
        ({"a": {}, "b": {"features": {"fast": True}}}, ALL.on, "another kernel set"),
    ],
)
def test_arms_that_the_present_switches_rule_out(arms, on, says):
    with pytest.raises(ConflictError, match=says):
        make_plan("x", experiment(split="slice", arms=arms), HOST, Switches(on), Config())


def test_settings_are_everybodys_and_complete_in_every_arm():
    arms = {"a": {"settings": {"scheduler.token_budget": 64}}, "b": {"settings": {"scheduler.max_running": 2}}}
    config = experiment(split="slice", arms=arms)
    check("x", config, HOST, Config())
    plan = make_plan("x", config, HOST, ALL, Config())
    assert plan.live == ("setting:scheduler.token_budget", "setting:scheduler.max_running")
    assert plan.before == {"setting:scheduler.token_budget": 2048, "setting:scheduler.max_running": 256}
    assert plan.everybodys("a") == {"setting:scheduler.token_budget": 64, "setting:scheduler.max_running": 256}
    assert plan.own("a") == {}
    with pytest.raises(ConfigError, match="settings are everybody"):
        check("x", experiment(arms=arms), HOST, Config())
    for bad, says in (({"scheduler.token_budged": 1}, "no setting"), ({"model.dtype": "auto"}, "can't change live")):
        with pytest.raises(ConfigError, match=says):
            check("x", experiment(split="slice", arms={"a": {}, "b": {"settings": bad}}), HOST, Config())
    with pytest.raises(ConfigError, match=r"x\.arms\.b\.settings: .*>= 1"):
        check("x", experiment(split="slice", arms={"a": {}, "b": {"settings": {"scheduler.token_budget": 0}}}), HOST, Config())


def beside(mine, theirs):
    plan, their_plan = make_plan("x", mine, HOST, ALL, Config()), make_plan("y", theirs, HOST, ALL, Config())
    check_beside("x", mine, plan, {"y": (theirs, their_plan)}, HOST)


def test_experiments_run_together_when_their_switches_have_nothing_to_do_with_each_other():
    beside(experiment(arms=off("cache")), experiment(arms=off("tree")))
    beside(experiment(arms=off("cache")), experiment(arms=off("fair"), split="slice"))
    beside(experiment(), experiment())
    with pytest.raises(ConflictError, match="both switch 'cache'; stop 'y' first"):
        beside(experiment(arms=off("cache")), experiment(arms=off("cache")))
    with pytest.raises(ConflictError, match="depend on each other"):
        beside(experiment(arms=off("draft", "tree")), experiment(arms=off("tree")))
    with pytest.raises(ConflictError, match="both go by time slices"):
        beside(experiment(split="slice"), experiment(split="slice"))
    arms = {name: {} for name in "abcdefgh"}
    assert MAX_COMBINATIONS < 9 * 9
    with pytest.raises(ConflictError, match="81 combinations"):
        beside(experiment(arms=arms), experiment(arms=arms))


# ---- guard rails ----------------------------------------------------------------------------------------------------------------


def fill(window, count, *, at=0.0, failed=False, ttft=0.1, gaps=(0.01,)):
    for _ in range(count):
        window.note(at, failed=failed, ttft=ttft, gaps=gaps)


def test_percentiles_are_values_that_were_seen():
    assert percentile(range(1, 101), 99) == 99
    assert percentile([5.0], 99) == 5.0
    assert percentile([3, 1, 2], 50) == 2


def test_too_few_samples_say_nothing_and_the_limit_itself_is_allowed():
    window = Window(GuardConfig(max_error_rate=0.1, min_samples=20))
    fill(window, 19, failed=True)
    assert window.problem(0) is None
    window = Window(GuardConfig(max_error_rate=0.1, min_samples=20))
    fill(window, 18)
    fill(window, 2, failed=True)
    assert window.problem(0) is None
    fill(window, 1, failed=True)
    assert "3 of 21 requests failed" in window.problem(0)
    assert window.problem(0) is None, "nothing came since"


def test_latency_limits():
    window = Window(GuardConfig(max_p99_ttft=0.5, min_samples=100))
    fill(window, 99, ttft=0.1)
    fill(window, 1, ttft=0.9)
    assert window.problem(0) is None
    fill(window, 1, ttft=0.9)
    assert "P99 of the time to the first token is 0.900 s" in window.problem(0)
    window = Window(GuardConfig(max_p99_inter_token=0.05, min_samples=2))
    fill(window, 2, gaps=(0.01, 0.2), ttft=None)
    assert "inter-token" in window.problem(0)


def test_limits_that_go_by_the_control():
    config = GuardConfig(max_p99_ttft_ratio=1.5, max_p99_inter_token_ratio=2, min_samples=10)
    arm, control = Window(config), Window(config)
    fill(arm, 20, ttft=0.2, gaps=(0.01,))
    assert arm.problem(0, control) is None, "nothing is known of the control"
    fill(control, 9, ttft=0.1, gaps=(0.01,))
    fill(arm, 1, ttft=0.2)
    assert arm.problem(0, control) is None, "too little is known of the control"
    fill(control, 1, ttft=0.1)
    fill(arm, 1, ttft=0.2)
    said = arm.problem(0, control)
    assert said.endswith("is 0.200 s over 22 requests, that of the control 0.100 s; the limit is 1.5 times that")
    arm, control = Window(config), Window(config)
    fill(control, 10, ttft=0.14, gaps=(0.01,))
    fill(arm, 10, ttft=0.2, gaps=(0.02,))
    assert arm.problem(0, control) is None
    fill(arm, 1, ttft=0.2, gaps=(0.03,))
    assert "P99 of inter-token latency is 0.030 s over 11 tokens of 11 requests, that of the control 0.010 s" in arm.problem(
        0, control
    )


def test_what_is_old_leaves_the_window():
    window = Window(GuardConfig(max_error_rate=0.5, min_samples=10, window=60))
    fill(window, 10, at=0.0, failed=True)
    fill(window, 10, at=61.0)
    assert window.problem(61.0) is None
    assert window.summary(61.0) == {"requests": 10, "failed": 0, "p50_ttft": 0.1, "p99_ttft": 0.1}


# ---- rows on disk ---------------------------------------------------------------------------------------------------------------


def row(number):
    return Row(experiment="x", run=1, arm="a", weight=0.5, split="request", arrival=float(number), ended=number + 1.0)


def write(writer, count, first=0):
    assert writer.reserve(count)
    for number in range(first, first + count):
        writer.put(row(number))
    writer.settle(writer.write(writer.take()))


def test_rows_come_back_in_order_from_files_of_bounded_size(tmp_path):
    writer = RowWriter(tmp_path, 100, file_bytes=1000)
    for first in range(0, 60, 6):
        write(writer, 6, first)
    writer.close()
    assert len(record_files(tmp_path)) > 3
    assert [found.arrival for found in read_rows(tmp_path)] == list(range(60))
    assert writer.written == 60
    assert writer.bytes == sum(path.stat().st_size for path in record_files(tmp_path))
    again = RowWriter(tmp_path, 100)
    assert again.bytes == writer.bytes
    before = len(record_files(tmp_path))
    write(again, 1, 60)
    again.close()
    assert len(record_files(tmp_path)) == before + 1, "a new server begins a new file"
    assert next(iter(read_rows(record_files(tmp_path)[-1]))) == row(60)


def test_room_is_reserved_before_and_never_passed(tmp_path):
    writer = RowWriter(tmp_path, 3)
    assert writer.reserve(2)
    assert not writer.reserve(2)
    assert writer.reserve(1)
    writer.put(row(1))
    assert not writer.reserve(1), "it waits for the disk"
    writer.give_back(2)
    assert writer.reserve(2)
    assert writer.pending == 3


class FullDisk:
    """A file that takes a few bytes, then fails, until there is room."""

    def __init__(self, file):
        self.file, self.full = file, True

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        if not self.full:
            return self.file.write(data)
        self.file.write(data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_full_disk_refuses_is_written_later_once_and_whole(tmp_path):
    writer = RowWriter(tmp_path, 100)
    write(writer, 2)
    disk = writer._file = FullDisk(writer._file)
    write(writer, 3, first=2)
    assert "No space" in writer.problem
    assert (writer.written, writer.pending) == (2, 3)
    write(writer, 1, first=5)
    disk.full = False
    writer.settle(writer.write(writer.take()))
    assert (writer.problem, writer.written, writer.pending) == ("", 6, 0)
    assert [found.arrival for found in read_rows(tmp_path)] == list(range(6))
    writer.close()


def test_a_line_cut_off_by_a_crash_is_left_out_and_nonsense_is_named(tmp_path):
    path = tmp_path / "records-000001.jsonl"
    line = msgspec.json.encode(row(1)) + b"\n"
    path.write_bytes(line + line[:20])
    assert list(read_rows(tmp_path)) == [row(1)]
    path.write_bytes(line + b'{"arm": 3}\n' + line)
    with pytest.raises(ValueError, match=r"records-000001\.jsonl:2: not a row"):
        list(read_rows(tmp_path))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(row(1), format=2)) + b"\n")
    with pytest.raises(ValueError, match="format 2"):
        list(read_rows(path))
