"""`tokenbus serve`."""

from __future__ import annotations

import argparse

from ..config import Config
from ..front import server


def run(arguments: argparse.Namespace, config: Config) -> int:
    return server.run(config)
