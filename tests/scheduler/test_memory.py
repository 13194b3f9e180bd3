"""Preemption and recomputation: nothing lost, nothing twice, always progress."""

from __future__ import annotations

import pytest

from tokenbus.core.config import CacheConfig
from tokenbus.core.errors import ConfigError
from tokenbus.core.kv.sizing import MIB, free_memory, plan
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.request import Resumed


class Scorer(Plugin):
    """Asks for the logits of every prompt position."""

    info = PluginInfo(name="scorer", summary="", scope="request", lossless=False, claims={"score"})

    @hookimpl
    def wants_prompt_logits(self, request):
        return True


@pytest.mark.parametrize(
    "on", [(), ("chunked_prefill",), ("prefix_cache",), ("chunked_prefill", "prefix_cache", "scheduling.priority")]
)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_c28_pool_for_two_and_a_half_sequences(harness, on: tuple[str, ...], block_size: int) -> None:
    settings = {"chunked_prefill": {"mode": "fixed", "chunk_size": 4}}
    h = harness(
        num_blocks=200 // block_size, block_size=block_size, on=on, settings=settings if "chunked_prefill" in on else None
    )
    prompts = {f"r{n}": [3 + (n * 11 + i * i) % 40 for i in range(40)] for n in range(8)}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=40)
    h.run(max_steps=3000)
    for name, prompt in prompts.items():
        assert h.tokens[name] == h.solo(prompt, 40), name
        assert h.finished[name].reason == "length"
    preempted = sum(len(plan.preempted) for plan in h.plans)
    assert preempted <= 24
    assert preempted > 0 or block_size == 16
    assert preempted == sum(finish.preemptions for finish in h.finished.values())
    assert h.finished["r0"].preemptions == 0, "the oldest always advances"


def test_the_newest_gives_way_and_comes_back_to_its_old_place(harness) -> None:
    h = harness(num_blocks=6, block_size=4, max_running=3)
    h.add("a", 7, max_tokens=12)
    h.add("b", 7, max_tokens=9)
    h.step()
    h.add("c", 4, max_tokens=2)
    while not any(plan.preempted for plan in h.plans):
        h.step()
    assert h.plans[-1].preempted == ("b",)
    assert h.plans[-1].num_tokens == {"a": 1}
    h.step()
    h.run()
    order = [new.request_id for order in h.inputs for new in order.new]
    assert order.index("b", order.index("b") + 1) < order.index("c"), "b was before c and stays so"
    resumed = next(new for order in h.inputs[1:] for new in order.new if new.request_id == "b")
    assert resumed.tokens[7:] == h.solo(resumed.tokens[:7], len(resumed.tokens) - 7)
    assert resumed.num_prompt_tokens == 7
    assert h.finished["b"].preemptions == 1


def test_a_preempted_request_is_dropped_on_the_worker_before_it_is_new_again(harness) -> None:
    h = harness(num_blocks=6, block_size=4)
    h.add("a", 7, max_tokens=12)
    h.add("b", 7, max_tokens=12)
    h.run()
    dropped = [name for order in h.inputs for name in order.dropped]
    assert dropped.count("b") == h.finished["b"].preemptions >= 1


def test_prompt_logprobs_go_out_once_although_the_prompt_runs_twice(harness) -> None:
    h = harness(
        num_blocks=9, block_size=4, plugins=(Scorer,), on=("scorer", "chunked_prefill", "prefix_cache"),
        settings={"chunked_prefill": {"mode": "fixed", "chunk_size": 3}},
    )  # fmt: skip
    h.add("a", 12, max_tokens=20)
    h.add("b", 12, max_tokens=12, fields={"score": 1})
    h.run()
    assert h.finished["b"].preemptions >= 1
    prompt = next(new.tokens[:12] for order in h.inputs for new in order.new if new.request_id == "b")
    assert [entry.token_id for entry in h.prompt_logprobs["b"]] == prompt[1:]
    assert h.tokens["b"] == h.solo(prompt, 12)
    assert "every prompt position" in h.finished["b"].notes["prefix_cache"]
    assert "prefix_cache" not in h.finished["a"].notes


def test_prompt_logprobs_when_preempted_in_the_middle_of_the_prompt(harness) -> None:
    h = harness(
        num_blocks=11, block_size=4, plugins=(Scorer,), on=("scorer", "chunked_prefill"),
        settings={"chunked_prefill": {"mode": "fixed", "chunk_size": 2}},
    )  # fmt: skip
    h.add("a", 4, max_tokens=36)
    for _ in range(14):
        h.step()
    h.add("b", 16, max_tokens=4, fields={"score": 1})
    h.run()
    prompt = next(new.tokens[:16] for order in h.inputs for new in order.new if new.request_id == "b")
    assert [entry.token_id for entry in h.prompt_logprobs["b"]] == prompt[1:]
    assert h.tokens["b"] == h.solo(prompt, 4)


def test_a_waiting_request_joins_only_when_everybody_has_room_to_grow(harness) -> None:
    h = harness(num_blocks=7, block_size=4)
    h.add("a", 12, max_tokens=16)
    h.add("b", 12, max_tokens=4)
    plan = h.step()
    assert plan.num_tokens == {"a": 12}, "b's prompt would fit, its and a's next blocks would not"
    h.run()
    assert not any(plan.preempted for plan in h.plans)


def test_memory_plan_and_its_table() -> None:
    cache = CacheConfig(block_size=16, kv_memory_fraction=0.5)
    memory = plan(100 * MIB, 1024, 30 * MIB, cache, 4096)
    assert memory.num_blocks == 3200
    assert memory.longest_request == 4096
    assert memory.concurrency == 12.5
    table = memory.table()
    for word in ("weights", "30.0 MiB", "1,024 bytes", "4,096 tokens", "12.5", "50% of free memory"):
        assert word in table
    assert plan(100 * MIB, 1024, 0, CacheConfig(kv_memory_mb=1), 4096).longest_request == 1024
    assert plan(100 * MIB, 1024, 0, CacheConfig(num_blocks=7), 4096).capacity_tokens == 112
    assert plan(1 << 50, 1024, 0, cache, 100).num_blocks == 256 * 7
    with pytest.raises(ConfigError, match="kv_memory_mb"):
        plan(100 * MIB, 1024, 0, CacheConfig(kv_memory_mb=101), 4096)
    with pytest.raises(ConfigError, match="no room"):
        plan(1000, 1024, 0, cache, 4096)


def test_free_memory_respects_every_cgroup_above_us(tmp_path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999 kB\nMemAvailable:    8000 kB\n")
    own = tmp_path / "self"
    own.write_text("0::/outer/inner\n")
    root = tmp_path / "cgroup"
    inner = root / "outer" / "inner"
    inner.mkdir(parents=True)

    def free() -> int:
        return free_memory(meminfo=meminfo, cgroup=root, self_cgroup=own)

    assert free() == 8000 * 1024
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("1000\n")
    assert free() == 8000 * 1024
    (root / "outer" / "memory.max").write_text("500000\n")
    (root / "outer" / "memory.current").write_text("400000\n")
    (root / "outer" / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert free() == 150_000
    own.write_text("5:memory:/x\n0::/\n")
    v1 = root / "memory" / "x"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("90000")
    (v1 / "memory.usage_in_bytes").write_text("100000")
    assert free() == 0
    assert free_memory(meminfo=tmp_path / "none", cgroup=tmp_path / "none", self_cgroup=tmp_path / "none") == 0
    assert free_memory() > 0


# ---- requests that another engine had ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", range(1, 9))
@pytest.mark.parametrize("on", [(), ("chunked_prefill", "prefix_cache")])
def test_a_resumed_request_gives_the_rest_of_its_answer(harness, given: int, on: tuple[str, ...]) -> None:
    settings = {"chunked_prefill": {"mode": "fixed", "chunk_size": 4}}
    plain = harness(on=on, settings=settings)
    plain.add("a", 10, max_tokens=9)
    plain.run()
    assert len(plain.tokens["a"]) == 9
    h = harness(on=on, settings=settings)
    h.add("a", 10, max_tokens=9, resumed=Resumed(tokens=plain.tokens["a"][:given]))
    h.run()
    assert h.tokens["a"] == plain.tokens["a"][given:]
    assert h.finished["a"].reason == plain.finished["a"].reason
    assert h.inputs[0].new[0].num_prompt_tokens == 10
    chunks = -(-(10 + given) // 4) if on else 1
    assert len(h.plans) == chunks + 9 - given - 1


def test_prompt_logprobs_that_went_out_do_not_go_out_again(harness) -> None:
    """Nor are any lost: the prompt is run again, in other chunks."""
    plain = harness(plugins=(Scorer,), on=("scorer",))
    plain.add("a", 10, max_tokens=2, fields={"score": 1})
    plain.run()
    for sent in range(10):
        h = harness(
            plugins=(Scorer,),
            on=("scorer", "chunked_prefill"),
            settings={"chunked_prefill": {"mode": "fixed", "chunk_size": 3}},
        )
        h.add("a", 10, max_tokens=2, fields={"score": 1}, resumed=Resumed(prompt_logprobs=sent))
        h.run()
        assert len(h.plans) == 5, "four chunks and a token"
        assert h.prompt_logprobs.get("a", []) == plain.prompt_logprobs["a"][sent:]
