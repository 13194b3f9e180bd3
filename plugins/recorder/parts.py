"""Notes into frames, frames into files of a bounded size. Each part begins with what is open, so it can be read without those before it."""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from ...core.media import ENCODED_ITEMS
from ...core.recording.file import SUFFIX, RecordingWriter
from ...core.recording.frames import Arrival, Configured, End, Given, Header, Opened, Ordered, Step
from ...core.recording.hashing import KeyedHash
from ...core.recording.identity import layers, model_hash, version
from ...core.recording.media import without_tensors
from ...core.recording.tracker import WorkerTracker
from . import notes
from .media import MediaFrames
from .notes import Ended, Joined, Note, Ran

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...core.contexts import EngineContext
    from ...core.media import MediaItem
    from ...core.plan import WorkerRequest
    from . import RecorderSettings

log = structlog.get_logger(__name__)

MIB = 1024 * 1024
NAME = re.compile(rf"\d{{8}}T\d{{6}}Z-[0-9a-f]{{8}}-\d{{4,}}{re.escape(SUFFIX)}")
"""Files that may be deleted to make room."""


class Parts:
    """Turns notes into frames and keeps what the next part has to begin with."""

    def __init__(self, settings: RecorderSettings, header: Header) -> None:
        self._settings = settings
        self._header = header
        self._created = header.created
        self._folder = Path(settings.path)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hash = KeyedHash()
        self._full = settings.level == "full"
        self._block_size = self._header.block_size
        self._features = self._header.features
        self._tracker = WorkerTracker(self._block_size)
        self._open: dict[str, Arrival] = {}
        self._media: dict[str, tuple[MediaItem, ...]] = {}
        """Of the open requests that have any."""
        self._media_frames = MediaFrames(keep=settings.media)
        self._outputs: dict[str, int] = {}
        self._serials = 0
        self._file = self._new_file()
        self._limit = settings.max_file_mb * MIB
        if self._full:
            log.warning("recorder_keeps_token_ids", folder=str(self._folder), level="full")

    # ---- files ------------------------------------------------------------------------------------------------------------------

    def _new_file(self) -> RecordingWriter:
        self._make_room()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._created))
        name = f"{stamp}-{self._header.recording[:8]}-{self._header.part:04d}{SUFFIX}"
        log.info("recording", file=str(self._folder / name), level=self._settings.level)
        return RecordingWriter(self._folder / name, self._header)

    def _make_room(self) -> None:
        """Delete the oldest recordings, so that one more file fits below the cap."""
        found = sorted(entry.name for entry in os.scandir(self._folder) if NAME.fullmatch(entry.name) and entry.is_file())
        sizes = {name: (self._folder / name).stat().st_size for name in found}
        room = (self._settings.max_total_mb - self._settings.max_file_mb) * MIB
        for name in found:
            if sum(sizes.values()) <= room:
                return
            (self._folder / name).unlink(missing_ok=True)
            del sizes[name]
            log.info("recording_deleted", file=name, because="max_total_mb")

    def _next_part(self) -> None:
        self._file.close()
        self._header = msgspec.structs.replace(self._header, part=self._header.part + 1, features=self._features)
        self._file = self._new_file()
        for request_id, arrival in self._open.items():
            self._file.write(msgspec.structs.replace(arrival, known=self._outputs[request_id], again=True))
        self._media_frames.new_part()
        if self._full and self._tracker.requests:
            for media in self._media.values():
                self._write_media(media)
            self._file.write(Opened(self._tracker.open_requests()))
        self._file.flush()
        self._limit = max(self._settings.max_file_mb * MIB, 2 * self._file.size)  # what is open may be much

    def flush(self) -> None:
        self._file.flush()
        if self._file.size >= self._limit:
            self._next_part()

    def close(self) -> None:
        self._file.close()

    # ---- frames -----------------------------------------------------------------------------------------------------------------

    def write(self, note: Note) -> None:
        match note:
            case Joined():
                self._joined(note)
            case Ran():
                self._ran(note)
            case Ended():
                self._ended(note)
            case notes.Configured():
                self._configured(note)
        if self._file.size >= self._limit:
            self._next_part()

    def _joined(self, note: Joined) -> None:
        admitted = note.admitted
        salt = admitted.fields.get("cache_salt")
        arrival = Arrival(
            serial=self._serial(),
            request_id=admitted.request_id,
            at=note.at,
            arrival=admitted.arrival - self._created if admitted.arrival else note.at,
            prompt=len(admitted.prompt),
            max_tokens=admitted.max_tokens,
            hashes=self._hash.blocks(admitted.prompt, self._block_size, media=admitted.media),
            features=tuple(sorted(note.features)),
            known=note.known,
            tenant=self._hash.of(b"tenant", admitted.tenant.encode()) if admitted.tenant else b"",
            salt=self._hash.of(b"salt", salt.encode("utf-8", "surrogatepass")) if isinstance(salt, str) else None,
            fields=_numbers(admitted.fields),
            pinned=dict(admitted.pinned),
            again=note.worker is not None,
            spans=_spans(admitted.media),
            media=self._hashes(admitted.media),
        )
        self._add(arrival, admitted.media)
        if note.worker is not None:
            (worker,) = without_tensors([note.worker])
            self._tracker.open(worker)
            if self._full:
                self._write_media(admitted.media)
                self._file.write(Opened([worker]))

    def _unseen(self, request: WorkerRequest, at: float) -> Arrival:
        """A request that was on its way when the recorder was switched on: what the worker's order says of it."""
        return Arrival(
            serial=self._serial(),
            request_id=request.request_id,
            at=at,
            arrival=at,
            prompt=request.num_prompt_tokens,
            max_tokens=self._header.max_model_len - request.num_prompt_tokens,
            hashes=self._hash.blocks(request.tokens[: request.num_prompt_tokens], self._block_size, media=request.media),
            features=request.features,
            known=len(request.tokens) - request.num_prompt_tokens,
            fields=_numbers(request.fields),
            pinned=dict.fromkeys(request.pinned, True),
            spans=_spans(request.media),
            media=self._hashes(request.media),
        )

    def _add(self, arrival: Arrival, media: tuple[MediaItem, ...]) -> Arrival:
        self._open[arrival.request_id] = arrival
        if media:
            self._media[arrival.request_id] = media
        self._outputs[arrival.request_id] = arrival.known
        self._file.write(arrival)
        return arrival

    def _hashes(self, media: Sequence[MediaItem]) -> bytes:
        return b"".join(self._hash.of(b"media", item.digest.encode()) for item in media)

    def _write_media(self, media: Sequence[MediaItem]) -> None:
        for frame in self._media_frames.missing(media):
            self._file.write(frame)

    def _serial(self) -> int:
        self._serials += 1
        return self._serials

    def _ran(self, note: Ran) -> None:
        plan, order, result = note.plan, note.order, note.result
        for new in order.new:
            if new.request_id not in self._open:
                self._add(self._unseen(new, note.at), new.media)
        serials = {request_id: arrival.serial for request_id, arrival in self._open.items()}
        sampled = {} if result is None else result.sampled
        step = Step(
            step_id=plan.step_id,
            at=note.at,
            seconds=note.seconds,
            runs=[number for name, n in plan.num_tokens.items() if name in serials for number in (serials[name], n)],
            sampled=[serials[name] for name in sampled if name in serials],
            started=[(serials[new.request_id], new.num_computed, new.prompt_logits) for new in order.new],
            drafts=[
                (serials[name], len(drafts), len(sampled[name]) - 1)
                for name, drafts in order.drafts.items()
                if name in serials and name in sampled
            ],
            preempted=[serials[name] for name in plan.preempted if name in serials],
            budget=plan.budget,
            free_blocks=plan.free_blocks,
            waiting=plan.waiting,
            running=plan.running,
            features=order.features,
            failed=result is None,
            encoded=None if result is None else int(result.counters.get(ENCODED_ITEMS, 0)),
            encode_us=None if result is None else _encoding(result.phases),
        )
        if order.features is not None:
            self._features = order.features
        self._file.write(step)
        if self._full:
            for new in order.new:
                self._write_media(new.media)
            order = msgspec.structs.replace(order, new=without_tensors(order.new), encode=None)
            self._file.write(Ordered(order))
            if result is not None:
                self._file.write(Given(plan.step_id, result.sampled, sorted(result.errors)))
            self._tracker.ordered(order)
            for name in order.dropped:
                if name not in self._open:
                    self._media.pop(name, None)
            self._tracker.given(order, sampled)
        for name, tokens in sampled.items():
            if name in self._outputs:
                self._outputs[name] += len(tokens)

    def _ended(self, note: Ended) -> None:
        arrival = self._open.pop(note.request_id, None)
        if arrival is None:  # refused before it was a request
            return
        outputs = self._outputs.pop(note.request_id)
        media = self._media.get(note.request_id, ())
        if not self._full or note.request_id not in self._tracker.requests:  # else a part that begins now still opens with it
            self._media.pop(note.request_id, None)
        hashes = b"" if note.tokens is None else self._hash.blocks(note.tokens, self._block_size, arrival.hashes, media)
        finish = note.finish
        self._file.write(
            End(
                serial=arrival.serial,
                at=note.at,
                reason=finish.reason,
                output=outputs - (finish.stop_token is not None) if note.tokens is None else len(note.tokens) - arrival.prompt,
                hashes=hashes[len(arrival.hashes) :],
                stop_token=finish.stop_token is not None,
                cached=finish.cached_tokens,
                preemptions=finish.preemptions,
            )
        )

    def _configured(self, note: notes.Configured) -> None:
        """In the header of the next part, and in a frame of this one."""
        config = {section: dict(values) for section, values in self._header.config.items()}
        kept = {}
        for name, value in note.values.items():
            section, _, rest = name.partition(".")
            plugin, _, field = rest.rpartition(".")
            if section == "scheduler":
                config["scheduler"][rest] = value
            elif section == "plugins" and plugin != "recorder":
                config["plugins"][plugin] = {**config["plugins"].get(plugin, {}), field: value}
            else:
                continue
            kept[name] = value
        if kept:
            self._header = msgspec.structs.replace(self._header, config=config)
            self._file.write(Configured(note.at, kept))


def _encoding(phases: Mapping[str, float]) -> int | None:
    """Microseconds; None of a model that reads text only, and on a GPU, where a phase is the time to start the work."""
    return None if "wait" in phases or "encode" not in phases else round(1e6 * phases["encode"])


def _spans(media: Sequence[MediaItem]) -> list[tuple[int, int, bool]]:
    return [(item.start, item.length, item.bidirectional) for item in media]


def _numbers(fields: dict[str, Any]) -> dict[str, int | float | bool | None]:
    return {name: value if isinstance(value, int | float) else None for name, value in fields.items()}


def make_header(engine: EngineContext, settings: RecorderSettings, created: float, on: tuple[str, ...]) -> Header:
    config, info = engine.config, engine.info
    kept = {name: msgspec.to_builtins(getattr(config, name)) for name in ("cache", "scheduler")}
    kept["plugins"] = {name: values for name, values in config.plugins.items() if name in on and name != "recorder"}
    if settings.level == "full":
        kept["model"] = msgspec.to_builtins(config.model)
    return Header(
        recording=secrets.token_hex(16),
        level=settings.level,
        created=created,
        version=version(),
        model="" if info is None else info.model,
        model_hash="" if info is None else model_hash(config),
        dtype="" if info is None else info.dtype,
        architecture="" if info is None else info.architecture,
        layers="" if info is None else layers(config),
        ahead=info is not None and info.ahead,
        lossless=info is None or info.lossless,
        vocab_size=0 if info is None else info.vocab_size,
        max_model_len=engine.pool.num_blocks * engine.pool.block_size if info is None else info.max_model_len,
        block_size=engine.pool.block_size,
        num_blocks=engine.pool.num_blocks,
        kv_bytes_per_token=0 if info is None else info.kv_bytes_per_token,
        features=on,
        config=kept,
    )
