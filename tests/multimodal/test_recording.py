"""Recorded steps with pictures among texts, run again on the model: with the pictures, and without those that were not kept."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "recording"))  # the stage

from stage import Ask, Stage

from tokenbus.core.commands import replay as replay_command
from tokenbus.core.errors import RecordingError
from tokenbus.core.host import make_host
from tokenbus.core.models.resolve import resolve
from tokenbus.core.recording.file import RecordingFile, RecordingWriter
from tokenbus.core.recording.frames import Given, Media, Opened, Ordered
from tokenbus.core.recording.media import MediaStore
from tokenbus.core.recording.replay import Replay, check_before, check_loaded, left_out, replay_config
from tokenbus.core.worker.runner import ModelRunner

SIZE = 16
ON = (
    "chunked_prefill", "prefix_cache", "scheduling.fcfs", "speculative.ngram", "sampling.truncation", "attention.torch",
    "multimodal",
)  # fmt: skip


@pytest.fixture
def tiny(request, tiny_media):
    """With M-RoPE, if a test does not say otherwise."""
    return tiny_media(getattr(request, "param", "qwen2-vl"))


both = pytest.mark.parametrize("tiny", ["qwen2-vl", "gemma3"], indirect=True)
"""Also with pictures that attend in both directions, so that their spans can't be cut."""


@pytest.fixture
def played(tiny, tmp_path, monkeypatch):
    """`played(work, ...)`: a stage with the tiny model that has recorded, and the files."""

    def play(work, name="full", num_blocks=120, late=0, ahead=False, **recorder):
        on = [name for name in ON if not (ahead and name.startswith("speculative"))]
        model = {"model": str(tiny.path), "dtype": "float32", "kernels": "torch", "threads": 1}
        found = resolve(str(tiny.path))
        info = {"architecture": found.config["architectures"][0], "vocab_size": 256, "max_model_len": 512, "model": found.name}
        one = Stage(
            tmp_path / name, monkeypatch, level="full", model=model, num_blocks=num_blocks, block_size=SIZE, info=info,
            on=tuple(on if late else [*on, "recorder"]), recorder=recorder, ahead=ahead,
            settings={"speculative.ngram": {"adaptive": False, "min_match": 1}, "chunked_prefill": {"mode": "fixed", "chunk_size": 7}},
        )  # fmt: skip
        runner = ModelRunner(one.config, one.switches.names(), make_host("worker", one.config))
        runner.load()
        runner.allocate(num_blocks)
        one.execute = runner.run

        def switch(step):
            if late and step == late and "recorder" not in one.scheduler.switches.on:
                one.switch(recorder=True)

        one.play(work, between=switch)
        return one, one.close()

    return play


def work_of(tiny, count=16):
    """Every second request is of text; two more have the same pictures behind the same text, every other a picture that comes again."""
    draw, made = random.Random(2), []
    for i in range(count):
        values = {"temperature": 0.8 * (i % 3 == 1), "seed": i}
        if i % 2:
            prompt = tiny.prompt([0] if i % 4 == 1 else [1, 0], seed=i % 4, text=20)
            made.append(Ask(0.05 * i, prompt.tokens, draw.randint(8, 24), {**values, "media": prompt.media}))
        else:
            shared = tiny.prompt([0], seed=1, text=20).tokens[:20]
            own = [draw.randrange(10, 240) for _ in range(draw.randint(4, 30))]
            made.append(Ask(0.05 * i, shared + own, draw.randint(8, 24), values))
    return made


def replay(path):
    file = RecordingFile(path)
    config = replay_config(file.header)
    check_before(file.header, config)
    runner = ModelRunner(config, file.header.features, make_host("worker", config))
    check_loaded(file.header, runner.load())
    runner.allocate(file.header.num_blocks)
    return Replay(file, runner).run()


def orders(path):
    return [frame.order for frame in RecordingFile(path) if isinstance(frame, Ordered)]


@both
def test_with_the_pictures_kept_every_token_comes_again(tiny, played):
    one, (path,) = played(work_of(tiny), media=True)
    assert any(new.media and new.num_computed for order in orders(path) for new in order.new)
    done = replay(path)
    assert done.difference is None
    assert done.steps == one.steps
    assert not done.left_out
    assert sum(isinstance(frame, Media) for frame in RecordingFile(path)) == 3


def test_preempted_ones_too(tiny, played):
    prompts = [tiny.prompt([i % 3], seed=i) for i in range(8)]
    work = [Ask(0.0, prompt.tokens, 60, {"media": prompt.media}) for prompt in prompts]
    one, (path,) = played(work, num_blocks=14, media=True)
    again = {name for plan in one.plans for name in plan.preempted}
    assert len(again) > 2
    done = replay(path)
    assert done.difference is None
    assert not done.left_out
    assert sum(isinstance(frame, Media) for frame in RecordingFile(path)) == 8


@both
def test_a_recording_that_begins_in_the_middle_of_a_prompt_with_a_picture(tiny, played):
    one, (path,) = played(work_of(tiny), late=20, media=True)
    opened = [request for frame in RecordingFile(path) if isinstance(frame, Opened) for request in frame.requests]
    assert any(request.media and request.num_computed for request in opened)
    done = replay(path)
    assert done.difference is None
    assert 0 < done.steps < one.steps
    assert done.warmed


@pytest.mark.parametrize("media", [True, False])
def test_steps_planned_ahead(tiny, played, media):
    one, (path,) = played(work_of(tiny), ahead=True, media=media)
    assert any(order.ahead for order in orders(path))
    done = replay(path)
    assert done.difference is None
    assert bool(done.left_out) is not media
    assert 0 < done.steps <= one.steps


def test_a_recording_with_tensors_in_its_orders_is_replayed_too(tiny, played, tmp_path):
    """By a version that knew no other place for them."""
    _, (path,) = played(work_of(tiny, 6), media=True)
    file, store = RecordingFile(path), MediaStore()
    older = RecordingWriter(tmp_path / "older.tbrec", file.header)
    for frame in file:
        if isinstance(frame, Media):
            store.add(frame)
        elif isinstance(frame, Ordered):
            new = [request for one in frame.order.new if (request := store.filled(one)) is not None]
            older.write(Ordered(msgspec.structs.replace(frame.order, new=new)))
        else:
            older.write(frame)
    older.close()
    done = replay(older.path)
    assert (done.difference, done.left_out) == (None, {})
    assert done.steps


def test_without_them_the_requests_are_left_out_and_named_and_all_others_are_compared(tiny, played):
    one, (path,) = played(work_of(tiny))
    done = replay(path)
    assert done.difference is None
    assert done.left_out == {f"r{i}": len(ask.values["media"]) for i, ask in enumerate(work_of(tiny)) if i % 2}
    given = [frame for frame in RecordingFile(path) if isinstance(frame, Given)]
    texts = {name: ids for frame in given for name, ids in frame.sampled.items() if name not in done.left_out}
    assert len(texts) == 8
    assert done.tokens == sum(len(ids) for frame in given for name, ids in frame.sampled.items() if name not in done.left_out)
    assert 0 < done.steps <= one.steps
    assert "r1 (1)" in left_out(done)
    assert "recorder.media=true" in left_out(done)


def test_what_a_left_out_request_would_have_written_is_computed_for_those_who_use_it(tiny, played):
    """A text that begins like the one before a picture gets that beginning from the cache: from blocks of a request that isn't run, which
    another request had before."""
    prompt = tiny.prompt([0], seed=5, text=40)
    before = Ask(0.0, [30 + i for i in range(125)], 18)
    media = Ask(10.0, prompt.tokens, 4, {"media": prompt.media})
    text = Ask(20.0, [*prompt.tokens[:40], 11, 12, 13], 12)
    _, (path,) = played([before, media, text], num_blocks=9)
    news = {new.request_id: new for order in orders(path) for new in order.new}
    assert news["r2"].num_computed == 32
    assert set(news["r2"].blocks[:2]) <= set(news["r0"].blocks + blocks_of(path, "r0"))
    done = replay(path)
    assert done.difference is None
    assert done.left_out == {"r1": 1}
    assert done.warmed == 32


def blocks_of(path, name):
    return [block for order in orders(path) for block in order.new_blocks.get(name, ())]


def test_where_nothing_is_left_it_is_an_error(tiny, played):
    work = [ask for ask in work_of(tiny) if "media" in ask.values]
    _, (path,) = played(work)
    with pytest.raises(RecordingError, match=r"nothing can be replayed: .*8 requests .*: r0 \(1\), .* and 3 more"):
        replay(path)


def test_the_command_names_who_was_left_out(tiny, played, monkeypatch, capsys):
    from tokenbus.core import cli

    monkeypatch.setattr(replay_command, "configure_logs", lambda *_: None)
    _, (path,) = played(work_of(tiny, 6))
    assert cli.main(["replay", str(path), "--threads", "1"]) == 0
    said = capsys.readouterr()
    assert "all the same" in said.out
    assert "3 requests are not in the recording, so these were not run again: r1 (1), r3 (2), r5 (1)" in said.err
