"""All that serves on a GPU, at once and on the CPU: a real engine that plans ahead, a runner that launches and collects, "graphs", the
decoder on Triton kernels in the interpreter, sampling on the device. Bit by bit what the same kernels give step by step."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_harness import Harness, engine, request

from tokenbus.core import sampler
from tokenbus.core.config import Config, from_mapping
from tokenbus.core.engine.main import Start, _describe_engine, _plan_memory, _plans_ahead
from tokenbus.core.host import make_host
from tokenbus.core.messages import Cancel
from tokenbus.core.models.triton_decoder import TritonDecoder
from tokenbus.core.request import AdmittedRequest
from tokenbus.core.worker.device import CpuDevice, Event
from tokenbus.core.worker.runner import ModelRunner
from tokenbus.core.worker.thread import ThreadWorker

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, about rows that pad a batch: these hold anything
]

FEATURES = ("attention.triton", "sampling.logprobs", "sampling.penalties", "sampling.stops", "sampling.truncation")
PROMPT = [1, 5, 9, 33, 2, 17, 40, 41, 8, 8, 60, 11, 90, 3, 77]
ON_HOST = {"penalised", "looked at"}
POLLS = 20
"""How often a step is asked for before it has ended."""


class Late(Event):
    """Of work that takes a while."""

    def __init__(self) -> None:
        self.polls = 0

    def done(self) -> bool:
        self.polls += 1
        return self.polls > POLLS

    def wait(self) -> None:
        self.polls = POLLS


class LateDevice(CpuDevice):
    """Takes the ways of a GPU."""

    def __init__(self) -> None:
        super().__init__(asynchronous=True)
        self.captures = 0

    def event(self) -> Event:
        return Late()

    def capture(self, work):
        self.captures += 1
        return super().capture(work)


class Worker(ThreadWorker):
    """Its runner is at hand, and counts its launches."""

    def __init__(self, config: Config, device: CpuDevice | None) -> None:
        super().__init__(config, FEATURES, self._make)
        self.device, self.closed, self.seen = device, False, Counter[str]()
        self.runner: Any = None

    def _make(self, config: Config, features: tuple[str, ...]) -> ModelRunner:
        self.runner = ModelRunner(config, features, make_host("worker", config), device=self.device)
        launch = self.runner.launch

        def counted(order):
            self.seen["before an end"] += len(self.runner._in_flight._steps) > 0
            self.seen["launches"] += bool(order.num_tokens)
            return launch(order)

        self.runner.launch = counted
        return self.runner

    async def close(self) -> None:
        await super().close()
        self.closed = True


def config_of(path: Path, ahead: str) -> Config:
    model = {"model": str(path), "dtype": "float32", "device": "cpu", "kernels": "triton", "threads": 1}
    sections = {"model": model, "cache": {"num_blocks": 64, "block_size": 8}, "scheduler": {"ahead": ahead}}
    return from_mapping({**sections, "features": {"enable": list(FEATURES)}}, "test")


@asynccontextmanager
async def serving(path: Path, ahead: str, device: CpuDevice | None):
    config = config_of(path, ahead)
    worker = Worker(config, device)
    found = await worker.load()
    memory = _plan_memory(config, found)
    await worker.allocate(memory.num_blocks)
    start = Start()
    start.seconds["model"] = 0.0
    info = _describe_engine(found, memory, start, ahead=_plans_ahead(config, found))
    assert info.lossless, info.lossless_reason
    host = make_host("engine", config)
    host.load(FEATURES)
    async with engine(worker=worker, on=FEATURES, served=(config, info, host)) as e:
        yield e, worker


def requests(end: int) -> list[AdmittedRequest]:
    """end: a token that the greedy answer comes to."""
    kinds: dict[str, dict[str, Any]] = {
        "cut": {"max_tokens": 9, "temperature": 0.9, "seed": (1 << 64) - 5, "fields": {"top_k": 20, "top_p": 0.9}},
        "greedy": {"max_tokens": 12, "temperature": 0.0},
        "stopped": {"max_tokens": 12, "temperature": 0.0, "fields": {"stop_token_ids": [end]}},
        "cancelled": {"max_tokens": 14, "temperature": 1.0, "seed": 3},
        "nucleus": {"max_tokens": 11, "temperature": 1.3, "seed": 11, "fields": {"top_p": 0.7, "min_p": 0.01}},
        "penalised": {"max_tokens": 5, "temperature": 0.0, "fields": {"frequency_penalty": 1.5, "repetition_penalty": 1.2}},
        "looked at": {"max_tokens": 3, "temperature": 0.8, "seed": 9, "fields": {"logprobs": 2}},
    }
    prompts = [PROMPT[:4], PROMPT, PROMPT, PROMPT[2:9], PROMPT[5:], PROMPT[:9], PROMPT[3:6]]
    return [
        request(name, prompt, features=FEATURES, **options)
        for (name, options), prompt in zip(kinds.items(), prompts, strict=True)
    ]


def logprobs(e: Harness) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for output in e.outputs:
        for request_id, entries in output.logprobs.items():
            found.setdefault(request_id, []).extend(entries)
    return found


@pytest.mark.long
async def test_the_whole_of_it_changes_no_bit(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    async with serving(tiny_llama, "off", None) as (e, worker):
        await e.add(request("first", PROMPT, 12, temperature=0.0, features=FEATURES))
        await e.until_finished("first")
        answer = e.tokens.pop("first")
        end = next(token for i, token in enumerate(answer) if i >= 4 and token not in answer[:i])
        await e.add(*requests(end))
        await e.until_finished(*(one.request_id for one in requests(end)))
        plain, plain_logprobs = e.tokens, logprobs(e)
        reasons = {name: finish.reason for name, finish in e.finished.items() if name != "first"}
        assert isinstance(worker.runner._loaded()[0], TritonDecoder)
        assert plain["greedy"] == answer
        assert reasons["stopped"] == "stop"
        assert not any(output.report.ahead for output in e.outputs if output.report is not None)

    sampled_on_host: Counter[str] = Counter()
    sample = sampler.sample

    def noting(logits, rows, order):
        sampled_on_host.update(row.request.request_id for row in rows)
        return sample(logits, rows, order)

    monkeypatch.setattr(sampler, "sample", noting)
    device = LateDevice()
    async with serving(tiny_llama, "on", device) as (e, worker):
        await e.add(*requests(end))
        await e.until(lambda: len(e.tokens.get("cancelled", ())) >= 3)
        await e.channel.send(Cancel(["cancelled"]))
        await e.until_finished(*plain)
        mine = dict(e.tokens)
        assert e.finished["cancelled"].reason == "cancelled"
        cancelled = mine.pop("cancelled")
        assert 3 <= len(cancelled) < len(plain["cancelled"])
        assert cancelled == plain.pop("cancelled")[: len(cancelled)]
        assert mine == plain
        assert logprobs(e) == plain_logprobs
        assert {name: finish.reason for name, finish in e.finished.items()} == reasons | {"cancelled": "cancelled"}
        again = [one for one in requests(end) if one.request_id in {"cut", "greedy", "nucleus"}]  # from graphs that are there
        await e.add(*(msgspec.structs.replace(one, request_id=f"{one.request_id} again") for one in again))
        await e.until_finished(*(f"{one.request_id} again" for one in again))
        assert [e.tokens[f"{one.request_id} again"] for one in again] == [plain[one.request_id] for one in again]
        assert await e.query("integrity") == {"ok": True, "problem": ""}

        graphs, seen = worker.runner._computer._steps.graphs, worker.seen
        assert sum(output.report.ahead for output in e.outputs if output.report is not None) >= 6
        assert seen["before an end"] >= 4, seen
        assert not graphs.off
        assert 1 <= device.captures == len(graphs)
        assert graphs.replays >= 8
        assert sampled_on_host.keys() == ON_HOST
        assert sampled_on_host["penalised"] == len(mine["penalised"])
