"""Pictures and sounds in messages: found in the contents, prepared by a plugin, placed among the prompt's tokens.

A message's content with media is a list of texts and `MediaPart`s. The template writes a marker for each part, as the model's family
expects it; the marker gives way to the text that the plugin made for the part, and the whole is tokenised. Where the placeholders then
stand is where the items are. Markers and placeholders that a client writes as text are hidden from both (`ChatTemplate`), or make the
counts differ, which is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import FeatureOffError, FieldError, RequestError, shorten
from ..media import Kind, MediaItem, MediaPart, PreparedMedia
from .prepare import PreparePool

if TYPE_CHECKING:
    from .client import EngineClient

FIELD = "media"
"""What a request with media uses, as plugins claim it."""
PART_TYPES: Mapping[str, Kind] = {"image_url": "image", "input_audio": "audio"}
OWN_TYPES: Mapping[str, Kind] = {"image": "image", "audio": "audio"}
"""Types of parts whose value is an object: only this process's own caller can send them."""
THREADS = 8
"""Requests whose media are fetched and processed at the same time; they mostly wait, for others' servers and for processes of ours."""
WORDS: Mapping[Kind, str] = {"image": "images", "audio": "sounds"}


def media_part(part: Mapping[str, Any], where: str, *, own: bool) -> MediaPart | None:
    """The part as a MediaPart; None when its type is none of media. FieldError when there is anything else in it."""
    kind_name = part.get("type")
    types: dict[str, Kind] = {**PART_TYPES, **OWN_TYPES} if own else {**PART_TYPES}
    if not isinstance(kind_name, str) or (kind := types.get(kind_name)) is None:
        return None
    if unknown := next((key for key, value in part.items() if key not in ("type", kind_name) and value is not None), None):
        raise FieldError(f"{where}.{shorten(unknown)}", "unknown field")
    if (value := part.get(kind_name)) is None:
        raise FieldError(f"{where}.{kind_name}", "is required")
    return MediaPart(kind, f"{where}.{kind_name}", value, own=own)


def own_prompt(prompt: Mapping[str, Any]) -> tuple[str, list[MediaPart]]:
    """Text and media of a prompt that a Python caller wrote as {"prompt": str, "images": list, "audio": list}. FieldError."""
    if unknown := prompt.keys() - {"prompt", "images", "audio"}:
        raise FieldError(f"prompt.{min(map(str, unknown))}", "unknown field; there are prompt, images and audio")
    if not isinstance(text := prompt.get("prompt"), str):
        raise FieldError("prompt.prompt", "must be a string")
    parts = []
    kinds: tuple[tuple[str, Kind], ...] = (("images", "image"), ("audio", "audio"))
    for name, kind in kinds:
        if not isinstance(values := prompt.get(name, []), (list, tuple)):
            raise FieldError(f"prompt.{name}", "must be a list")
        parts += [MediaPart(kind, f"prompt.{name}[{index}]", value, own=True) for index, value in enumerate(values)]
    if not parts:
        raise FieldError("prompt", "has neither images nor audio: give the text itself")
    return text, parts


def media_of(messages: Sequence[Mapping[str, Any]]) -> list[MediaPart]:
    """All media parts of a conversation, in order."""
    contents = (message["content"] for message in messages if isinstance(message["content"], list))
    return [part for content in contents for part in content if isinstance(part, MediaPart)]


def text_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of a conversation's texts."""
    return sum(len(text) for message in messages for text in _texts(message["content"]))


def _texts(content: str | Sequence[str | MediaPart]) -> Iterator[str]:
    yield from (content,) if isinstance(content, str) else (part for part in content if isinstance(part, str))


class MediaIntake:
    """Has the plugin that claims media prepare them, on threads of its own."""

    def __init__(self, client: EngineClient, max_waiting: Callable[[], int]) -> None:
        self._client = client
        self._pool = PreparePool(max_waiting, threads=THREADS)

    async def prepare(self, parts: Sequence[MediaPart], seconds: float) -> list[PreparedMedia]:
        """One for each of `parts`, in order. FeatureOffError when no plugin that is on claims media, and what `prepare_media` and
        `PreparePool.run` raise. seconds: until its turn has to come."""
        host, on = self._client.host, self._client.switches.on
        claimers = host.claimers(FIELD)
        active = on.intersection(claimers)
        if not active:
            if not claimers:
                raise FieldError(parts[0].where, "there is no plugin here that reads anything but text")
            reason = self._client.switches.reasons.get(claimers[0])
            raise FeatureOffError(
                parts[0].where,
                f"the plugin that honours it, {claimers[0]!r}, is off{f' ({reason})' if reason else ''}",
                plugin=claimers[0],
            )
        with self._client.hold_plugins() as hold:
            hold.load(active, on)
            impls = [impl for impl in host.table(on, (FIELD,)).prepare_media if impl.plugin in active]

            def ask() -> list[PreparedMedia]:
                for impl in impls:
                    if (prepared := impl(parts=parts)) is not None:
                        return list(prepared)
                raise RequestError("nobody could prepare this request's pictures and sounds", param=parts[0].where)

            return await self._pool.run(ask, seconds)


def expand(text: str, prepared: Sequence[PreparedMedia], field: str = "messages") -> str:
    """A rendered template with each marker replaced by its item's text. FieldError when there are not as many markers as items."""
    waiting: dict[str, list[PreparedMedia]] = {}
    for one in prepared:
        waiting.setdefault(one.marker, []).append(one)
    found = re.compile("|".join(map(re.escape, sorted(waiting, key=len, reverse=True))))
    for marker, items in waiting.items():
        shown = sum(match[0] == marker for match in found.finditer(text))
        if shown != len(items):
            what = f"for {shown} of the {len(items)} {WORDS[items[0].item.kind]}"
            if field == "prompt":
                raise FieldError(field, f"has places {what}: write {marker!r} once for each of them")
            raise FieldError(
                field, f"this model's chat template has places {what}: it may not show any in messages of that role"
            )
    places = {marker: iter(items) for marker, items in waiting.items()}
    return found.sub(lambda match: next(places[match[0]]).text, text)


def place(
    token_ids: Sequence[int], prepared: Sequence[PreparedMedia], token_id: Callable[[str], int | None]
) -> tuple[MediaItem, ...]:
    """The items, where their placeholders stand in the prompt. FieldError when those are not as many as there should be."""
    waiting: dict[str, list[PreparedMedia]] = {}
    for one in prepared:
        waiting.setdefault(one.placeholder, []).append(one)
    placed: list[MediaItem] = []
    for token, items in waiting.items():
        if (known := token_id(token)) is None:
            raise RequestError(f"the model's tokenizer has no token {token!r} to stand for {WORDS[items[0].item.kind]}")
        positions = [position for position, found in enumerate(token_ids) if found == known]
        if len(positions) != sum(one.rows for one in items):
            raise FieldError(
                "messages",
                f"a text among them has the model's placeholder {token!r} in it, which stands for media: leave it out",
            )
        taken = 0
        for one in items:
            placed.append(_placed(one.item, positions[taken : taken + one.rows]))
            taken += one.rows
    return tuple(sorted(placed, key=lambda item: item.start))


def _placed(item: MediaItem, positions: Sequence[int]) -> MediaItem:
    start, length = positions[0], positions[-1] + 1 - positions[0]
    embeds = () if length == len(positions) else tuple(position - start for position in positions)
    return msgspec.structs.replace(item, start=start, length=length, embeds=embeds)
