"""Files to sounds: one channel of float32 at the rate that the model's family wants. Runs in a process that can be killed.

Channels are averaged; the rate is changed by soxr (quality HQ). Needs the packages of `tokenbus[audio]`.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from .family import Sound
from .images import RefusedError

if TYPE_CHECKING:
    import numpy as np

FORMATS = {"wav": ("WAV", "WAVEX", "RF64"), "mp3": ("MPEG", "MP3"), "flac": ("FLAC",), "ogg": ("OGG",), "opus": ("OPUS",)}
"""What clients call it, and what libsndfile calls its container or, for opus, what is in it."""
UNKNOWN = 0x7FFF_0000
"""Bytes of sound that a WAV declares, from which on the number means that whoever wrote it did not know: files that were streamed."""
MAX_CHANNELS = 16
RATES = (1_000, 384_000)
"""Hz, least and most."""
BLOCK = 1 << 16


def open_sound(data: bytes, declared: str | None, rate: int, max_seconds: float) -> tuple[Sound, str]:
    """The sound at `rate` Hz, and what the file was. declared: one of FORMATS, which the file then has to be. RefusedError."""
    try:
        import soundfile
    except ImportError:
        raise ModuleNotFoundError("sounds need the packages of tokenbus[audio]: soundfile and soxr") from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if declared is not None and not {file.format, file.subtype}.intersection(FORMATS[declared]):
                raise RefusedError(f"is a sound in the form {file.format} ({file.subtype}), not {declared}")
            if file.format in FORMATS["wav"]:
                _check_whole(data)
            _check(file.samplerate, file.channels)
            most = int(max_seconds * file.samplerate)
            if 0 < most < file.frames < 1 << 62:  # as declared; what can't know declares 2^63 - 1
                raise RefusedError(
                    f"is a sound of {file.frames / file.samplerate:.1f} s; at most {max_seconds:g} s are allowed"
                )
            samples = _mixed(file, most, max_seconds)
            origin = f"{file.format} {file.subtype} {file.samplerate} {file.channels}"
            return Sound(_resampled(samples, file.samplerate, rate), rate), origin
    except soundfile.LibsndfileError as error:
        raise RefusedError(f"is not a sound that can be read ({error.error_string})") from None


def _check_whole(data: bytes) -> None:
    """RefusedError for a WAV that ends before what it declares; libsndfile takes what there is. Other forms declare no length, or their
    decoders notice."""
    place, declared = 12, None
    while place + 8 <= len(data):
        name, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8
        if name == b"ds64":  # RF64: sizes of 64 bits; the data's is the second
            declared = int.from_bytes(data[place + 8 : place + 16], "little")
        if name == b"data":
            there, wanted = len(data) - place, size if size < UNKNOWN else declared or 0
            if wanted > there:
                raise RefusedError(f"is cut short: it declares {wanted} bytes of sound, and {there} are there")
            return
        place += size + size % 2


def _mixed(file: Any, most: int, max_seconds: float) -> np.ndarray:
    import numpy as np

    parts, count = [], 0
    while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
        count += len(block)
        if count > most:
            raise RefusedError(f"is a sound of more than {max_seconds:g} s")
        parts.append(block.mean(axis=1, dtype=np.float32))
    if not count:
        raise RefusedError("is a sound without samples, or cut short")
    return _finite(np.concatenate(parts))


def from_samples(samples: np.ndarray, given: int, rate: int, max_seconds: float) -> tuple[Sound, str]:
    """float32 [num_samples, channels] at `given` Hz. RefusedError."""
    import numpy as np

    _check(given, samples.shape[1])
    if len(samples) > max_seconds * given:
        raise RefusedError(f"is a sound of {len(samples) / given:.1f} s; at most {max_seconds:g} s are allowed")
    if not len(samples):
        raise RefusedError("is a sound without samples")
    mixed = _finite(samples.mean(axis=1, dtype=np.float32))
    return Sound(_resampled(mixed, given, rate), rate), f"samples {given} {samples.shape[1]}"


def _check(rate: int, channels: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise RefusedError(f"is a sound of {rate} Hz; rates from {RATES[0]} to {RATES[1]} Hz can be read")
    if not 1 <= channels <= MAX_CHANNELS:
        raise RefusedError(f"is a sound of {channels} channels; at most {MAX_CHANNELS} can be read")


def _finite(samples: np.ndarray) -> np.ndarray:
    import numpy as np

    if not np.isfinite(samples).all():
        raise RefusedError("is a sound with samples that are no numbers")
    return samples


def _resampled(samples: np.ndarray, given: int, wanted: int) -> np.ndarray:
    """As many samples as its duration takes, rounded up: with how many soxr ends it depends on its buffers, and so would the prompt."""
    if given == wanted:
        return samples
    import numpy as np
    import soxr

    count = -(-len(samples) * wanted // given)
    made = soxr.resample(samples, given, wanted)[:count]
    return np.ascontiguousarray(np.pad(made, (0, count - len(made))), dtype=np.float32)
