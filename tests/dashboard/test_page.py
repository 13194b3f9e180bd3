"""What the page is made of."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import tokenbus
from tokenbus.plugins.dashboard.page import FOLDER, SCRIPTS, load_page

ROOT = Path(tokenbus.__file__).parent


def test_every_file_is_in_the_page_and_in_the_package():
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {*SCRIPTS, "page.html", "style.css"}
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "tokenbus.plugins.dashboard"
    ]
    assert all(any(fnmatch(f"static/{name}", pattern) for pattern in patterns) for name in names)


def test_the_script_speaks_only_of_elements_that_are_there():
    text = load_page().body.decode()
    ids = set(re.findall(r'\bid="([\w-]+)"', text))
    asked = set(re.findall(r'\bby\("([\w-]+)"\)', text))
    assert len(asked) > 25
    assert asked - ids == set()
    assert set(re.findall(r'(?:aria-labelledby|for)="([\w-]+)"', text)) - ids == set()
    tiles = set(re.findall(r'\btile\("(\w+)"', text))
    assert {f"t-{name}" for name in tiles} | {f"t-{name}-of" for name in tiles} == {
        name for name in ids if name.startswith("t-")
    }


def test_light_and_dark_have_the_same_colours():
    style = (FOLDER / "style.css").read_text()
    light, dark = (set(re.findall(r"(--[\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2])
    assert light == dark
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= light
    used = set(re.findall(r"colours\.(\w+)\b", "".join((FOLDER / name).read_text() for name in SCRIPTS)))
    assert {f"--{name}" for name in used - {"read"}} <= light
