from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenbus.core.cgroups import ancestors
from tokenbus.core.worker.threads import SPINS, available_cores, calm_openmp, cgroup_quota


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("given", "spins"), [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_openmp_threads_sleep_unless_the_user_says_otherwise(monkeypatch, given, spins):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    calm_openmp()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


def test_this_machine():
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


def test_ancestors_include_the_root(tmp_path):
    assert ancestors(tmp_path, "/a/b") == [tmp_path / "a/b", tmp_path / "a", tmp_path]
    assert ancestors(tmp_path, "/") == [tmp_path]


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"": "max 100000"}, None),
        ({"": "150000 100000"}, 1.5),
        ({"": "400000 100000", "a": "max 1", "a/b": "50000 100000"}, 0.5),
    ],
)
def test_quota_version_2(tmp_path, files, quota):
    for path, text in files.items():
        write(tmp_path / path, cpu__max=text)
    assert cgroup_quota(tmp_path, {"": "/a/b"}) == quota


@pytest.mark.parametrize(("value", "quota"), [("-1", None), ("300000", 3.0)])
def test_quota_version_1(tmp_path, value, quota):
    write(tmp_path / "cpu/x", cpu__cfs_quota_us=value, cpu__cfs_period_us="100000")
    assert cgroup_quota(tmp_path, {"cpu": "/x"}) == quota
