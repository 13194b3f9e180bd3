"""Steps that find no memory: tried again once, then told as a step of which nothing was done. And what is left for the cache."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from device_fakes import AheadDriver, ResidentModel, on_device
from worker_fakes import ALL, BLOCK, Driver, FakeBackend, FakeModel, Spec, config, loaded, make_runner

from tokenbus.core.errors import ConfigError, EngineDiedError, StepMemoryError, WorkerError
from tokenbus.core.kv import sizing
from tokenbus.core.plan import StepInput
from tokenbus.core.worker import device
from tokenbus.core.worker.device import CpuDevice

PROMPT = [5, 9, 33, 2, 17, 40, 41, 8, 8, 60, 1]


class Counting(CpuDevice):
    """How often memory was given back."""

    def __init__(self, *, asynchronous: bool = False) -> None:
        super().__init__(asynchronous=asynchronous)
        self.released = 0

    def release_cache(self) -> None:
        self.released += 1


class Hungry(ResidentModel):
    """Has memory for `most` tokens."""

    most = 8

    def forward(self, batch, kv, attention):
        if len(batch.token_ids) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(batch, kv, attention)


class Once(ResidentModel):
    """Finds no memory, once."""

    lacking = True

    def forward(self, batch, kv, attention):
        if self.lacking:
            self.lacking = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(batch, kv, attention)


def runners(asynchronous: bool, model: FakeModel):
    runner = make_runner(config(), ALL, model=model)
    runner._device = Counting(asynchronous=asynchronous)
    runner.load()
    runner.allocate(512)
    return runner


@pytest.fixture(params=[False, True], ids=["cpu", "device"])
def make(request) -> Callable[[FakeModel], object]:
    return lambda model: runners(request.param, model)


def test_memory_that_a_cache_holds_is_given_back(make):
    spec = Spec("a", PROMPT, 3)
    runner = make(Once())
    Driver([spec]).run(runner)
    expected = Spec("a", PROMPT, 3)
    Driver([expected]).run(loaded())
    assert spec.tokens == expected.tokens
    assert runner._device.released == 1


def test_a_step_without_memory_leaves_everything_as_it_was(make):
    model = Hungry()
    runner, driver = make(model), Driver([Spec("a", PROMPT, 5), Spec("b", PROMPT[:3], 5)])
    order = driver.plan()
    with pytest.raises(StepMemoryError, match="no memory for a step of 14 tokens: CUDA out of memory"):
        runner.run(order)
    known = {name: (request.tokens, request.computed, len(request.blocks)) for name, request in runner._requests.items()}
    assert known == {"a": (PROMPT, 0, 3), "b": (PROMPT[:3], 0, 1)}
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for step, num in enumerate([{"a": 8}, {"b": 3}, {"a": 3, "b": 1}, {"a": 1}]):
        result = runner.run(StepInput(step_id=1 + step, num_tokens=num))
        for name, given in result.sampled.items():
            tokens[name] += given
    expected = [Spec("a", PROMPT, 2), Spec("b", PROMPT[:3], 2)]
    Driver(expected).run(loaded())
    assert [tokens["a"], tokens["b"]] == [spec.output for spec in expected]


def test_drafts_of_such_a_step_are_taken_back(make):
    model = Hungry()
    runner, driver = make(model), Driver([Spec("a", PROMPT[:6], 9)])
    driver.take(order := driver.plan(), runner.run(order))
    known = list(driver.specs[0].tokens)
    more = StepInput(step_id=1, num_tokens={"a": 9}, drafts={"a": [1] * 8}, new_blocks={"a": [100, 101]})
    with pytest.raises(StepMemoryError):
        runner.run(more)
    request = runner._requests["a"]
    assert (request.tokens, request.computed, len(request.blocks)) == (known, 6, 4)
    again = runner.run(StepInput(step_id=2, num_tokens={"a": 1}))
    expected = Spec("a", PROMPT[:6], 2)
    Driver([expected]).run(loaded())
    assert [known[-1], *again.sampled["a"]] == expected.output


def test_steps_in_flight_are_not_lost():
    """A step that fails for want of memory, launched while another one is not collected: that one's tokens come all the same."""
    model = Hungry()
    runner, driver = on_device(model=model), Driver([Spec("a", PROMPT[:6], 4)])
    first = runner.launch(driver.plan())
    with pytest.raises(StepMemoryError):
        runner.launch(msgspec.structs.replace(Driver([Spec("b", PROMPT, 4)]).plan(), step_id=1))
    expected = Spec("a", PROMPT[:6], 1)
    Driver([expected]).run(loaded())
    assert runner.collect(first).sampled == {"a": expected.output}


def test_attention_of_a_plugin_is_not_to_blame(make, monkeypatch):
    def prepare(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner, driver = make(ResidentModel()), Driver([Spec("a", PROMPT, 3)])
    monkeypatch.setattr(FakeBackend, "prepare", prepare)
    with pytest.raises(StepMemoryError):
        runner.run(driver.plan())


def test_nor_for_a_device_that_broke(make, monkeypatch):
    def prepare(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runner, driver = make(ResidentModel()), Driver([Spec("a", PROMPT, 3)])
    monkeypatch.setattr(FakeBackend, "prepare", prepare)
    with pytest.raises(EngineDiedError, match="the GPU broke"):
        runner.run(driver.plan())


class HeadFails(ResidentModel):
    left = 1

    def logits(self, hidden):
        self.left -= 1
        if self.left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().logits(hidden)


def test_logits_are_tried_again_too(make):
    spec, model = Spec("a", PROMPT, 3), HeadFails()
    Driver([spec]).run(make(model))
    assert spec.error is None
    model.left = 2
    with pytest.raises(WorkerError, match="out of memory") as caught:
        make(model).run(Driver([Spec("a", PROMPT, 3)]).plan())
    assert not isinstance(caught.value, StepMemoryError), "tokens may have been computed for good: it can't be planned again"


@pytest.mark.parametrize(
    ("error", "is_memory", "is_broken"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False, True),
        (torch.AcceleratorError("CUDA error: out of memory"), True, False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False, True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True, False),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), False, False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True, False),
        (MemoryError(), True, False),
        (RuntimeError("shapes do not fit"), False, False),
    ],
)
def test_what_errors_mean(error, is_memory, is_broken):
    assert (device.out_of_memory(error), device.device_broke(error)) == (is_memory, is_broken)


def test_a_broken_device_is_the_engines_end():
    class Broken(ResidentModel):
        def forward(self, batch, kv, attention):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(EngineDiedError, match="the GPU broke: step 0 failed"):
        on_device(model=Broken()).run(Driver([Spec("a", PROMPT, 3)]).plan())


class Counted(CpuDevice):
    """Memory of its own, of which a step takes 1000 bytes for each token."""

    def __init__(self) -> None:
        super().__init__(asynchronous=True)
        self.counts_memory = True
        self.steps: list[int] = []

    def free_bytes(self) -> int:
        return 10_000_000

    def peak_bytes(self, work) -> int:
        before = list(self.model.batches)
        work()
        self.steps += self.model.batches[len(before) :]
        return 1000 * self.steps[-1]


def test_room_is_left_for_the_largest_step():
    counted, model = Counted(), ResidentModel()
    counted.model = model
    runner = make_runner(config(scheduler={"token_budget": 700, "max_running": 9}), ALL, model=model)
    runner._device = counted
    info = runner.load()
    assert counted.steps == [700]
    assert info.free_bytes == 10_000_000 - 700_000
    assert info.kv_memory_fraction == sizing.GPU_FRACTION
    assert loaded_info().kv_memory_fraction == sizing.CPU_FRACTION


def loaded_info():
    return make_runner(config(), ALL).load()


def test_a_token_budget_without_memory_says_what_to_do():
    class Never(ResidentModel):
        def forward(self, batch, kv, attention):
            raise torch.OutOfMemoryError("CUDA out of memory")

    counted = Counted()
    counted.model = Never()
    runner = make_runner(config(), ALL, model=counted.model)
    runner._device = counted
    with pytest.raises(ConfigError, match=r"scheduler\.token_budget = 2048"):
        runner.load()


def test_the_fraction_of_the_device_counts_where_none_is_set():
    settings = config().cache
    free = 1000 * BLOCK * 10
    assert sizing.plan(free, 10, 0, settings, 100_000, sizing.GPU_FRACTION).num_blocks == 900
    assert sizing.plan(free, 10, 0, settings, 100_000).num_blocks == 250
    half = config(cache={"block_size": BLOCK, "kv_memory_fraction": 0.5}).cache
    assert sizing.plan(free, 10, 0, half, 100_000, sizing.GPU_FRACTION).num_blocks == 500


def test_ahead_driver_with_smaller_steps_gives_the_same():
    """What the engine does after such a step, here by hand: chunks that fit."""
    mine = [Spec("a", PROMPT, 6, chunk=4), Spec("b", PROMPT[:4], 6, chunk=4)]
    AheadDriver(mine).run(on_device(model=Hungry()))
    expected = [Spec("a", PROMPT, 6), Spec("b", PROMPT[:4], 6)]
    Driver(expected).run(loaded())
    assert [spec.tokens for spec in mine] == [spec.tokens for spec in expected]
