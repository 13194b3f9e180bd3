"""A plugin package of somebody else's: found by its entry point, refused with the reason when it doesn't fit, and really applied."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenbus
from tokenbus import LLM, SamplingParams
from tokenbus.core.errors import FeatureOffError, FieldError

EXAMPLE = Path(tokenbus.__file__).parent / "examples" / "plugin-shout"
sys.path.insert(0, str(EXAMPLE))

from tokenbus_shout import Shouter

ENTRY_POINTS = """[tokenbus.plugins]
shout = tokenbus_shout:Shout
broken = tokenbus_shout:NoSuchThing
from_the_future = future_plugin:Future
"""
FUTURE = """
from tokenbus import Plugin, PluginInfo
class Future(Plugin):
    info = PluginInfo(name="from_the_future", summary="", scope="step", lossless=True, api_version=(99, 0))
"""


@pytest.fixture
def installed(tmp_path):
    """The example as if pip had installed it, beside two packages that don't fit."""
    folder = tmp_path / "tokenbus_shout-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenbus-shout\nVersion: 0.1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "future_plugin.py").write_text(FUTURE)
    return os.pathsep.join([str(tmp_path), str(EXAMPLE)])


def tokenbus_command(path, *words):
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-m", "tokenbus", *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_it_is_listed_with_its_source_and_the_others_with_the_reason(installed):
    done = tokenbus_command(installed, "plugins", "--json", "--enable", "shout")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["plugins"]}
    assert rows["shout"]["on"] is True
    assert rows["shout"]["source"] == "tokenbus-shout"
    assert rows["broken"]["broken"] is True
    assert "NoSuchThing" in rows["broken"]["because"]
    assert "99.0" in rows["from_the_future"]["because"]
    assert "hook API 1." in rows["from_the_future"]["because"]


@pytest.mark.parametrize(
    ("name", "says"), [("broken", "NoSuchThing"), ("from_the_future", "hook API 99.0"), ("shuot", "did you mean")]
)
def test_what_does_not_fit_can_not_be_enabled(installed, name, says):
    done = tokenbus_command(installed, "plugins", "--enable", name)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@given(st.text(alphabet="ab c", max_size=30), st.lists(st.integers(0, 30), max_size=6), st.integers(1, 5))
def test_the_filter_does_not_depend_on_how_text_is_cut(text, cuts, max_words):
    def shown(pieces):
        shouter, out = Shouter(max_words), ""
        for piece in pieces:
            more, reason = shouter.feed(piece, final=False)
            out += more
            if reason:
                return out, reason
        more, reason = shouter.feed("", final=True)
        return out + more, reason

    borders = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    whole, reason = shown([text])
    assert shown(pieces) == (whole, reason)
    assert text.upper().startswith(whole.rstrip(" "))
    if reason is None:
        assert whole == text.upper()


def test_it_is_applied_to_the_request_that_asks():
    settings = {"shout": {"max_words": 3}}
    params = {"temperature": 0, "max_tokens": 12}
    with LLM(
        "demo", max_model_len=128, num_blocks=32, load=("tokenbus_shout:Shout",), enable=("shout",), plugins=settings
    ) as llm:
        prompt = "The three largest cities of Europe are"
        plain, loud = llm.generate(
            [prompt, prompt], [SamplingParams(**params), SamplingParams(**params, extra={"shout": True})], use_tqdm=False
        )
        assert loud.outputs[0].stop_reason == "enough words"
        assert loud.outputs[0].finish_reason == "stop"
        text = loud.outputs[0].text
        assert text == text.upper()
        assert plain.outputs[0].text.upper().startswith(text.rstrip())
        assert plain.outputs[0].text != plain.outputs[0].text.upper()
        with pytest.raises(FieldError, match="must be true"):
            llm.generate(prompt, SamplingParams(extra={"shout": "yes"}), use_tqdm=False)
        with pytest.raises(FeatureOffError, match="'shout'"):
            llm.generate(prompt, SamplingParams(extra={"shout": True}, features={"shout": False}), use_tqdm=False)
