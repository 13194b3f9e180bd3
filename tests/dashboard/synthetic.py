"""A server that isn't one: the real page, and frames of a made-up engine with as many requests as one likes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tokenbus.plugins.dashboard.page import load_page


class Engine:
    """Steps of `running` requests, of which a few are replaced in each, with `waiting` behind them."""

    def __init__(self, running: int, waiting: int, *, speculative: bool = True) -> None:
        self.dice = random.Random(1)
        self.speculative = speculative
        self.step_id = 0
        self.made = 0
        self.time = time.time()
        self.frames = 0
        self.open = [self.new() for _ in range(running + waiting)]
        for one in self.open[: running * 9 // 10]:
            one["computed"] = one["prompt"]
        self.running = running
        self.features = {
            name: {"on": on, "scope": scope, "lossless": lossless, **({} if on else {"because": "not on by default"})}
            for name, on, scope, lossless in (
                ("chunked_prefill", True, "request", True),
                ("prefix_cache", True, "request", True),
                ("quantization.int8", False, "engine", False),
                ("sampling.penalties", True, "step", False),
                ("scheduling.priority", False, "step", True),
                ("speculative.ngram", True, "request", True),
            )
        }

    def new(self) -> dict[str, Any]:
        self.made += 1
        prompt = self.dice.choice((40, 180, 900, 2400))
        return {
            "id": f"cmpl-{self.made:020x}-0", "prompt": prompt, "computed": 0, "output": 0, "max": self.dice.randint(60, 400),
            "arrival": self.time,
        }  # fmt: skip

    def step(self, ids: dict[str, int]) -> dict[str, Any]:
        self.step_id += 1
        prefill: dict[int, int] = {}
        verify: dict[int, tuple[int, int]] = {}
        decode: list[int] = []
        budget = 2048 - self.running
        for index, one in enumerate(self.open[: self.running]):
            row = ids.setdefault(one["id"], len(ids))
            if one["computed"] < one["prompt"]:
                n = min(512, budget, one["prompt"] - one["computed"])
                if n > 0:
                    prefill[row] = n
                    one["computed"] += n
                    budget -= n
                continue
            if self.speculative and self.dice.random() < 0.15:
                good = self.dice.randint(0, 4)
                verify[row] = (4, good)
                one["output"] += 1 + good
            else:
                decode.append(row)
                one["output"] += 1
            if one["output"] >= one["max"]:
                self.open[index] = self.new()
        seconds = 0.02 + sum(prefill.values()) * 4e-5 + len(decode) * 2e-5
        began, self.time = self.time, self.time + seconds
        drafts = sum(n for n, _ in verify.values())
        return {
            "step_id": self.step_id, "started": began, "duration": seconds, "prefill": prefill, "verify": verify,
            "decode": decode, "num_decodes": len(decode), "prompt_tokens": sum(prefill.values()), "draft_tokens": drafts,
            "sampled": len(decode) + len(verify), "preempted": [0] if self.step_id % 40 == 0 else [], "budget": 2048,
            "running": self.running, "waiting": len(self.open) - self.running, "phases": {"forward": seconds * 0.9},
            "bytes_moved": 10**9, "flops": 10**10,
        }  # fmt: skip

    def frame(self, steps: int) -> dict[str, Any]:
        ids: dict[str, int] = {}
        made = [self.step(ids) for _ in range(steps)]
        self.frames += 1
        latency = {"count": 800, "p50": 0.11, "p95": 0.4 + 0.1 * self.dice.random(), "p99": 0.9, "max": 1.4}
        gaps = {"count": 8192, "p50": 0.03, "p95": 0.05 + 0.01 * self.dice.random(), "p99": 0.09, "max": 0.2}
        parts = [(8, 0, 0) if i < 300 else (2, 4, 2) if i < 380 else (0, 0, 8) for i in range(512)]
        return {
            "time": self.time, "server": {"state": "ready", "doubt": "", "open": len(self.open), "restarts": 0, "suspects": 0},
            "steps": made, "ids": list(ids), "lost_steps": 0,
            "engine": {
                "open": len(self.open), "running": self.running, "waiting": len(self.open) - self.running, "free_blocks": 1216,
                "retained_blocks": 320, "num_blocks": 4096, "allocation_failures": 3,
            },
            "requests": [
                [one["id"], i < self.running, one["prompt"], one["computed"], one["output"], one["max"], one["arrival"], 12, 0, 0, ""]
                for i, one in enumerate(self.open[:1024])
            ],
            "blocks": parts, "window_seconds": 300.0, "latency": {"ttft": latency, "inter_token": gaps},
            "finished": {"stop": 700, "length": 100, "DeadlineError": 2}, "ended": {"requests": 802}, "refused": {"429 OverloadedError": 5},
            "arms": {"drafts/with": {"requests": 60, "errors": 0, "ttft": latency, "inter_token": gaps}}, "lag": {},
            "events": [{"when": self.time - 60, "kind": "engine", "text": "engine ready: synthetic, restarts 0"}],
            "limits": {"max_running": 1024, "max_waiting": 1024, "token_budget": 2048},
            "info": {"model": "synthetic", "dtype": "bfloat16", "lossless": True},
        }  # fmt: skip


EXPERIMENTS = {
    "drafts": {
        "status": "running", "run": 1, "split": "request", "traffic": 0.5, "control": "without", "shared_steps": True,
        "note": "the arms shared steps", "arms": {
            "without": {"share": 0.5, "features": {"speculative.ngram": False}, "counted": 58, "failed": 0},
            "with": {"share": 0.5, "features": {"speculative.ngram": True}, "counted": 60, "failed": 1},
        },
    }
}  # fmt: skip


@asynccontextmanager
async def serve(
    engine: Engine, *, steps: int = 6, experiments: bool = True, period: float = 0.25, key: str = "", port: int = 0
) -> AsyncIterator[str]:
    """Its address."""

    async def page(_: web.Request) -> web.Response:
        made = load_page()
        return web.Response(body=made.body, headers=made.headers)

    def refused(request: web.Request) -> web.Response | None:
        if not key or request.headers.get("Authorization") == f"Bearer {key}":
            return None
        return web.json_response({"error": {"message": "the admin key is needed"}}, status=401)

    async def events(request: web.Request) -> web.StreamResponse:
        if (no := refused(request)) is not None:
            return no
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + json.dumps(engine.frame(steps)).encode() + b"\n\n")
            await asyncio.sleep(period)

    async def features(request: web.Request) -> web.Response:
        if (no := refused(request)) is not None:
            return no
        if request.method == "POST":
            for name, wish in (await request.json())["features"].items():
                if engine.features[name]["scope"] == "engine":
                    return web.json_response({"error": {"message": f"{name} can only be chosen at start"}}, status=409)
                engine.features[name]["on"] = wish
        return web.json_response({"features": engine.features, "slots": {"attention": "attention.cpu"}})

    async def shown(request: web.Request) -> web.Response:
        if (no := refused(request)) is not None:
            return no
        if not experiments:
            return web.json_response({"error": {"message": "nothing here"}}, status=404)
        return web.json_response({"experiments": EXPERIMENTS})

    app = web.Application()
    app.router.add_get("/dashboard", page)
    app.router.add_get("/v1/tokenbus/events", events)
    app.router.add_route("*", "/v1/tokenbus/features", features)
    app.router.add_get("/v1/tokenbus/experiments", shown)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
