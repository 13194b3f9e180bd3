"""What CudaDevice asks of torch, with a torch that keeps torch's rules about graphs and streams; no GPU."""

from __future__ import annotations

import itertools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenbus.core.config import from_mapping
from tokenbus.core.worker import start
from tokenbus.core.worker.device import CudaDevice, _CudaEvent

GPU = torch.device("cuda", 0)


class Driver:
    """Streams and pools. A pool whose last graph has gone may not be used again; a capture that can't be ended leaves its stream there."""

    def __init__(self) -> None:
        self.stream = "default"
        self.users: dict[int, int] = {}
        self.handles = itertools.count()

    def graph_pool_handle(self) -> int:
        return next(self.handles)

    @contextmanager
    def graph(self, graph: Any, *, pool: int, capture_error_mode: str):
        assert capture_error_mode == "thread_local"
        assert self.users.get(pool) != 0, "use_count > 0 INTERNAL ASSERT FAILED"
        before, self.stream = self.stream, "capture"
        self.users[pool] = self.users.get(pool, 0) + 1
        graph.driver, graph.pool = self, pool
        yield
        self.stream = before


class Recorded:
    driver: Driver
    pool: int

    def __del__(self) -> None:
        self.driver.users[self.pool] -= 1

    def replay(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.graph_pool_handle)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(made, "stream", stream))
    return made


def test_graphs_share_a_pool_as_long_as_one_of_them_lives(driver):
    device = CudaDevice(GPU)
    first = [device.capture(lambda: None) for _ in range(3)]
    assert driver.users == {0: 3}
    del first[0]
    first.append(device.capture(lambda: None))
    assert driver.users == {0: 3}
    first.clear()
    kept = device.capture(lambda: None)
    assert driver.users == {0: 0, 1: 1}
    kept.replay()


def test_a_failed_capture_leaves_the_stream_as_it_was(driver):
    def work() -> None:
        assert driver.stream == "capture"
        raise RuntimeError("operation not permitted when stream is capturing")

    device = CudaDevice(GPU)
    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(work)
    assert driver.stream == "default"


def test_asking_a_broken_device_ends_nobody():
    """A poller's thread would die of it, and nobody would be told anything."""

    class Query:
        def query(self) -> bool:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        synchronize = query

    event: Any = object.__new__(_CudaEvent)
    event._event = Query()
    assert event.done()
    with pytest.raises(torch.AcceleratorError):
        event.wait()


def test_float32_is_not_multiplied_as_tf32(monkeypatch):
    from tokenbus.core.models import loader, resolve

    said = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    monkeypatch.setattr(resolve, "resolve", lambda _: SimpleNamespace(name="m"))
    monkeypatch.setattr(loader, "load", lambda *_, **__: "model")
    for place in (torch.device("cpu"), GPU):
        monkeypatch.setattr(start, "resolve_device", lambda _, place=place: place)
        assert start.load_model(from_mapping({"model": {"model": "m"}}, "test"), None) == ("m", "model")
    assert said == ["highest"]
