"""The runner on a GPU: what the tests beside this one show on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_fakes import AheadDriver
from worker_fakes import Driver, Spec, config

from tokenbus.core.host import make_host
from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.core.worker.device import CudaDevice, device_broke, out_of_memory
from tokenbus.core.worker.runner import ModelRunner
from tokenbus.core.worker.staging import Staging

pytestmark = pytest.mark.cuda
FEATURES = ("attention.triton", "sampling.truncation", "sampling.logprobs")
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny")))


def runner_of(path: str, graphs: str) -> ModelRunner:
    settings = config(
        model={"model": path, "device": "cuda", "dtype": "float32", "batch_invariant": "on", "cuda_graphs": graphs}
    )
    made = ModelRunner(settings, FEATURES, make_host("worker", settings))
    info = made.load()
    assert info.ahead
    assert 0 < info.free_bytes < torch.cuda.get_device_properties(GPU).total_memory
    made.allocate(512)
    return made


def specs() -> list[Spec]:
    made = []
    for i in range(12):
        options = {"temperature": 0.8, "seed": i, "top_k": 40, "top_p": 0.9} if i % 2 else {}
        prompt = [(31 * i + 7 * j) % 256 for j in range(1 + 9 * i)]
        made.append(Spec(f"r{i}", prompt, 10 + 3 * i, chunk=16, features=FEATURES, **options))
    made.append(Spec("host", [9, 8, 7], 12, features=FEATURES, logprobs=1))
    return made


def outcome(of: list[Spec]) -> list:
    return [(spec.name, spec.tokens, spec.logprobs, spec.error) for spec in of]


def test_graphs_and_steps_ahead_change_nothing(tiny):
    plain = specs()
    Driver(plain).run(runner_of(tiny, "off"))
    runner = runner_of(tiny, "on")
    for driver in (Driver, AheadDriver, AheadDriver):
        mine = specs()
        driver(mine).run(runner)
        assert outcome(mine) == outcome(plain)
    graphs = runner._computer._steps.graphs
    assert graphs.replays > 20
    assert not graphs.off


def test_a_request_alone_gives_the_same(tiny):
    runner, together = runner_of(tiny, "on"), specs()
    Driver(together).run(runner)
    for number, spec in enumerate(specs()):
        Driver([spec]).run(runner)
        assert outcome([spec]) == outcome(together)[number : number + 1]


def test_copies_events_and_graphs():
    device = CudaDevice(GPU)
    staging = Staging(device)
    buffer, out = torch.zeros(4, dtype=torch.int64, device=GPU), torch.zeros(4, dtype=torch.int64, device=GPU)

    def work() -> None:
        out.copy_(buffer * 2)

    work()
    graph = device.capture(work)
    for number in range(9):
        staging.begin()
        staging.put(np.arange(4, dtype=np.int64) + number, buffer)
        staging.end()
        graph.replay()
        event = device.event()
        event.wait()
        assert event.done()
        assert out.tolist() == [2 * (number + i) for i in range(4)]


def test_memory_is_counted_and_its_lack_is_known():
    device = CudaDevice(GPU)
    size = 64 * 1024 * 1024
    assert size <= device.peak_bytes(lambda: torch.empty(size, dtype=torch.uint8, device=GPU)) <= 2 * size
    with pytest.raises(RuntimeError) as caught:
        torch.empty(4 * torch.cuda.get_device_properties(GPU).total_memory, dtype=torch.uint8, device=GPU)
    assert out_of_memory(caught.value)
    assert not device_broke(caught.value)
