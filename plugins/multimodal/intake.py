"""A request's media, from parts of messages to processed items: sources, fetching, limits, jobs, and a cache of what was made before."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ...core.errors import FieldError, RequestError, UnavailableError
from ...core.media import Kind, MediaPart, PreparedMedia
from .jobs import Done, Job
from .processes import CannotProcessError
from .sources import Source, source_of

if TYPE_CHECKING:
    from .family import Family
    from .fetch import Fetcher
    from .processes import Processes
    from .settings import MultimodalSettings


class Cache:
    """What jobs made, by the file they were given. Least recently used goes first. Safe on any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, Done] = OrderedDict()
        self.bytes = 0
        """Of the entries' tensors; never more than the maximum."""
        self.hits = 0

    def get(self, key: bytes) -> Done | None:
        with self._lock:
            if (found := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                self.hits += 1
            return found

    def put(self, key: bytes, done: Done) -> None:
        with self._lock:
            if key in self._entries or _size(done) > self._max_bytes:
                return
            self._entries[key] = done
            self.bytes += _size(done)
            while self.bytes > self._max_bytes:
                self.bytes -= _size(self._entries.popitem(last=False)[1])

    def check_integrity(self) -> None:
        """AssertionError when the count of bytes is not that of the entries, or above the limit."""
        with self._lock:
            assert self.bytes == sum(map(_size, self._entries.values())) <= self._max_bytes


def _size(done: Done) -> int:
    return 0 if done.item is None else done.item.size


class Intake:
    """For one model. Safe on any thread; blocking."""

    def __init__(
        self, settings: MultimodalSettings, family: Family, model: str, processes: Processes, fetcher: Fetcher
    ) -> None:
        self._settings = settings
        self._family = family
        self._model = model
        self._processes = processes
        self._fetcher = fetcher
        self.cache = Cache(settings.cache_mb << 20)

    def prepare(self, parts: Sequence[MediaPart]) -> list[PreparedMedia]:
        """One for each part, in order. FieldError names the part that is at fault; UnavailableError, OverloadedError."""
        deadline = time.monotonic() + self._settings.request_seconds
        self._check_counts(parts)
        most = self._settings.max_item_mb << 20
        sources = [source_of(part, most, self._settings.max_pixels) for part in parts]
        self._check_bytes(sources)
        prepared: list[PreparedMedia] = []
        for source in self._fetched(sources, most, deadline):
            if time.monotonic() >= deadline:
                raise self._too_slow(source)
            prepared.append(self._prepared(source, deadline))
            rows = sum(one.rows for one in prepared)
            if rows > self._settings.max_tokens:
                raise FieldError(
                    source.where,
                    f"the media up to here take {rows} tokens; at most {self._settings.max_tokens} are allowed in one request",
                )
        return prepared

    def warm_up(self) -> None:
        self._processes.warm_up()

    def _too_slow(self, source: Source) -> RequestError:
        seconds = self._settings.request_seconds
        return FieldError(source.where, f"the request's media were not processed within {seconds:g} s: send fewer of them")

    def _check_counts(self, parts: Sequence[MediaPart]) -> None:
        limits: dict[Kind, int] = {"image": self._settings.max_images, "audio": self._settings.max_sounds}
        for kind, most in limits.items():
            found = [part for part in parts if part.kind == kind]
            if found and kind not in self._family.markers:
                reads = " and ".join(sorted(self._family.markers))
                raise FieldError(found[0].where, f"the model {self._model!r} reads no {kind}, only {reads}")
            if len(found) > most:
                raise FieldError(
                    found[most].where, f"{len(found)} parts of kind {kind}; at most {most} are allowed in one request"
                )

    def _check_bytes(self, sources: Sequence[Source]) -> None:
        total, most = 0, self._settings.max_request_mb << 20
        for source in sources:
            total += source.size
            if total > most:
                raise FieldError(source.where, f"the media up to here have {total} bytes; at most {most} are allowed")

    def _fetched(self, sources: Sequence[Source], most: int, deadline: float) -> list[Source]:
        """With the files in place of URLs. All are fetched at the same time; when one can't be had the others are stopped."""
        urls = [source for source in sources if source.form == "url"]
        if not urls:
            return list(sources)
        if not self._settings.fetch_hosts:
            raise FieldError(
                urls[0].where,
                "this server fetches nothing: send the file itself, as data:image/...;base64,... (an operator may set [plugins.multimodal] "
                "fetch_hosts)",
            )
        from .fetch import Budget

        budget = Budget((self._settings.max_request_mb << 20) - sum(source.size for source in sources))
        waiting: dict[int, Future[bytes]] = {}
        try:
            for index, source in enumerate(sources):
                if source.form == "url":
                    waiting[index] = self._fetcher.begin(source.url, source.where, source.kind, most, budget)
            got = {index: future.result(max(0.0, deadline - time.monotonic())) for index, future in waiting.items()}
        except TimeoutError:
            raise self._too_slow(urls[0]) from None
        except CancelledError:
            raise UnavailableError("fetching was stopped", retry_after=2.0) from None
        finally:
            for future in waiting.values():
                future.cancel()
        return [
            replace(source, form="file", data=got[index]) if index in got else source for index, source in enumerate(sources)
        ]

    def _prepared(self, source: Source, deadline: float) -> PreparedMedia:
        key, kind, family = _key(source), source.kind, self._family
        found = self.cache.get(key)
        done = found or self._done(source, deadline)
        assert done.item is not None
        if found is None:
            self.cache.put(key, done)
        return PreparedMedia(
            done.item, family.markers[kind], done.text, family.placeholders[kind], done.rows, known=found is not None
        )

    def _done(self, source: Source, deadline: float) -> Done:
        assert source.form != "url"
        job = Job(
            kind=source.kind,
            form=source.form,
            data=source.data,
            shape=source.shape,
            origin=source.origin,
            declared=source.declared,
            max_bytes=self._settings.max_item_mb << 20,
            max_pixels=self._settings.max_pixels,
            max_seconds=self._settings.max_sound_seconds,
        )
        try:
            done = self._processes.run(job, deadline - time.monotonic())
        except CannotProcessError as error:
            raise FieldError(
                source.where, f"the model {self._model!r} reads images or sounds, but its processor can't be loaded: {error}"
            ) from None
        if done.refused is not None:
            raise FieldError(source.where, done.refused)
        if done.fault is not None:
            raise RuntimeError(f"processing {source.where} failed: {done.fault}")
        return done


def _key(source: Source) -> bytes:
    head = msgspec.msgpack.encode((source.kind, source.form, source.shape, source.origin, source.declared))
    total = hashlib.sha256(head)
    total.update(source.data)
    return total.digest()
