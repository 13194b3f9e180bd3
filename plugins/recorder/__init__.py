"""Records what the engine does, for `tokenbus replay`, `simulate` and `trace`: see docs/recording.md.

Here events are only noted, on the engine's loop, some microseconds each; a thread of its own hashes, encodes, compresses and writes
(writer.py). Nothing is dropped: when the thread is far behind, the engine holds new requests (`Bus.listen`, `backlog`). A disk that can't
be written to switches the recorder off; requests don't notice.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ...core.messages import SetSettings, StepOutput
from ...core.plan import StepInput, StepPlan, WorkerRequest
from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.recording.frames import Level
from .notes import Configured, Ended, Joined, Ran

if TYPE_CHECKING:
    from ...core.bus import Listener
    from ...core.contexts import EngineContext
    from ...core.plan import StepResult
    from ...core.request import Request
    from .writer import WriterThread


HEARD = (StepPlan, StepInput, StepOutput, SetSettings)


class RecorderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str = "recordings"
    """The folder that recordings are written to; made when it is not there."""
    level: Level = "shape"
    """shape: lengths, times, plans and keyed hashes. full: token ids as well, to run steps again: it holds what people wrote."""
    media: bool = False
    """Keep, at level full, what pictures and sounds became, megabytes each: without it, replay leaves requests with media out."""
    max_file_mb: Annotated[int, msgspec.Meta(ge=1)] = 64
    """MiB after which a recording goes on in another file, give or take a block."""
    max_total_mb: Annotated[int, msgspec.Meta(ge=2)] = 1024
    """MiB of all recordings in the folder: the oldest files are deleted to stay below."""

    def __post_init__(self) -> None:
        if self.media and self.level != "full":
            raise ValueError('media = true needs level = "full": a recording of level "shape" holds nothing that people sent')
        if self.max_total_mb < 2 * self.max_file_mb:
            raise ValueError(f"max_total_mb = {self.max_total_mb} must be at least twice max_file_mb = {self.max_file_mb}")


class Recorder(Plugin):
    info = PluginInfo(
        name="recorder",
        summary="records requests, plans and step times to disk, for replay, simulate and trace",
        scope="step",
        lossless=True,
    )
    Settings = RecorderSettings

    def __init__(self, settings: Any, role: Any) -> None:
        super().__init__(settings, role)
        self._engine: EngineContext | None = None
        self._writer: WriterThread | None = None
        self._listener: Listener | None = None
        self._plan: tuple[StepPlan, float] | None = None
        self._steps: deque[tuple[StepPlan, StepInput, float]] = deque()
        """Steps without a result, oldest first, and when their plans were published."""
        self._landed = 0.0
        """When the last result was there."""
        self._failed = False
        """The last step has failed."""
        self._ends: list[Ended] = []
        """Of requests that steps in flight still run: they are noted behind those."""
        self._leaving: dict[str, list[int]] = {}
        """Tokens of requests that end, until the output says how."""

    @hookimpl
    def engine_started(self, engine: EngineContext) -> None:
        from .writer import WriterThread

        self._engine = engine
        self._writer = WriterThread(engine, self.settings)
        self._listener = engine.bus.listen(self._hear, *HEARD, backlog=self._writer.backlog)

    @hookimpl
    def engine_stopped(self) -> None:
        if self._listener is not None and self._writer is not None:
            self._listener.close()
            for note in self._ends:
                self._writer.put(note)
            self._writer.stop()

    def _writing(self) -> WriterThread:
        if self._writer is None:
            raise RuntimeError("the engine has not started the recorder")
        return self._writer

    # ---- noting -----------------------------------------------------------------------------------------------------------------

    @hookimpl
    def request_added(self, request: Request) -> None:
        self._writing().put(
            Joined(
                at=self._writing().now(),
                admitted=request.admitted,
                features=request.features,
                known=request.num_output,
                worker=_worker_request(request) if request.worker_knows else None,
            )
        )

    @hookimpl
    def request_removed(self, request: Request) -> None:
        self._leaving[request.request_id] = list(request.tokens)

    @hookimpl
    def step_finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if (error := self._writing().error) is not None:
            raise error
        if self._steps:
            self._ran(result, seconds)

    def _hear(self, event: StepPlan | StepInput | StepOutput | SetSettings) -> None:
        match event:
            case SetSettings():
                self._writing().put(Configured(self._writing().now(), event.values))
            case StepPlan():
                self._plan = event, self._writing().now()
            case StepInput():
                if self._plan is not None:
                    self._steps.append((self._plan[0], event, self._plan[1]))
                self._plan = None
            case StepOutput():
                if self._steps and self._steps[0][0].step_id == event.step_id:  # no step_finished has taken it
                    self._ran(None, self._writing().now() - max(self._steps[0][2], self._landed))
                now = self._writing().now()
                self._ends += [Ended(now, name, end, self._leaving.pop(name, None)) for name, end in event.finished.items()]
                self._note_ends()

    def _ran(self, result: StepResult | None, seconds: float) -> None:
        """The oldest step is over; without a result it failed, or was not run because the one before it had."""
        plan, order, planned_at = self._steps.popleft()
        if self._failed and order.ahead:
            plan = msgspec.structs.replace(plan, num_tokens={})
            order = msgspec.structs.replace(order, num_tokens={}, drafts={}, encode=None)
        self._failed = result is None
        began, self._landed = max(planned_at, self._landed), self._writing().now()
        self._writing().put(Ran(began, seconds, plan, order, result))

    def _note_ends(self) -> None:
        if not self._ends:
            return
        running = set[str]().union(*(plan.num_tokens for plan, _, _ in self._steps))
        for note in self._ends:
            if note.request_id not in running:
                self._writing().put(note)
        self._ends = [note for note in self._ends if note.request_id in running]


def _worker_request(request: Request) -> WorkerRequest:
    """What the worker knows of a request that runs."""
    admitted = request.admitted
    return WorkerRequest(
        request_id=request.request_id,
        tokens=list(request.tokens),
        num_prompt_tokens=request.num_prompt,
        num_computed=request.computed,
        blocks=list(request.blocks),
        temperature=admitted.temperature,
        seed=admitted.seed,
        choice=admitted.choice,
        features=tuple(sorted(request.features)),
        fields=request.fields,
        pinned=tuple(request.pinned),
        prompt_logits=request.prompt_logits,
        media=admitted.media,
    )
