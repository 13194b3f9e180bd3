"""scripts/gpu: its options, its parts' limits, what it writes, and its exit status. See test_gpu_parts.py for what parts measure."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu import checks, kernels, reaches, suite
from gpu.parts import PARTS, TOTAL_SECONDS, Part, chosen
from gpu.reaches import REACHES
from gpu.record import Findings, Record
from gpu.report import table

ROOT = Path(__file__).parents[2]
CARD = {
    "card": "Some GPU",
    "driver": "1.2",
    "versions": {"Python": "3.12", "torch": "2.11", "triton": "3.6", "transformers": "5.17"},
    "memory": 80 * 2**30,
    "processors": 100,
    "l2": 50 * 2**20,
    "capability": "9.0",
    "cuda": "13.0",
}
HEAD = "import json, sys, time\ndef tell(**line): open(sys.argv[2], 'a').write(json.dumps(line) + '\\n')\n"


# ---- options --------------------------------------------------------------------------------------------------------------------


def test_without_names_all_but_tune_run_within_eight_minutes():
    names = [part.name for part in chosen([], interpret=False)]
    assert names == ["kernels", "ids", "copy", "attention", "model", "linears"]
    assert TOTAL_SECONDS < 480


def test_a_part_brings_what_it_needs_before_it():
    assert [part.name for part in chosen(["attention"], interpret=False)] == ["copy", "attention"]
    assert [part.name for part in chosen(["tune"], interpret=False)] == ["tune"]


def test_the_interpreter_runs_only_what_is_about_correctness():
    assert [part.name for part in chosen([], interpret=True)] == ["kernels", "ids"]
    assert [part.name for part in chosen(["ids"], interpret=True)] == ["ids"]
    with pytest.raises(ValueError, match="attention measures speed"):
        chosen(["ids", "attention"], interpret=True)


def test_every_part_is_a_module():
    for part in PARTS.values():
        assert (ROOT / "bench" / "gpu" / f"{part.module}.py").is_file()


@pytest.mark.parametrize("words", [["speed"], ["--interpret", "model"], ["--seconds", "many"]])
def test_wrong_options_are_told_with_status_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        suite.main(words)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_and_how_to_run_without(monkeypatch, capsys):
    monkeypatch.setattr(suite, "device_facts", lambda interpret: CARD | {"card": ""})
    assert suite.main([]) == suite.NO_GPU == 2
    assert "--interpret" in capsys.readouterr().err


def test_an_earlier_result_of_the_day_stays(tmp_path):
    names = []
    for _ in range(3):
        path = suite.free_name(tmp_path, "2030-01-02-gpu")
        path.touch()
        names.append(path.name)
    assert names == ["2030-01-02-gpu.md", "2030-01-02-gpu-2.md", "2030-01-02-gpu-3.md"]


# ---- parts that fail, hang, or tell nothing ---------------------------------------------------------------------------------------


@pytest.fixture
def play(monkeypatch, tmp_path):
    """play({part: code}, options...): the suite with these programs for its parts; (status, the result's text, its JSON lines' folder)."""

    def run(programs, *words):
        parts = [Part(name, name, f"about {name}", 20, correctness=name.startswith("right")) for name in programs]
        monkeypatch.setattr(suite, "chosen", lambda names, interpret: parts)
        monkeypatch.setattr(suite, "device_facts", lambda interpret: CARD)
        monkeypatch.setattr(suite, "command_of", lambda part: [sys.executable, "-c", HEAD + programs[part.name]])
        out = tmp_path / "out.md"
        status = suite.main(["--out", str(out), "--logs", str(tmp_path / "logs"), *words])
        return status, out.read_text(encoding="utf-8"), tmp_path / "logs"

    return run


def test_all_is_well(play):
    status, text, _ = play({"right": "tell(kind='check', name='sums', ok=True, detail='')", "speed": "pass"})
    assert status == suite.OK
    assert "1 of 1 checks hold" in text
    assert "| right | ended |" in text
    assert "Some GPU: 100 multiprocessors, 80 GiB" in text
    assert "torch 2.11, triton 3.6, transformers 5.17" in text
    assert "scripts/gpu" in text


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ({"right": "sys.exit(1)", "speed": "pass"}, suite.WRONG),
        ({"right": "pass", "speed": "sys.exit(1)"}, suite.NOT_ALL),
        ({"right": "pass", "speed": "tell(kind='check', name='sums', ok=False, detail='7')"}, suite.WRONG),
    ],
)
def test_the_status_says_what_went_wrong(play, programs, expected):
    status, text, _ = play(programs)
    assert status == expected
    assert len([line for line in text.splitlines() if line.startswith(("| right |", "| speed |"))]) == 2


def test_a_part_that_hangs_is_ended_with_what_it_started_and_keeps_what_it_had_told(play):
    hang = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
tell(kind='row', table='Times', cells={'what': 'first', 'us': '7'})
tell(kind='figure', name='child', value=child.pid)
print('the last thing it said', flush=True)
time.sleep(300)
"""
    status, text, logs = play({"speed": hang, "right": "pass"}, "--part-seconds", "2")
    assert status == suite.NOT_ALL
    assert "| speed | ended at its limit |" in text
    assert "| right | ended |" in text
    assert "| first | 7 |" in text
    assert "the last thing it said" in text
    child = next(json.loads(line)["value"] for line in (logs / "speed.jsonl").read_text().splitlines() if "child" in line)
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(child)


def test_a_suite_that_is_ended_ends_its_part(tmp_path):
    code = f"""
import sys
from gpu import suite
from gpu.parts import Part
suite.chosen = lambda names, interpret: [Part("speed", "speed", "", 60)]
suite.device_facts = lambda interpret: {CARD!r}
part = "import os, sys, time; open(sys.argv[2] + '.pid', 'w').write(str(os.getpid())); time.sleep(300)"
suite.command_of = lambda _: [sys.executable, "-c", part]
suite.main(["--out", {str(tmp_path / "out.md")!r}, "--logs", {str(tmp_path)!r}])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    written = tmp_path / "speed.jsonl.pid"
    deadline = time.monotonic() + 60
    while not (written.exists() and written.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(written.read_text())
    process.terminate()
    assert process.wait(20) == 143
    assert not running(pid)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_result_is_written_while_a_part_runs(play):
    waits = """
import pathlib
tell(kind='row', table='Times', cells={'what': 'early'})
out = pathlib.Path(sys.argv[2]).parents[1] / 'out.md'
end = time.time() + 15
while time.time() < end and not (out.exists() and 'early' in out.read_text()): time.sleep(0.05)
sys.exit(0 if out.exists() and 'still running' in out.read_text() else 5)
"""
    assert play({"speed": waits})[0] == suite.OK


def test_no_part_begins_when_the_time_is_over(play):
    status, text, _ = play({"speed": "time.sleep(300)", "right": "pass"}, "--seconds", "2")
    assert status == suite.WRONG
    assert "| right | not started: no time left |" in text


def test_later_parts_know_earlier_figures(play):
    reads = "tell(kind='note', text=f'it was {json.load(open(sys.argv[4]))}')"
    _, text, _ = play({"speed": "tell(kind='figure', name='limit.copy', value=4.5)", "speed2": reads})
    assert "it was {'limit.copy': 4.5}" in text


def test_parts_run_with_the_interpreter_off_whatever_the_environment_says():
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert suite.child_environment(interpret=False)["TRITON_INTERPRET"] == "0"


# ---- the kernels part: checks in several processes, and the tests --------------------------------------------------------------------


def test_a_process_of_checks_that_dies_or_hangs_fails_the_part(monkeypatch):
    record = Record(None, seconds=3)
    codes = ["", "sys.exit(1)", "import os; os.abort()", "import time; time.sleep(60)"]
    started = [subprocess.Popen([sys.executable, "-c", f"import sys; {code}"]) for code in codes]
    told = []
    monkeypatch.setattr(record, "check", lambda name, ok, detail="": told.append((name, detail)))
    kernels.wait_for(record, started)
    assert record.failed == 1, "the process with status 1 has told its checks itself"
    assert told == [
        ("checks, process 2", "it ended with status -6"),
        ("checks, process 3", "it did not end in time"),
    ]


def test_shards_share_the_checks_without_leaving_any_out():
    def names(shard, shards):
        found = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks.Record, "attempt", lambda self, name, call, needs=0: found.append(name))
            checks.run(Record(None), checks.DEVICE, shard, shards)
        return found

    whole = names(0, 1)
    parts = [names(i, 3) for i in range(3)]
    assert sorted(itertools.chain(*parts)) == sorted(whole)
    assert len(set(whole)) == len(whole) > 20


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.long)])
def test_tests_that_do_not_end_in_time_tell_what_they_had(slow, monkeypatch, tmp_path, capfd):
    pause = "time.sleep(100)" if slow else "pass"
    path = tmp_path / "test_some.py"
    path.write_text(
        f"import time\ndef test_quick(): pass\ndef test_wrong(): assert 0\ndef test_last(): {pause}\n", encoding="utf-8"
    )
    monkeypatch.setattr(kernels, "INTERPRETED", (str(path),))
    record = Record(tmp_path / "record.jsonl", seconds=kernels.RESERVE + 30)
    kernels.run_tests(record, interpret=True)
    found = Findings()
    found.read(tmp_path / "record.jsonl")
    told = dict(found.failed)
    assert any(name.endswith("::test_wrong") for name in told)
    expected = "at most 2 passed; they did not end in time" if slow else "2 passed, status 1"
    assert told["tests, interpreted"] == expected


def test_what_the_tests_gave_is_told(tmp_path):
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="skipped"><skipped/></testcase>'
        '<testcase classname="a" name="bad"><failure message="1 is\nnot 2"/></testcase></testsuite></testsuites>',
        encoding="utf-8",
    )
    record = Record(tmp_path / "record.jsonl")
    assert kernels.tell(record, report) == 1
    found = Findings()
    found.read(tmp_path / "record.jsonl")
    assert [name for name, _ in found.failed] == ["a::bad"]
    assert found.notes == ["1 tests were skipped, such as a::skipped"]


# ---- what parts tell ------------------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_found_again(tmp_path):
    path = tmp_path / "record.jsonl"
    record = Record(path)
    record.row("T", what="a", us=3.5)
    record.figure("x", 2.0)
    record.figure("nothing", float("nan"))
    record.check("good", ok=True)
    record.check("bad", ok=False, detail="off by one")
    record.note("noted")
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "row", "tab')  # ended in the middle of a line
    found = Findings()
    found.read(path)
    assert found.tables == {"T": [{"what": "a", "us": "3.5"}]}
    assert found.figures == {"x": 2.0}
    assert found.failed == [("bad", "off by one")]
    assert found.notes == ["noted"]
    assert record.failed == 1


def test_a_failing_attempt_is_a_check_and_one_without_time_is_not_begun():
    record, begun = Record(None, seconds=5), []
    record.attempt("broken", lambda: 1 / 0)
    assert record.failed == 1
    record.attempt("long", lambda: begun.append(1), needs=100)
    record.attempt("short", lambda: begun.append(2), needs=1)
    assert begun == [2]
    assert record.failed == 1


def test_tables_have_a_column_for_each_name_and_no_bars_in_cells():
    lines = table([{"a": "1", "b": "x|y"}, {"b": "2", "c": "3"}])
    assert lines == ["| a | b | c |", "|---|---|---|", "| 1 | x\\|y |  |", "|  | 2 | 3 |"]


# ---- reaches --------------------------------------------------------------------------------------------------------------------


def reach(name):
    return next(r for r in REACHES if name in r.names)


def test_reaches_are_met_missed_or_not_measured():
    share = reach("step.8B.1.share")
    assert share.verdict({}) == ("not measured", "not measured")
    assert share.verdict({"step.8B.1.share": 0.85}) == ("85.0%", "met")
    assert share.verdict({"step.8B.1.share": 0.849}) == ("84.9%", "**missed**")
    gap = reach("step.1B.256.gap_ms")
    assert gap.verdict({"step.1B.256.gap_ms": 0.31})[1] == "**missed**"
    assert gap.verdict({"step.1B.256.gap_ms": 0.05}) == ("0.050 ms", "met")


def test_the_worst_context_counts_and_all_must_be_there():
    decode = reach("decode.bf16.4096.share")
    good = {f"decode.bf16.{context}.share": 0.9 for context in reaches.CONTEXTS}
    assert decode.verdict(good)[1] == "met"
    measured, met = decode.verdict(good | {"decode.bf16.32768.share": 0.8})
    assert (measured, met) == ("80.0% (best 90.0%)", "**missed**")
    del good["decode.bf16.8192.share"]
    assert decode.verdict(good)[1] == "not all measured"


def test_every_reach_is_in_the_result_measured_or_not(play):
    _, text, _ = play({"speed": "tell(kind='figure', name='step.8B.1.share', value=0.9)"})
    for one in REACHES:
        assert f"| {one.what} | {one.reach} |" in text
    assert "| 90.0% | met |" in text
    assert text.count("| not measured | not measured |") == len(REACHES) - 1


# ---- the real thing -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_suite_in_the_interpreter(tmp_path):
    out = tmp_path / "gpu.md"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), *sys.path])}
    command = [sys.executable, "-P", "-m", "gpu", "--interpret", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=390)
    assert done.returncode == 0, done.stderr[-3000:]
    text = out.read_text(encoding="utf-8")
    assert "| kernels | ended |" in text
    assert "| ids | ended |" in text
    assert "nothing here is about a GPU" in text
    assert "Reaches" not in text
    checked = next(line for line in text.splitlines() if line.endswith("checks hold."))
    assert int(checked.split()[0]) > 80
