"""The audit trail: every live change of switches or settings, who made it, and every one that was refused; and what was done with
experiments. Listens to the front's bus.

One JSON object a line, the same in memory (`/v1/tokenbus/audit`) and, with `server.audit_file`, on disk:

    {"time": "2026-01-31T12:00:00.123456Z", "what": "features", "who": "admin key", "result": "applied",
     "asked": {"speculative.ngram": true}, "from": {"speculative.ngram": false}, "to": {"speculative.ngram": true}}

what     features, settings or experiment
who      "admin key", "loopback ADDRESS", "offline", "engine: plugin 'NAME' failed", or the experiment that did it
result   applied: `from` and `to` say what changed, other plugins that had to go with it included; `because` says why those are off
         refused: nothing changed; `because` says why
         started, ramped, stopped, rolled_back, tripped, slice_failed, resumed: of an experiment; `asked` has its name, its run, and where
         there are some the arm concerned, the share of traffic and the arms' shares after it; `because` says why

A file that has reached its size is renamed to FILE.1, FILE.1 to FILE.2 and so on; the oldest is deleted. Lines are written in order, by a
thread of their own, so that a slow disk stops nobody; a line that can't be written is a loud line in the log.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ..bus import Bus
from ..config import ServerConfig
from ..errors import ConfigError, plain_text
from ..experiments.records import Event
from ..host import Switches
from .events import ChangeRefused, FeatureChange, SettingsChange

log = structlog.get_logger(__name__)

KEPT = 1024
"""Entries in memory: the newest."""
TAIL_BYTES = 1 << 20
"""Of the file, read at start for them."""


class AuditTrail:
    def __init__(self, config: ServerConfig, bus: Bus) -> None:
        """ConfigError when the file can't be written."""
        self._entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._file: _RotatedFile | None = None
        self._writer: ThreadPoolExecutor | None = None
        if config.audit_file is not None:
            self._file = _RotatedFile(Path(config.audit_file), config.audit_file_mb * 2**20, config.audit_files_kept)
            self._entries.extend(self._file.tail())
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="audit")
        bus.listen(self._take, FeatureChange, SettingsChange, ChangeRefused, Event)

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest entries, oldest first; those of earlier runs too, where there is a file."""
        return list(self._entries)[-count:]

    def close(self) -> None:
        """Write what is left to write. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown(wait=True)

    def _take(self, event: FeatureChange | SettingsChange | ChangeRefused | Event) -> None:
        entry = {"time": datetime.fromtimestamp(event.when, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")}
        match event:
            case FeatureChange():
                entry |= {"what": "features", "who": event.who, "result": "applied", "asked": event.changes}
                entry |= _difference(event.before, event.state)
            case SettingsChange():
                entry |= {"what": "settings", "who": event.who, "result": "applied", "asked": event.after}
                entry |= {"from": event.before, "to": event.after}
            case ChangeRefused():
                entry |= {
                    "what": event.what,
                    "who": event.who,
                    "result": "refused",
                    "asked": event.asked,
                    "because": event.reason,
                }
            case Event():
                about = {"arm": event.arm, "traffic": event.traffic, "weights": event.weights}
                asked = {"experiment": event.experiment, "run": event.run} | {
                    key: value for key, value in about.items() if value
                }
                entry |= {"what": "experiment", "who": event.who, "result": event.kind, "asked": asked}
                entry |= {"because": event.detail} if event.detail else {}
        entry = msgspec.to_builtins(entry)
        self._entries.append(entry)
        if self._writer is not None and self._file is not None:
            self._writer.submit(self._file.write, msgspec.json.encode(entry) + b"\n")


def _difference(before: Switches, after: Switches) -> dict[str, Any]:
    changed = sorted(before.on ^ after.on) or sorted(after.failed ^ before.failed)
    because = {name: after.reasons[name] for name in changed if name in after.reasons and name not in after.on}
    found: dict[str, Any] = {
        "from": {name: name in before.on for name in changed},
        "to": {name: name in after.on for name in changed},
    }
    return found | ({"because": because} if because else {})


class _RotatedFile:
    """Lines are appended by one thread; each is one write, so that a reader never sees half of one."""

    def __init__(self, path: Path, most_bytes: int, kept: int) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._kept = kept
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise ConfigError(f"server.audit_file: can't write {path}: {error.strerror or error}") from None

    def write(self, line: bytes) -> None:
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > self._most_bytes:
                self._rotate()
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            log.exception("audit_not_written", file=str(self._path), error=plain_text(error), entry=line.decode())

    def _rotate(self) -> None:
        for number in range(self._kept - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            if older.exists():
                older.replace(self._path.with_name(f"{self._path.name}.{number + 1}"))
        if self._kept:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        else:
            self._path.unlink()

    def tail(self) -> list[dict[str, Any]]:
        """The newest entries that stand in it. Lines that are none (a disk that was full, somebody's edit) are passed over."""
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines()
        entries = []
        for line in lines[1 if size > TAIL_BYTES else 0 :]:
            try:
                entries.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                continue
        return entries
