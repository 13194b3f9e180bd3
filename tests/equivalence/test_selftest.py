"""`tokenbus selftest`: it passes where the promise holds, and fails where it is broken."""

from __future__ import annotations

import json

import pytest

from tokenbus.core import cli, rng
from tokenbus.core.selftest.run import KINDS
from tokenbus.core.worker import batch


def selftest(capsys, model: str, *flags: str):
    status = cli.main(["selftest", "--model", model, "--dtype", "float32", "--max-model-len", "512", *flags])
    return status, capsys.readouterr()


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("torch", marks=pytest.mark.long)], indirect=True)
def test_every_way_fires_and_changes_nothing(tiny_path, kernels, capsys):
    status, shown = selftest(
        capsys, tiny_path, "--json", "--kernels", kernels, *(["--enable", "attention.torch"] if kernels == "torch" else [])
    )
    report = json.loads(shown.out[shown.out.index("{") :])
    assert status == 0, shown.err
    assert report["lossless"]
    ways = {cell["way"] for cell in report["cells"]}
    assert ways == {
        "batch mates", "chunks of 1", "chunks of 7", "prefix cache", "preemption", "drafts, right and wrong", "engine restart",
        "prompts as text", "planned ahead", "planned ahead, little room", "all at once",
    }  # fmt: skip
    assert len(report["cells"]) == len(ways) * len(KINDS)
    assert {cell["kind"] for cell in report["cells"]} == set(KINDS)
    assert all(cell["same"] and cell["fired"] and not cell["missing"] for cell in report["cells"])


def test_a_broken_promise_is_found_and_named(tiny_path, capsys, monkeypatch):
    """A row that depends on its neighbours, as with kernels that aren't invariant."""
    build = batch.build

    def leaking(runs, layout):
        made = build(runs, layout)
        if len(runs) > 3:
            made.token_ids[-1] = (made.token_ids[-1] + 1) % 250
        return made

    monkeypatch.setattr(batch, "build", leaking)
    status, shown = selftest(capsys, tiny_path)
    assert status == 1
    assert "DIFFERS" in shown.out
    assert "batch mates" in shown.err
    assert "output token" in shown.err


@pytest.mark.long
def test_random_numbers_that_count_steps_are_found(tiny_path, capsys, monkeypatch):
    draws = iter(range(10**9))
    sample = rng.sample
    monkeypatch.setattr(
        rng, "sample", lambda logits, seed, position, choice: sample(logits, seed + next(draws) // 50, position, choice)
    )
    status, shown = selftest(capsys, tiny_path)
    assert status == 1
    lines = [line for line in shown.out.splitlines() if "DIFFERS" in line]
    assert lines
    assert not any(" greedy " in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    "flag", ["--disable=chunked_prefill", pytest.param("--disable=sampling.penalties", marks=pytest.mark.long)]
)
def test_what_is_off_is_left_out(tiny_path, capsys, flag):
    status, shown = selftest(capsys, tiny_path, flag)
    assert status == 0, shown.err
    assert ("chunks of" in shown.out) == ("penalties" in flag)
    assert ("penalties    same" in shown.out) == ("chunked" in flag)
