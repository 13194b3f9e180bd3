"""The page as it is sent: one document that holds its own style and script and may load nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "static"
SCRIPTS = ("format.js", "model.js", "stream.js", "canvas.js", "timeline.js", "charts.js", "lists.js", "main.js")
"""In this order they are one script."""


class Page(NamedTuple):
    body: bytes
    headers: dict[str, str]


@cache
def load_page() -> Page:
    style = _read("style.css")
    script = "".join(map(_read, SCRIPTS))
    text = _read("page.html").replace("/*STYLE*/", style, 1).replace("/*SCRIPT*/", script, 1)
    policy = (
        "default-src 'none'",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(script)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(text.encode(), headers)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
