"""Cost of scheduling: schedule + update per step while N requests decode; no model runs.

    python bench/scheduler.py [--peer-python PYTHON --peer-model DIR] [--steps 64] [--json FILE]

Work measured, the same for both sides: plan every request, grow block tables, append the sampled token, check stop ids and lengths,
hash blocks that became full (prefix cache on; one request in 16 each step), build the output message. Ours also publishes the plan on a
bus with a history and encodes the output as it goes to the front process. Default plugins are on; prompts of 128 to 143 tokens, block
size 16, medians over the steps after all prompts and 10 steps of warm-up. "hashing" is the prefix cache's share of that time.
With --peer-python, an interpreter that can import vllm, its scheduler does the same work in turn, each side three times, and the ratio of
the medians is printed. The peer needs a model directory (its configuration is read, nothing is loaded).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import msgspec

from tokenbus.core.bus import Bus
from tokenbus.core.config import Config, from_mapping
from tokenbus.core.contexts import EngineContext
from tokenbus.core.host import PluginHost
from tokenbus.core.kv.pool import BlockPool
from tokenbus.core.messages import StepOutput
from tokenbus.core.plan import StepPlan, StepResult
from tokenbus.core.request import AdmittedRequest
from tokenbus.core.scheduling.scheduler import Scheduler
from tokenbus.plugins.chunked_prefill import ChunkedPrefill
from tokenbus.plugins.prefix_cache import PrefixCache
from tokenbus.plugins.scheduling.unified import Unified

SIZES = (32, 256, 1024)
ROUNDS = 3
PROMPT = 128
WARM_UP = 10

PEER = r"""
import json, os, sys, time
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

size, steps, warm_up, prompt, model = *map(int, sys.argv[1:5]), sys.argv[5]
model_config = ModelConfig(model=model, dtype="bfloat16", seed=0, max_model_len=4096)
scheduler_config = SchedulerConfig(max_num_seqs=size, max_num_batched_tokens=8192, max_model_len=4096,
                                   enable_chunked_prefill=True, is_encoder_decoder=False)
cache_config = CacheConfig(block_size=16, gpu_memory_utilization=0.5, cache_dtype="auto", enable_prefix_caching=True)
cache_config.num_gpu_blocks = 400000
config = VllmConfig(scheduler_config=scheduler_config, model_config=model_config, cache_config=cache_config)
spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
kv = KVCacheConfig(num_blocks=400000, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
scheduler = Scheduler(vllm_config=config, kv_cache_config=kv, log_stats=True,
                      structured_output_manager=StructuredOutputManager(config), block_size=16)
init_none_hash(sha256)
hasher = get_request_block_hasher(16, sha256)
for i in range(size):
    params = SamplingParams(ignore_eos=True, max_tokens=2000)
    scheduler.add_request(Request(request_id=f"request-{i}", prompt_token_ids=[(i * 7 + j) % 40000 for j in range(prompt + i % 16)],
                                  sampling_params=params, pooling_params=None, block_hasher=hasher))
times = []
decoding = 0
while decoding < steps + warm_up:
    began = time.perf_counter()
    plan = scheduler.schedule()
    middle = time.perf_counter()
    ids = list(plan.num_scheduled_tokens)
    done = plan.total_num_scheduled_tokens == size == len(ids)
    sampled = [[5] if r.num_computed_tokens >= r.num_tokens else [] for r in map(scheduler.requests.get, ids)]
    output = ModelRunnerOutput(req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled,
                               logprobs=None, prompt_logprobs_dict={}, pooler_output=[])
    resumed = time.perf_counter()
    scheduler.update_from_output(plan, output)
    ended = time.perf_counter()
    if done:
        decoding += 1
        if decoding > warm_up:
            times.append(middle - began + ended - resumed)
print(json.dumps(times))
"""


def make(size: int) -> tuple[Scheduler, PrefixCache]:
    host = PluginHost("engine")
    for cls in (ChunkedPrefill, PrefixCache, Unified):
        host.add(cls)
    switches = host.start_switches()
    host.load(switches.on)
    config: Config = from_mapping({"scheduler": {"token_budget": 8192, "max_running": size}}, "bench")
    pool = BlockPool(400_000, 16)
    for impl in host.table(switches.on).engine_started:
        impl(engine=EngineContext(bus=Bus(), config=config, pool=pool))

    def failed(name: str, error: Exception) -> None:
        raise RuntimeError(name) from error

    scheduler = Scheduler(
        config,
        max_model_len=4096,
        eos_token_ids=frozenset({2}),
        pool=pool,
        host=host,
        switches=switches,
        on_plugin_failure=failed,
    )
    for i in range(size):
        prompt = [(i * 7 + j) % 40000 for j in range(PROMPT + i % 16)]
        scheduler.add(
            AdmittedRequest(
                request_id=f"request-{i}", prompt=prompt, max_tokens=2000, features=switches.names(), arrival=float(i)
            ),
            0.0,
        )
    cache = host.loaded["prefix_cache"]
    assert isinstance(cache, PrefixCache)
    return scheduler, cache


def ours(size: int, steps: int) -> tuple[list[float], float]:
    """Seconds of schedule + update for each step after the warm-up, and the prefix cache's share of them."""
    scheduler, cache = make(size)
    bus = Bus()
    history: list[StepPlan] = []
    bus.listen(history.append, StepPlan)
    encoder = msgspec.msgpack.Encoder()
    times: list[float] = []
    cached_before = 0.0
    output = StepOutput(step_id=0)
    decoding = 0
    while decoding < steps + WARM_UP:
        began = time.perf_counter()
        planned = scheduler.schedule(began)
        assert planned is not None
        plan, order = planned
        bus.publish(plan)
        middle = time.perf_counter()
        requests = scheduler.requests
        sampled = {name: [5] for name, n in order.num_tokens.items() if n == requests[name].remaining}
        result = StepResult(step_id=plan.step_id, sampled=sampled)
        resumed = time.perf_counter()
        output = scheduler.update(plan, result, resumed, 0.02)
        encoder.encode(output)
        ended = time.perf_counter()
        if len(plan.num_tokens) == size and not plan.num_prompt_tokens:
            decoding += 1
            if decoding == WARM_UP:
                cached_before = cache.seconds
            elif decoding > WARM_UP:
                times.append(middle - began + ended - resumed)
    assert msgspec.msgpack.decode(encoder.encode(output), type=StepOutput).step_id >= steps
    return times, (cache.seconds - cached_before) / sum(times)


def peer(python: str, model: str, size: int, steps: int) -> list[float]:
    run = subprocess.run(
        [python, "-c", PEER, str(size), str(steps), str(WARM_UP), str(PROMPT), model],
        check=True, capture_output=True, text=True, env={**os.environ, "MODEL_DIR": model},
    )  # fmt: skip
    return json.loads(run.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of schedule + update per step")
    parser.add_argument("--peer-python", help="an interpreter that can import vllm")
    parser.add_argument("--peer-model", help="a Hugging Face model directory for the peer")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    if bool(options.peer_python) != bool(options.peer_model):
        parser.error("--peer-python and --peer-model go together")
    rows = []
    print(
        f"{'running':>8}  {'median ms':>10}  {'p90 ms':>8}  {'hashing':>8}"
        + ("  peer ms     ratio" if options.peer_python else "")
    )
    for size in SIZES:
        mine: list[float] = []
        theirs: list[float] = []
        share = 0.0
        for _ in range(ROUNDS):
            times, share = ours(size, options.steps)
            mine += times
            if options.peer_python:
                theirs += peer(options.peer_python, options.peer_model, size, options.steps)
        row = {
            "running": size,
            "median_ms": statistics.median(mine) * 1e3,
            "p90_ms": statistics.quantiles(mine, n=10)[-1] * 1e3,
            "hashing": share,
        }
        line = f"{size:>8}  {row['median_ms']:>10.3f}  {row['p90_ms']:>8.3f}  {share:>8.1%}"
        if theirs:
            row |= {
                "peer_median_ms": statistics.median(theirs) * 1e3,
                "ratio": statistics.median(mine) / statistics.median(theirs),
            }
            line += f"  {row['peer_median_ms']:>7.3f}  {row['ratio']:>8.3f}"
        rows.append(row)
        print(line, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
