"""Qwen2-Audio through a real server: sounds of every length, rate and form against transformers, and files that are none."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

import media_kit as kit
import numpy as np
import pytest
from demo_process import DemoServer
from served_kit import ServedFolder, Sound, ask, check_answer, noise, serving, talk

pytest.importorskip("soundfile", reason="needs tokenbus[audio]")
pytest.importorskip("soxr", reason="needs tokenbus[audio]")
GOOD = noise(0.5).data


@pytest.fixture(scope="module")
def running(served: Any) -> Iterator[tuple[ServedFolder, DemoServer]]:
    folder: ServedFolder = served("qwen2-audio")
    folder.add_weights()
    with serving(folder) as server:
        yield folder, server


def test_answers_are_those_of_transformers(running: tuple[ServedFolder, DemoServer]) -> None:
    short, stereo, other = noise(0.1), noise(1.7, channels=2, seed=1), noise(0.9, 44_100, seed=2)
    seen = [
        check_answer(*running, ["the end?"]),
        check_answer(*running, ["What is\n", noise(0.5), "the?"]),
        check_answer(*running, [short, "and\n", stereo, other], ["the same\n"], ["then?"]),
        check_answer(*running, ["first"], ["A text."], [other, "?", other]),
    ]
    assert len({tuple(answer.logprobs) for answer in seen}) == len(seen)


@pytest.mark.parametrize(
    "sound",
    [
        pytest.param(noise(30.0), id="half a minute"),
        pytest.param(noise(3.3, 8_000), id="8 kHz"),
        pytest.param(noise(1.234, 48_000, 2, "flac"), id="flac"),
        pytest.param(noise(2.1, 44_100, 2, "mp3"), id="mp3"),
        pytest.param(noise(2.1, 22_050, 1, "ogg"), id="ogg"),
        pytest.param(noise(1.0, subtype="PCM_U8"), id="8 bits"),
        pytest.param(noise(1.0, subtype="PCM_24"), id="24 bits"),
    ],
)
def test_sounds_of_many_kinds(sound: Sound, running: tuple[ServedFolder, DemoServer]) -> None:
    check_answer(*running, ["What is ", sound, "?"])


def wav(data_size: int, *, rate: int = 16_000, channels: int = 1, body: bytes = bytes(3200)) -> bytes:
    """16 bits a sample; the header says how much there is."""
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 * channels, 2 * channels, 16)
    head = b"RIFF" + struct.pack("<I", min(36 + data_size, 0xFFFFFFFF)) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + b"data" + struct.pack("<I", data_size) + body


def hours() -> bytes:
    """A FLAC of 0.1 s that declares 2^36 - 1 samples."""
    data = bytearray(noise(0.1, form="flac").data)
    info = int.from_bytes(data[18:26], "big") | ((1 << 36) - 1)
    data[18:26] = info.to_bytes(8, "big")
    return bytes(data)


BAD: dict[str, tuple[bytes, str, str]] = {
    "text": (b"hello, this is no sound at all", "wav", "is not a sound that can be read"),
    "nothing": (b"", "wav", "is empty"),
    "one byte": (b"R", "wav", "is not a sound that can be read"),
    "a picture": (kit.encoded(kit.noise()), "wav", "is not a sound that can be read"),
    "half a header": (GOOD[:20], "wav", "is not a sound that can be read"),
    "no samples": (wav(0, body=b""), "wav", "is a sound without samples"),
    "cut at once": (GOOD[:58], "wav", "is cut short"),
    "cut short": (GOOD[:5000], "wav", "is cut short: it declares 16000 bytes of sound, and 4956 are there"),
    "flac cut short": (noise(1.0, form="flac").data[:9000], "flac", "is not a sound that can be read"),
    "ogg cut short": (noise(1.0, form="ogg").data[:5000], "ogg", "cut short|is not a sound that can be read"),
    "flac as wav": (noise(0.1, form="flac").data, "wav", r"is a sound in the form FLAC \(PCM_16\), not wav"),
    "wav as mp3": (GOOD, "mp3", r"is a sound in the form WAV \(PCM_16\), not mp3"),
    "vorbis as opus": (noise(0.1, form="ogg").data, "opus", r"is a sound in the form OGG \(VORBIS\), not opus"),
    "declares hours": (hours(), "flac", "at most 600 s are allowed"),
    "31 seconds": (noise(31.0).data, "wav", "lasts 31.0 s, and may last 30 s: send it in parts"),
    "half a minute and a sample": (noise(30.00005).data, "wav", "may last 30 s: send it in parts"),
    "one sample": (noise(1 / 16_000).data, "wav", "too short to be heard"),
    "40 channels": (noise(0.1, channels=40).data, "wav", "is a sound of 40 channels; at most 16"),
    "no rate": (wav(3200, rate=0), "wav", "can't? be read|is not a sound|of 0 Hz"),
    "100 Hz": (noise(0.5, 100).data, "wav", "is a sound of 100 Hz"),
    "not a number": (kit.wav(np.full(1600, np.nan, np.float32)), "wav", "samples that are no numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sounds_are_the_clients_fault(name: str, running: tuple[ServedFolder, DemoServer]) -> None:
    data, form, says = BAD[name]
    _, server = running
    _, sent = talk(["What is ", Sound(data, form), "?"])
    status, body = server.call("/v1/chat/completions", {"messages": sent, "max_tokens": 1})
    assert status == 400, body
    assert body["error"]["param"] == "messages[0].content[1].input_audio.data"
    assert re.search(says, body["error"]["message"]), body


@pytest.mark.parametrize(
    ("value", "where", "says"),
    [
        ({"data": "!!!!", "format": "wav"}, ".data", "is not valid base64"),
        ({"data": "UklGR", "format": "wav"}, ".data", "is not valid base64"),
        ({"data": "AAAA", "format": "aiff"}, ".format", "must be one of wav, mp3"),
        ({"data": "AAAA"}, ".format", "must be one of wav, mp3"),
        ({"format": "wav"}, ".data", "must be a string"),
        ("AAAA", "", "must be an object"),
    ],
)
def test_bad_parts(value: Any, where: str, says: str, running: tuple[ServedFolder, DemoServer]) -> None:
    _, server = running
    part = {"type": "input_audio", "input_audio": value}
    status, body = server.call("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
    assert (status, body["error"]["param"]) == (400, f"messages[0].content[0].input_audio{where}")
    assert says in body["error"]["message"]


def test_a_wav_that_was_streamed_is_heard_to_its_end(running: tuple[ServedFolder, DemoServer]) -> None:
    _, server = running
    body = (np.random.default_rng(0).standard_normal(3200) * 3000).astype("<i2").tobytes()
    whole, endless = (talk([Sound(wav(size, body=body)), "?"])[1] for size in (len(body), 0xFFFFFFFF))
    assert ask(server, endless).tokens == ask(server, whole).tokens


def test_a_picture_is_refused(running: tuple[ServedFolder, DemoServer]) -> None:
    _, server = running
    messages = [{"role": "user", "content": [kit.image_part(kit.encoded(kit.noise()))]}]
    status, body = server.call("/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "reads no image, only audio" in body["error"]["message"]


def test_more_sounds_than_allowed_are_refused(running: tuple[ServedFolder, DemoServer]) -> None:
    _, server = running
    _, sent = talk([noise(0.1)] * 9)
    status, body = server.call("/v1/chat/completions", {"messages": sent})
    assert status == 400
    assert "at most 8 are allowed" in body["error"]["message"]


def test_after_all_that_the_server_is_well(running: tuple[ServedFolder, DemoServer]) -> None:
    check_answer(*running, ["Still ", noise(0.7, seed=9), "?"])
    assert running[1].call("/ready")[0] == 200
