"""From the offline engine to a replay: the real model, the real processes."""

from __future__ import annotations

import pytest

from tokenbus import LLM, SamplingParams
from tokenbus.core.config import Config
from tokenbus.core.host import make_host
from tokenbus.core.recording import ask
from tokenbus.core.recording.file import RecordingFile
from tokenbus.core.recording.history import read
from tokenbus.core.recording.replay import Replay, check_before, check_loaded, replay_config
from tokenbus.core.worker.runner import ModelRunner


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_what_an_engine_recorded_is_replayed_and_simulated(tmp_path, worker):
    settings = {"recorder": {"path": str(tmp_path), "level": "full"}}
    options = {"max_model_len": 512, "num_blocks": 100, "worker": worker, "plugins": settings}
    with LLM("demo", enable=("recorder", "speculative.ngram"), **options) as llm:
        prompts = ["One two three four " * (3 + 2 * i) for i in range(8)]
        params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=16) for i in range(8)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    (path,) = tmp_path.glob("*.tbrec")
    history = read([path])
    assert not history.notices
    assert sorted(life.outputs for life in history.lives.values()) == sorted(len(o.outputs[0].token_ids) for o in outputs)

    file = RecordingFile(path)
    config = replay_config(file.header)
    check_before(file.header, config)
    runner = ModelRunner(config, file.header.features, make_host("worker", config))
    check_loaded(file.header, runner.load())
    runner.allocate(file.header.num_blocks)
    done = Replay(file, runner).run()
    assert done.difference is None
    assert done.tokens >= sum(len(o.outputs[0].token_ids) for o in outputs)

    answer = ask.simulate(history, ("max_running=1",), make_host("engine", Config()).catalogue)
    assert answer.columns[ask.WISHED]["output_tokens"] == answer.columns[ask.RECORDED]["output_tokens"]
    assert answer.columns[ask.WISHED]["steps"] > answer.columns[ask.RECORDED]["steps"]
