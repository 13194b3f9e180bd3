"""What the bus tells becomes the right samples."""

from __future__ import annotations

import pytest

from tokenbus.core.bus import Bus
from tokenbus.core.config import Config
from tokenbus.core.contexts import FrontContext
from tokenbus.core.front.events import (
    EngineDied,
    EngineStarted,
    LoopLag,
    MediaPrepared,
    RequestAdmitted,
    RequestRecord,
    RequestRefused,
)
from tokenbus.core.messages import EngineInfo, StepReport
from tokenbus.plugins.metrics import Metrics, MetricsSettings
from tokenbus.plugins.metrics.collector import Collector, IdleAlarm, prompt_bucket

INFO = EngineInfo(
    version=1,
    model="m",
    architecture="a",
    dtype="float32",
    vocab_size=10,
    max_model_len=100,
    block_size=16,
    num_blocks=50,
    weights_bytes=1,
    kv_bytes_per_token=1,
    eos_token_ids=(0,),
    lossless=True,
    read_bytes_per_second=1000.0,
    flops_per_second=4000.0,
)


def step(**changes):
    values = {
        "step_id": 1,
        "started": 100.0,
        "duration": 0.5,
        "phases": {"forward": 0.4, "sample": 0.1},
        "num_requests": 3,
        "prompt_tokens": 20,
        "decode_tokens": 2,
        "running": 3,
        "waiting": 4,
        "free_blocks": 10,
        "num_blocks": 50,
        "preempted": 1,
        "allocation_failures": 2,
        "bytes_moved": 250,
        "flops": 1000,
        "cpu_seconds": 7.0,
    }
    return StepReport(**(values | changes))


def record(**changes):
    values = {
        "request_id": "r",
        "group": "g",
        "endpoint": "chat",
        "tenant": "",
        "arm": "",
        "arrival": 1.0,
        "prompt_tokens": 300,
        "cached_tokens": 32,
        "output_tokens": 3,
        "finish_reason": "length",
        "ttft": 0.3,
        "e2e": 0.9,
        "gaps": (0.1, 0.2),
    }
    return RequestRecord(**(values | changes))


@pytest.fixture
def collector():
    return Collector(FrontContext(bus=Bus(), config=Config(), info=lambda: INFO), MetricsSettings())


def value(collector, name, **labels):
    return collector.registry.get_sample_value(f"tokenbus_{name}", labels)


def tell(collector, *events):
    for event in events:
        collector._front.bus.publish(event)


def test_a_step(collector):
    tell(collector, step(), step(step_id=2, allocation_failures=5, cpu_seconds=9.0, preempted=0))
    assert value(collector, "steps_total") == 2
    assert value(collector, "requests_running") == 3
    assert value(collector, "requests_waiting") == 4
    assert value(collector, "kv_usage_ratio") == pytest.approx(0.8)
    assert value(collector, "step_prompt_tokens_sum") == 40
    assert value(collector, "step_decode_tokens_sum") == 4
    assert value(collector, "step_phase_seconds_total", phase="forward") == pytest.approx(0.8)
    assert value(collector, "preemptions_total") == 1
    assert value(collector, "kv_allocation_failures_total") == 5
    assert value(collector, "process_cpu_seconds_total", process="engine") == 9.0
    assert value(collector, "step_bandwidth_ratio") == pytest.approx(250 / 0.5 / 1000)
    assert value(collector, "step_flops_ratio") == pytest.approx(1000 / 0.5 / 4000)


def test_a_step_that_only_encodes_is_counted_and_is_none_of_the_tokens(collector):
    counters = {"multimodal.encoded_pieces": 1.0}
    only = {"num_requests": 0, "prompt_tokens": 0, "decode_tokens": 0, "phases": {"encode": 0.1}, "counters": counters}
    tell(collector, step(), step(step_id=2, **only), step(step_id=2, **only, ran=False))
    assert value(collector, "steps_total") == 2
    assert value(collector, "step_requests_count") == 1
    assert value(collector, "step_phase_seconds_total", phase="encode") == pytest.approx(0.1)
    counted = collector.plugin_counts.labels("multimodal.encoded_pieces")
    assert counted._value.get() == 2, "what plugins count is never lost"


def test_steps_planned_ahead_and_why_others_were_not(collector):
    tell(
        collector,
        step(ahead=True, gap=0.0002, ahead_discarded=3),
        step(step_id=2, ahead=True),
        step(step_id=3, waited="drafts", gap=0.004),
        step(step_id=4, num_requests=0, ran=False),
    )
    assert value(collector, "steps_planned_ahead_total") == 2
    assert value(collector, "steps_that_waited_total", why="drafts") == 1
    assert value(collector, "ahead_discarded_tokens_total") == 3
    assert value(collector, "step_gap_seconds_count") == 3
    assert value(collector, "step_gap_seconds_sum") == pytest.approx(0.0042)
    assert value(collector, "step_gap_seconds_bucket", le="0.0003") == 2


def test_a_request_counts_once_and_by_prompt_length(collector):
    tell(collector, RequestAdmitted("r"), record(), RequestAdmitted("s"))
    assert prompt_bucket(300) == "le_512"
    assert value(collector, "requests_started_total") == 2
    assert value(collector, "requests_open") == 1
    assert value(collector, "requests_finished_total", reason="length", arm="") == 1
    assert value(collector, "ttft_seconds_count", prompt="le_512") == 1
    assert value(collector, "inter_token_latency_seconds_count", prompt="le_512") == 2
    assert value(collector, "inter_token_latency_seconds_sum", prompt="le_512") == pytest.approx(0.3)
    assert value(collector, "cached_prompt_tokens_total") == 32


def test_a_request_without_a_token_has_no_ttft(collector):
    tell(collector, record(ttft=None, gaps=(), finish_reason="cancelled", output_tokens=0))
    assert value(collector, "ttft_seconds_count", prompt="le_512") in (None, 0)
    assert value(collector, "requests_finished_total", reason="cancelled", arm="") == 1


def test_refusals_lag_and_the_engines_life(collector):
    tell(collector, RequestRefused("chat", 429, "OverloadedError"), LoopLag("front", 0.002, 3.0), LoopLag("front", 0.2, 4.0))
    assert value(collector, "requests_refused_total", status="429", kind="OverloadedError") == 1
    assert value(collector, "loop_lag_seconds_count", process="front") == 2
    assert value(collector, "process_cpu_seconds_total", process="front") == 4.0
    tell(
        collector,
        step(cpu_seconds=9.0),
        EngineDied("killed", 3, 0.5),
        EngineStarted(INFO, 1),
        step(cpu_seconds=2.0, allocation_failures=1),
    )
    assert value(collector, "engine_deaths_total") == 1
    assert value(collector, "engine_restarts") == 1
    # a new process starts counting at zero; what was counted stays
    assert value(collector, "process_cpu_seconds_total", process="engine") == 11.0
    assert value(collector, "kv_allocation_failures_total") == 3
    assert value(collector, "machine_read_bytes_per_second") == 1000.0


@pytest.mark.parametrize("length", [1, 128, 129, 2048, 8192, 8193])
def test_prompt_buckets(length):
    expected = {1: "le_128", 128: "le_128", 129: "le_512", 2048: "le_2048", 8192: "le_8192", 8193: "gt_8192"}
    assert prompt_bucket(length) == expected[length]


def test_the_alarm_rises_when_work_waits_between_steps_and_falls_again():
    alarm = IdleAlarm(fraction=0.2, window=10.0)
    assert alarm.step(0.0, 1.0, busy=True) == 0.0
    assert alarm.step(2.0, 1.0, busy=True) == pytest.approx(1.0)
    assert not alarm.alarm
    assert alarm.step(5.0, 1.0, busy=False) == pytest.approx(2.0)
    assert alarm.alarm
    # nothing waited: a long pause is no idleness, and the old gaps leave the window
    assert alarm.step(30.0, 1.0, busy=True) == 0.0
    assert not alarm.alarm


def test_the_alarm_rises_without_any_step_and_falls_when_nothing_comes():
    alarm = IdleAlarm(fraction=0.2, window=10.0)
    alarm.step(0.0, 1.0, busy=True)
    alarm.look(2.0, computing=False)
    assert not alarm.alarm
    alarm.look(3.5, computing=True)
    assert not alarm.alarm, "a long step is not idleness"
    alarm.look(3.5, computing=False)
    assert alarm.alarm, "work waits and no step comes"
    alarm.step(4.0, 1.0, busy=False)
    assert alarm.alarm
    alarm.look(20.0, computing=False)
    assert not alarm.alarm


def test_the_engines_heartbeat_lets_the_alarm_look(collector):
    tell(collector, step(started=1.0, duration=1.0, running=2), LoopLag("engine", 0.0, 1.0, 0.0))
    assert value(collector, "alarm_queue_busy_device_idle") == 1
    tell(collector, step(started=1.0, duration=1.0, running=0, waiting=0), LoopLag("engine", 0.0, 1.0, 0.0))
    assert value(collector, "alarm_queue_busy_device_idle") == 0


def test_media_are_counted_by_where_they_came_from_and_weighed_while_they_are_open(collector):
    prepared = MediaPrepared(items={"image": 3, "audio": 1}, known={"image": 2}, tokens=50, seconds=0.3)
    tell(collector, prepared, RequestAdmitted("r", 600), RequestAdmitted("s", 200))
    counted = {
        (kind, source): value(collector, "media_items_total", kind=kind, source=source)
        for kind in ("image", "audio")
        for source in ("processed", "cache")
    }
    assert counted == {("image", "processed"): 1, ("image", "cache"): 2, ("audio", "processed"): 1, ("audio", "cache"): 0}
    assert value(collector, "media_tokens_total") == 50
    assert value(collector, "media_seconds_count") == 1
    assert value(collector, "media_seconds_sum") == pytest.approx(0.3)
    assert value(collector, "media_open_bytes") == 800
    tell(collector, record(media_bytes=600))
    assert value(collector, "media_open_bytes") == 200


def test_off_means_no_listener_and_no_route_answers(collector):
    plugin = Metrics(MetricsSettings(), "front")
    bus = Bus()
    plugin.front_started(front=FrontContext(bus=bus, config=Config(), info=lambda: None))
    assert bus.wants(StepReport)
    assert [(route.method, route.path) for route in plugin.http_routes()] == [("GET", "/metrics")]
    plugin.front_stopped()
    assert not bus.wants(StepReport)


@pytest.mark.parametrize("accept", ["", "text/plain", "application/openmetrics-text; version=1.0.0"])
def test_exposition_is_the_library_s(collector, accept):
    from prometheus_client.parser import text_string_to_metric_families

    tell(collector, step(), record())
    body, content_type = collector.exposition(accept)
    assert content_type.startswith("application/openmetrics-text" if "openmetrics" in accept else "text/plain")
    if "openmetrics" not in accept:
        names = {family.name for family in text_string_to_metric_families(body.decode())}
        assert {"tokenbus_steps", "tokenbus_ttft_seconds", "tokenbus_requests_running"} <= names
