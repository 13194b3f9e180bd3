"""Replay: the same steps on the model again, up to the first difference.

The worker gets the recorded orders as they were: the same tokens, blocks, drafts, seeds and switches, so nothing is decided anew. K/V that
was there before the recording began (open requests, cached prefixes) is computed first: by the determinism contract it comes out the same.
Requests with pictures or sounds that are not in the recording are left out, and told: by the same contract nobody else misses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import Config, from_mapping, merge
from ..errors import TokenbusError
from ..host import make_host
from ..models.resolve import resolve
from ..plan import StepInput, StepResult, WorkerRequest
from .file import RecordingError, RecordingFile
from .frames import Given, Header, Media, Opened, Ordered
from .identity import layers, model_hash
from .media import MediaStore
from .tracker import WorkerTracker

if TYPE_CHECKING:
    from ..worker.base import WorkerInfo
    from ..worker.runner import ModelRunner


NAMED = 5
"""Requests that a notice names."""


@dataclass(frozen=True)
class Difference:
    """Where the replay left the recording."""

    step_id: int
    request_id: str
    expected: object
    """Token ids that were recorded for the request, or the error."""
    got: object

    def __str__(self) -> str:
        return f"step {self.step_id}, request {self.request_id}: expected {self.expected}, got {self.got}"


@dataclass
class Replayed:
    steps: int = 0
    """Run and compared."""
    tokens: int = 0
    warmed: int = 0
    """Tokens run to have K/V that was there before the recording."""
    failed: int = 0
    """Steps that failed as a whole when they were recorded: not run."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Requests that were not run, and how many pictures and sounds each has, as these are not in the recording."""
    difference: Difference | None = None


def replay_config(header: Header, model: Mapping[str, Any] | None = None, load: tuple[str, ...] = ()) -> Config:
    """The recorded settings. model: settings of the model that take the place of recorded ones (where it lies now, threads ...).
    load: plugins beside those installed, as in `features.load`. RecordingError for a shape recording."""
    if header.level != "full":
        raise RecordingError(
            f"a recording of level {header.level!r} has no token ids: replay needs one of level 'full' "
            "(--plugin-setting recorder.level=full)"
        )
    data = {name: header.config.get(name, {}) for name in ("model", "cache", "scheduler", "plugins")}
    return from_mapping(merge(data, {"model": dict(model or {}), "features": {"load": list(load)}}), "the recording's settings")


def check_before(header: Header, config: Config) -> None:
    """RecordingError, naming both, when model or kernels can be seen to be others than those recorded. Loads nothing."""
    host = make_host("worker", config)
    for name in header.features:
        if name not in host.catalogue:
            raise RecordingError(f"plugin {name!r} was on when this was recorded and is not installed here (--load?)")
    _same("kernels", header.layers, layers(config))
    if header.model_hash:
        _same("model", f"{header.model}, config.json {header.model_hash[:12]}", _model_here(config))


def _model_here(config: Config) -> str:
    return f"{resolve(config.model.model).name}, config.json {model_hash(config)[:12]}"


def check_loaded(header: Header, info: WorkerInfo) -> None:
    """The same, once the model is loaded."""
    _same("dtype", header.dtype, info.dtype)
    _same("architecture", header.architecture, info.architecture)
    _same("vocabulary", f"{header.vocab_size} tokens", f"{info.vocab_size} tokens")


def _same(what: str, recorded: str, here: str) -> None:
    if recorded != here:
        raise RecordingError(f"recorded with {what} {recorded}, here it is {here}: a replay would differ for that alone")


class Replay:
    """Feeds a worker with a recording's orders."""

    def __init__(self, file: RecordingFile, runner: ModelRunner) -> None:
        """runner: loaded and allocated, with the header's features."""
        self._file = file
        self._runner = runner
        self._tracker = WorkerTracker(file.header.block_size)
        self._media = MediaStore()
        self._warming = 0
        self.done = Replayed()

    def run(self, tell: Callable[[int], None] = lambda _: None) -> Replayed:
        """Up to the first difference, or the end. tell: called with each step's id. Raises RecordingError, also when all that ran needs
        media that are not in the recording; OSError."""
        order: StepInput | None = None
        for frame in self._file:
            match frame:
                case Media():
                    self._media.add(frame)
                case Opened():
                    self._open(self._known(frame.requests))
                case Ordered():
                    if order is not None:
                        self._failed(order)
                    order = self._playable(frame.order)
                case Given():
                    if order is None or order.step_id != frame.step_id:
                        raise RecordingError(f"the result of step {frame.step_id} has no order")
                    tell(frame.step_id)
                    self._step(order, frame)
                    order = None
                    if self.done.difference is not None:
                        break
                case _:
                    pass
        if self.done.left_out and not self.done.steps:
            raise RecordingError("nothing can be replayed: " + left_out(self.done))
        return self.done

    def _known(self, requests: list[WorkerRequest]) -> list[WorkerRequest]:
        """Those that can be run, with their media. What the others would have written counts as not written."""
        kept = []
        for request in requests:
            if (filled := self._media.filled(request)) is not None:
                kept.append(filled)
            else:
                self.done.left_out[request.request_id] = len(request.media)
                self._tracker.written.difference_update(request.blocks[request.num_computed // self._tracker.block_size :])
        return kept

    def _playable(self, order: StepInput) -> StepInput:
        """The order without requests that are left out."""
        new, out = self._known(order.new), self.done.left_out
        if not out:
            return msgspec.structs.replace(order, new=new)
        for request_id in out.keys() & order.new_blocks.keys():
            self._tracker.written.difference_update(order.new_blocks[request_id])

        def kept(of: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in of.items() if name not in out}

        return msgspec.structs.replace(
            order, new=new, num_tokens=kept(order.num_tokens), drafts=kept(order.drafts), new_blocks=kept(order.new_blocks)
        )

    def _step(self, order: StepInput, given: Given) -> None:
        try:
            result = self._execute(order)
        except TokenbusError as error:
            first = next(iter(order.num_tokens), "")
            self.done.difference = Difference(
                order.step_id, first, given.sampled.get(first), f"the step failed: {error.message}"
            )
            return
        self._tracker.given(order, given.sampled)
        self.done.steps += bool(order.num_tokens)
        self.done.tokens += sum(map(len, result.sampled.values()))
        self.done.difference = compare(order, given, result)

    def _execute(self, order: StepInput) -> StepResult:
        self._warm([new for new in order.new if new.num_computed and not self._tracker.holds(new)])
        self._tracker.ordered(order)
        return self._runner.run(order)

    def _failed(self, order: StepInput) -> None:
        """A step without a result: its requests ended with it, or go on as if it had not run (StepMemoryError). Its tokens are not run."""
        self.done.failed += 1
        try:
            self._execute(msgspec.structs.replace(order, num_tokens={}, drafts={}))
        except TokenbusError:
            return

    def _open(self, requests: list[WorkerRequest]) -> None:
        self._warm([request for request in requests if request.num_computed])
        self._runner.run(StepInput(step_id=0, num_tokens={}, new=requests))
        for request in requests:
            self._tracker.open(request)

    def _warm(self, requests: Iterable[WorkerRequest]) -> None:
        """Compute K/V that the requests say is in their blocks."""
        for request in requests:
            self._warming += 1
            name, size = f"warm-{self._warming}", self._tracker.block_size
            blocks = request.blocks[: -(-request.num_computed // size)]
            plain = WorkerRequest(
                request_id=name,
                tokens=request.tokens[: request.num_computed + 1],
                num_prompt_tokens=min(request.num_prompt_tokens, request.num_computed + 1),
                num_computed=0,
                blocks=blocks,
                temperature=0.0,
                seed=0,
                choice=0,
                features=(),
                fields={},
                media=tuple(item for item in request.media if item.start < request.num_computed),
            )
            self._runner.run(StepInput(step_id=0, num_tokens={name: request.num_computed}, new=[plain]))
            self._runner.run(StepInput(step_id=0, num_tokens={}, dropped=[name]))
            self._tracker.written.update(blocks)
            self.done.warmed += request.num_computed


def left_out(done: Replayed) -> str:
    """Names the requests that were not run, and says why, and what to do."""
    names = [f"{name} ({count})" for name, count in done.left_out.items()]
    shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    return (
        f"the pictures and sounds of {len(names)} requests are not in the recording, so these were not run again: {shown}. Record with "
        "--plugin-setting recorder.media=true to have them replayed"
    )


def compare(order: StepInput, given: Given, result: StepResult) -> Difference | None:
    """The first request, in the order in which they ran, that got something else."""
    failed = set(given.errors)
    for request_id in order.num_tokens:
        expected = "an error" if request_id in failed else given.sampled.get(request_id)
        error = result.errors.get(request_id)
        if error is not None and request_id not in failed:
            return Difference(order.step_id, request_id, expected, f"the error {error.message!r}")
        got = "an error" if error is not None else result.sampled.get(request_id)
        if expected != got:
            return Difference(order.step_id, request_id, expected, got)
    return None
