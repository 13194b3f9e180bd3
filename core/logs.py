"""structlog, set up once in each process: readable lines on a terminal, JSON lines otherwise, always on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def configure_logs(fmt: Literal["auto", "console", "json"], level: str) -> None:
    """auto: console when standard error is a terminal. level: debug, info, warning or error."""
    console = fmt == "console" or (fmt == "auto" and sys.stderr.isatty())
    renderer: list[structlog.typing.Processor]
    if console:
        plain = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=24
        )
        renderer = [structlog.processors.TimeStamper("%H:%M:%S", utc=False), plain]
    else:
        renderer = [
            structlog.processors.TimeStamper("iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=repr),
        ]
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
