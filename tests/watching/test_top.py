"""`tokenbus top`: one look as plain text, and the screen it draws."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tokenbus.core.cli import main
from tokenbus.core.commands import top
from tokenbus.core.watching.screen import Screen

IDS = ["cmpl-00000000000000000000aaaa-0", "cmpl-00000000000000000000bbbb-0"]


@pytest.fixture
def screen(make_frame, make_step, told):
    screen = Screen()
    steps = [
        make_step(0, prefill={"0": 30}, decode=[], num_decodes=0),
        make_step(1, decode=[0]),
        make_step(2, decode=None),
        make_step(3, decode=[], verify={"0": [4, 2]}, prefill={"1": 512}),
        make_step(4, decode=[0], preempted=[1]),
    ]
    screen.take(make_frame(steps=steps))
    screen.features = told.features
    return screen


def test_a_row_shows_what_each_step_did_for_it(screen):
    lines = screen.lines(120, 40)
    rows = {line.split()[0]: line for line in lines if line.startswith("cmpl")}
    assert rows["cmpl-..00aaaa-0"].endswith("decode         30      11/100  P==V=")
    assert rows["cmpl-..00bbbb-0"].endswith("prefill       900        0/50     P!")


def test_the_head_has_the_numbers(screen):
    text = "\n".join(screen.lines(120, 40))
    assert "m, float32  ready" in text
    assert "running 2/256  waiting 0" in text
    assert "10 % used (#), 10 % retained (+)  too few 3 times" in text
    assert "first token  50 % 100 ms  95 % 200 ms  99 % 250 ms  of 20" in text
    assert re.search(r"^on +attention.cpu metrics prefix_cache$", text, re.MULTILINE)
    assert "engine ready: m, restarts 0" in text


def test_those_that_wait_come_last_and_what_does_not_fit_is_counted(screen, make_frame):
    waiting = [[f"w{i:04}", False, 10, 0, 0, 5, 999_990.0 + i / 1000, 0, 0, i % 2, ""] for i in range(1000)]
    screen.take(make_frame(requests=waiting + make_frame()["requests"], engine={"open": 1002, "waiting": 1000}))
    lines = screen.lines(100, 30)
    assert len(lines) <= 30
    states = [line.split()[1] for line in lines if re.match(r"cmpl|w\d", line)]
    assert states[:4] == ["decode", "prefill", "waiting", "preempted"]
    assert f"and {1002 - len(states)} more" in lines
    assert "waiting 1000 (longest 10.0 s)" in "\n".join(lines)


@pytest.mark.parametrize(("width", "height"), [(20, 5), (60, 12), (200, 60)])
@pytest.mark.parametrize("colour", [False, True])
def test_it_fits_every_terminal(screen, width, height, colour):
    screen._colour = colour
    lines = screen.lines(width, height)
    assert 1 <= len(lines) <= height
    assert all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= width for line in lines)
    assert any("\x1b" in line for line in lines) is colour
    for line in lines:
        assert line.count("\x1b[0m") * 2 == line.count("\x1b["), "each colour ends in its line"


def test_what_a_server_says_cannot_steer_the_terminal(screen, make_frame):
    events = [{"when": 0.0, "kind": "switch", "text": "x\x1b[2J\x07 off"}]
    screen.take(make_frame(events=events, info={"model": "evil\x1b]0;title\x07"}))
    text = "\n".join(screen.lines(120, 40))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


def test_media_are_shown_while_some_come(screen, make_frame, make_step):
    assert "media" not in "\n".join(screen.lines(160, 40))
    steps = [make_step(100 + i, started=1_000_000.0 - 1 + i / 10, media_tokens=60, phases={"encode": 0.038}) for i in range(10)]
    screen.facts.steps.clear()
    screen.take(make_frame(steps=steps))
    assert "media 600/s, encoder 40 %" in "\n".join(screen.lines(160, 40))


def test_nothing_yet():
    assert "the engine has not answered yet" in "\n".join(Screen().lines(80, 24))


def test_one_look_and_the_end(url, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["top", "--url", url, "--once"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "cmpl-..00aaaa-0" in out
    assert "========================================" in out


def test_without_a_terminal_it_is_one_look_too(url):
    command = [sys.executable, "-m", "tokenbus.core.cli", "top", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("Tokenbus  m, float32  ready")
    assert "\x1b" not in done.stdout


def test_no_server_is_an_error_with_what_to_do(capsys):
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "--url say where it is" in capsys.readouterr().err


def test_it_goes_on_when_the_server_comes_back(told, url, monkeypatch):
    """On a terminal: a stream that ends is taken up again, and Ctrl-C ends it."""
    seen: list[str] = []

    def show(screen: Screen) -> None:
        seen.append(screen.problem)
        if len(seen) == 2:
            told.frames = []  # the stream ends
        if "ended the stream" in screen.problem:
            told.frames = before
        if len(seen) > 3 and not screen.problem and seen[-2]:
            raise KeyboardInterrupt

    before = list(told.frames)
    monkeypatch.setattr(top, "show", show)
    monkeypatch.setattr(top, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(top.sys, "stdout", _Terminal())
    assert main(["top", "--url", url]) == 0
    assert "the server has ended the stream" in seen
    written = "".join(top.sys.stdout.written)
    assert written.startswith(top.OPEN)
    assert written.endswith(top.CLOSE)


class _Terminal:
    def __init__(self) -> None:
        self.written: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.written.append(text)

    def flush(self) -> None:
        pass


def test_a_screen_is_drawn_over_the_last_one(screen, monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(top.sys, "stdout", terminal)
    top.show(screen)
    text = "".join(terminal.written)
    assert text.startswith("\x1b[H")
    assert text.endswith("\x1b[K\x1b[J")
    assert IDS[0][-8:] in text
