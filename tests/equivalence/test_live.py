"""Front and engine together: live switches while requests run, each request with pins of its own, and still the same answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import anyio
import msgspec
import pytest
from equivalence_stand import Ask, Stand

from tokenbus.core.bus import Bus
from tokenbus.core.config import from_mapping
from tokenbus.core.front.client import EngineClient, TokenStream
from tokenbus.core.host import make_host
from tokenbus.core.messages import Finish

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("kernels", ["cpu", pytest.param("torch", marks=pytest.mark.long)], indirect=True),
]

SPEED = ("chunked_prefill", "prefix_cache")
PINS: list[dict[str, bool]] = [
    {},
    {"chunked_prefill": False},
    {"prefix_cache": False},
    dict.fromkeys(SPEED, False),
    {"keep": True},
]
"""The last: True for whatever is on as it is admitted."""
CHANGES = [
    {"prefix_cache": False}, {"chunked_prefill": False}, dict.fromkeys(SPEED, True), {"sampling.logprobs": False, "chunked_prefill": False},
    {"sampling.logprobs": True, "prefix_cache": False}, dict.fromkeys(SPEED, True),
]  # fmt: skip


def asks() -> list[Ask]:
    """Waves of five, one for each kind of pins; the beginnings of the prompts are shared, so that the cache has something to give."""
    made = []
    for wave in range(len(CHANGES)):
        for index in range(len(PINS)):
            prompt = [20 + (7 * i + i * i) % 200 for i in range(33 + 16 * index)] + [30 + wave, 40 + index]
            kind: dict[str, Any] = {"temperature": 0.8, "seed": wave} if (wave + index) % 2 else {}
            made.append(Ask(prompt=prompt, max_tokens=40, fields={"logprobs": 2, "ignore_eos": True}, **kind))
    return made


async def test_pins_and_live_switches_change_no_answer(tiny_stand: Stand):
    wanted = [tiny_stand.run([ask], off=SPEED, threads=1).answers[0] for ask in asks()]
    config = from_mapping(
        {
            "model": {
                "model": tiny_stand.runner.config.model.model,
                "kernels": tiny_stand.runner.config.model.kernels,
                "dtype": "float32",
                "max_model_len": 512,
                "threads": 2,
            },
            "cache": {"num_blocks": 32, "block_size": 16},
            "scheduler": {"token_budget": 48},
            "plugins": {"chunked_prefill": {"mode": "fixed", "chunk_size": 13}},
        },
        "test",
    )
    host = make_host("front", config)
    client = EngineClient(config, Bus(), host, host.start_switches(tiny_stand.enable))
    got: dict[str, tuple[list[int], list[Any]]] = {}
    admitted: dict[str, Any] = {}
    finished: dict[str, Finish] = {}

    async def read(stream: TokenStream, begun: anyio.Event) -> None:
        tokens, logprobs = got.setdefault(stream.request_id, ([], []))
        async for chunk in stream:
            tokens += chunk.tokens
            logprobs += chunk.logprobs or []
            if len(tokens) > 3:
                begun.set()
        assert stream.finish is not None
        finished[stream.request_id] = stream.finish

    async with anyio.create_task_group() as tasks:
        await tasks.start(lambda *, task_status: client.run(task_status=task_status))
        await client.wait_ready()
        async with anyio.create_task_group() as readers:
            for wave, change in enumerate(CHANGES):
                some = asks()[wave * len(PINS) : (wave + 1) * len(PINS)]
                requests = [admit(tiny_stand, client, ask, pins) for ask, pins in zip(some, PINS, strict=True)]
                admitted |= {request.request_id: request for request in requests}
                begun = anyio.Event()
                for stream in client.submit(requests):
                    readers.start_soon(read, stream, begun)
                await begun.wait()
                await client.set_features(change, "test")
        stats = await client.query("stats")
        assert (await client.query("integrity"))["ok"]
        assert (stats["open"], stats["free_blocks"], set(stats["on"])) == (0, 32, client.switches.on)
        assert set(stats["loaded"]) == set(client.host.loaded) == client.switches.on
        await client.close()

    for request_id, truth in zip(admitted, wanted, strict=True):
        asked = "logprobs" in admitted[request_id].fields
        assert got[request_id] == (truth.tokens, truth.logprobs if asked else []), f"{request_id}: {finished[request_id]}"
    moved: Counter[str] = Counter()
    for request_id, request in admitted.items():
        before, after = frozenset(request.features), frozenset(finished[request_id].features)
        assert not (before ^ after) & request.pinned.keys(), "a pin was not kept"
        assert "sampling.logprobs" in after or "logprobs" not in request.fields
        moved.update(f"-{name}" for name in before - after)
        moved.update(f"+{name}" for name in after - before)
    assert {"-prefix_cache", "-chunked_prefill", "+chunked_prefill"} <= moved.keys()
    assert sum(finish.cached_tokens for finish in finished.values()) > 0
    assert sum(finish.preemptions for finish in finished.values()) > 0


def admit(stand: Stand, client: EngineClient, ask: Ask, pins: dict[str, bool]) -> Any:
    """As admission does it: what is on, less what the client pinned off. `sampling.logprobs`, which goes off for one wave, is kept."""
    on = client.switches.on
    pins = {name: True for name in SPEED if name in on} if "keep" in pins else pins
    features = tuple(sorted(on - {name for name, wish in pins.items() if not wish}))
    fields = ask.fields if "sampling.logprobs" in on else {name: v for name, v in ask.fields.items() if name != "logprobs"}
    return msgspec.structs.replace(stand.admit(replace(ask, fields=fields), features), pinned=pins)
