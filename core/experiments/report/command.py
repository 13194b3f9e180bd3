"""`tokenbus ab report`: where the rows are, what was asked for, and where the report goes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...errors import StartupError
from ..records import experiment_dir, read_rows, record_files
from .measures import MEASURES
from .result import Options
from .table import Reader

EXTRA = 'pip install "tokenbus[report]"'


def run(arguments: argparse.Namespace) -> int:
    options = options_of(arguments)
    require("scipy", *(["matplotlib"] if arguments.html else []))
    from .make import report_on

    reader = Reader(arguments.experiment, arguments.run_number)
    folder = find(Path(arguments.path), arguments.experiment)
    try:
        reader.add(read_rows(folder))
    except ValueError as error:
        raise StartupError(str(error)) from None
    table = reader.table(options.seed)
    report = report_on(table, options)
    if arguments.html:
        from .page import page

        Path(arguments.html).write_text(page(table, report), encoding="utf-8")
    if arguments.json:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    else:
        from .text import terminal

        text = terminal(report)
    sys.stdout.write(text + "\n")
    return 0


def require(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise StartupError(f"the report needs {' and '.join(missing)}: {EXTRA}")


def find(path: Path, experiment: str | None) -> Path:
    """The file or folder to read: `path` itself, or an experiment below a state directory. StartupError naming what there
    is."""
    if path.is_file() or (path.is_dir() and record_files(path)):
        return path
    if not path.is_dir():
        raise StartupError(f"{path}: no such file or folder")
    if experiment is not None and record_files(folder := experiment_dir(path, experiment)):
        return folder
    parent = experiment_dir(path, "x").parent
    there = sorted(one.name for one in parent.iterdir() if record_files(one)) if parent.is_dir() else []
    if experiment is None and len(there) == 1:
        return experiment_dir(path, there[0])
    if experiment is None and there:
        raise StartupError(f"{path} holds rows of {', '.join(there)}: choose one with --experiment")
    asked = f"experiment {experiment!r}" if experiment else "any experiment"
    raise StartupError(f"{path} holds no rows of {asked}" + (f", but of {', '.join(there)}" if there else ""))


def options_of(arguments: argparse.Namespace) -> Options:
    if arguments.primary not in MEASURES:
        raise StartupError(f"--primary {arguments.primary}: must be one of {', '.join(MEASURES)}")
    if not 0 < arguments.alpha < 0.5:
        raise StartupError(f"--alpha {arguments.alpha:g}: must be between 0 and 0.5")
    for flag, value, least in (("requests", arguments.min_requests, 1), ("clusters", arguments.min_clusters, 2)):
        if value < least:
            raise StartupError(f"--min-{flag} {value}: must be at least {least}")
    return Options(
        alpha=arguments.alpha,
        looks="once" if arguments.once else "any",
        primary=arguments.primary,
        buckets=_buckets(arguments.buckets),
        min_requests=arguments.min_requests,
        min_clusters=arguments.min_clusters,
    )


def _buckets(text: str) -> tuple[int, ...]:
    try:
        found: Sequence[int] = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or list(found) != sorted(set(found)):
        raise StartupError(f"--buckets {text}: must be rising whole numbers with commas between them, like 128,512,2048")
    return tuple(found)
