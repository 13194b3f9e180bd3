"""A Tokenbus server whose front and engine note how long their parts take: methods are wrapped from outside, nothing in them changes.

    python -P bench/serving/traced.py front FILE serve --port ...      FILE.front and FILE.engine are written when the server ends

FILE.engine holds one dict of seconds for each step, FILE.front sums over all calls. A method that is not there (any more) is named in
"missing". The worker must be a thread of the engine (the default).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

StepOf = Callable[[tuple[Any, ...], Any], int | None]
"""(arguments, result) of a call -> the step that its time belongs to; None: not counted."""


class Trace:
    """Seconds by step and part. Calls come from the loop's thread and the worker's; a part belongs to one of them."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = defaultdict(dict)
        self.totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        """Part -> [calls, seconds]."""
        self.missing: list[str] = []
        self.running: int | None = None
        """The step that the worker computes."""

    def add(self, step: int | None, part: str, seconds: float) -> None:
        if step is not None:
            self.steps[step][part] = self.steps[step].get(part, 0.0) + seconds

    def wrap(self, where: str, part: str, step_of: StepOf | None = None) -> None:
        """where: "module:Class.method", the module without `tokenbus.`. step_of: None counts into `totals`."""
        module, _, path = where.partition(":")
        name, _, method = path.partition(".")
        try:
            owner = getattr(importlib.import_module(f"tokenbus.{module}"), name)
            old = getattr(owner, method)
        except (ImportError, AttributeError):
            self.missing.append(where)
            return
        setattr(owner, method, self.timed(old, part, step_of))

    def timed(self, old: Callable[..., Any], part: str, step_of: StepOf | None) -> Callable[..., Any]:
        def note(began: float, arguments: tuple[Any, ...], result: Any) -> None:
            seconds = time.perf_counter() - began
            if step_of is not None:
                self.add(step_of(arguments, result), part, seconds)
            else:
                self.totals[part][0] += 1
                self.totals[part][1] += seconds

        @functools.wraps(old)
        async def later(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = await old(*arguments, **options)
            note(began, arguments, result)
            return result

        @functools.wraps(old)
        def now(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = old(*arguments, **options)
            note(began, arguments, result)
            return result

        return later if inspect.iscoroutinefunction(old) else now

    def write(self, path: str) -> None:
        content = {"steps": self.steps, "totals": self.totals, "missing": self.missing}
        Path(path).write_text(json.dumps(content), encoding="utf-8")


def _own_step(arguments: tuple[Any, ...], _: Any) -> int | None:
    """Of the first argument after self."""
    return getattr(arguments[1], "step_id", None) if len(arguments) > 1 else None


def trace_loop(trace: Trace) -> None:
    """The engine's side of a step."""

    def planned(_: tuple[Any, ...], result: Any) -> int | None:
        if result is None:
            return None
        plan = result[0]
        facts = {"requests": len(plan.num_tokens), "prompt_tokens": plan.num_prompt_tokens, "planned_at": time.perf_counter()}
        trace.steps[plan.step_id].update(facts)
        return plan.step_id

    def sent(arguments: tuple[Any, ...], _: Any) -> int | None:
        """A step's output; the loop's other messages are not counted."""
        return arguments[1].step_id if type(arguments[1]).__name__ == "StepOutput" and arguments[1].tokens else None

    trace.wrap("core.scheduling.scheduler:Scheduler.schedule", "schedule", planned)
    trace.wrap("core.scheduling.scheduler:Scheduler.update", "update", _own_step)
    trace.wrap("core.bus:Bus.publish", "publish", _own_step)
    trace.wrap("core.ipc:Channel.send", "send", sent)
    trace.wrap("core.engine.switchboard:Switchboard.step_done", "switchboard", _own_step)
    trace.wrap("core.worker.thread:ThreadWorker.execute", "execute", _own_step)


def trace_worker(trace: Trace) -> None:
    """The worker's side: phases as the runner reports them, and the time inside the decoder's C functions."""

    def ran(arguments: tuple[Any, ...], result: Any) -> int:
        for phase, seconds in result.phases.items():
            trace.add(result.step_id, phase, seconds)
        trace.steps[result.step_id]["flops"] = result.flops
        trace.steps[result.step_id]["bytes"] = result.bytes_moved
        return arguments[1].step_id

    trace.wrap("core.worker.runner:ModelRunner.run", "run", ran)
    from tokenbus.core.worker.runner import ModelRunner

    inner = ModelRunner.run

    def run(self: ModelRunner, order: Any) -> Any:
        trace.running = order.step_id
        return inner(self, order)

    ModelRunner.run = run  # type: ignore[method-assign]
    _trace_library(trace)


def _trace_library(trace: Trace) -> None:
    try:
        from tokenbus.kernels.cpu.decoder import FusedDecoder
    except ImportError:
        trace.missing.append("kernels.cpu.decoder:FusedDecoder")
        return
    old = FusedDecoder.__init__

    @functools.wraps(old)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        old(self, *arguments, **options)
        for name, part in (("tb_decoder_step", "forward_c"), ("tb_decoder_logits", "logits_c")):
            function = getattr(self._c, name, None)
            if function is None:
                trace.missing.append(f"kernels.cpu:{name}")
            elif not getattr(function, "traced", False):
                wrapped = _timed_c(trace, function, part)
                setattr(self._c, name, wrapped)

    FusedDecoder.__init__ = init


def _timed_c(trace: Trace, function: Any, part: str) -> Any:
    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments)
        trace.add(trace.running, part, time.perf_counter() - began)
        return result

    call.traced = True  # type: ignore[attr-defined]
    return call


def trace_front(trace: Trace) -> None:
    for where, part in {
        "core.front.client:EngineClient._take_output": "take the step's message",
        "core.front.generation:Choice._take": "detokenise, filters",
        "core.api.answers:CompletionAnswer.chunks": "make events",
        "core.api.sse:EventStream.send": "encode, write to socket",
        "core.bus:Bus.publish": "publish (metrics; most of it inside the message)",
    }.items():
        trace.wrap(where, part)


def engine(file: str, arguments: list[str]) -> None:
    from tokenbus.core.engine import main
    from tokenbus.core.engine.loop import EngineCore
    from tokenbus.core.worker.threads import calm_openmp

    calm_openmp()
    trace = Trace()
    trace_loop(trace)
    trace_worker(trace)
    old = EngineCore.run

    async def run(self: EngineCore) -> bool:
        try:
            return await old(self)
        finally:
            trace.write(f"{file}.engine")

    EngineCore.run = run  # type: ignore[method-assign]
    main.main(arguments=arguments)


def front(file: str, arguments: list[str]) -> int:
    from tokenbus.core import cli
    from tokenbus.core.front import server

    command = (sys.executable, "-P", __file__, "engine", file)
    server.EngineClient = functools.partial(server.EngineClient, command=command)  # type: ignore[misc, assignment]
    trace = Trace()
    trace_front(trace)
    try:
        return cli.main(arguments)
    finally:
        trace.write(f"{file}.front")


if __name__ == "__main__":
    role, path, *rest = sys.argv[1:]
    if role == "engine":
        engine(path, rest)
    else:
        sys.exit(front(path, rest))
