"""A recording in memory, as lives of requests and a list of steps: what simulation and timeline are made from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .file import RecordingError, RecordingFile
from .frames import Arrival, Configured, End, Header, Step
from .media import Encoder, items_of
from .step_time import Run


@dataclass
class Life:
    """One request."""

    arrival: Arrival
    end: End | None = None
    """None: still open when the recording ends."""
    outputs: int = 0
    """Tokens it has at the end of the recording, those it arrived with included; a stop token is none of them."""
    emitted: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) of each step that gave it some."""
    drafted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(proposed, accepted) by the number of output tokens it had."""
    prompt_logits: bool = False
    cached: int = 0
    """Prompt tokens that a cache gave when it first started."""
    partial: bool = False
    """It was under way when the recording began."""

    @property
    def hashes(self) -> bytes:
        return self.arrival.hashes + (b"" if self.end is None else self.end.hashes)


@dataclass
class StepRecord:
    """A step, with what each request ran."""

    step: Step
    runs: list[Run]
    serials: list[int]
    open_after: int
    """Requests open after it: 0 means that the engine had nothing to do."""


@dataclass
class History:
    header: Header
    """Of the first part."""
    lives: dict[int, Life]
    """By serial number."""
    steps: list[StepRecord]
    """Those that gave a result."""
    notices: list[str]
    changes: list[Configured] = field(default_factory=list)
    """Live changes of settings, in order."""

    @property
    def seconds(self) -> float:
        """From the first thing recorded to the last."""
        times = [life.arrival.at for life in self.lives.values()] + [one.step.at + one.step.seconds for one in self.steps]
        return max(times) - min(times) if times else 0.0


def read(paths: Sequence[str | Path]) -> History:
    """One recording from its parts, which must follow each other. Raises RecordingError, OSError."""
    files = [RecordingFile(path) for path in paths]
    if not files:
        raise RecordingError("no recording was given")
    for before, after in itertools.pairwise(files):
        if after.header.recording != before.header.recording or after.header.part != before.header.part + 1:
            raise RecordingError(f"{after.path} does not follow {before.path}: give the parts of one recording, in order")
    reader = _Reader(files[0].header)
    for file in files:
        for frame in file:
            match frame:
                case Arrival():
                    reader.arrival(frame)
                case Step():
                    reader.step(frame)
                case End():
                    reader.end(frame)
                case Configured():
                    reader.history.changes.append(frame)
    history = reader.history
    history.notices += [notice for file in files for notice in file.notices]
    return history


def shown(emitted: list[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """What of a request's sampled tokens is output: not a stop token, nor what was sampled behind the end."""
    kept = []
    for at, count in emitted:
        if (count := min(count, most)) > 0:
            kept.append((at, count))
            most -= count
    return kept


class _Reader:
    def __init__(self, header: Header) -> None:
        self.history = History(header, {}, [], [])
        self._computed: dict[int, int] = {}
        self._open: set[int] = set()
        self._encoder = Encoder()
        self._encoded = 0
        """Items that were encoded, and whose tokens have not run."""

    def arrival(self, frame: Arrival) -> None:
        if frame.serial in self.history.lives:  # a later part begins with what is open
            return
        self.history.lives[frame.serial] = Life(frame, outputs=frame.known, partial=frame.again)
        self._open.add(frame.serial)
        if frame.again and frame.known:
            self._computed[frame.serial] = frame.prompt + frame.known - 1

    def end(self, frame: End) -> None:
        life = self.history.lives.get(frame.serial)
        if life is None:
            return
        life.end = frame
        if frame.output is not None:
            life.outputs = frame.output
            life.emitted = shown(life.emitted, frame.output - life.arrival.known)
        self._open.discard(frame.serial)
        self._computed.pop(frame.serial, None)
        if not self._open and self.history.steps:
            self.history.steps[-1].open_after = 0

    def step(self, frame: Step) -> None:
        lives = self.history.lives
        for serial, cached, prompt_logits in frame.started:
            if serial in lives:
                if serial not in self._computed and not lives[serial].emitted:
                    lives[serial].cached = min(cached, lives[serial].arrival.prompt)
                self._computed[serial] = cached
                lives[serial].prompt_logits = prompt_logits
        for serial in frame.preempted:
            if serial not in {one for one, _, _ in frame.started}:
                self._computed.pop(serial, None)
        drafts = {serial: (proposed, accepted) for serial, proposed, accepted in frame.drafts}
        sampled = set(frame.sampled)
        runs, serials = [], []
        self._encoded += frame.encoded or 0
        done = frame.at + frame.seconds
        for serial, n in zip(frame.runs[::2], frame.runs[1::2], strict=False):
            life = lives.get(serial)
            if life is None:
                continue
            before = self._computed.get(serial, 0)
            proposed, accepted = drafts.get(serial, (0, 0))
            known = life.arrival.prompt + life.outputs
            decode = before >= life.arrival.prompt and n - proposed == 1 and before == known - 1
            media = 0
            if life.arrival.spans and before < life.arrival.prompt:
                for length in self._encoder.lengths(items_of(life.arrival), before, n):
                    if frame.encoded is None or self._encoded > 0:  # else it was known before the recording began
                        media += length
                        self._encoded -= 1
            runs.append(Run(before, n, proposed, serial in sampled, prompt=not decode, media=media))
            serials.append(serial)
            self._computed[serial] = before + n - proposed + accepted
            if serial in sampled:
                if proposed:
                    life.drafted[life.outputs] = (proposed, accepted)
                life.outputs += 1 + accepted
                life.emitted.append((done, 1 + accepted))
        if not frame.failed:
            self.history.steps.append(StepRecord(frame, runs, serials, len(self._open)))
