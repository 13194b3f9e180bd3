"""The packages of `examples/plugin-*`: installed by pip, then found, switched at start, live and for a request, shown, and refused."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

import tokenbus

ROOT = Path(tokenbus.__file__).parent
sys.path[:0] = [str(ROOT / "tests" / "api"), str(ROOT / "tests" / "examples")]

from demo_process import serve_demo
from packages import install, path_of, run

PLUGINS = {
    "plugin-no-repeat-ngram": "no_repeat_ngram",
    "plugin-shortest-first": "scheduling.shortest_first",
    "plugin-shout": "shout",
    "plugin-statsd": "metrics.statsd",
}
TEXT = "One two one two one two one two"


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """pip leaves things behind where it builds."""
    folder = tmp_path_factory.mktemp("sources")
    for name in PLUGINS:
        shutil.copytree(
            ROOT / "examples" / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        )
    return folder


@pytest.fixture(scope="module")
def installed(copies, tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    install([copies / name for name in PLUGINS], target)
    return target


@pytest.fixture(scope="module")
def statsd():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(20)
        yield listener


@pytest.fixture(scope="module")
def server(installed, statsd):
    flags = ["--enable", "no_repeat_ngram", "--enable", "metrics.statsd", "--client-features", "no_repeat_ngram"]
    flags += ["--plugin-setting", f"metrics.statsd.port={statsd.getsockname()[1]}"]
    with serve_demo(*flags, environment={"PYTHONPATH": path_of(installed)}) as server:
        yield server


def test_every_example_is_here():
    assert {path.name for path in (ROOT / "examples").glob("plugin-*")} == set(PLUGINS)


@pytest.mark.parametrize("name", sorted(PLUGINS))
def test_each_states_the_hook_api_it_was_written_for(name):
    source = next((ROOT / "examples" / name).glob("*.py")).read_text(encoding="utf-8")
    assert "api_version=(1, " in source, "without it a plugin is never refused"


def test_they_are_listed_and_switched_at_start(installed):
    wanted = sorted(PLUGINS.values())
    done = run(installed, "tokenbus", "plugins", "--json", *(word for name in wanted for word in ("--enable", name)))
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["plugins"]}
    assert [rows[name]["on"] for name in wanted] == [True] * len(wanted)
    assert rows["no_repeat_ngram"]["source"] == "tokenbus-no-repeat-ngram"
    assert rows["no_repeat_ngram"]["claims"] == ["no_repeat_ngram_size"]
    assert rows["scheduling.shortest_first"]["slot"] == "scheduling"
    assert "scheduling.shortest_first" in rows["scheduling.unified"]["because"]
    table = run(installed, "tokenbus", "plugins").stdout.splitlines()
    assert any(line.startswith("metrics.statsd") and "off" in line and "not on by default" in line for line in table)


@pytest.mark.parametrize("name", ["plugin-no-repeat-ngram", "plugin-shortest-first", "plugin-statsd"])
def test_their_own_tests_pass_where_they_are_installed(copies, installed, name):
    done = run(installed, "pytest", "-q", "-p", "no:cacheprovider", cwd=copies / name)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_one_for_another_major_version_is_refused_with_both_named(copies, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(copies / "plugin-statsd", source)
    module = source / "tokenbus_statsd.py"
    text = module.read_text(encoding="utf-8")
    assert "api_version=(1, 1)" in text
    module.write_text(text.replace("api_version=(1, 1)", "api_version=(2, 0)"), encoding="utf-8")
    target = tmp_path / "target"
    install([source], target)
    done = run(target, "tokenbus", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    row = next(row for row in json.loads(done.stdout)["plugins"] if row["name"] == "metrics.statsd")
    major, minor = tokenbus.HOOK_API_VERSION
    assert (row["on"], row["broken"]) == (False, True)
    assert "made for hook API 2.0" in row["because"]
    assert f"has hook API {major}.{minor}" in row["because"]
    done = run(target, "tokenbus", "serve", "--enable", "metrics.statsd")
    assert done.returncode == 1
    assert "made for hook API 2.0" in done.stderr


def words_of(server, **fields):
    return server.complete(TEXT, max_tokens=24, ignore_eos=True, logprobs=1, **fields)["logprobs"]["tokens"]


def ngrams(tokens, size):
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


def test_the_logits_processor_is_applied_to_the_request_that_asks(server):
    plain, held = words_of(server), words_of(server, no_repeat_ngram_size=2)
    assert len(set(ngrams(plain, 2))) < len(ngrams(plain, 2))
    assert len(set(ngrams(held, 2))) == len(ngrams(held, 2))
    status, body = server.call("/v1/completions", {"prompt": TEXT, "no_repeat_ngram_size": -3})
    assert (status, body["error"]["param"]) == (400, "no_repeat_ngram_size")


def test_it_is_switched_off_for_one_request_and_live(server):
    off = {"features": {"no_repeat_ngram": False}}
    status, body = server.call("/v1/completions", {"prompt": TEXT, "max_tokens": 2, "tokenbus": off, "no_repeat_ngram_size": 2})
    assert (status, body["error"]["plugin"]) == (400, "no_repeat_ngram")
    status, body = server.call("/v1/completions", {"prompt": TEXT, "max_tokens": 2, "tokenbus": off})
    assert status == 200
    assert server.call("/v1/tokenbus/features", {"features": {"no_repeat_ngram": False}})[0] == 200
    status, body = server.call("/v1/completions", {"prompt": TEXT, "max_tokens": 2, "no_repeat_ngram_size": 2})
    assert (status, body["error"]["plugin"]) == (400, "no_repeat_ngram")
    assert server.call("/v1/tokenbus/features", {"features": {"no_repeat_ngram": True}})[0] == 200
    assert words_of(server, no_repeat_ngram_size=2)


def test_the_policy_takes_the_slot_live_and_answers_stay(server):
    before = words_of(server)
    status, state = server.call("/v1/tokenbus/features", {"features": {"scheduling.shortest_first": True}})
    assert status == 200, state
    assert server.call("/v1/tokenbus/features")[1]["slots"]["scheduling"] == "scheduling.shortest_first"
    assert words_of(server) == before
    assert server.call("/v1/tokenbus/features", {"features": {"scheduling.unified": True}})[0] == 200
    assert server.call("/v1/tokenbus/features")[1]["slots"]["scheduling"] == "scheduling.unified"
    assert words_of(server) == before


def test_the_exporter_tells_of_requests_until_it_is_switched_off(server, statsd):
    server.complete("abc", max_tokens=3, ignore_eos=True)
    seen = ""
    deadline = time.monotonic() + 20
    while "tokenbus.output_tokens:3|c" not in seen and time.monotonic() < deadline:
        seen += statsd.recv(65536).decode() + "\n"
    assert "tokenbus.output_tokens:3|c" in seen
    assert "tokenbus.requests.length:1|c" in seen
    assert "tokenbus.free_blocks:" in seen
    assert server.call("/v1/tokenbus/features", {"features": {"metrics.statsd": False}})[0] == 200
    statsd.setblocking(False)
    while True:
        try:
            statsd.recv(65536)
        except BlockingIOError:
            break
    server.complete("abc", max_tokens=3)
    with pytest.raises(BlockingIOError):
        statsd.recv(65536)
