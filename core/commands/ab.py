"""`tokenbus ab`: experiments from the command line."""

from __future__ import annotations

import argparse

from ..config import Config
from ..experiments import report


def run(arguments: argparse.Namespace, config: Config) -> int:
    return report.main(arguments)
