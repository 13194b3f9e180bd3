from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenbus.core.cgroups import ancestors
from tokenbus.core.errors import ConfigError
from tokenbus.core.worker.threads import (
    SPINS,
    available_cores,
    calm_openmp,
    cgroup_quota,
    cores_in_order,
    format_cores,
    keep_to,
    parse_cores,
)


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


def test_a_list_of_cpus_is_read_and_written():
    assert parse_cores("0-3,8") == [0, 1, 2, 3, 8]
    assert parse_cores(" 5 , 2-2,2") == [2, 5]
    assert parse_cores(format_cores([4, 1])) == [1, 4]


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1.5", "0-99999999999", "²"])
def test_no_list_of_cpus(text):
    with pytest.raises(ConfigError, match="no list of CPUs"):
        parse_cores(text)


def test_cores_in_order_are_those_of_the_mask():
    assert sorted(cores_in_order()) == sorted(os.sched_getaffinity(0))


def test_a_process_keeps_to_its_cpus_with_all_its_threads():
    code = (
        "import os, threading, sys\n"
        "from tokenbus.core.worker.threads import keep_to\n"
        "go, seen = threading.Event(), []\n"
        "before = threading.Thread(target=lambda: (go.wait(), seen.append(os.sched_getaffinity(0))))\n"
        "before.start()\n"
        "keep_to(sys.argv[1])\n"
        "go.set(); before.join()\n"
        "print(seen[0] == os.sched_getaffinity(0) == {int(sys.argv[1])})\n"
    )
    core = max(os.sched_getaffinity(0))
    answer = subprocess.run([sys.executable, "-c", code, str(core)], capture_output=True, text=True, check=True)
    assert answer.stdout == "True\n"


def test_cpus_that_are_not_there_are_refused():
    keep_to(None)
    with pytest.raises(ConfigError, match=r"model\.cores: can't run on the CPUs 60000"):
        keep_to("60000")
