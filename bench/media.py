"""Text requests' inter-token latency while images are decoded, processed and encoded, over the same without images."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "photo"))

from photo import make_model, wait_ready  # noqa: E402 - of the example

_number = itertools.count()


def picture(side: int) -> str:
    """The data URL of a JPEG that nobody has seen yet: no cache has it."""
    small = np.random.default_rng(next(_number)).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@contextmanager
def serving(hidden: int, layers: int) -> Iterator[str]:
    """A server of a LLaVA with random weights; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), hidden, layers)
        words = ["serve", "--model", folder, "--dtype", "bfloat16", "--port", str(port), "--log-level", "warning"]
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


async def images(http: aiohttp.ClientSession, urls: list[str], stop: asyncio.Event) -> int:
    """One request with an image after the other, until told to stop; how many."""
    done = 0
    while not stop.is_set() and urls:
        parts = [{"type": "image_url", "image_url": {"url": urls.pop()}}, {"type": "text", "text": "?"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        async with http.post("/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()
        done += 1
    return done


async def one_round(http: aiohttp.ClientSession, options: argparse.Namespace, urls: list[str]) -> tuple[list[float], int]:
    """Gaps of all text streams, and images that were answered meanwhile."""
    stop = asyncio.Event()
    senders = [asyncio.create_task(images(http, urls, stop)) for _ in range(options.senders if urls else 0)]
    gaps = await asyncio.gather(*(text(http, options.tokens) for _ in range(options.streams)))
    stop.set()
    return [gap for stream in gaps for gap in stream], sum(await asyncio.gather(*senders))


async def measure(server: str, options: argparse.Namespace) -> None:
    ratios, tails = [], []
    async with aiohttp.ClientSession(server, timeout=aiohttp.ClientTimeout(600)) as http:
        await one_round(http, options, [picture(options.side) for _ in range(options.senders)])
        for index in range(options.rounds):
            found = {}
            for kind in ("text", "images") if index % 2 else ("images", "text"):  # each goes first as often
                urls = [picture(options.side) for _ in range(options.images)] if kind == "images" else []
                gaps, sent = await one_round(http, options, urls)
                found[kind] = (statistics.fmean(gaps), float(np.quantile(gaps, 0.99)))
                count = f", {sent} images of {options.side} x {options.side} answered" if urls or sent else ""
                print(f"{kind:7} mean {1e3 * found[kind][0]:.2f} ms, p99 {1e3 * found[kind][1]:.2f} ms{count}")
                if kind == "images" and not urls:
                    print("        the images were all sent before the texts had ended: give more --images")
            ratios.append(found["images"][0] / found["text"][0])
            tails.append(found["images"][1] / found["text"][1])
    for name, values in (("mean", ratios), ("p99", tails)):
        print(
            f"{name}: {statistics.median(values):.3f} x without images ({min(values):.3f} to {max(values):.3f}, {len(values)} pairs)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of rounds, with images and without")
    parser.add_argument("--streams", type=int, default=4, help="texts at the same time")
    parser.add_argument("--tokens", type=int, default=300, help="of each text's answer")
    parser.add_argument("--images", type=int, default=200, help="different ones for a round: more than are answered in it")
    parser.add_argument("--senders", type=int, default=1, help="requests with an image at the same time")
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    with serving(options.hidden, options.layers) as server:
        asyncio.run(measure(server, options))


if __name__ == "__main__":
    main()
