"""A closed-loop load on any OpenAI-compatible server: throughput, TTFT, inter-token latency; one line of JSON for each workload.

    python bench/load.py --url http://127.0.0.1:8000 --model NAME [--workload single,c8,c32,...] [--seed 7] [--short]

Prompts are random token ids (the same for every server of one seed), sent as token lists; answers are forced to their full length with
`ignore_eos`. Workloads (requests x prompt/output): warm 2 x 200/8, for nothing but that; single 4 x 128/128 one after another;
c8 32 x 128/128, 8 at a time; c32 64 x 256/64, 32 at a time; long 6 x 2048/32, 2 at a time; prefill 4 x 2048/1 one after another;
prefix 32 x (1024 shared + 32 own)/32 over two prefixes, 8 at a time; context 8 x 4000/64, all at once; stream1, stream8, stream32
2, 8 and 32 x 16/256, 1, 8 and 32 at a time; interference: 4 streams decode, then a 3000-token prompt arrives: the worst gap between their
tokens over the median gap.
--short: as many requests as run at a time, a quarter of the output: to see that it works, not to measure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Workload:
    requests: int
    concurrency: int
    prompt: int
    output: int
    shared: int = 0
    """Tokens at the beginning that requests have in common."""
    prefixes: int = 1

    def short(self) -> Workload:
        return replace(self, requests=self.concurrency, output=max(1, self.output // 4))


WORKLOADS = {
    "warm": Workload(2, 2, 200, 8),
    "single": Workload(4, 1, 128, 128),
    "c8": Workload(32, 8, 128, 128),
    "c32": Workload(64, 32, 256, 64),
    "long": Workload(6, 2, 2048, 32),
    "prefill": Workload(4, 1, 2048, 1),
    "prefix": Workload(32, 8, 32, 32, shared=1024, prefixes=2),
    "context": Workload(8, 8, 4000, 64),
    "stream1": Workload(2, 1, 16, 256),
    "stream8": Workload(8, 8, 16, 256),
    "stream32": Workload(32, 32, 16, 256),
}


@dataclass
class Seen:
    started: float
    times: list[float] = field(default_factory=list)
    """When each piece of text came."""
    tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.started

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url.rstrip("/"), model

    async def complete(self, prompt: list[int], output: int, seen: Seen | None = None) -> Seen:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        seen = seen or Seen(time.perf_counter())
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("error"):
                    raise RuntimeError(event["error"])
                if event.get("choices"):
                    seen.times.append(time.perf_counter())
                if event.get("usage"):
                    seen.tokens = event["usage"]["completion_tokens"]
        seen.tokens = seen.tokens or len(seen.times)
        return seen


def prompts_of(load: Workload, seed: str, vocab: int) -> list[list[int]]:
    draw = random.Random(seed)
    heads = [[draw.randrange(1000, vocab) for _ in range(load.shared)] for _ in range(load.prefixes)]
    return [
        [*heads[i % load.prefixes], *(draw.randrange(1000, vocab) for _ in range(load.prompt))] for i in range(load.requests)
    ]


async def run(client: Client, load: Workload, seed: str, vocab: int) -> dict[str, Any]:
    prompts = prompts_of(load, seed, vocab)
    gate = asyncio.Semaphore(load.concurrency)

    async def one(prompt: list[int]) -> Seen:
        async with gate:
            return await client.complete(prompt, load.output)

    began = time.perf_counter()
    seen = await asyncio.gather(*(one(prompt) for prompt in prompts))
    seconds = time.perf_counter() - began
    out = sum(s.tokens for s in seen)
    gaps = [b - a for s in seen for a, b in zip(s.times, s.times[1:], strict=False)]
    figures = {
        "requests": len(seen),
        "output_tokens": out,
        "seconds": round(seconds, 3),
        "output_tok_s": round(out / seconds, 1),
        "total_tok_s": round((out + sum(map(len, prompts))) / seconds, 1),
        "median_ttft_ms": round(1e3 * statistics.median(s.ttft for s in seen), 1),
    }
    if gaps:
        figures["median_tpot_ms"] = round(1e3 * statistics.median(s.tpot for s in seen), 3)
        figures["p99_itl_ms"] = round(1e3 * sorted(gaps)[int(0.99 * (len(gaps) - 1))], 1)
    return figures


async def interference(client: Client, seed: str, vocab: int, *, streams: int = 4, prompt: int = 3000) -> dict[str, Any]:
    """Four streams decode; a long prompt arrives once all have emitted 20 tokens."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(1000, vocab) for _ in range(count)]

    alone = await client.complete(ids(prompt), 1)
    seen = [Seen(time.perf_counter()) for _ in range(streams)]
    running = [asyncio.create_task(client.complete(ids(64), 320, s)) for s in seen]
    while min(len(s.times) for s in seen) < 20:
        await asyncio.sleep(0.01)
    long = await client.complete(ids(prompt), 1)
    await asyncio.gather(*running)
    during = [
        b - a for s in seen for a, b in zip(s.times, s.times[1:], strict=False) if b >= long.started and a <= long.times[0]
    ]
    quiet = [b - a for s in seen for a, b in zip(s.times, s.times[1:], strict=False) if b < long.started]
    return {
        "median_gap_ms": round(1e3 * statistics.median(quiet), 2),
        "worst_gap_ms": round(1e3 * max(during), 1),
        "worst_over_median": round(max(during) / statistics.median(quiet), 1),
        "long_ttft_s": round(long.ttft, 3),
        "long_ttft_alone_s": round(alone.ttft, 3),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", default="warm,single,c8,c32,long,prefill,prefix,interference")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=49000)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        client = Client(session, options.url, options.model)
        for name in options.workload.split(","):
            seed = f"{options.seed} {name}"  # no workload's prompts are another's: nothing is found in a prefix cache by chance
            if name == "interference":
                result = await interference(client, seed, options.vocab)
            else:
                load = WORKLOADS[name].short() if options.short else WORKLOADS[name]
                result = await run(client, load, seed, options.vocab)
            print(json.dumps({"workload": name, **result}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
