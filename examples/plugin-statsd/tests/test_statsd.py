from __future__ import annotations

import socket

import pytest
from tokenbus_statsd import Statsd

from tokenbus.core.errors import PluginLoadError
from tokenbus.core.front.events import RequestRecord
from tokenbus.core.messages import StepReport
from tokenbus.testing import TinyEngine


@pytest.fixture
def listener():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(10)
        yield listener


def record(**values):
    return RequestRecord(
        request_id="r", group="g", endpoint="chat", tenant="", arm="", arrival=0.0, prompt_tokens=3, cached_tokens=0, output_tokens=7,
        finish_reason="stop", **values,
    )  # fmt: skip


def report(started):
    return StepReport(
        step_id=1, started=started, duration=0.5, phases={}, num_requests=2, prompt_tokens=0, decode_tokens=2, running=2, waiting=1,
        free_blocks=30, num_blocks=64, preempted=0, allocation_failures=0, bytes_moved=0, flops=0,
    )  # fmt: skip


def test_what_it_sends(listener):
    engine = TinyEngine(Statsd, settings={"metrics.statsd": {"port": listener.getsockname()[1], "prefix": "t"}})
    engine.bus.publish(record(ttft=0.25, e2e=1.5))
    assert listener.recv(4096).decode().splitlines() == [
        "t.requests.stop:1|c",
        "t.output_tokens:7|c",
        "t.e2e:1500.000|ms",
        "t.ttft:250.000|ms",
    ]
    engine.bus.publish(report(started=100.0))
    assert listener.recv(4096).decode().splitlines() == ["t.running:2|g", "t.waiting:1|g", "t.free_blocks:30|g"]
    engine.bus.publish(report(started=100.7))  # too soon for gauges
    engine.bus.publish(record())
    assert listener.recv(4096).decode().splitlines()[0] == "t.requests.stop:1|c"
    engine.bus.publish(report(started=101.0))
    assert b"t.running:2|g" in listener.recv(4096)
    engine.close()
    engine.bus.publish(record())
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(4096)


def test_nobody_listens():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    engine = TinyEngine(Statsd, settings={"metrics.statsd": {"port": port}})
    for _ in range(5):
        engine.bus.publish(record())
    engine.close()


def test_a_name_is_refused():
    with pytest.raises(PluginLoadError, match="front_started"):
        TinyEngine(Statsd, settings={"metrics.statsd": {"host": "localhost"}})
