"""Sounds: files and samples to one channel at the rate that a family wants, and what is refused."""

from __future__ import annotations

import base64
import io

import media_kit as kit
import numpy as np
import pytest

from tokenbus.core.errors import FieldError
from tokenbus.core.media import MediaPart
from tokenbus.plugins.multimodal import job_main
from tokenbus.plugins.multimodal.family import Processed
from tokenbus.plugins.multimodal.images import RefusedError
from tokenbus.plugins.multimodal.jobs import Job
from tokenbus.plugins.multimodal.sounds import FORMATS, open_sound
from tokenbus.plugins.multimodal.sources import SOUND_FORMATS, source_of

soundfile = pytest.importorskip("soundfile", reason="needs tokenbus[audio]")
pytest.importorskip("soxr", reason="needs tokenbus[audio]")
RATE = 16_000


def tone(seconds=0.5, rate=RATE, hertz=440.0):
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def written(samples, rate, form, **options):
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=form, **options)
    return buffer.getvalue()


def pitch(samples, rate):
    spectrum = np.abs(np.fft.rfft(samples))
    return np.argmax(spectrum) * rate / len(samples)


def test_a_wav_at_the_right_rate_is_its_samples():
    sound, _ = open_sound(kit.wav(tone()), "wav", RATE, 10.0)
    assert np.array_equal(sound.samples, tone())
    assert sound.samples.dtype == np.float32


@pytest.mark.parametrize("size", [0x7FFF_0000, 0x8000_0000, 0xFFFF_FFFF])
def test_a_wav_that_was_streamed_does_not_say_how_long_it_is(size):
    data = bytearray(written(tone(), RATE, "WAV"))
    place = data.index(b"data") + 4
    data[place : place + 4] = size.to_bytes(4, "little")
    sound, _ = open_sound(bytes(data), "wav", RATE, 10.0)
    assert np.abs(sound.samples - tone()).max() < 1e-4


@pytest.mark.parametrize("form", ["WAV", "WAVEX"])
def test_a_wav_may_have_more_than_sound_in_it(form):
    data = bytearray(written(tone(), RATE, form))
    place = data.index(b"data")
    data[place:place] = b"junk" + (3).to_bytes(4, "little") + b"abc\0"
    sound, _ = open_sound(bytes(data) + b"LIST" + (4).to_bytes(4, "little") + b"INFO", "wav", RATE, 10.0)
    assert np.abs(sound.samples - tone()).max() < 1e-4


@pytest.mark.parametrize("count", [1, 2, 7, 441, 44_099, 44_101])
@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000])
def test_the_number_of_samples_is_the_duration_rounded_up(rate, count):
    sound, _ = open_sound(written(tone(1.2, rate)[:count], rate, "WAV"), "wav", RATE, 10.0)
    assert len(sound.samples) == -(-min(count, int(1.2 * rate)) * RATE // rate)


@pytest.mark.parametrize(("form", "declared"), [("WAV", "wav"), ("FLAC", "flac"), ("OGG", "ogg"), ("MP3", "mp3")])
@pytest.mark.parametrize("rate", [8000, 44_100, 48_000])
def test_every_form_and_rate_keeps_pitch_and_length(form, declared, rate):
    sound, origin = open_sound(written(tone(1.0, rate), rate, form), declared, RATE, 10.0)
    assert abs(pitch(sound.samples, RATE) - 440) < 3
    assert abs(len(sound.samples) / RATE - 1.0) < 0.1  # mp3 pads
    assert str(rate) in origin


def test_channels_are_averaged():
    stereo = np.stack([tone(), np.zeros_like(tone())], axis=1)
    sound, _ = open_sound(kit.wav(stereo), "wav", RATE, 10.0)
    assert np.allclose(sound.samples, tone() / 2, atol=1e-7)


@pytest.mark.parametrize(
    ("data", "declared", "says"),
    [
        (b"no sound", "wav", "is not a sound that can be read"),
        (kit.encoded(kit.noise()), "wav", "is not a sound that can be read"),
        (kit.wav(tone())[:30], "wav", "is not a sound that can be read"),
        (kit.wav(np.zeros(0, np.float32)), "wav", "is a sound without samples"),
        (written(tone(), RATE, "FLAC"), "wav", r"is a sound in the form FLAC \(PCM_16\), not wav"),
        (written(tone(), RATE, "OGG"), "opus", r"is a sound in the form OGG \(VORBIS\), not opus"),
        (kit.wav(tone())[:-1], "wav", r"is cut short: it declares \d+ bytes of sound, and \d+ are there"),
        (written(tone(), RATE, "RF64")[:-4000], "wav", "is cut short"),
        (written(tone(), RATE, "WAVEX")[:-4000], "wav", "is cut short"),
        (written(tone(), RATE, "FLAC")[:-4000], "flac", "is not a sound that can be read"),
        (written(tone(), RATE, "OGG")[:2000], "ogg", "cut short|is not a sound that can be read"),
        (kit.wav(tone(3.0)), "wav", "is a sound of 3.0 s; at most 2 s"),
        (written(tone(3.0), RATE, "MP3"), "mp3", "at most 2 s|more than 2 s"),
        (kit.wav(np.zeros((100, 20), np.float32)), "wav", "of 20 channels; at most 16"),
        (kit.wav(np.full(100, np.nan, np.float32)), "wav", "samples that are no numbers"),
        (kit.wav(tone(0.1), 500), "wav", "of 500 Hz"),
    ],
)
def test_bad_sounds_are_refused(data, declared, says):
    with pytest.raises(RefusedError, match=says):
        open_sound(data, declared, RATE, 2.0)


def test_opus_is_read():
    data = written(tone(1.0, 48_000), 48_000, "OGG", subtype="OPUS")
    for declared in ("opus", "ogg"):
        sound, _ = open_sound(data, declared, RATE, 10.0)
        assert abs(pitch(sound.samples, RATE) - 440) < 3


def test_a_header_that_declares_hours_is_refused_before_it_is_read():
    data = bytearray(written(tone(0.1), RATE, "FLAC"))
    info = int.from_bytes(data[18:26], "big") & ~((1 << 36) - 1)
    data[18:26] = (info | ((1 << 36) - 1)).to_bytes(8, "big")
    with pytest.raises(RefusedError, match="at most 2 s"):
        open_sound(bytes(data), "flac", RATE, 2.0)


class Ears:
    """A family that hears: a row for each tenth of a second."""

    name, sampling_rate, options = "ears", RATE, {"window": 0.1}
    markers = placeholders = {"audio": "<audio>"}

    def process(self, kind, media):
        rows = -(-len(media.samples) * 10 // media.sampling_rate)
        if rows > 30:
            raise ValueError("it hears 3 s at most")
        return Processed({"samples": media.samples[None]}, "<audio>" * rows, rows)


def job_of(part, **limits):
    source = source_of(part, 1 << 24, 1 << 24)
    return Job(
        kind="audio", form=source.form, data=source.data, shape=source.shape, declared=source.declared, max_bytes=1 << 24,
        max_pixels=1, max_seconds=10.0, **limits,
    )  # fmt: skip


def api_part(data, form="wav"):
    value = {"data": base64.b64encode(data).decode(), "format": form}
    return MediaPart("audio", "messages[0].content[0].input_audio", value)


def test_a_part_of_the_api_becomes_an_item():
    done = job_main.done_of(job_of(api_part(kit.wav(tone(0.55)))), Ears())
    assert (done.rows, done.text) == (6, "<audio>" * 6)
    assert done.item.kind == "audio"
    tensor = done.item.tensors["samples"]
    assert np.array_equal(np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)[0], tone(0.55))


@pytest.mark.parametrize("make", [lambda path: path, str, lambda path: path.read_bytes(), lambda _: (tone(0.55), RATE)])
def test_what_python_callers_give(make, tmp_path):
    path = tmp_path / "tone.wav"
    path.write_bytes(kit.wav(tone(0.55)))
    own = job_main.done_of(job_of(MediaPart("audio", "here", make(path), own=True)), Ears())
    sent = job_main.done_of(job_of(api_part(kit.wav(tone(0.55)))), Ears())
    assert own.item.tensors == sent.item.tensors


def test_a_family_that_cannot_take_it_says_so_to_the_client():
    with pytest.raises(RefusedError, match="can't be read by this model: it hears 3 s at most"):
        job_main.done_of(job_of(api_part(kit.wav(tone(4.0)))), Ears())


def test_digests_depend_on_samples_and_options():
    def digest(samples, family=None):
        return job_main.done_of(job_of(api_part(kit.wav(samples))), family or Ears()).item.digest

    other = Ears()
    other.options = {"window": 0.2}
    assert digest(tone()) == digest(tone())
    assert len({digest(tone()), digest(tone(hertz=441.0)), digest(tone(0.6)), digest(tone(), other)}) == 4


@pytest.mark.parametrize(
    ("value", "where", "says"),
    [
        ("x", "", "must be an object"),
        ({"data": "aGVsbG8="}, ".format", "must be one of wav, mp3"),
        ({"data": "aGVsbG8=", "format": "midi"}, ".format", "must be one of wav, mp3"),
        ({"format": "wav"}, ".data", "must be a string"),
        ({"format": "wav", "data": "é"}, ".data", "is not valid base64"),
        ({"format": "wav", "data": "aGVsbG8=", "url": "x"}, ".url", "unknown field"),
    ],
)
def test_parts_of_a_wrong_form(value, where, says):
    with pytest.raises(FieldError, match=says) as raised:
        source_of(MediaPart("audio", "place", value), 1 << 20, 1 << 20)
    assert raised.value.param == f"place{where}"


@pytest.mark.parametrize(
    "value", [5, (tone(),), (tone(), "16000"), (tone().astype(int), RATE), (np.zeros((1, 1, 1)), RATE), tone()]
)
def test_samples_of_a_wrong_form(value):
    with pytest.raises(FieldError, match="must be"):
        source_of(MediaPart("audio", "place", value, own=True), 1 << 20, 1 << 20)


def test_both_lists_of_formats_are_the_same():
    assert tuple(FORMATS) == SOUND_FORMATS
