"""An attention backend of a plugin that fails: its plugin is named, the engine is told, and core's backend computes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worker_fakes import ALL, Driver, FakeBackend, FakeModel, Spec, config, make_runner, reference_greedy

from tokenbus.core.errors import PluginError
from tokenbus.core.host import make_host
from tokenbus.core.plan import StepInput
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.worker import plugins as worker_plugins
from tokenbus.core.worker.attention import AttentionParams

PROMPT = [5, 9, 33, 2, 17]
OTHERS = tuple(name for name in ALL if name != "test.attention")
BRITTLE = (*OTHERS, "test.brittle")


class BrittleBackend(FakeBackend):
    name = "brittle"

    def prepare(self, batch: Any) -> Any:
        if Brittle.fault == "prepare":
            raise ValueError("broken")
        return super().prepare(batch)

    def attend(self, q, k, v, k_cache, v_cache, batch, params):
        match Brittle.fault:
            case "attend":
                raise ValueError("broken")
            case "shape":
                return q[:, :, :0]
            case "dtype":
                return q.to(torch.float64)
            case "nothing":
                return None
        return q


class Brittle(Plugin):
    info = PluginInfo(name="test.brittle", summary="", scope="step", lossless=True, slot="attention")
    fault = ""

    @hookimpl
    def attention_backend(self) -> Any:
        if self.fault == "hook":
            raise ValueError("broken")
        return 3 if self.fault == "answer" else BrittleBackend()


class AttendingModel(FakeModel):
    def forward(self, batch, kv, attention):
        q = torch.zeros(len(batch.token_ids), 1, 1)
        attention.attend(q, q, q, kv.k[0], kv.v[0], batch.attention, AttentionParams(scale=1.0))
        return super().forward(batch, kv, attention)


class CoresBackend(FakeBackend):
    name = "core's"

    def attend(self, q, k, v, k_cache, v_cache, batch, params):
        return q


@pytest.fixture(autouse=True)
def no_fault(monkeypatch):
    monkeypatch.setattr(Brittle, "fault", "")
    monkeypatch.setattr(worker_plugins, "default_attention", lambda _: CoresBackend())


def loaded(features: tuple[str, ...]) -> Any:
    settings = config()
    host = make_host("worker", settings)
    host.add(Brittle)
    runner = make_runner(settings, features, host, AttendingModel())
    runner.load()
    runner.allocate(64)
    return runner


@pytest.mark.parametrize("fault", ["prepare", "attend", "shape", "dtype", "nothing"])
def test_a_backend_that_fails_in_a_step_is_named_and_core_goes_on(monkeypatch, fault):
    runner = loaded(BRITTLE)
    fine = Spec("fine", PROMPT, 3)
    Driver([fine]).run(runner)
    assert fine.output == reference_greedy(PROMPT, 3)
    monkeypatch.setattr(Brittle, "fault", fault)
    with pytest.raises(PluginError, match=r"'test\.brittle' failed in attention_backend") as raised:
        runner.run(Driver([Spec("bad", PROMPT)]).plan())
    assert (raised.value.plugin, raised.value.hook) == ("test.brittle", "attention_backend")
    runner.run(StepInput(step_id=50, num_tokens={}, dropped=["bad"], features=OTHERS))  # what the engine then says
    after = Spec("after", PROMPT, 3)
    driver = Driver([after])
    driver.run(runner)
    assert after.output == fine.output
    assert [result.kernels.attention for result in driver.results if result.kernels] == ["core's"]


@pytest.mark.parametrize("fault", ["hook", "answer"])
def test_a_backend_that_cant_be_had_is_told_and_core_computes(monkeypatch, fault):
    monkeypatch.setattr(Brittle, "fault", fault)
    runner = loaded(BRITTLE)
    spec = Spec("a", PROMPT, 3)
    driver = Driver([spec])
    driver.run(runner)
    assert spec.output == reference_greedy(PROMPT, 3)
    (kernels,) = [result.kernels for result in driver.results if result.kernels]
    assert (kernels.attention, kernels.error.plugin, kernels.error.hook) == ("core's", "test.brittle", "attention_backend")


def test_what_holds_is_told_when_the_slot_changes_hands(monkeypatch):
    monkeypatch.setattr(BrittleBackend, "invariant", False)
    runner = loaded(OTHERS)
    monkeypatch.setattr(runner, "_lossless", lambda *_: ((backend := runner.plugins._backend).invariant, backend.name))
    told = []
    for features in (None, BRITTLE, None, OTHERS):
        driver = Driver([Spec("a", PROMPT, 2)])
        runner.run(StepInput(step_id=90, num_tokens={}, dropped=["a"], features=features))
        driver.run(runner)
        told.append([(r.kernels.attention, r.kernels.lossless) for r in driver.results if r.kernels])
    assert told == [[], [("brittle", False)], [], [("core's", True)]]
