"""The timeline: the form that viewers expect, and spans that add up to what was recorded."""

from __future__ import annotations

import itertools
import json

import pytest
from stage import Ask

from tokenbus.core import cli
from tokenbus.core.recording.trace import ENGINE, REQUESTS, trace


@pytest.fixture
def history(stage, some_load):
    one = stage(
        on=("chunked_prefill", "prefix_cache", "speculative.ngram", "recorder"), scheduler={"max_running": 5}, num_blocks=50
    )
    one.play([*some_load(40, 15.0, shared=24), Ask(0.0, [300] * 9, 30), Ask(0.5, [300] * 9, 30, cancel_at=0.501)])
    return one.history()


def test_the_form_is_that_of_trace_events(history):
    document = json.loads(json.dumps(trace(history)))
    assert document["displayTimeUnit"] == "ms"
    for event in document["traceEvents"]:
        assert event["ph"] in {"M", "X", "C"}
        assert isinstance(event["name"], str)
        assert event["pid"] in {ENGINE, REQUESTS}
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            assert isinstance(event["args"]["name"], str)
            continue
        assert isinstance(event["ts"], float | int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)
        else:
            assert all(isinstance(value, int) for value in event["args"].values())


def test_spans_add_up(history):
    events = trace(history)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == REQUESTS]
    assert {span["name"] for span in spans} == {"queue", "prefill", "decode", "verify"}
    named = {
        event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == REQUESTS
    }
    assert named == {span["tid"] for span in spans} == set(history.lives)
    runs = [run for step in history.steps for run in step.runs]
    by_name = {name: [span["args"] for span in spans if span["name"] == name] for name in ("prefill", "decode", "verify")}
    assert sum(one["tokens"] for one in by_name["prefill"]) == sum(run.n for run in runs if run.prompt)
    assert sum(one["steps"] for one in by_name["decode"]) == sum(not run.prompt and not run.drafts for run in runs)
    assert sum(one["proposed"] for one in by_name["verify"]) == sum(run.drafts for run in runs) > 0
    for serial in history.lives:
        own = sorted((span["ts"], span["ts"] + span["dur"], span["name"]) for span in spans if span["tid"] == serial)
        assert all(after[0] >= before[1] - 0.11 for before, after in itertools.pairwise(own)), own
        assert own[0][2] == "queue"
    preempted = sum(len(step.step.preempted) for step in history.steps)
    assert sum(span["name"] == "queue" for span in spans) == len(history.lives) + preempted
    assert preempted > 0


def test_counters_are_those_of_the_plans(history):
    events = trace(history)["traceEvents"]
    for name, field in (("running", "running"), ("waiting", "waiting"), ("free blocks", "free_blocks")):
        found = [event["args"][name] for event in events if event["ph"] == "C" and event["name"] == name]
        assert found == [getattr(step.step, field) for step in history.steps]


@pytest.mark.usefixtures("quiet_commands")
def test_the_commands_read_what_was_recorded(stage, some_load, tmp_path, capsys):
    one = stage()
    one.play(some_load(20, 10.0))
    (path,) = one.close()
    target = tmp_path / "trace.json"
    assert cli.main(["trace", str(path), "-o", str(target)]) == 0
    assert len(json.loads(target.read_text())["traceEvents"]) > 100
    assert cli.main(["simulate", str(path)]) == 0
    assert "simulated as recorded" in capsys.readouterr().out
    assert cli.main(["simulate", str(path), "--set", "max_running=1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["runs"]["simulated as asked"]["ttft_p99"] > said["runs"]["recorded"]["ttft_p99"]
    assert said["set"] == ["max_running=1"]
    path.write_bytes(path.read_bytes()[:-3])
    assert cli.main(["trace", str(path), "-o", str(target)]) == 0
    assert "torn" in capsys.readouterr().err
    assert cli.main(["simulate", str(path), "--set", "attention.torch=on"]) == 1
    assert "attention.torch" in capsys.readouterr().err
    assert cli.main(["replay", str(path)]) == 1
    assert "'full'" in capsys.readouterr().err
    assert cli.main(["trace", str(tmp_path / "none.tbrec"), "-o", str(target)]) == 1
