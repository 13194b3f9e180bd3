"""A running server as a watcher in another process sees it: its answers, and the frames of its feed (front/feed.py)."""

from __future__ import annotations

import argparse
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from ..config import Config, ServerConfig
from ..errors import ConfigError, ConflictError, NotFoundError, UnavailableError, shorten

SECONDS = 15.0
"""For an answer, and between two frames."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what a server listens on is not where it is asked
"""Addresses to listen on, and how to reach who does."""


class Remote:
    """Each call raises UnavailableError when nothing answers, NotFoundError for a 404, ConflictError with the server's words when it
    refuses otherwise."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        """ConfigError when the URL is not one of HTTP's."""
        self.url = url.rstrip("/")
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(f"--url {shorten(url)}: must begin with http:// or https://")
        self._headers = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> Any:
        """Decoded JSON."""
        try:
            return json.loads(self.text(path))
        except ValueError as error:
            raise UnavailableError(f"{self.url}{path} gave no JSON ({shorten(error)}): is this a Tokenbus server?") from None

    def text(self, path: str) -> str:
        with self._open(path) as response, self._faults():
            return response.read().decode("utf-8", "replace")

    def frames(self) -> Generator[dict[str, Any]]:
        """Until the server ends the stream. The caller closes the iterator."""
        with self._open("/v1/tokenbus/events") as response, self._faults():
            while line := response.readline():
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def _open(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=self._headers)  # noqa: S310 - the scheme is checked above
        with self._faults():
            return self._opener.open(request, timeout=SECONDS)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError as error:
            with error:
                words = words_of(error)
            raise (NotFoundError if error.code == 404 else ConflictError)(words) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise UnavailableError(
                f"no server answers at {self.url}: {reason} (--host, --port, --url say where it is)"
            ) from None


def connect(arguments: argparse.Namespace, config: Config) -> Remote:
    """The server that `--url` names, or the settings' host and port. ConfigError when URL or key file can't be used."""
    return Remote(arguments.url or server_url(config.server), admin_key(config.server))


def admin_key(server: ServerConfig) -> str | None:
    """ConfigError when it is in a file that can't be used."""
    from ..api.auth import read_keys

    return None if server.admin_key is None else read_keys([server.admin_key], "server.admin_key")[0]


def server_url(server: ServerConfig) -> str:
    """Where a server with these settings can be reached from this machine."""
    host = ANYWHERE.get(server.host, server.host)
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def words_of(error: urllib.error.HTTPError) -> str:
    """What the server says is wrong, or its status."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the server answered {error.code} {shorten(error.reason)}"
