"""What an experiment writes down: one row for each choice of each request that it took part in, as lines of JSON.

    STATE_DIR/experiments/NAME/records-000001.jsonl    rows (`Row`), in order of their end; the highest number is being written
    STATE_DIR/experiments/NAME/events.jsonl            what was done with the experiment (`Event`): starts, ramps, trips of guard rails
    STATE_DIR/experiments/NAME/state.json              where it stands (controller.py)

A row says all that a report needs: reading one file alone is enough. No row has any text, key, or header value.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

FORMAT = 1
"""Version of `Row`. Fields may be added, with a default; a change of meaning is another version."""
MOST_GAPS = 512
"""Inter-token latencies that one row keeps; the first ones."""
UNIT_HEX = 16
"""Hexadecimal digits of a unit: 64 bits."""
Kind = Literal["started", "ramped", "stopped", "rolled_back", "tripped", "slice_failed", "resumed"]
"""What is done with an experiment."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice's life in one experiment. Times in seconds but where they say ms."""

    format: int = FORMAT
    experiment: str
    run: int
    """Which start of the experiment, from 1: rows of different runs are not to be mixed."""
    arm: str
    """The arm that was assigned, whether or not the row is excluded."""
    control: bool = False
    """The arm that the others are compared with."""
    weight: float
    """The share that the arm should have of all rows of this run that are not excluded, 0 to 1, at that moment (0: it was off)."""
    split: str
    """request, user, key, header:NAME or slice."""
    shared_steps: bool = False
    """Requests of different arms ran in the same engine steps: what one arm costs, the others felt too."""
    own_engine: bool = False
    """Each arm has an engine of its own: requests of one time window depend on each other, and windows are the clusters."""
    unit: str = ""
    """Keyed hash of what the split goes by: a cluster of rows that are not independent. Of the API request for request, of the sticky value
    for user, key and header; "" for slice, where the slice is the cluster."""
    slice: int | None = None
    """Number of the time slice (with engines of their own, of the time window) in which it was admitted, counted from the run's start; None
    for other splits."""
    washout: bool = False
    """Touched by a change of slices: it arrived within the wash-out time of its slice's begin, or ended after its slice. Not to be
    compared."""
    excluded: str = ""
    """Why it is not to be compared: "client" (the request itself chose a switch of the experiment), "claims" (it uses a field that such a
    switch's plugin honours), "tripped" (its arm was switched off by a guard rail or a rollback, so it ran as control), "failed" (the arm's
    switches couldn't be applied). "": it counts. But for "tripped", the request ran with the server's own switches."""
    traffic: float = 1.0
    """Share of all traffic that was in the experiment then."""
    config: str = ""
    """Hash of the arm's switches and settings: rows with different ones are not the same treatment."""

    request_id: str = ""
    """Ours, as in the log: requests of several choices have several rows, which share `group`."""
    group: str = ""
    endpoint: str = ""
    """chat, completion, generate."""
    arrival: float
    """Unix seconds."""
    ended: float
    """Unix seconds."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that a cache gave."""
    completion_tokens: int = 0
    ttft: float | None = None
    """From arrival to the first token; None when there was none."""
    gap_count: int = 0
    """Inter-token latencies there were; each is the time between two token messages divided by the tokens of the later one."""
    gap_mean: float | None = None
    """ms, over all of them; None when there were none."""
    gap_max: float | None = None
    """ms, over all of them."""
    gaps: list[float] = []
    """ms; the first MOST_GAPS of them."""
    e2e: float = 0.0
    """From arrival to the end."""
    finish_reason: str = ""
    """stop, length, tool_calls, cancelled, error; refused: answered with an error before the engine had it."""
    error: str = ""
    """Class in the error tree (core/errors.py) for error and refused."""
    status: int = 0
    """HTTP status of that class: 4xx other than 429 is the client's own doing. 0: no error."""
    preemptions: int = 0
    draft_tokens: int | None = None
    """Drafts that were verified for it; None: not known."""
    accepted_tokens: int | None = None
    """Drafts among them that were accepted."""
    allocation_failures: int | None = None
    """Times that the engine's pool had too few blocks while the request was open; shared by all that were open then. None: not known."""
    resumptions: int = 0
    """Engines that died while they had it."""
    engine_pid: int = 0
    engine: int = 0
    """Which life of the engine (of the arm's own, where it has one), from 0, at the end."""

    @property
    def cluster(self) -> str:
        """Rows of one cluster are not independent of each other."""
        return self.unit if self.slice is None else f"slice-{self.slice}"

    @property
    def counts(self) -> bool:
        """Whether it is to be compared."""
        return not (self.excluded or self.washout)

    @property
    def failed(self) -> bool:
        """It ended with an error that is the server's doing, a full queue included."""
        return self.status >= 500 or self.status == 429


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something was done with an experiment."""

    when: float
    """Unix seconds."""
    who: str
    """As in the audit trail; "guard rail" for an arm that was switched off by itself, "server" for what the server did at its start."""
    experiment: str
    run: int
    kind: Kind
    arm: str = ""
    detail: str = ""
    traffic: float | None = None
    """After it."""
    weights: dict[str, float] = {}
    """Shares of the arms after it."""


def experiment_dir(state_dir: str | Path, name: str) -> Path:
    return Path(state_dir) / "experiments" / name


def record_files(folder: str | Path) -> list[Path]:
    """The files of rows in an experiment's folder, oldest first."""
    return sorted(Path(folder).glob("records-*.jsonl"))


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of one file, or of an experiment's folder, one by one. A last line that was cut off by a crash is left out.

    ValueError naming file and line for anything else that is no row, and for a row of another format."""
    path = Path(path)
    decoder = msgspec.json.Decoder(Row)
    for file in record_files(path) if path.is_dir() else [path]:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                if not line.strip():
                    continue
                try:
                    row = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ValueError(f"{file}:{number}: not a row of an experiment: {error}") from None
                if row.format != FORMAT:
                    raise ValueError(f"{file}:{number}: format {row.format}; this version reads format {FORMAT}")
                yield row
