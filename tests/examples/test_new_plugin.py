"""`tokenbus new-plugin`: what it writes works as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import tokenbus
from tokenbus.core.cli import main

sys.path.insert(0, str(Path(__file__).parent))

from packages import install, run


@pytest.mark.parametrize(
    ("name", "package", "field"),
    [("terse", "tokenbus-terse", "terse"), ("my.own_thing", "tokenbus-my-own-thing", "my_own_thing")],
)
def test_the_skeleton_passes_its_own_tests_and_is_found_when_installed(tmp_path, capsys, name, package, field):
    assert main(["new-plugin", name, "--into", str(tmp_path)]) == 0
    folder = tmp_path / package
    written = capsys.readouterr().out.splitlines()
    assert sorted(written[:4]) == sorted(str(path) for path in folder.rglob("*") if path.is_file())
    assert f"--enable {name}" in written[-1]
    assert f"api_version={tokenbus.HOOK_API_VERSION!r}" in (folder / f"tokenbus_{field}.py").read_text(encoding="utf-8")
    done = run(folder, "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout
    install([folder], tmp_path / "installed")
    done = run(tmp_path / "installed", "tokenbus", "plugins", "--json", "--enable", name)
    assert done.returncode == 0, done.stderr
    row = next(row for row in json.loads(done.stdout)["plugins"] if row["name"] == name)
    assert (row["on"], row["source"], row["claims"]) == (True, package, [field])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Terse", "small letters"),
        ("a..b", "small letters"),
        ("../up", "small letters"),
        ("x" * 65, "at most 64"),
        ("prefix_cache", "is called 'prefix_cache' already"),
        ("top_k", "belongs to 'sampling.truncation'"),
        ("user", "belongs to 'core'"),
    ],
)
def test_a_name_that_would_not_work_is_refused(tmp_path, capsys, name, says):
    assert main(["new-plugin", name, "--into", str(tmp_path)]) == 1
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(tmp_path, capsys):
    assert main(["new-plugin", "terse", "--into", str(tmp_path)]) == 0
    module = tmp_path / "tokenbus-terse" / "tokenbus_terse.py"
    module.write_text("mine", encoding="utf-8")
    assert main(["new-plugin", "terse", "--into", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert module.read_text(encoding="utf-8") == "mine"
