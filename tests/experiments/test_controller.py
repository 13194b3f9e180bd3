"""Experiments over their life: starts, ramps, slices, guard rails, stops, and what is left after a restart. The clock is the test's."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from tokenbus.core.bus import Bus
from tokenbus.core.config import from_mapping
from tokenbus.core.errors import ConfigError, ConflictError, FieldError, NotFoundError, OverloadedError, UnavailableError
from tokenbus.core.experiments.controller import Experiments
from tokenbus.core.experiments.records import Event, experiment_dir, read_rows
from tokenbus.core.front.admission import ParsedRequest, Prompt
from tokenbus.core.front.events import EngineStarted, FeatureChange, RequestRecord
from tokenbus.core.front.settings import LiveSettings
from tokenbus.core.host import PluginHost, Switches
from tokenbus.core.plugin import Plugin, PluginInfo

pytestmark = pytest.mark.anyio


def plugin(name, scope="request", **values):
    info = PluginInfo(name=name, summary="", scope=scope, lossless=True, **values)
    return type(name.title(), (Plugin,), {"info": info})


PLUGINS = [plugin("draft"), plugin("cache", claims={"salt"}), plugin("fair", "step"), plugin("calm", "step")]
PLUGINS += [plugin("queue", "step", slot="scheduling"), plugin("stack", "step", slot="scheduling")]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Engine:
    """What the front's client is to experiments."""

    def __init__(self, config, bus, host, on):
        self.bus, self.host, self.switches = bus, host, Switches(frozenset(on))
        self.settings = LiveSettings(config, host, bus)
        self.info = SimpleNamespace(pid=7)
        self.changes = []
        self.refuses = None

    async def set_features(self, changes, who):
        if self.refuses is not None:
            raise self.refuses
        self.switches = self.host.change_switches(self.switches, changes)
        self.changes.append(dict(changes))
        self.bus.publish(FeatureChange(dict(changes), self.switches, who, 0.0))

    async def set_settings(self, changes, who):
        if self.refuses is not None:
            raise self.refuses
        self.settings.begin(1, changes, who)
        self.settings.answered(1)


class Assigned:
    """A request, and what was decided about it."""

    def __init__(self, parsed):
        self.parsed = parsed
        self.arm = "" if parsed.overrides is None else parsed.overrides.arm
        self.overrides = {} if parsed.overrides is None else parsed.overrides.features

    def __getattr__(self, name):
        return getattr(self.parsed, name)


class World:
    """A server's experiments without the server."""

    def __init__(self, folder, settings, *, clock=None, on=("draft", "cache", "fair"), **server):
        self.folder = folder
        self.clock = clock or Clock()
        self.bus = Bus()
        host = PluginHost("front")
        for cls in PLUGINS:
            host.add(cls)
        config = from_mapping({"server": {"state_dir": str(folder), **server}, "experiments": {"x": settings}}, "test")
        self.engine = Engine(config, self.bus, host, on)
        self.all = Experiments(config, host, self.engine, self.bus, now=self.clock)
        self.events = []
        self.bus.listen(self.events.append, Event)
        self.all._resume()
        self.serial = 0

    @property
    def x(self):
        return self.all.get("x")

    def kinds(self):
        return [event.kind for event in self.events]

    def assign(self, user=None, *, prompts=1, **values):
        self.serial += 1
        fields = values.pop("fields", {}) | ({} if user is None else {"user": user})
        parsed = ParsedRequest(
            endpoint="completion", prompts=[Prompt([1, 2])] * prompts, group=f"g{self.serial}-{id(self)}", fields=fields,
            arrival=self.clock.now, **values,
        )  # fmt: skip
        parsed.overrides = self.all.assign(parsed)
        return Assigned(parsed)

    def end(self, parsed, **values):
        choices = len(parsed.prompts) * parsed.n
        for choice in range(choices):
            self.bus.publish(
                RequestRecord(
                    request_id=f"{parsed.group}-{choice}", group=parsed.group, endpoint="completion", tenant="", arm=parsed.arm,
                    arrival=parsed.arrival, prompt_tokens=2, cached_tokens=1, output_tokens=3,
                    **{"finish_reason": "length", "ttft": 0.1, "gaps": (0.01, 0.02), "e2e": self.clock.now - parsed.arrival} | values,
                )
            )  # fmt: skip

    def serve(self, user=None, **values):
        parsed = self.assign(user)
        self.end(parsed, **values)
        return parsed.arm

    async def rows(self):
        await self.all.tick()
        return list(read_rows(experiment_dir(self.folder, "x")))

    def restart(self, settings, **values):
        self.all.close()
        return World(self.folder, settings, clock=self.clock, **values)


ARMS = {"a": {}, "b": {"features": {"cache": False}}}
USERS = [f"u{i}" for i in range(400)]


@pytest.fixture
def world(tmp_path):
    made = []

    def make(settings=None, **values):
        made.append(World(tmp_path, {"arms": ARMS, "split": "user", **(settings or {})}, **values))
        return made[-1]

    yield make
    for one in made:
        one.all.close()


# ---- arms -----------------------------------------------------------------------------------------------------------------------


async def test_nobody_is_in_an_arm_before_the_start_and_after_the_stop(world):
    w = world()
    assert w.serve("u1") == ""
    await w.all.start("x", "me")
    assert w.serve("u1") in {"x/a", "x/b"}
    await w.all.stop("x", "me")
    assert w.serve("u1") == ""
    assert w.kinds() == ["started", "stopped"]
    assert len(await w.rows()) == 1


async def test_an_arm_is_switches_that_go_with_the_request(world):
    w = world()
    await w.all.start("x", "me")
    seen = {parsed.arm: parsed.overrides for parsed in map(w.assign, USERS)}
    assert seen == {"x/a": {"cache": True}, "x/b": {"cache": False}}
    assert w.engine.changes == []


async def test_users_keep_their_arm_through_restarts_ramps_and_new_runs(world, tmp_path):
    w = world({"traffic": 0.3})
    await w.all.start("x", "me")
    first = {user: w.serve(user) for user in USERS}
    assert 0.2 < sum(map(bool, first.values())) / len(USERS) < 0.4
    await w.all.ramp("x", "me", 0.7)
    second = {user: w.serve(user) for user in USERS}
    assert all(second[user] == arm for user, arm in first.items() if arm)
    assert sum(map(bool, second.values())) > sum(map(bool, first.values()))
    w = w.restart({"arms": ARMS, "split": "user", "traffic": 0.3})
    try:
        assert w.x.state.traffic == 0.7
        assert {user: w.serve(user) for user in USERS} == second
        assert w.kinds() == ["resumed"]
        assert w.x.state.run == 1
        rows = await w.rows()
    finally:
        w.all.close()
    by_unit = {}
    for row in rows:
        by_unit.setdefault(row.unit, set()).add(row.arm)
    assert len(by_unit) == sum(map(bool, second.values())), "units keep their name over a restart, too"
    assert all(len(arms) == 1 for arms in by_unit.values())
    assert not any(user in path.read_text() for user in ("u17", "u399") for path in experiment_dir(tmp_path, "x").iterdir())


async def test_a_request_without_the_sticky_value_is_in_no_experiment(world):
    w = world()
    await w.all.start("x", "me")
    assert w.serve(None) == ""
    assert w.assign(fields={"user": ""}).arm == ""
    assert await w.rows() == []


@pytest.mark.parametrize(
    ("split", "values", "same"),
    [
        ("key", {"tenant": "abc"}, {"tenant": "abc"}),
        ("header:X-Team", {"headers": {"x-team": "red"}}, {"headers": {"x-team": "red"}}),
    ],
)
async def test_other_sticky_splits(world, split, values, same):
    w = world({"split": split, "salt": "s"}, api_key=["k"])
    await w.all.start("x", "me")
    assert w.assign(**values).arm == w.assign(**same).arm != ""
    assert w.assign().arm == ""
    arms = Counter(w.assign(tenant=f"t{i}", headers={"x-team": f"t{i}"}).arm for i in range(100))
    assert set(arms) == {"x/a", "x/b"}


async def test_choices_of_one_request_share_arm_and_unit(world):
    w = world({"split": "request"})
    await w.all.start("x", "me")
    w.end(w.assign(prompts=2, n=3))
    rows = await w.rows()
    assert len(rows) == 6
    assert len({(row.arm, row.unit, row.group) for row in rows}) == 1
    assert len({row.request_id for row in rows}) == 6
    assert w.x.writer.pending == 0


# ---- who is left out ------------------------------------------------------------------------------------------------------------


async def test_a_client_that_chooses_is_left_out_and_keeps_what_it_chose(world):
    w = world()
    await w.all.start("x", "me")
    parsed = w.assign("u1", features={"cache": False})
    w.end(parsed)
    assert (parsed.arm, parsed.overrides) == ("x/excluded", {})
    w.end(w.assign("u1", features={"draft": False}))
    rows = await w.rows()
    assert [row.excluded for row in rows] == ["client", ""]
    assert rows[0].arm in {"a", "b"}
    assert rows[0].arm == rows[1].arm, "the arm it would have had"
    assert not rows[0].counts


async def test_a_request_that_needs_the_switched_plugin_is_left_out_in_every_arm(world):
    w = world()
    await w.all.start("x", "me")
    for user in USERS[:40]:
        parsed = w.assign(user, fields={"salt": "s"})
        assert (parsed.arm, parsed.overrides) == ("x/excluded", {})
        w.end(parsed)
    assert w.assign("u1", fields={"salt": None}).arm != "x/excluded"
    rows = await w.rows()
    assert {row.excluded for row in rows} == {"claims"}
    assert {row.arm for row in rows} == {"a", "b"}


async def test_an_arm_that_admission_could_not_apply_is_not_counted(world):
    w = world()
    await w.all.start("x", "me")
    for user in USERS[:10]:
        parsed = w.assign(user)
        w.all.not_given(parsed.group)
        w.end(parsed)
    assert {row.excluded for row in await w.rows()} == {"failed"}


async def test_without_room_for_rows_requests_are_left_out_rather_than_rows_lost(world):
    w = world()
    await w.all.start("x", "me")
    w.x.writer._most = 5
    open_requests = [w.assign(user) for user in USERS[:8]]
    assert [bool(parsed.arm) for parsed in open_requests] == [True] * 5 + [False] * 3
    assert w.all.view()["x"]["unrecorded"] == 3
    for parsed in open_requests:
        w.end(parsed)
    assert len(await w.rows()) == 5
    assert w.assign("u1").arm


# ---- rows -----------------------------------------------------------------------------------------------------------------------


async def test_a_row_says_what_happened(world):
    w = world()
    w.bus.publish(EngineStarted(SimpleNamespace(pid=42), 3))
    await w.all.start("x", "me")
    parsed = w.assign("u1")
    w.clock.now += 2.0
    w.end(parsed, preemptions=1, draft_tokens=8, accepted_tokens=5, resumptions=1)
    w.end(parsed)
    (row,) = await w.rows()
    assert (row.experiment, row.run, f"x/{row.arm}", row.split, row.slice) == ("x", 1, parsed.arm, "user", None)
    assert (row.control, row.weight, row.shared_steps, row.traffic) == (row.arm == "a", 0.5, True, 1.0)
    assert (row.arrival, row.ended, row.e2e, row.ttft) == (1000.0, 1002.0, 2.0, 0.1)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (2, 1, 3)
    assert (row.gaps, row.gap_count, row.gap_mean, row.gap_max) == ([10.0, 20.0], 2, 15.0, 20.0)
    assert (row.preemptions, row.draft_tokens, row.accepted_tokens, row.resumptions) == (1, 8, 5, 1)
    assert (row.engine_pid, row.engine, row.allocation_failures) == (42, 3, 0)
    assert (row.counts, row.failed, row.error, row.status) == (True, False, "", 0)
    assert row.cluster == row.unit


async def test_failures_and_refusals_have_rows_with_their_status(world):
    w = world()
    await w.all.start("x", "me")
    w.end(w.assign("u1"), finish_reason="error", error_kind="EngineDiedError", ttft=None, gaps=())
    w.all.refused(w.assign("u1", prompts=3), OverloadedError("full"))
    w.all.refused(w.assign("u1"), FieldError("top_p", "is wrong"))
    w.all.dropped(w.assign("u1").group)
    rows = await w.rows()
    assert [(row.finish_reason, row.error, row.status, row.failed) for row in rows] == [
        ("error", "EngineDiedError", 500, True),
        ("refused", "OverloadedError", 429, True),
        ("refused", "FieldError", 400, False),
    ]
    assert rows[0].gap_mean is None
    assert w.x.writer.pending == 0


async def test_many_gaps_are_counted_and_the_first_kept(world):
    w = world()
    await w.all.start("x", "me")
    w.end(w.assign("u1"), gaps=tuple(0.001 * i for i in range(600)))
    (row,) = await w.rows()
    assert (len(row.gaps), row.gap_count, row.gap_max, row.gap_mean) == (512, 600, 599.0, 299.5)


async def test_a_request_that_is_admitted_again_has_one_row(world):
    w = world()
    await w.all.start("x", "me")
    parsed = w.assign("u1")
    w.all.assign(parsed)
    w.end(parsed)
    assert len(await w.rows()) == 1
    assert w.x.writer.pending == 0


async def test_rows_of_a_run_that_was_stopped_meanwhile_keep_their_run(world):
    w = world()
    await w.all.start("x", "me")
    parsed = w.assign("u1")
    await w.all.stop("x", "me")
    await w.all.start("x", "me")
    w.end(parsed)
    w.serve("u1")
    assert [row.run for row in await w.rows()] == [1, 2]
    assert sum(arm["counted"] for arm in w.all.view()["x"]["arms"].values()) == 1, "this run's"


# ---- slices ---------------------------------------------------------------------------------------------------------------------

SLICES = {"split": "slice", "slice_seconds": 60, "washout_seconds": 10}
FAIR = {"arms": {"a": {}, "b": {"features": {"fair": False}}}}


async def walk(w, slices, per_slice=12):
    """One request each 5 s, each taking 1 s."""
    for _ in range(slices * per_slice):
        await w.all.tick()
        parsed = w.assign()
        w.clock.now += 1.0
        w.end(parsed)
        w.clock.now += 4.0
    return await w.rows()


async def test_slices_switch_everybody_and_every_block_has_each_arm_once(world):
    w = world({**SLICES, **FAIR})
    await w.all.start("x", "me")
    rows = await walk(w, 20)
    assert [row.slice for row in rows] == [i // 12 for i in range(240)]
    arms = [next(row.arm for row in rows if row.slice == i) for i in range(20)]
    assert all({arms[i], arms[i + 1]} == {"a", "b"} for i in range(0, 20, 2))
    assert all(row.arm == arms[row.slice] for row in rows)
    assert [row.washout for row in rows] == [i % 12 < 2 for i in range(240)]
    assert not any(row.excluded or row.shared_steps or row.unit for row in rows)
    assert rows[0].cluster == "slice-0"
    states, on = [], True
    for arm in arms:
        if on != (arm == "a"):
            on = not on
            states.append({"fair": on})
    assert w.engine.changes[: len(states)] == states
    await w.all.stop("x", "me")
    assert "fair" in w.engine.switches.on, "as it was before"


async def test_what_spans_a_border_is_not_compared(world):
    w = world({**SLICES, **FAIR})
    await w.all.start("x", "me")
    w.clock.now += 55
    parsed = w.assign()
    w.clock.now += 4
    w.end(parsed)
    parsed = w.assign()
    w.clock.now += 2
    w.end(parsed)
    assert [(row.slice, row.washout) for row in await w.rows()] == [(0, False), (0, True)]


async def test_switches_of_requests_go_with_requests_in_slices_too(world):
    w = world(SLICES)
    await w.all.start("x", "me")
    seen = set()
    for _ in range(8):
        parsed = w.assign()
        seen.add((parsed.arm, parsed.overrides["cache"]))
        w.clock.now += 60
    assert seen == {("x/a", True), ("x/b", False)}
    assert w.engine.changes == []


async def test_an_engine_that_starts_anew_brings_a_wash_out(world):
    w = world(SLICES)
    await w.all.start("x", "me")
    w.clock.now += 30
    w.bus.publish(EngineStarted(SimpleNamespace(pid=1), 1))
    w.serve()
    w.clock.now += 10
    w.serve()
    assert [row.washout for row in await w.rows()] == [True, False]


async def test_a_slice_whose_switches_fail_is_not_counted_and_tried_again(world):
    w = world({**SLICES, **FAIR})
    await w.all.start("x", "me")
    first = w.all.view()["x"]["slice"]["arm"]
    w.engine.refuses = ConflictError("it won't")
    w.clock.now += 60
    await w.all.tick()
    await w.all.tick()
    assert w.all.view()["x"]["slice"]["arm"] != first
    assert w.kinds().count("slice_failed") == 1
    assert w.all.view()["x"]["failing"] == "it won't"
    w.clock.now += 15
    assert w.assign().arm == "x/excluded"
    w.engine.refuses = None
    await w.all.tick()
    assert "failing" not in w.all.view()["x"]
    parsed = w.assign()
    assert parsed.arm != "x/excluded"
    w.end(parsed)
    assert [row.washout for row in await w.rows()] == [True], "the switch was late, and so is its wash-out"


async def test_a_start_whose_switches_fail_leaves_nothing_running(world):
    w = world({**SLICES, "arms": {"a": {"features": {"calm": True}}, "b": {"features": {"calm": True}}}})
    w.engine.refuses = UnavailableError("no engine")
    with pytest.raises(UnavailableError):
        await w.all.start("x", "me")
    assert not w.x.running
    assert "no engine" in w.all.view()["x"]["reason"]
    w.engine.refuses = None
    await w.all.start("x", "me")
    assert w.engine.switches.on == {"draft", "cache", "fair", "calm"}


async def test_a_hand_on_its_switches_ends_it_and_stays(world):
    w = world({**SLICES, **FAIR})
    await w.all.start("x", "me")
    await w.engine.set_features({"fair": False}, "admin key")
    assert not w.x.running
    assert w.x.state.reason == "fair was changed by admin key"
    await w.all.tick()
    assert "fair" not in w.engine.switches.on
    await w.engine.set_features({"calm": True}, "admin key")


async def test_switches_that_could_not_be_put_back_are_put_back_later(world):
    w = world({**SLICES, "arms": {"a": {"features": {"fair": False}}, "b": {"features": {"fair": False}}}})
    await w.all.start("x", "me")
    w.engine.refuses = UnavailableError("no engine")
    await w.all.stop("x", "me")
    with pytest.raises(UnavailableError, match="no engine"):
        await w.all.start("x", "me")
    assert not w.x.running
    w.engine.refuses = None
    await w.all.tick()
    assert "fair" in w.engine.switches.on
    await w.all.start("x", "me")


async def test_slices_go_on_after_a_restart_where_the_clock_stands(world):
    w = world({**SLICES, **FAIR})
    await w.all.start("x", "me")
    w.clock.now += 130
    before = w.all.view()["x"]["slice"]
    assert before["index"] == 2
    w = w.restart({"arms": FAIR["arms"], **SLICES})
    try:
        assert w.all.view()["x"]["slice"] == before
        await w.all.tick()
        assert ("fair" in w.engine.switches.on) == (before["arm"] == "a")
        w.serve()
        assert [row.washout for row in await w.rows()] == [True], "a restart is a disturbance"
    finally:
        w.all.close()


async def test_settings_change_at_the_borders_and_go_back(world):
    w = world({**SLICES, "arms": {"a": {}, "b": {"settings": {"scheduler.token_budget": 64}, "features": {"fair": False}}}})

    def stands():
        return w.engine.settings.config.scheduler.token_budget, "fair" in w.engine.switches.on

    await w.all.start("x", "me")
    seen = set()
    for _ in range(8):
        await w.all.tick()
        w.clock.now += 15
        seen.add((w.assign().arm, stands()))
        w.clock.now += 45
    assert seen == {("x/a", (2048, True)), ("x/b", (64, False))}
    assert w.all.view()["x"]["arms"]["b"]["settings"] == {"scheduler.token_budget": 64}
    await w.all.stop("x", "me")
    assert stands() == (2048, True)
    await w.all.start("x", "me")
    await w.engine.set_settings({"scheduler.token_budget": 100}, "admin key")
    assert w.x.state.reason == "scheduler.token_budget was changed by admin key"
    await w.all.tick()
    assert stands() == (100, True)


# ---- guard rails ----------------------------------------------------------------------------------------------------------------


async def test_an_arm_that_fails_is_switched_off_by_itself_and_its_users_get_control(world):
    w = world({"guard": {"max_error_rate": 0.1, "min_samples": 20}})
    await w.all.start("x", "me")
    arms = {user: w.assign(user).arm for user in USERS}
    for user in USERS[:60]:
        bad = arms[user] == "x/b"
        w.serve(user, **({"finish_reason": "error", "error_kind": "PluginError"} if bad else {}))
    await w.all.tick()
    assert w.kinds() == ["started", "tripped"]
    assert (w.events[-1].who, w.events[-1].arm, w.events[-1].weights) == ("guard rail", "b", {"a": 0.5, "b": 0.0})
    assert "requests failed" in w.all.view()["x"]["arms"]["b"]["off"]
    counted = w.all.view()["x"]["arms"]["b"]["counted"]
    for user in USERS:
        parsed = w.assign(user)
        assert (parsed.arm, parsed.overrides) == ("x/a", {"cache": True})
        w.end(parsed)
    rows = (await w.rows())[60:]
    assert {(row.arm, row.excluded, row.weight) for row in rows} == {("a", "", 0.5), ("b", "tripped", 0.0)}
    assert {row.config for row in rows} == {w.x.plan.config("a")}
    assert w.all.view()["x"]["arms"]["b"]["counted"] == counted


async def test_a_slow_arm_trips_in_slices_and_its_slices_run_control(world):
    w = world({**SLICES, **FAIR, "guard": {"max_p99_ttft": 0.5, "min_samples": 5}})
    await w.all.start("x", "me")
    for _ in range(40):
        await w.all.tick()
        parsed = w.assign()
        slow = parsed.arm == "x/b"
        w.clock.now += 10
        w.end(parsed, ttft=0.9 if slow else 0.1)
    assert w.kinds() == ["started", "tripped"]
    assert "fair" in w.engine.switches.on
    assert {row.excluded for row in await w.rows() if row.arm == "b"} == {"", "tripped"}


async def test_the_control_has_no_guard_and_a_clients_own_mistakes_are_no_failures(world):
    w = world({"guard": {"max_error_rate": 0.1, "min_samples": 5}})
    await w.all.start("x", "me")
    for user in USERS[:60]:
        parsed = w.assign(user)
        if parsed.arm == "x/a":
            w.end(parsed, finish_reason="error", error_kind="PluginError")
        else:
            w.all.refused(parsed, FieldError("top_p", "is wrong"))
    await w.all.tick()
    assert w.kinds() == ["started"]


async def test_an_arm_that_was_switched_off_stays_off_over_a_restart_until_a_new_run(world):
    settings = {"arms": ARMS, "split": "user"}
    w = world(settings)
    await w.all.start("x", "me")
    await w.all.rollback("x", "me")
    assert set(map(w.serve, USERS)) == {"x/a"}
    w = w.restart(settings)
    try:
        assert set(map(w.serve, USERS)) == {"x/a"}
        assert w.all.view()["x"]["arms"]["b"]["off"] == "rolled back by me"
        await w.all.stop("x", "me")
        await w.all.start("x", "me")
        assert set(map(w.serve, USERS)) == {"x/a", "x/b"}
    finally:
        w.all.close()


# ---- refusals and restarts ------------------------------------------------------------------------------------------------------


async def test_what_makes_no_sense_is_refused(world):
    w = world()
    for act in (w.all.stop("x", "me"), w.all.rollback("x", "me"), w.all.ramp("x", "me", 0.5)):
        with pytest.raises(ConflictError, match="not running"):
            await act
    with pytest.raises(NotFoundError, match="no experiment is called 'y'; there are: x"):
        await w.all.start("y", "me")
    for traffic in (-0.1, 1.5, float("nan")):
        with pytest.raises(FieldError, match="between 0 and 1"):
            await w.all.start("x", "me", traffic)
    assert w.events == []
    await w.all.start("x", "me", 0.25)
    assert w.x.state.traffic == 0.25
    with pytest.raises(ConflictError, match=r"is running \(run 1\)"):
        await w.all.start("x", "me")
    with pytest.raises(FieldError):
        await w.all.ramp("x", "me", 2)


async def test_a_time_slice_takes_no_part_of_traffic(world):
    w = world(SLICES)
    with pytest.raises(ConflictError, match="everybody's"):
        await w.all.start("x", "me", 0.5)
    await w.all.start("x", "me")
    with pytest.raises(ConflictError, match="everybody's"):
        await w.all.ramp("x", "me", 0.5)


async def test_a_hand_that_reaches_its_switches_by_another_way_ends_it_too(world):
    """Here a plugin that displaces the experiment's own from its slot."""
    arms = {"a": {"features": {"queue": True}}, "b": {"features": {"queue": True}}}
    w = world({**SLICES, "arms": arms}, on=("draft", "cache"))
    await w.all.start("x", "me")
    assert "queue" in w.engine.switches.on
    await w.engine.set_features({"stack": True}, "admin key")
    assert w.x.state.reason == "queue was changed by admin key"
    await w.all.tick()
    assert w.engine.switches.on == {"draft", "cache", "stack"}


async def test_an_explicit_wish_for_what_holds_already_ends_nothing(world):
    w = world({**SLICES, "arms": {"a": {"features": {"fair": False}}, "b": {"features": {"fair": False}}}})
    await w.all.start("x", "me")
    await w.engine.set_features({"fair": False}, "admin key")
    assert w.x.running


async def test_other_arms_in_the_settings_are_shown_and_started_anew(world):
    w = world()
    await w.all.start("x", "me")
    w = w.restart({"arms": {"new": {}, "b": {"features": {"draft": False}}, "c": {}}, "split": "user"})
    try:
        view = w.all.view()["x"]
        assert (view["status"], list(view["arms"])) == ("stopped", ["new", "b", "c"])
        await w.all.start("x", "me")
        assert set(map(w.serve, USERS)) == {"x/new", "x/b", "x/c"}
        assert w.x.state.run == 2
    finally:
        w.all.close()


async def test_a_server_without_requests_writes_no_file_of_rows(world):
    w = world()
    await w.all.start("x", "me")
    await w.rows()
    w.all.close()
    assert not list(experiment_dir(w.folder, "x").glob("records-*"))


@pytest.mark.parametrize(
    ("settings", "on", "says"),
    [
        ({"arms": {"a": {}, "b": {"features": {"draft": False}}}}, ("draft", "cache", "fair"), "settings were changed"),
        ({}, ("draft", "fair"), "switches are others than before"),
    ],
)
async def test_a_run_does_not_go_on_as_something_else(world, settings, on, says):
    w = world()
    await w.all.start("x", "me")
    w = w.restart({"arms": ARMS, "split": "user", **settings}, on=on)
    try:
        assert not w.x.running
        assert says in w.x.state.reason
        assert w.kinds() == ["stopped"]
        assert w.serve("u1") == ""
    finally:
        w.all.close()


async def test_guard_rails_may_change_over_a_restart(world):
    w = world()
    await w.all.start("x", "me")
    w = w.restart({"arms": ARMS, "split": "user", "guard": {"max_error_rate": 0.5}})
    try:
        assert w.x.running
    finally:
        w.all.close()


async def test_autostart_is_for_the_first_time_only(world):
    settings = {"arms": ARMS, "split": "user", "autostart": True}
    w = world(settings)
    assert w.x.running
    await w.all.tick()
    await w.all.stop("x", "me")
    w = w.restart(settings)
    try:
        assert not w.x.running
    finally:
        w.all.close()


async def test_a_state_directory_is_one_servers(world):
    w = world()
    with pytest.raises(ConfigError, match="another server uses"):
        World(w.folder, {"arms": ARMS})
    with pytest.raises(ConfigError, match=r"\[experiments\.x\] needs server\.state_dir"):
        Experiments(
            from_mapping({"experiments": {"x": {"arms": ARMS}}}, "test"), PluginHost("front"), w.engine, w.bus, now=w.clock
        )


async def test_a_broken_state_file_stops_the_server_with_its_path(world):
    w = world()
    await w.all.start("x", "me")
    path = experiment_dir(w.folder, "x") / "state.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"state\.json"):
        w.restart({"arms": ARMS})


async def test_rows_that_pass_their_limit_end_the_experiment(world):
    w = world({"max_megabytes": 0.01})
    await w.all.start("x", "me")
    for user in USERS[:100]:
        w.serve(user)
    await w.all.tick()
    await w.all.tick()
    assert not w.x.running
    assert "MiB" in w.x.state.reason


async def test_every_act_is_on_disk_and_in_order(world):
    w = world()
    await w.all.start("x", "me", 0.5)
    await w.all.ramp("x", "you", 1.0)
    await w.all.rollback("x", "you")
    await w.all.stop("x", "me")
    lines = (experiment_dir(w.folder, "x") / "events.jsonl").read_bytes().splitlines()
    events = [msgspec.json.decode(line, type=Event) for line in lines]
    assert events == w.events
    assert [(e.kind, e.who, e.traffic) for e in events] == [
        ("started", "me", 0.5), ("ramped", "you", 1.0), ("rolled_back", "you", 1.0), ("stopped", "me", 1.0),
    ]  # fmt: skip
