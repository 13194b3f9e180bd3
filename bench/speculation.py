"""What drafts bring: one stream with and without a proposer, in alternating pairs, on text that repeats itself and on text that does not.

    python bench/speculation.py [--plugin speculative.ngram] [--pairs 20] [--only copy,edit,json,prose,noise] [--out FILE]

One server runs all; a pair is the same request with the proposer off and on, in changing order, over HTTP. Both give the same text,
which is checked. The ratio is of output tokens a second, decoding only (first token to last); its interval is that of the pairs'
median, by bootstrap.

    copy    a passage, then its beginning again: the model goes on copying
    edit    code, and then the same code again with one name changed
    json    a list in words, to be written as JSON of a schema (`--plugin` and `structured.jump_forward` on and off together)
    prose   a story's beginning, greedy
    noise   a story at temperature 1.5: nothing repeats
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.servers import MODEL, Server, Variant, served

PASSAGE = (
    "The lighthouse keeper climbed the narrow stairs every evening at six. He trimmed the wick, filled the lamp with oil, and wound "
    "the clockwork that turned the great lens. Then he sat down by the window with his logbook, wrote down the wind and the weather, "
    "and counted the ships that passed. In forty years he had counted more than ninety thousand of them, and only eleven had ever "
    "answered his greeting."
)
CODE = """def total(orders):
    result = 0
    for order in orders:
        if order.paid and not order.cancelled:
            result += order.amount * order.price
    return result


def average(orders):
    count = 0
    result = 0
    for order in orders:
        if order.paid and not order.cancelled:
            result += order.amount * order.price
            count += 1
    return result / count if count else 0
"""
ITEMS = ("hammer", "saw", "drill", "chisel", "pliers", "wrench", "level", "rasp")
LIST = "".join(f"- {name}: id {i}, in stock, {i}9.50 EUR, in the category tools\n" for i, name in enumerate(ITEMS, 1))
FORM = {
    "id": {"type": "integer", "minimum": 1, "maximum": 99},
    "name": {"type": "string", "maxLength": 20},
    "category": {"enum": ["tools", "toys"]},
    "in_stock": {"type": "boolean"},
    "price": {"type": "number", "minimum": 0, "maximum": 999},
}
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": FORM, "required": list(FORM), "additionalProperties": False},
    "minItems": len(ITEMS),
    "maxItems": len(ITEMS),
}
STORY = "Once upon a time, in a village between two mountains, there lived a clockmaker who"
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "copy": (f"{PASSAGE}\n\n{PASSAGE}\n\n{PASSAGE[:120]}", {"temperature": 0}),
    "edit": (
        f"# Version 1\n{CODE}\n# Version 2\n{CODE.replace('orders', 'bills')}\n# Version 3\n{CODE[:60]}",
        {"temperature": 0},
    ),
    "json": (f"{LIST}\nThe same list as JSON:\n", {"temperature": 0, "structured_outputs": {"json": SCHEMA}}),
    "prose": (STORY, {"temperature": 0}),
    "noise": (STORY, {"temperature": 1.5}),
}
TOKENS = 128


def ask(server: Server, plugin: str, name: str, seed: int, *, on: bool) -> tuple[float, str]:
    """(output tokens a second from the first to the last, the text)"""
    prompt, options = WORKLOADS[name]
    body = {
        "model": MODEL, "prompt": f"{seed}. {prompt}", "max_tokens": TOKENS, "ignore_eos": True, "seed": seed, "stream": True,
        "tokenbus": {"features": {plugin: on, "structured.jump_forward": on}}, **options,
    }  # fmt: skip
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    first = last = 0.0
    text = ""
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            if choices := json.loads(line[6:])["choices"]:
                last = time.perf_counter()
                first = first or last
                text += choices[0]["text"]
    return (TOKENS - 1) / (last - first), text


def interval(ratios: list[float], draw: random.Random) -> tuple[float, float]:
    """Of the median, 95 %."""
    found = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return found[100], found[3899]


def counts(server: Server, plugin: str) -> dict[str, float]:
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    begin = f'tokenbus_plugin_counts_total{{name="{plugin}.'
    return {line[len(begin) :].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", default="speculative.ngram")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    words = (
        f"{sys.executable} -m tokenbus serve --port {{port}} --served-model-name {MODEL} --log-level warning --dtype bfloat16"
    )
    rows = [
        "| text | tok/s without | with | ratio (95 %) | drafts right | tokens a verified step |",
        "|---|---|---|---|---|---|",
    ]
    draw = random.Random(1)
    with served(Variant("ours", tuple(f"{words} --enable {options.plugin}".split()), 0)) as server:
        for name in options.only.split(","):
            pairs: list[tuple[float, float]] = []
            ask(server, options.plugin, name, 0, on=True)
            before = counts(server, options.plugin)
            for seed in range(1, options.pairs + 1):
                order = (False, True) if seed % 2 else (True, False)
                found = {on: ask(server, options.plugin, name, seed, on=on) for on in order}
                if found[True][1] != found[False][1]:
                    raise SystemExit(f"{name}, seed {seed}: the texts differ:\n{found[False][1]}\n---\n{found[True][1]}")
                pairs.append((found[False][0], found[True][0]))
            time.sleep(1.2)
            after = counts(server, options.plugin)
            more = {key: value - before.get(key, 0) for key, value in after.items()}
            ratios = [on / off for off, on in pairs]
            low, high = interval(ratios, draw)
            proposed, steps = more.get("proposed_tokens", 0), more.get("verified_steps", 0)
            right = f"{more.get('accepted_tokens', 0):.0f} of {proposed:.0f}"
            each = f"{1 + more.get('accepted_tokens', 0) / steps:.2f}" if steps else "-"
            off, on = (statistics.median(column) for column in zip(*pairs, strict=True))
            rows.append(
                f"| {name} | {off:.0f} | {on:.0f} | {statistics.median(ratios):.3f} ({low:.3f} ... {high:.3f}) | {right} | {each} |"
            )
            print(rows[-1], file=sys.stderr, flush=True)
    given = " ".join(sys.argv[1:]).replace(str(options.out), f"bench/results/{options.out.name}") if options.out else ""
    page = [
        f"# Speculation with {options.plugin}, SmolLM2-135M on a CPU, {datetime.now(UTC):%Y-%m-%d}", "",
        f"    scripts/bench speculation {given}".rstrip(), "", f"{options.pairs} alternating pairs a row, one stream, bfloat16.", "", *rows,
    ]  # fmt: skip
    print("\n".join(page))
    if options.out:
        options.out.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
