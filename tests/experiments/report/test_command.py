"""`tokenbus ab report`: from files to terminal, JSON and page, and what it says when it can't."""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser

import msgspec
import pytest

from tokenbus.core import cli
from tokenbus.core.experiments.report.result import Report

VOID = {"meta", "br", "img", "link", "hr", "input"}


@pytest.fixture
def state_dir(tmp_path, slices):
    """With one experiment, "cache", whose rows stand in two files."""
    rows = slices(24, 45, slower=1.5)
    write(tmp_path, "cache", rows[:700], 1)
    write(tmp_path, "cache", rows[700:], 2)
    return tmp_path


def write(state_dir, name, rows, number=1, tail=b""):
    folder = state_dir / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"records-{number:06d}.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows) + tail)
    return path


def run(capsys, *argv):
    code = cli.main(["ab", "report", *map(str, argv)])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_the_terminal(state_dir, capsys):
    code, out, _ = run(capsys, state_dir)
    assert code == 0
    assert out.startswith("cache, run 1, split by slice, ")
    assert re.search(r"^B: P99 TTFT \+\d+ % \[\+\d", out, re.MULTILINE)
    assert re.search(r"^A \(control\)\s+50%\s+1080\s+24\s+1 in unfinished slices$", out, re.MULTILINE)
    assert re.search(r"^P99 TTFT, ms \*\s+[\d.,]+\s+[\d.,]+\s+\+\d+ % \[.*\]\s+worse$", out, re.MULTILINE)
    assert "B beside A, prompts of 129-512 tokens" in out
    assert "asymptotic confidence sequences" in out
    assert max(map(len, out.splitlines())) <= 140


def test_json_is_the_whole_report(state_dir, capsys):
    code, out, _ = run(capsys, state_dir, "--json", "--once", "--primary", "itl_p95", "--alpha", "0.1", "--buckets", "300")
    assert code == 0
    report = msgspec.json.decode(out, type=Report)
    assert (report.options.looks, report.options.primary, report.options.alpha) == ("once", "itl_p95", 0.1)
    assert {row.bucket for row in report.comparisons} == {"all", "1-300", "over 300"}
    assert [arm.requests for arm in report.arms] == [1080, 1080]
    assert {row.family for row in report.comparisons if row.measure == "itl_p95"} == {"primary", "by prompt length"}


def test_the_same_rows_give_the_same_report(state_dir, capsys):
    assert run(capsys, state_dir, "--json")[1] == run(capsys, state_dir, "--json")[1]


@pytest.mark.parametrize("where", [".", "experiments/cache"])
def test_a_state_directory_and_an_experiments_folder(state_dir, capsys, where):
    assert run(capsys, state_dir / where, "--experiment", "cache")[0] == 0


def test_one_file(state_dir, capsys):
    code, out, _ = run(capsys, state_dir / "experiments/cache/records-000001.jsonl")
    assert code == 0
    assert "not enough data" in out


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path, capsys, slices):
    write(tmp_path, "cache", slices(3, 5), tail=b'{"format":1,"exper')
    code, out, _ = run(capsys, tmp_path)
    assert code == 0
    assert "not enough data (15 of 1000 requests)" in out


class Page(HTMLParser):
    """Fails on tags that don't match; collects what a browser would load."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.ids, self.refs, self.tags = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.loads += [values[name] for name in ("src", "action", "srcset", "data") if name in values]
        self.refs += [values["href"]] if "href" in values else []
        self.refs += re.findall(r"url\((#[^)]*)\)", " ".join(value or "" for value in values.values()))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def page(state_dir, capsys):
    file = state_dir / "report.html"
    assert run(capsys, state_dir, "--html", file)[0] == 0
    return file.read_text(encoding="utf-8")


def test_the_page_is_whole_and_loads_nothing(page):
    parsed = Page()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    assert parsed.loads == []
    assert "script" not in parsed.tags
    assert "://" not in page
    assert "@import" not in page
    assert parsed.tags.count("svg") == 4
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {ref.removeprefix("#") for ref in parsed.refs} <= set(parsed.ids)
    assert all(ref.startswith("#") for ref in parsed.refs)


def test_the_page_says_what_the_terminal_says(page, state_dir, capsys):
    verdict = next(line for line in run(capsys, state_dir)[1].splitlines() if line.startswith("B: "))
    assert verdict in page
    assert '<td class="worse">worse</td>' in page


def test_the_page_is_readable_in_the_dark(page):
    """Text and axes of the plots have the page's colour, which follows the reader's choice."""
    assert "prefers-color-scheme: dark" in page
    assert "#010203" not in page
    assert "#000000" not in page
    assert page.count("currentColor") > 50


def test_names_are_escaped(tmp_path, capsys, slices):
    rows = [msgspec.structs.replace(row, arm=f"{row.arm}<b>", control=row.arm == "A") for row in slices(24, 10)]
    write(tmp_path, "cache", rows)
    assert run(capsys, tmp_path, "--html", tmp_path / "out.html")[0] == 0
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "B&lt;b&gt;" in page
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--primary", "speed"], "--primary speed: must be one of ttft_p50, "),
        (["--alpha", "1"], "--alpha 1: must be between 0 and 0.5"),
        (["--buckets", "5,5"], "--buckets 5,5: must be rising whole numbers"),
        (["--buckets", "few"], "--buckets few: must be rising"),
        (["--min-requests", "0"], "--min-requests 0: must be at least 1"),
        (["--min-clusters", "1"], "--min-clusters 1: must be at least 2"),
        (["--experiment", "other"], "holds no rows of experiment 'other', but of cache"),
        (["--run", "9"], "there are no rows of run 9 to report on"),
        (["--html", "no/such/folder/x.html"], "No such file"),
    ],
)
def test_what_can_not_be_is_said(state_dir, capsys, argv, message):
    code, out, err = run(capsys, state_dir, *argv)
    assert (code, out) == (1, "")
    assert message in err
    assert err.startswith("tokenbus: ")
    assert err.count("\n") == 1


def test_places_without_rows(tmp_path, capsys, slices):
    assert "no such file or folder" in run(capsys, tmp_path / "nowhere")[2]
    assert "holds no rows of any experiment" in run(capsys, tmp_path)[2]
    write(tmp_path, "one", slices(1, 1))
    write(tmp_path, "two", slices(1, 1))
    assert "holds rows of one, two: choose one with --experiment" in run(capsys, tmp_path)[2]


def test_a_file_of_something_else(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    code, _, err = run(capsys, tmp_path / "x.jsonl")
    assert code == 1
    assert "x.jsonl:1: not a row of an experiment" in err


@pytest.mark.parametrize(("module", "argv"), [("scipy", []), ("matplotlib", ["--html", "x.html"])])
def test_a_missing_library_is_named_with_what_brings_it(state_dir, capsys, monkeypatch, module, argv):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == module else real(name, *more))
    code, _, err = run(capsys, state_dir, *argv)
    assert code == 1
    assert err == f'tokenbus: the report needs {module}: pip install "tokenbus[report]"\n'


def test_a_bucket_without_data_is_one_line(tmp_path, capsys, slices):
    rows = [msgspec.structs.replace(row, prompt_tokens=5000 if i % 60 == 0 else 100) for i, row in enumerate(slices(24, 20))]
    write(tmp_path, "cache", rows)
    out = run(capsys, tmp_path, "--html", tmp_path / "out.html")[1]
    line = "B beside A, prompts of over 2048 tokens: not enough data (8 of 100 requests)"
    assert out.splitlines().count(line) == 1
    assert f"<h2>{line}</h2>" in (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "B beside A, prompts of 1-128 tokens\n" in out
