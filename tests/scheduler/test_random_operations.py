"""Random sequences of everything that can happen: integrity holds after each, every request ends exactly once, with a lone run's tokens."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenbus.core.errors import ErrorInfo
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl


class Sometimes(Plugin):
    """Lossy by declaration only: requests keep it, so that it lingers."""

    info = PluginInfo(name="sometimes", summary="", scope="request", lossless=False)

    @hookimpl
    def limit_chunk(self, wanted):
        return max(0, wanted - 1)


SWITCHABLE = (
    "chunked_prefill",
    "prefix_cache",
    "scheduling__unified",
    "scheduling__priority",
    "scheduling__two_phase",
    "scheduling__static",
    "sometimes",
)

SHAPES = [(4, 16), (6, 4), (10, 4), (16, 2), (24, 1), (24, 3), (12, 4), (40, 1)]
"""(num_blocks, block_size): from one long request's worth to a few."""


def random_operations(rng: random.Random, count: int, longest: int) -> list[tuple]:
    """Drawn with fixed weights, as lists of hypothesis' own are mostly short and mostly refused; `count` is what shrinks."""
    operations: list[tuple] = []
    for _ in range(count):
        kind = rng.choices(
            ["add", "step", "cancel", "cancel while it computes", "switch", "error", "fail step", "no memory"],
            [40, 40, 4, 4, 8, 2, 1, 2],
        )[0]
        match kind:
            case "add":
                size = rng.randint(1, longest // 2 + 1) if rng.random() < 0.95 else rng.randint(1, 2 * longest)
                timeout = rng.choice([None] * 6 + [0.05, 0.3])
                operation = (size, rng.randint(0, 20), rng.randint(-3, 3), timeout, rng.randint(0, 3), rng.random() < 0.3)
            case "step":
                operation = (rng.randint(1, 8),)
            case "cancel":
                operation = (rng.randrange(40), rng.choice(["cancelled", "stop", "deadline"]))
            case "switch":
                operation = (rng.choice(SWITCHABLE), rng.random() < 0.6)
            case "fail step" | "no memory":
                operation = ()
            case _:
                operation = (rng.randrange(40),)
        operations.append((kind, *operation))
    return operations


COVERED: Counter[str] = Counter()


class Script:
    """Applies operations and remembers what each request should give."""

    def __init__(self, h) -> None:
        self.h = h
        self.expected: dict[str, list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def add(self, size: int, max_tokens: int, priority: int, timeout: float | None, family: int, pinned: bool) -> None:
        h, name = self.h, f"r{len(self.expected)}"
        prompt = [3 + (i * i + 7 * family) % 40 for i in range(size)]
        self.expected[name], self.max_tokens[name], self.sizes[name] = h.solo(prompt, max_tokens), max_tokens, size
        h.add(
            name, prompt, max_tokens=max_tokens, fields={"priority": priority} if priority else {},
            deadline=None if timeout is None else h.now + timeout,
            pinned={"prefix_cache": "prefix_cache" in h.switches.on} if pinned else {},
        )  # fmt: skip

    def name(self, number: int) -> str:
        return f"r{number % max(1, len(self.expected))}"

    def step(self, times: int) -> None:
        for _ in range(times):
            self.h.scheduler.expire(self.h.now)
            self.h.step()

    def cancel(self, number: int, reason: str) -> None:
        self.h.scheduler.cancel(self.name(number), reason, self.h.now)

    def cancel_while_it_computes(self, number: int) -> None:
        h = self.h
        if not h.plan():
            return
        plan, order = h.flights.popleft()
        result = h.worker.execute(order)
        h.scheduler.cancel(self.name(number), "cancelled", h.now)
        h.take(h.scheduler.update(plan, result, h.now, 0.01))

    def switch(self, name: str, wish: bool) -> None:
        if (name.replace("__", ".") in self.h.switches.on) != wish:
            self.h.switch(**{name: wish})

    def error(self, number: int) -> None:
        if self.name(number) in self.h.scheduler.requests:
            self.h.worker.fail[self.name(number)] = ErrorInfo(kind="PluginError", message="x")

    def fail_step(self) -> None:
        h = self.h
        if h.plan():
            COVERED["failed with another behind"] += len(h.flights) > 1
            h.fail_step(ErrorInfo(kind="WorkerError", message="x"))

    def no_memory(self) -> None:
        h = self.h
        if h.plan():
            COVERED["no memory"] += 1
            COVERED["no memory with another behind"] += len(h.flights) > 1
            h.no_memory(ErrorInfo(kind="StepMemoryError", message="x"))

    def run(self, operation: tuple) -> None:
        kind, *arguments = operation
        getattr(self, kind.replace(" ", "_"))(*arguments)
        self.h.check()

    def verify(self) -> None:
        h = self.h
        assert h.finished.keys() == self.expected.keys()
        COVERED["preempted"] += sum(len(plan.preempted) for plan in h.plans)
        COVERED["hit tokens"] += sum(finish.cached_tokens for finish in h.finished.values())
        COVERED["evicted"] += h.evicted
        COVERED["ahead"] += h.planned_ahead
        COVERED["run in vain"] += h.discarded
        COVERED.update({f"waited: {why}": count for why, count in h.waits.items()})
        COVERED.update(finish.reason for finish in h.finished.values())
        longest = h.pool.num_blocks * h.pool.block_size
        for name, finish in h.finished.items():
            tokens = h.tokens.get(name, [])
            assert tokens == self.expected[name][: len(tokens)], name
            if finish.reason == "length":
                assert len(tokens) == min(self.max_tokens[name], longest - self.sizes[name])
            elif finish.reason == "error":
                assert finish.error.kind in {
                    "DeadlineError",
                    "PluginError",
                    "WorkerError",
                    "StepMemoryError",
                    "ContextLengthError",
                }
            else:
                assert finish.reason in {"cancelled", "stop"}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    shape=st.sampled_from(SHAPES),
    budget=st.sampled_from([64, 16, 4]),
    max_running=st.integers(2, 8),
    on=st.sets(st.sampled_from(["chunked_prefill", "prefix_cache", "scheduling.priority", "sometimes"])),
    chunk=st.sampled_from([None, 8, 3, 1]),
    seed=st.integers(0, 1 << 32),
    count=st.integers(20, 60),
    ahead=st.booleans(),
)
def check_random_operations(harness, shape, budget, max_running, on, chunk, seed, count, ahead) -> None:
    operations = random_operations(random.Random(seed), count, shape[0] * shape[1])
    chunked = {"mode": "adaptive"} if chunk is None else {"mode": "fixed", "chunk_size": chunk}
    h = harness(
        num_blocks=shape[0], block_size=shape[1], token_budget=budget, max_running=max_running, on=tuple(on), plugins=(Sometimes,),
        settings={"chunked_prefill": chunked, "scheduling.priority": {"age_seconds": 0.1}}, ahead=ahead,
    )  # fmt: skip
    script = Script(h)
    for operation in operations:
        script.run(operation)
    for _ in range(3000):
        h.scheduler.expire(h.now)
        if h.step() is None and not h.scheduler.has_work():
            break
    h.take(h.scheduler.flush(h.now))
    h.check()
    assert not h.scheduler.requests
    assert h.pool.num_available == h.pool.num_blocks
    assert not h.failures
    script.verify()


def test_random_operations(harness) -> None:
    COVERED.clear()
    check_random_operations(harness)
    assert COVERED["length"] > 500
    assert COVERED["ahead"] > 1000
    assert min(COVERED[name] for name in ("run in vain", "failed with another behind", "no memory with another behind")) > 10, (
        COVERED
    )
    assert min(COVERED[f"waited: {why}"] for why in ("blocks", "displacing", "policy", "switches", "failed")) > 5, COVERED
    ends = ("preempted", "hit tokens", "evicted", "cancelled", "stop", "error", "no memory")
    assert min(COVERED[name] for name in ends) > 10, COVERED
