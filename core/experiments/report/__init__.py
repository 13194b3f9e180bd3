"""The report on an experiment: what differed between its arms, how sure that is, and what can't be said yet. See
docs/experiment-reports.md.

    rows (core/experiments/records.py) -> table.py: columns, and what is left out -> compare.py: every measure by cluster, one
    correction -> make.py: `Report`, plain data (result.py) -> text.py, page.py with plots.py, or JSON

Statistics need the extra `tokenbus[report]`; nothing here is imported by a running server.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `tokenbus ab report`."""
    parser.add_argument(
        "path", metavar="PATH", help="a server's state directory, an experiment's folder in it, or a file of rows"
    )
    parser.add_argument("--experiment", metavar="NAME", help="which experiment, where there are several")
    parser.add_argument("--run", type=int, metavar="N", dest="run_number", help="which run (default: the newest)")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots, too")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--primary", default="ttft_p99", metavar="MEASURE", help="the measure that counts most (default: ttft_p99)"
    )
    parser.add_argument(
        "--once", action="store_true", help="this is the only look at it, at a time fixed beforehand: narrower intervals"
    )
    parser.add_argument(
        "--alpha",
        type=float,
        default=0.05,
        metavar="P",
        help="chance that equal arms are called different anywhere (default: 0.05)",
    )
    parser.add_argument(
        "--buckets",
        default="128,512,2048",
        metavar="N,N...",
        help="prompt lengths at which a bucket ends (default: 128,512,2048)",
    )
    parser.add_argument(
        "--min-requests", type=int, default=100, metavar="N", help="of each arm (default: 100; percentiles need more)"
    )
    parser.add_argument("--min-clusters", type=int, default=20, metavar="N", help="of each arm (default: 20)")


def main(arguments: argparse.Namespace) -> int:
    """The exit code. StartupError says what can't be read or what is missing."""
    from .command import run

    return run(arguments)
