"""Talking to the admin surface of a running server: what `tokenbus features` and `tokenbus settings` share."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from ..config import Config
from ..errors import ConfigError, ConflictError, FieldError, UnavailableError
from ..watching.remote import admin_key, server_url, words_of

SECONDS = 120.0
"""For an answer: a change waits for the end of the step that computes."""


def split_changes(items: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words. FieldError for one that is none, or comes twice."""
    changes: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not (equals and name.strip()):
            raise FieldError(item, "must be NAME=VALUE")
        if name.strip() in changes:
            raise FieldError(name.strip(), "is given twice")
        changes[name.strip()] = value.strip()
    return changes


def ask(arguments: argparse.Namespace, config: Config, path: str, body: Any = None) -> Any:
    """The decoded answer: of a GET, or with a body of a POST. ConflictError with the server's words when it refuses, UnavailableError when
    it can't be reached."""
    url = (arguments.url or server_url(config.server)).rstrip("/")
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"--url {url}: must begin with http:// or https://")
    headers = {"Content-Type": "application/json"}
    if (key := admin_key(config.server)) is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)  # noqa: S310 - the scheme is checked above
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SECONDS) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise ConflictError(words_of(error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UnavailableError(f"no server answers at {url}: {reason} (--host, --port, --url say where it is)") from None
