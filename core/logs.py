"""structlog, set up once in each process: readable lines on a terminal, JSON lines otherwise, always on standard error. The level can
change at any time (`set_level`)."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "exception": 40, "critical": 50}
"""By the name of a logger's method."""
_least = LEVELS["info"]


def set_level(level: str) -> None:
    """From now on: debug, info, warning or error."""
    global _least  # noqa: PLW0603 - one process has one log
    _least = LEVELS[level]


def _drop_below_level(_logger: Any, method: str, event: Any) -> Any:
    if LEVELS.get(method, _least) < _least:
        raise structlog.DropEvent
    return event


def configure_logs(fmt: Literal["auto", "console", "json"], level: str) -> None:
    """auto: console when standard error is a terminal. level: debug, info, warning or error."""
    set_level(level)
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
        processors=[_drop_below_level, structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
