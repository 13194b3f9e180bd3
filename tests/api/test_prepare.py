"""`prepare_fields`: on pool threads, while everybody else goes on; few at a time, a bounded queue, the request's own deadline."""

from __future__ import annotations

import threading

import anyio
import pytest

from tokenbus.core.errors import FieldError, OverloadedError
from tokenbus.core.front import prepare
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl

pytestmark = pytest.mark.anyio


class Slow(Plugin):
    """Waits until it is let go."""

    info = PluginInfo(name="slow", summary="waits", scope="step", lossless=False, claims={"slow"})

    def __init__(self, settings, role):
        super().__init__(settings, role)
        self.go = threading.Event()
        self.calls = self.inside = self.most = self.stopped = 0
        self.lock = threading.Lock()

    @hookimpl
    def check_fields(self, fields, request):
        return {"slow": {"checked": fields["slow"]}}

    @hookimpl
    def prepare_fields(self, fields, request):
        wish = fields["slow"]["checked"]
        with self.lock:
            self.calls, self.inside = self.calls + 1, self.inside + 1
            self.most = max(self.most, self.inside)
        assert self.go.wait(10)
        with self.lock:
            self.inside -= 1
        if wish == "bad":
            raise FieldError("slow", "is bad")
        if wish == "full":
            raise OverloadedError("come again", retry_after=3.0)
        if wish == "boom":
            raise RuntimeError("broken")
        if wish == "odd":
            return {"other": 1}
        assert request.fields["slow"] == {"checked": wish}
        return {"slow": {"prepared": wish}}

    @hookimpl
    def front_stopped(self):
        self.stopped += 1


class Other(Plugin):
    info = PluginInfo(name="other", summary="", scope="step", lossless=True)


@pytest.fixture
async def api(serve):
    async with serve({"scheduler": {"max_waiting": 4}}) as harness:
        host = harness.engine.host
        for cls in (Slow, Other):
            host.add(cls)
        await harness.engine.set_features({"slow": True}, "test")
        harness.plugin = host.loaded["slow"]
        yield harness
        harness.plugin.go.set()
        await harness.check_well()


async def test_others_go_on_meanwhile_and_what_was_prepared_is_handed_on(api):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: api.complete("slow one", slow="a", n=2))
        await api.until(lambda: api.plugin.inside == 1)
        assert (await api.complete("quick")).text == "quick"
        api.plugin.go.set()
    assert [request.fields for request in api.engine.admitted] == [{}, *[{"slow": {"prepared": "a"}}] * 2]
    assert api.plugin.calls == 1


@pytest.mark.parametrize(
    ("wish", "status", "words"),
    [("bad", 400, "is bad"), ("full", 429, "come again"), ("boom", 500, "prepare_fields"), ("odd", 500, "does not claim")],
)
async def test_errors_say_whose_fault_it_is(api, wish, status, words):
    api.plugin.go.set()
    answer = await api.complete("x", slow=wish)
    assert answer.status == status
    assert words in answer.error["message"]
    events = await api.stream_completion("x", slow=wish)
    assert events.status == status


async def test_few_at_a_time_a_bounded_queue_and_a_deadline(api):
    answers = []

    async def ask():
        answers.append(await api.complete("x", slow="a"))

    async with anyio.create_task_group() as tasks:
        for _ in range(prepare.THREADS + 4):
            tasks.start_soon(ask)
        await api.until(
            lambda: api.plugin.inside == prepare.THREADS and api.service._pool._limiter.statistics().tasks_waiting == 4
        )
        full = await api.complete("x", slow="a")
        assert (full.status, full.headers["Retry-After"]) == (429, "1")
        api.plugin.go.set()
    assert [answer.status for answer in answers] == [200] * (prepare.THREADS + 4)
    assert api.plugin.most == prepare.THREADS

    api.plugin.go.clear()
    async with anyio.create_task_group() as tasks:
        for _ in range(prepare.THREADS):
            tasks.start_soon(ask)
        await api.until(lambda: api.plugin.inside == prepare.THREADS)
        late = await api.complete("x", slow="a", timeout=0.05)
        assert (late.status, late.error["code"]) == (504, "DeadlineError")
        api.plugin.go.set()


async def test_switches_that_change_meanwhile_leave_a_request_what_it_was_admitted_with(api):
    async with anyio.create_task_group() as tasks:
        answers = []

        async def ask():
            answers.append(await api.complete("x", slow="a"))

        tasks.start_soon(ask)
        await api.until(lambda: api.plugin.inside == 1)
        await api.engine.set_features({"slow": False, "other": True}, "me")
        assert "slow" in api.engine.host.loaded
        assert api.plugin.stopped == 0
        api.plugin.go.set()
    assert answers[0].status == 200
    assert api.plugin.calls == 1
    admitted = api.engine.admitted[-1]
    assert ("slow" in admitted.features, "other" in admitted.features) == (True, False)
    await api.until(lambda: api.plugin.stopped == 1)
    assert "slow" not in api.engine.host.loaded
    assert (await api.complete("x", slow="a")).error["param"] == "slow"


async def test_a_client_that_leaves_is_never_submitted(api):
    with anyio.move_on_after(0.3):
        await api.complete("x", slow="a")
    api.plugin.go.set()
    await api.until(lambda: api.plugin.inside == 0)
    assert (await api.complete("y")).text == "y"
    assert [bytes(request.prompt) for request in api.engine.admitted if not request.fields] == [b"y"]
    await api.until(lambda: api.engine.open == {})
