"""Talking to the admin surface of a running server: what the commands for it share."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from ..config import Config, ServerConfig
from ..errors import ConfigError, ConflictError, UnavailableError, shorten

SECONDS = 120.0
"""For an answer: a change waits for the end of the step that computes."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what a server listens on is not where it is asked
"""Addresses to listen on, and how to reach who does."""


def ask(arguments: argparse.Namespace, config: Config, path: str, body: Any = None) -> Any:
    """The decoded answer: of a GET, or with a body of a POST. ConflictError with the server's words when it refuses, UnavailableError when
    it can't be reached."""
    url = (arguments.url or _url(config.server)).rstrip("/")
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"--url {url}: must begin with http:// or https://")
    headers = {"Content-Type": "application/json"}
    if (key := _key(config.server)) is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)  # noqa: S310 - the scheme is checked above
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SECONDS) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise ConflictError(_words(error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UnavailableError(f"no server answers at {url}: {reason} (--host, --port, --url say where it is)") from None


def _url(server: ServerConfig) -> str:
    host = ANYWHERE.get(server.host, server.host)
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def _key(server: ServerConfig) -> str | None:
    from ..api.auth import read_keys

    return None if server.admin_key is None else read_keys([server.admin_key], "server.admin_key")[0]


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code} {shorten(error.reason)}"
