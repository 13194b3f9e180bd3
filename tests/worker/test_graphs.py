"""Steps from recorded graphs: the same bits as without, whatever joins, leaves and grows. On the CPU a graph calls what it was made of."""

from __future__ import annotations

import msgspec
import pytest
import torch
from device_fakes import AheadDriver
from worker_fakes import Driver, Spec, config

from tokenbus.core.errors import ConfigError, WorkerError
from tokenbus.core.host import make_host
from tokenbus.core.models.decoder import Decoder
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.core.worker import graphs
from tokenbus.core.worker.device import CpuDevice, Graph
from tokenbus.core.worker.graphs import bucket_of
from tokenbus.core.worker.runner import ModelRunner
from tokenbus.core.worker.triton_attention import TritonAttention

FEATURES = ("attention.triton", "sampling.truncation", "sampling.logprobs")
VOCAB = 256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Decoder:
    path = str(make_tiny(tmp_path_factory.mktemp("tiny")))
    model = load(resolve(path), "float32", "cpu", "torch", None)
    assert isinstance(model, Decoder)
    return model


class Strict(Decoder):
    """The decoder, with one layer, which may be recorded; says how many rows it was run with."""

    capturable = True

    @classmethod
    def of(cls, model: Decoder) -> Strict:
        made = object.__new__(cls)
        made.__dict__ = dict(model.__dict__)
        made.layers = model.layers[:1]  # the interpreter is slow
        made.rows = []
        return made

    def forward(self, batch, kv, attention):
        self.rows.append(len(batch.token_ids))
        return super().forward(batch, kv, attention)


class Counting(CpuDevice):
    def __init__(self) -> None:
        super().__init__(asynchronous=True)
        self.captures = 0

    def capture(self, work):
        self.captures += 1
        return super().capture(work)


def runner_of(served: Decoder, device: CpuDevice | None = None, features=FEATURES, **sections) -> ModelRunner:
    settings = config(**sections)
    made = ModelRunner(
        settings,
        features,
        make_host("worker", settings),
        loader=lambda *_: ("tiny", Strict.of(served)),
        device=device or CpuDevice(asynchronous=True),
    )
    made.load()
    made.allocate(128)
    return made


def graphs_of(runner: ModelRunner) -> graphs.Graphs:
    found = runner._computer._steps.graphs
    assert found is not None
    return found


def specs() -> list[Spec]:
    """Prompts of many lengths, in chunks; they end at different times, and cross borders of blocks (4) all the time."""
    made = []
    for i in range(4):
        options = {"temperature": 0.8, "seed": i, "top_k": 40} if i % 2 else {}
        prompt = [(31 * i + 7 * j) % VOCAB for j in range(1 + 3 * i)]
        made.append(Spec(f"r{i}", prompt, 4 + 2 * i, chunk=5, features=FEATURES, **options))
    made.append(Spec("host", [9, 8, 7], 3, features=FEATURES, logprobs=1))
    return made


def outcome(of: list[Spec]) -> list:
    return [(spec.name, spec.tokens, spec.logprobs, spec.error) for spec in of]


@pytest.fixture(scope="module")
def expected(tiny) -> list:
    mine = specs()
    Driver(mine).run(runner_of(tiny, model={"threads": 1, "cuda_graphs": "off"}))
    return outcome(mine)


@pytest.mark.parametrize("driver", [Driver, AheadDriver])
def test_the_same_with_graphs(driver, tiny, expected):
    mine, device = specs(), Counting()
    runner = runner_of(tiny, device)
    driver(mine).run(runner)
    driver(again := specs()).run(runner)
    assert outcome(mine) == outcome(again) == expected
    found = graphs_of(runner)
    assert found.replays > 6
    assert device.captures == len(found) > 1, "one for each bucket"
    assert not found.off


def test_logits_are_the_same_bits(tiny):
    """Not only the tokens: hidden states of real rows, with and without padding behind them."""
    seen: list[list[torch.Tensor]] = []
    for setting in ("off", "auto"):
        runner = runner_of(tiny, model={"threads": 1, "cuda_graphs": setting})
        steps, kept = runner._computer._steps, []
        forward = steps.forward

        def keep(step, forward=forward, kept=kept):
            hidden = forward(step)
            kept.append(hidden[: step.tokens].clone())
            return hidden

        steps.forward = keep
        Driver(specs()).run(runner)
        seen.append(kept)
    assert graphs_of(runner).replays > 1
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))


def test_few_graphs_are_kept(tiny, expected, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    mine, device = specs(), Counting()
    runner = runner_of(tiny, device)
    Driver(mine).run(runner)
    Driver(again := specs()).run(runner)
    assert outcome(again) == outcome(mine) == expected
    assert len(graphs_of(runner)) == 2
    assert device.captures > 2


def test_graphs_go_when_tables_move(tiny, expected, monkeypatch):
    from tokenbus.core.worker import staging

    monkeypatch.setattr(staging, "FIRST_WIDTH", 1)
    monkeypatch.setattr(staging, "FIRST_ROWS", 1)
    mine, runner = specs(), runner_of(tiny)
    Driver(mine).run(runner)
    assert outcome(mine) == expected
    assert runner._computer._steps.resident.generation > 3
    assert graphs_of(runner).replays > 0


class Failing(CpuDevice):
    def __init__(self, error: Exception) -> None:
        super().__init__(asynchronous=True)
        self.error = error

    def capture(self, work) -> Graph:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("not permitted when stream is capturing"), torch.OutOfMemoryError("none left")])
def test_a_graph_that_cannot_be_recorded_is_done_without(error, tiny, expected):
    mine = specs()
    runner = runner_of(tiny, Failing(error))
    Driver(mine).run(runner)
    assert outcome(mine) == expected
    assert graphs_of(runner).off
    assert not graphs_of(runner).replays


def test_a_graph_that_was_insisted_on_is_an_error(tiny):
    runner = runner_of(tiny, Failing(RuntimeError("no")), model={"threads": 1, "cuda_graphs": "on"})
    with pytest.raises(WorkerError, match="cuda_graphs is on, and a step of 1 tokens can't be recorded: no"):
        Driver([Spec("a", [1, 2, 3], 9, features=FEATURES)]).run(runner)


def test_what_can_have_no_graphs_refuses_to_promise_them(tiny, monkeypatch):
    on = {"threads": 1, "cuda_graphs": "on"}
    with pytest.raises(ConfigError, match="only a GPU has them"):
        runner_of(tiny, CpuDevice(), model=on)
    with pytest.raises(ConfigError, match="attention backend 'torch' can't be recorded"):
        runner_of(tiny, features=FEATURES[1:], model=on)
    monkeypatch.setattr(Strict, "capturable", False)
    with pytest.raises(ConfigError, match=r"the model .Strict. can't be recorded"):
        runner_of(tiny, model=on)


def test_other_attention_takes_no_graphs(tiny, expected):
    """A backend that can't be recorded, switched to and back while requests run: the graphs are made anew."""
    mine = specs()
    driver, runner = Driver(mine), runner_of(tiny)
    switches = {2: FEATURES[1:], 4: FEATURES}
    used = []
    while driver.open:
        order = driver.plan()
        order = msgspec.structs.replace(order, features=switches.get(order.step_id))
        before = graphs_of(runner).replays
        driver.take(order, runner.run(order))
        used.append(graphs_of(runner).replays > before)
    assert [(name, tokens) for name, tokens, *_ in outcome(mine)] == [(name, tokens) for name, tokens, *_ in expected]
    assert not any(used[2:4])
    assert any(used[4:])


def test_buckets():
    assert [bucket_of(n) for n in (1, 2, 3, 5, 8, 9, 16, 17, 64, 65, 256, 257, 512)] == [
        1,
        2,
        4,
        8,
        8,
        16,
        16,
        24,
        64,
        80,
        256,
        288,
        512,
    ]


def test_the_backend_can_be_recorded():
    assert TritonAttention.capturable
