"""`tokenbus selftest` with a model that reads pictures: prompts with some go the same ways, and what breaks them is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "api"))  # the kits

import media_kit as kit

from tokenbus.core import cli
from tokenbus.core.selftest import run
from tokenbus.core.selftest.run import MEDIA_KINDS, OTHER
from tokenbus.core.worker.encoder import Encoders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llava"
    kit.llava_checkpoint(path)
    return path


@pytest.fixture
def selftest(folder, monkeypatch, capsys):
    """`selftest(...)`: exit status, the report, stderr. Of the prompts without media only those of one kind."""
    monkeypatch.setattr(run, "KINDS", ("greedy",))
    monkeypatch.setattr(run, "LENGTHS", (15, 40))

    def call(*flags, model=folder, ways=()):
        if ways:
            every = run.SelfTest._ways
            monkeypatch.setattr(run.SelfTest, "_ways", lambda self: {name: every(self)[name] for name in ways})
        status = cli.main(["selftest", "--model", str(model), "--dtype", "float32", "--max-model-len", "512", "--json", *flags])
        shown = capsys.readouterr()
        return status, json.loads(shown.out[shown.out.index("{") :]), shown.err

    return call


SOME = ("preemption", "all at once")
ALL = (
    "batch mates", "chunks of 7", "prefix cache", "preemption", "drafts, right and wrong", "engine restart", "planned ahead",
    "planned ahead, little room", "all at once",
)  # fmt: skip


@pytest.mark.parametrize(
    ("ways", "kinds"), [(SOME, ("greedy",)), pytest.param((), MEDIA_KINDS, marks=pytest.mark.long)], ids=["some", "all"]
)
def test_prompts_with_pictures_go_these_ways(selftest, monkeypatch, ways, kinds):
    monkeypatch.setattr(run, "MEDIA_KINDS", kinds)
    status, report, errors = selftest(ways=ways)
    assert status == 0, errors
    assert report["media"] == {"kinds": ["image"], "problem": ""}
    cells = [cell for cell in report["cells"] if "media" in cell["way"]]
    assert {cell["way"] for cell in cells} == {f"{way}, media" for way in ways or ALL}
    assert {cell["kind"] for cell in cells} == set(kinds)
    assert all(cell["passed"] and any("tokens of media" in fired for fired in cell["fired"]) for cell in cells)
    others = [cell for cell in report["cells"] if cell["way"] == OTHER]
    assert [cell["kind"] for cell in others] == list(kinds)
    assert all(cell["passed"] and cell["fired"] for cell in others)


def test_a_cache_that_takes_one_picture_for_another_is_found(selftest, monkeypatch):
    get = Encoders._get

    def confused(self, item):
        return get(self, msgspec.structs.replace(item, digest="all the same"))

    monkeypatch.setattr(Encoders, "_get", confused)
    monkeypatch.setattr(run, "MEDIA_KINDS", ("greedy",))
    status, report, errors = selftest(ways=["batch mates"])
    assert status == 1
    passed = {cell["way"]: cell["passed"] for cell in report["cells"]}
    assert passed == {"batch mates": True, OTHER: False, "batch mates, media": True}
    assert f"{OTHER}, greedy: did not happen: another answer" in errors


@pytest.mark.long
def test_a_prefix_cache_that_ignores_pictures_is_found(selftest, monkeypatch):
    from tokenbus.plugins import prefix_cache

    monkeypatch.setattr(prefix_cache, "media_bytes", lambda *_: b"")
    monkeypatch.setattr(run, "MEDIA_KINDS", ("greedy",))
    status, report, _ = selftest(ways=["prefix cache"])
    assert status == 1
    differing = {cell["way"] for cell in report["cells"] if not cell["same"]}
    assert differing == {"prefix cache, media"}


def test_off_means_texts_only(selftest):
    status, report, errors = selftest("--disable", "multimodal", ways=["batch mates", "prefix cache"])
    assert status == 0, errors
    assert report["media"] == {"kinds": [], "problem": ""}
    assert not any("media" in cell["way"] for cell in report["cells"])


def test_a_model_whose_pictures_cant_be_processed_does_not_pass(selftest, folder, tmp_path):
    copy = tmp_path / "no-processor"
    copy.mkdir()
    for file in folder.iterdir():
        if file.name != "preprocessor_config.json":
            (copy / file.name).symlink_to(file)
    status, report, errors = selftest(model=copy, ways=["batch mates"])
    assert status == 1
    assert report["media"]["kinds"] == []
    assert "its processor can't be loaded" in report["media"]["problem"]
    assert "the model reads media, and no prompt with any could be made" in errors
