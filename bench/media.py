"""Text requests' inter-token latency while images are processed, and encoded, over the same without images."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "photo"))

from photo import PATCH, SIDE, make_model, wait_ready  # noqa: E402 - of the example

KINDS = ("alone", "processed", "prompts", "images")
"""Texts alone; beside images that are decoded and processed, and then refused; beside texts as long as an image; beside images."""
_number = itertools.count()


def picture(side: int) -> str:
    """The data URL of a JPEG that nobody has seen yet: no cache has it."""
    small = np.random.default_rng(next(_number)).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@contextmanager
def serving(hidden: int, layers: int, tower_layers: int, more: list[str]) -> Iterator[str]:
    """A server of a LLaVA with random weights; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), hidden, layers, tower_layers)
        words = ["serve", "--model", folder, "--dtype", "bfloat16", "--port", str(port), "--log-level", "warning", *more]
        process = subprocess.Popen([sys.executable, "-m", "tokenbus", *words])
        try:
            wait_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


async def text(http: aiohttp.ClientSession, tokens: int) -> list[float]:
    """Seconds between the tokens of one streamed answer."""
    body = {"messages": [{"role": "user", "content": f"Text {next(_number)}"}], "max_tokens": tokens, "stream": True}
    async with http.post("/v1/chat/completions", json={**body, "temperature": 0}) as answer:
        answer.raise_for_status()
        times = [
            time.perf_counter()
            async for line in answer.content
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"]
        ]
    return [later - sooner for sooner, later in itertools.pairwise(times)]


def beside(kind: str, url: str) -> dict[str, Any]:
    """What one sender asks for: an image, whose answer is one token; or one that is refused when its image has been processed, for its
    answer would be too long; or a text of as many tokens as the image has."""
    if kind == "prompts":
        return {"messages": [{"role": "user", "content": f"{next(_number):0{(SIDE // PATCH) ** 2}}?"}], "max_tokens": 1}
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 10**6 if kind == "processed" else 1}


async def send(http: aiohttp.ClientSession, kind: str, urls: list[str], stop: asyncio.Event) -> int:
    """One such request after the other, until told to stop; how many."""
    done = 0
    while not stop.is_set() and urls:
        async with http.post("/v1/chat/completions", json=beside(kind, urls.pop())) as answer:
            if answer.status != (400 if kind == "processed" else 200):
                raise RuntimeError(f"{kind}: status {answer.status}: {await answer.text()}")
            await answer.read()
        done += 1
    return done


async def one_round(http: aiohttp.ClientSession, kind: str, options: argparse.Namespace) -> tuple[list[float], int]:
    """Gaps of all text streams, and how many requests were answered beside them."""
    stop = asyncio.Event()
    urls = [] if kind == "alone" else [picture(options.side) for _ in range(options.images)]
    senders = [asyncio.create_task(send(http, kind, urls, stop)) for _ in range(options.senders if urls else 0)]
    gaps = await asyncio.gather(*(text(http, options.tokens) for _ in range(options.streams)))
    if kind != "alone" and not urls:
        print(f"{kind}: all were sent before the texts had ended: give more --images")
    stop.set()
    return [gap for stream in gaps for gap in stream], sum(await asyncio.gather(*senders))


async def measure(server: str, options: argparse.Namespace) -> None:
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    async with aiohttp.ClientSession(server, timeout=aiohttp.ClientTimeout(600)) as http:
        for kind in KINDS:
            stop = asyncio.Event()
            await send(http, kind, [picture(options.side)], stop)
        await one_round(http, "alone", options)
        for index in range(options.rounds):
            for kind in KINDS[index % len(KINDS) :] + KINDS[: index % len(KINDS)]:  # each goes first as often
                gaps, sent = await one_round(http, kind, options)
                mean, p99 = statistics.fmean(gaps), float(np.quantile(gaps, 0.99))
                found[kind].append((mean, p99))
                print(
                    f"{kind:9} mean {1e3 * mean:6.2f} ms, p99 {1e3 * p99:6.2f} ms, {sent} requests beside the texts", flush=True
                )
    for kind in KINDS[1:]:
        for name, column in (("mean", 0), ("p99", 1)):
            values = [there[column] / alone[column] for there, alone in zip(found[kind], found["alone"], strict=True)]
            spread = f"{min(values):.2f} to {max(values):.2f}, {len(values)} pairs"
            print(f"{kind:9} {name:4} {statistics.median(values):.2f} x alone ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each kind")
    parser.add_argument("--streams", type=int, default=4, help="texts at the same time")
    parser.add_argument("--tokens", type=int, default=300, help="of each text's answer")
    parser.add_argument("--images", type=int, default=200, help="different ones for a round: more than are answered in it")
    parser.add_argument("--senders", type=int, default=1, help="requests with an image at the same time")
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tower-layers", type=int, default=16)
    parser.add_argument("--arg", default="", help='more for `tokenbus serve`: "--encoder-slice-ms 0"')
    options = parser.parse_args()
    with serving(options.hidden, options.layers, options.tower_layers, shlex.split(options.arg)) as server:
        asyncio.run(measure(server, options))


if __name__ == "__main__":
    main()
