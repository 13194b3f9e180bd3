"""Files to sounds: one channel of float32 at the rate that the model's family wants. Runs in a process that can be killed.

Channels are averaged; the rate is changed by soxr (quality HQ). Needs the packages of `tokenbus[audio]`.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from .family import Sound
from .images import RefusedError

if TYPE_CHECKING:
    import numpy as np

FORMATS = {"wav": ("WAV", "WAVEX", "RF64"), "mp3": ("MPEG", "MP3"), "flac": ("FLAC",), "ogg": ("OGG",), "opus": ("OGG",)}
"""What clients call it, and what libsndfile does."""
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
            if declared is not None and file.format not in FORMATS[declared]:
                raise RefusedError(f"is a sound in the form {file.format}, not {declared}")
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


def _mixed(file: Any, most: int, max_seconds: float) -> np.ndarray:
    import numpy as np

    parts, count = [], 0
    while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
        count += len(block)
        if count > most:
            raise RefusedError(f"is a sound of more than {max_seconds:g} s")
        parts.append(block.mean(axis=1, dtype=np.float32))
    if not count:
        raise RefusedError("is a sound without samples")
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
    if given == wanted:
        return samples
    import numpy as np
    import soxr

    made = np.ascontiguousarray(soxr.resample(samples, given, wanted), dtype=np.float32)
    if not len(made):
        raise RefusedError(f"is too short a sound ({len(samples) / given * 1000:.1f} ms)")
    assert math.isclose(len(made) / wanted, len(samples) / given, abs_tol=0.01)
    return made
