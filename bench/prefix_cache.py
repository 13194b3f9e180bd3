"""What the prefix cache costs when nothing is ever found: its summed time over the time of the steps, with the demo model."""

from __future__ import annotations

import argparse
import random
import time

import torch

from tokenbus.core.bus import Bus
from tokenbus.core.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from tokenbus.core.contexts import EngineContext
from tokenbus.core.host import PluginHost
from tokenbus.core.kv.pool import BlockPool
from tokenbus.core.request import AdmittedRequest
from tokenbus.core.scheduling.scheduler import Scheduler
from tokenbus.core.worker.runner import ModelRunner


def host(role: str) -> PluginHost:
    made = PluginHost(role)
    made.discover()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    options = parser.parse_args()

    blocks = 4096
    config = Config(
        model=ModelConfig(model=options.model, dtype=options.dtype),
        cache=CacheConfig(num_blocks=blocks),
        scheduler=SchedulerConfig(),
    )
    engine = host("engine")
    switches = engine.start_switches()
    engine.load(switches.on)
    pool = BlockPool(blocks, config.cache.block_size)
    for impl in engine.table(switches.on).engine_started:
        impl(engine=EngineContext(bus=Bus(), config=config, pool=pool))
    runner = ModelRunner(config, switches.names(), host("worker"))
    info = runner.load()
    runner.allocate(blocks)
    scheduler = Scheduler(
        config,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(),
        pool=pool,
        host=engine,
        switches=switches,
        on_plugin_failure=lambda name, error: print("plugin failed:", name, error),
    )
    draw = random.Random(1)
    for index in range(options.requests):
        prompt = [draw.randrange(info.vocab_size) for _ in range(options.prompt)]
        scheduler.add(
            AdmittedRequest(
                request_id=str(index), prompt=prompt, max_tokens=options.output, temperature=0.0, features=switches.names()
            ),
            time.time(),
        )
    steps, busy, hits = 0, 0.0, 0.0
    while scheduler.has_work():
        began = time.perf_counter()
        planned = scheduler.schedule(time.time())
        if planned is None:
            break
        plan, order = planned
        output = scheduler.update(plan, runner.run(order), time.time(), time.perf_counter() - began)
        busy += time.perf_counter() - began
        steps += 1
        hits += output.report.counters.get("prefix_cache.hit_tokens", 0.0) if output.report else 0.0
    spent = engine.loaded["prefix_cache"].seconds
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.model} in {options.dtype}")
    print(
        f"{options.requests} requests of {options.prompt} + {options.output} tokens: {steps} steps, {busy:.2f} s, hits {hits:.0f} tokens"
    )
    print(f"prefix cache: {spent * 1e3:.2f} ms = {100 * spent / busy:.3f} % of step time")


if __name__ == "__main__":
    main()
