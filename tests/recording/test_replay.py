"""The same steps again, on a real (tiny) model: equal, or found to differ where they differ."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from stage import Ask

from tokenbus.core import cli
from tokenbus.core.errors import WorkerError
from tokenbus.core.host import make_host
from tokenbus.core.models.resolve import resolve
from tokenbus.core.recording import history
from tokenbus.core.recording.file import RecordingError, RecordingFile, RecordingWriter
from tokenbus.core.recording.frames import End, Given, Opened, Ordered, Step
from tokenbus.core.recording.replay import Replay, check_before, check_loaded, replay_config
from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.core.worker.runner import ModelRunner
from tokenbus.core.worker.turns import Turns
from tokenbus.plugins.recorder import parts

ON = (
    "chunked_prefill", "prefix_cache", "scheduling.fcfs", "speculative.ngram", "sampling.penalties", "sampling.truncation",
    "attention.torch",
)  # fmt: skip
BLOCKS, SIZE = 60, 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def asks(count=24):
    draw = random.Random(5)
    head = [draw.randrange(20, 250) for _ in range(40)]
    made = []
    for i in range(count):
        own = [draw.randrange(20, 250) for _ in range(draw.randint(4, 50))]
        values = {"temperature": 0.8 * (i % 2), "seed": i}
        if i % 4 == 1:
            values["fields"] = {"repetition_penalty": 1.3, "top_p": 0.9}
        made.append(Ask(0.06 * i, head + own if i % 3 else own * 2, draw.randint(8, 30), values))
    return made


def runner_for(header, config):
    runner = ModelRunner(config, header.features, make_host("worker", config))
    check_loaded(header, runner.load())
    runner.allocate(header.num_blocks)
    return runner


@pytest.fixture
def played(stage, tiny):
    """`played(...)`: a stage with the tiny model that has recorded, and the files."""

    def play(name="full", late=0, num_blocks=BLOCKS, work=None, wrap=lambda runner: runner.run, **options):
        model = {"model": str(tiny), "dtype": "float32", "kernels": "torch", "threads": 1}
        options.setdefault("on", (*ON, "recorder"))
        options["settings"] = {"speculative.ngram": {"adaptive": False, "min_match": 1}, **options.pop("settings", {})}
        info = {"architecture": "LlamaForCausalLM", "vocab_size": 256, "max_model_len": 512, "model": resolve(str(tiny)).name}
        info |= options.pop("info", {})
        one = stage(name, level="full", model=model, num_blocks=num_blocks, block_size=SIZE, info=info, **options)
        config = msgspec.structs.replace(one.config, cache=msgspec.structs.replace(one.config.cache, block_size=SIZE))
        runner = ModelRunner(config, one.switches.names(), make_host("worker", config))
        runner.load()
        runner.allocate(num_blocks)
        one.execute = wrap(runner)

        def switch(step):
            if late and step == late and "recorder" not in one.scheduler.switches.on:
                one.switch(recorder=True)

        one.play(work or asks(), between=switch)
        return one, one.close()

    return play


def replay(path):
    file = RecordingFile(path)
    config = replay_config(file.header)
    check_before(file.header, config)
    return Replay(file, runner_for(file.header, config)).run()


def test_a_replay_gives_every_token_again(played):
    one, (path,) = played()
    file = RecordingFile(path)
    orders = [frame.order for frame in file if isinstance(frame, Ordered)]
    assert any(order.drafts for order in orders)
    assert any(new.num_computed for order in orders for new in order.new)
    done = replay(path)
    assert done.difference is None
    assert done.steps == one.steps
    assert done.tokens == sum(len(t) for frame in file if isinstance(frame, Given) for t in frame.sampled.values())
    assert done.warmed == 0


def test_preempted_requests_too(played):
    one, (path,) = played(num_blocks=14, work=[Ask(0.0, [20 + i] * 9, 60, {"seed": i}) for i in range(8)])
    assert sum(len(plan.preempted) for plan in one.plans) > 2
    assert replay(path).difference is None


AHEAD = tuple(name for name in ON if not name.startswith("speculative"))


def failing_at(*steps):
    """A runner's steps, some of which fail as a whole."""

    def make(runner):
        turns = Turns(runner)
        run = runner.run

        def fails(order):
            if order.step_id in steps:
                run(msgspec.structs.replace(order, num_tokens={}))
                raise WorkerError("it fails")
            return run(order)

        runner.run = fails
        return turns.run

    return make


@pytest.mark.parametrize("num_blocks", [BLOCKS, 14])
def test_steps_that_were_planned_ahead(played, num_blocks):
    """A token that ends a request leaves a step with tokens in vain: they are run again too. So is what comes after a step that failed."""
    work = [Ask(0.06 * i, [20 + i % 4] * (9 + i), 20, {"seed": i, "temperature": 1.0}) for i in range(12)]
    work[4].cancel_at = 0.5
    one, (path,) = played(
        on=(*AHEAD, "recorder"), ahead=True, num_blocks=num_blocks, work=work, info={"eos_token_ids": tuple(range(40, 60))},
        wrap=failing_at(9),
    )  # fmt: skip
    frames = list(RecordingFile(path))
    orders = [frame.order for frame in frames if isinstance(frame, Ordered)]
    assert sum(order.ahead for order in orders) > 10
    assert [order.ahead for order in orders if not order.num_tokens] == [True]
    done = replay(path)
    assert done.difference is None
    assert (done.failed, done.steps) == (2, one.steps - 2)
    ended = {frame.serial: index for index, frame in enumerate(frames) if isinstance(frame, End)}
    assert len(ended) == len(work)
    for index, frame in enumerate(frames):
        if isinstance(frame, Step):
            assert all(index < ended[serial] for serial in frame.runs[::2])
    assert history.read([path]).steps[-1].open_after == 0


def tampered(path, change):
    """The recording with one Given changed."""
    file = RecordingFile(path)
    copy = RecordingWriter(path.with_name("tampered.tbrec"), file.header)
    for frame in file:
        copy.write(change(frame) if isinstance(frame, Given) else frame)
    copy.close()
    return copy.path


@pytest.mark.parametrize("number", [1, 17, 40])
def test_a_changed_token_is_found_at_its_step_and_request(played, number):
    _, (path,) = played()
    steps = [frame for frame in RecordingFile(path) if isinstance(frame, Given) and frame.sampled]
    target = steps[number]
    victim = max(target.sampled)
    wrong = {**target.sampled, victim: [target.sampled[victim][0] ^ 1, *target.sampled[victim][1:]]}
    copy = tampered(path, lambda f: msgspec.structs.replace(f, sampled=wrong) if f.step_id == target.step_id else f)
    difference = replay(copy).difference
    assert difference is not None
    assert (difference.step_id, difference.request_id) == (target.step_id, victim)
    assert (difference.expected, difference.got) == (wrong[victim], target.sampled[victim])


def test_a_missing_and_an_extra_error_are_differences(played):
    _, (path,) = played()
    first = next(frame for frame in RecordingFile(path) if isinstance(frame, Given) and frame.sampled)
    name = next(iter(first.sampled))
    copy = tampered(
        path,
        lambda f: (
            Given(f.step_id, {k: v for k, v in f.sampled.items() if k != name}, [name]) if f.step_id == first.step_id else f
        ),
    )
    difference = replay(copy).difference
    assert (difference.step_id, difference.expected) == (first.step_id, "an error")


def test_a_recording_begun_live_is_replayed_from_there(played):
    one, (path,) = played(on=ON, late=25)
    file = RecordingFile(path)
    opened = [request for frame in file if isinstance(frame, Opened) for request in frame.requests]
    assert any(request.num_computed > 0 for request in opened)
    done = replay(path)
    assert done.difference is None
    assert 0 < done.steps < one.steps
    assert done.warmed > 0


def test_each_part_stands_for_itself(played, monkeypatch):
    monkeypatch.setattr(parts, "MIB", 4000)
    monkeypatch.setattr("tokenbus.core.recording.file.BLOCK_BYTES", 3000)
    one, files = played(recorder={"max_file_mb": 1, "max_total_mb": 1000})
    assert len(files) >= 3
    done = [replay(path) for path in files]
    assert [part.difference for part in done] == [None] * len(files)
    assert sum(part.steps for part in done) == one.steps
    assert any(part.warmed for part in done[1:])


def test_a_shape_recording_and_another_model_or_kernels_are_refused(played, stage, tmp_path):
    _, (path,) = played()
    header = RecordingFile(path).header
    shape = stage("shape")
    shape.play([Ask(0.0, [300, 301], 2)])
    with pytest.raises(RecordingError, match="level 'full'"):
        replay_config(RecordingFile(shape.close()[0]).header)

    config = replay_config(header)
    with pytest.raises(RecordingError, match=re.escape(f"kernels cpu scalar, here it is {header.layers}:")):
        check_before(msgspec.structs.replace(header, layers="cpu scalar"), config)
    other = make_other(Path(config.model.model), tmp_path / "other-model")
    with pytest.raises(RecordingError, match=rf"model {re.escape(header.model)}, .*here it is other-model"):
        check_before(header, replay_config(header, {"model": str(other)}))
    info = runner_for(header, config).load()
    with pytest.raises(RecordingError, match="dtype float32, here it is bfloat16"):
        check_loaded(header, msgspec.structs.replace(info, dtype="bfloat16"))
    with pytest.raises(RecordingError, match="not installed here"):
        check_before(msgspec.structs.replace(header, features=(*header.features, "theirs")), config)


def make_other(model, folder):
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    return folder


@pytest.mark.usefixtures("quiet_commands")
def test_the_command_says_so_by_its_exit_status(played, capsys):
    _, (path,) = played()
    assert cli.main(["replay", str(path), "--threads", "1"]) == 0
    assert "all the same" in capsys.readouterr().out
    last = [frame for frame in RecordingFile(path) if isinstance(frame, Given) and frame.sampled][-1]
    name = next(iter(last.sampled))
    copy = tampered(path, lambda f: Given(f.step_id, {**f.sampled, name: [3]}) if f.step_id == last.step_id else f)
    assert cli.main(["replay", str(copy), "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["same"] is False
    assert said["difference"]["step_id"] == last.step_id
    assert cli.main(["replay", str(path), "--dtype", "bfloat16"]) == 1
    assert "dtype float32, here it is bfloat16" in capsys.readouterr().err
