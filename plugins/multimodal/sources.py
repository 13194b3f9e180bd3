"""Where a part's file is: in the part itself, behind a URL, or in an object of a Python caller's. Nothing is decoded or fetched here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...core.errors import FieldError, shorten
from ...core.media import Kind, MediaPart

if TYPE_CHECKING:
    import numpy as np

SOUND_FORMATS = ("wav", "mp3", "flac", "ogg", "opus")


@dataclass(frozen=True, slots=True)
class Source:
    """What a job is made of, or a URL at which to get it."""

    kind: Kind
    where: str
    form: Literal["file", "base64", "pixels", "samples", "url"]
    data: bytes = b""
    url: str = ""
    shape: tuple[int, ...] = ()
    origin: str = ""
    declared: str | None = None
    """audio: the format that the client says it has."""

    @property
    def size(self) -> int:
        """Bytes of the file, as near as its form tells."""
        return len(self.data) // 4 * 3 if self.form == "base64" else len(self.data)


def source_of(part: MediaPart, max_bytes: int, max_pixels: int) -> Source:
    """FieldError for anything but what the API or, for an own caller, Python offers."""
    if part.own and (found := _of_object(part, max_bytes, max_pixels)) is not None:
        return found
    found = _of_image_url(part) if part.kind == "image" else _of_input_audio(part)
    if found.size > max_bytes + 2:
        raise FieldError(found.where, f"has {found.size} bytes; at most {max_bytes} are allowed")
    return found


# ---- what HTTP clients send -------------------------------------------------------------------------------------------------------


def _of_image_url(part: MediaPart) -> Source:
    value = part.value
    if not isinstance(value, dict):
        raise FieldError(part.where, 'must be an object: {"url": "data:image/png;base64,..."}')
    if unknown := next((key for key, given in value.items() if key not in ("url", "detail") and given is not None), None):
        raise FieldError(f"{part.where}.{shorten(unknown)}", "unknown field")
    if value.get("detail") not in (None, "auto"):
        raise FieldError(
            f"{part.where}.detail", 'only "auto" can be applied: this model has one way to see an image, so leave it out'
        )
    url = value.get("url")
    if not isinstance(url, str):
        raise FieldError(f"{part.where}.url", "must be a string")
    where = f"{part.where}.url"
    if url[:5].lower() != "data:":
        return Source("image", where, "url", url=url)
    head, comma, data = url[5:].partition(",")
    media_type, *options = head.split(";")
    if not comma or [option.strip().lower() for option in options[-1:]] != ["base64"]:
        raise FieldError(where, "must be of the form data:image/...;base64,...")
    check_data_type(media_type, where)
    return Source("image", where, "base64", _ascii(data, where))


def check_data_type(media_type: str, where: str) -> None:
    name = media_type.strip().lower()
    if name and not name.startswith("image/") and name != "application/octet-stream":
        raise FieldError(where, f"is of type {shorten(name)!r}, not image/...")


def _of_input_audio(part: MediaPart) -> Source:
    value = part.value
    if not isinstance(value, dict):
        raise FieldError(part.where, 'must be an object: {"data": "...", "format": "wav"}, the data in base64')
    if unknown := next((key for key, given in value.items() if key not in ("data", "format") and given is not None), None):
        raise FieldError(f"{part.where}.{shorten(unknown)}", "unknown field")
    declared, data = value.get("format"), value.get("data")
    if declared not in SOUND_FORMATS:
        raise FieldError(f"{part.where}.format", f"must be one of {', '.join(SOUND_FORMATS)}")
    if not isinstance(data, str):
        raise FieldError(f"{part.where}.data", "must be a string")
    where = f"{part.where}.data"
    return Source("audio", where, "base64", _ascii(data, where), declared=declared)


def _ascii(data: str, where: str) -> bytes:
    try:
        return data.encode("ascii")
    except UnicodeEncodeError:
        raise FieldError(where, "is not valid base64") from None


# ---- what Python callers give -----------------------------------------------------------------------------------------------------


def _of_object(part: MediaPart, max_bytes: int, max_pixels: int) -> Source | None:
    """None for what has the API's form."""
    value, where = part.value, part.where
    if isinstance(value, dict):
        return None
    if isinstance(value, (str, Path)):
        return Source(part.kind, where, "file", _read(Path(value), where, max_bytes))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Source(part.kind, where, "file", bytes(value))
    return _pixels(value, part, max_pixels) if part.kind == "image" else _samples(value, part)


def _read(path: Path, where: str, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise FieldError(where, f"can't be read: {error}") from None
    if len(data) > max_bytes:
        raise FieldError(where, f"has more than {max_bytes} bytes; at most these are allowed")
    return data


def _pixels(value: Any, part: MediaPart, max_pixels: int) -> Source:
    from .images import RefusedError, from_object

    try:
        image, origin = from_object(value, max_pixels)
    except RefusedError as error:
        raise FieldError(part.where, str(error)) from None
    return Source("image", part.where, "pixels", image.tobytes(), shape=(image.height, image.width), origin=origin)


def _samples(value: Any, part: MediaPart) -> Source:
    import numpy as np

    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int) and not isinstance(value[1], bool)):
        raise FieldError(part.where, "must be a path, bytes, or (samples, sampling rate)")
    samples: np.ndarray = np.asarray(value[0])
    if samples.dtype.kind != "f" or samples.ndim not in (1, 2):
        raise FieldError(
            part.where,
            f"samples must be floats, [num_samples] or [num_samples, channels], got {samples.dtype}, {samples.ndim}-d",
        )
    made = np.ascontiguousarray(samples if samples.ndim == 2 else samples[:, None], dtype=np.float32)
    return Source("audio", part.where, "samples", made.tobytes(), shape=(*made.shape, value[1]))
