"""What dispatching hooks costs a step: all built-in plugins on, 32 running requests that use them, the demo model.

    python bench/hooks.py [--requests 32] [--repeat 50] [--out FILE]

Scheduler and model runner run in this process, without IPC. "All built-ins": every plugin that can be on with the others and is no part
of the weights; of a slot's plugins the default one. Every request is sampled with truncation, penalties, bias, logprobs, `min_tokens`,
and one in four is held to a regular expression.

    a step      CPU time of the whole process and wall time between two ends of steps, median over steps in which all requests decode;
                the run has no tracer
    dispatch    a second run notes every hook call of such steps, with arguments and answer; each is then made again, `repeat` times,
                with a function that only gives the answer back in the plugin's place: looking up nothing, packing arguments,
                the call through `Impl`, the check of the answer. CPU time, the empty function's own call included
    with work   the same calls as they were in the second run, plugins' own work included; wall time

What is not counted: the loops of scheduler and sampler around the calls, and what front and API do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tokenbus.core.config import from_mapping
from tokenbus.core.host import Impl, make_host
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.testing.stand import AdmittingStand, FeatureAsk
from tokenbus.testing.tracer import HookCall, TracingHost

PROMPT, ANSWER = 64, 14
LIMIT = 0.05


class Clock(Plugin):
    """Notes when steps end in which everybody decodes."""

    info = PluginInfo(name="bench.clock", summary="", scope="step", lossless=True)
    expected: ClassVar[int] = 0
    previous: ClassVar[tuple[float, float] | None] = None
    steps: ClassVar[list[tuple[float, float]]] = []
    """(wall, CPU) seconds."""

    @hookimpl(trylast=True)
    def step_finished(self, plan: Any) -> None:
        cls, now = type(self), (time.perf_counter(), time.process_time())
        if is_full(plan, self.expected) and self.previous is not None:
            cls.steps.append((now[0] - self.previous[0], now[1] - self.previous[1]))
        cls.previous = now


def is_full(plan: Any, expected: int) -> bool:
    return len(plan.num_tokens) == expected and not plan.num_prompt_tokens


def make_config() -> Any:
    recorder = {"path": tempfile.mkdtemp(prefix="tokenbus-hooks-")}
    return from_mapping(
        {"model": {"model": "demo", "dtype": "bfloat16", "max_model_len": 512}, "plugins": {"recorder": recorder}}, "bench"
    )


def built_ins() -> tuple[str, ...]:
    host = make_host("engine", make_config())
    default = host.start_switches().on
    more = (
        name
        for name in sorted(host.catalogue.keys() - default)
        if host.sources[name] == "tokenbus"
        and host.info(name).slot is None
        and host.info(name).scope != "engine"
        and not host.info(name).resident  # needs another model
    )
    return (*sorted(default), *more)


def asks(count: int) -> list[FeatureAsk]:
    fields = {
        "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "logit_bias": {"100": 1.0},
        "logprobs": 2, "min_tokens": 4, "stop_token_ids": [7],
    }  # fmt: skip
    grammar = {"structured_outputs": {"regex": "[a-z ]{100,200}"}}
    return [
        FeatureAsk(
            [1000 + (7919 * i + 31 * k) % 40000 for k in range(PROMPT)], ANSWER, 0.8, i,
            fields=fields | (grammar if i % 4 == 0 else {}),
        )
        for i in range(count)
    ]  # fmt: skip


def full_steps(calls: list[HookCall], expected: int) -> list[list[HookCall]]:
    """The calls of each step in which everybody decodes; a step ends with its `step_finished` calls."""
    steps, current = [], []
    for call, after in zip(calls, [*calls[1:], None], strict=True):
        current.append(call)
        if call.hook == "step_finished" and (after is None or after.hook != "step_finished"):
            if is_full(call.arguments["plan"], expected):
                steps.append(current)
            current = []
    return steps


def replayed(calls: list[HookCall], host: Any, repeat: int) -> float:
    """CPU seconds that dispatching these calls once takes."""
    prepared: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (Impl(call.hook, host.info(call.plugin), partial(_give, call.answer)), dict(call.arguments))
        for call in calls
        if call.plugin != Clock.info.name
    ]
    for impl, arguments in prepared:
        impl(**arguments)
    began = time.thread_time()
    for _ in range(repeat):
        for impl, arguments in prepared:
            impl(**arguments)
    return (time.thread_time() - began) / repeat


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _give(answer: Any, **_arguments: Any) -> Any:
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    Clock.expected = options.requests
    names = built_ins()
    run = {"max_running": options.requests, "blocks": 2000, "token_budget": 4096}
    plain = AdmittingStand(make_config(), names, ())
    plain.run(asks(2), **run)
    plain.run(asks(options.requests), plugins=(Clock,), on=(Clock.info.name,), **run)
    wall, cpu = (statistics.median(column) for column in zip(*Clock.steps, strict=True))
    calls: list[HookCall] = []
    traced = AdmittingStand(make_config(), names, (), host_kind=partial(TracingHost, calls=calls))
    traced.run(asks(options.requests), **run)
    steps = full_steps(calls, options.requests)
    dispatch = statistics.median(replayed(step, traced.front.host, options.repeat) for step in steps)
    work = statistics.median(sum(call.seconds for call in step) for step in steps)
    counted = Counter(call.hook for call in steps[len(steps) // 2])
    held = dispatch <= LIMIT * min(cpu, wall)
    load = f"load average at the end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    page = [
        f"# Hook dispatch, SmolLM2-135M on a CPU, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"    scripts/bench hooks --requests {options.requests}",
        "",
        f"{options.requests} running requests, bfloat16, {len(Clock.steps)} steps timed, {len(steps)} traced; {load}.",
        f"On: {', '.join(f'`{name}`' for name in names)}.",
        "",
        "| | ms a step | of a step's CPU time | of its wall time |",
        "|---|---|---|---|",
        f"| a step: CPU | {1e3 * cpu:.2f} | | |",
        f"| a step: wall | {1e3 * wall:.2f} | | |",
        f"| dispatch of {sum(counted.values())} calls | {1e3 * dispatch:.3f} | {percent(dispatch / cpu)} | {percent(dispatch / wall)} |",
        f"| the same calls with the plugins' work | {1e3 * work:.2f} | | {percent(work / wall)} |",
        "",
        f"At most {100 * LIMIT:.0f} % of a step is allowed for dispatch: {'held' if held else 'NOT HELD'}.",
        f"Calls of one step: {', '.join(f'{count} {hook}' for hook, count in counted.most_common())}.",
    ]
    print("\n".join(page))
    if options.out:
        options.out.write_text("\n".join(page) + "\n", encoding="utf-8")
    sys.exit(not held)


if __name__ == "__main__":
    main()
