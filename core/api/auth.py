"""Who may do what: API keys, the admin key, and the rule that stands in for it on loopback."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from ..config import ServerConfig
from ..errors import AuthenticationError, ConfigError, NotAllowedError, shorten

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


def read_keys(values: Iterable[str], setting: str) -> list[str]:
    """Keys as given, those of "@FILE" one a line. ConfigError when a file can't be read or holds none: it never means "no key"."""
    keys: list[str] = []
    for value in values:
        if not value.startswith("@"):
            found = [value.strip()]
        else:
            try:
                lines = Path(value[1:]).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{setting}: can't read {value[1:]}: {error}") from None
            found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not all(found) or not found:
            raise ConfigError(f"{setting}: {value!r} holds no key")
        keys += found
    return keys


class Gate:
    def __init__(self, config: ServerConfig) -> None:
        """ConfigError when a key file can't be used."""
        self._keys = [_digest(key) for key in read_keys(config.api_key, "server.api_key")]
        admin = [] if config.admin_key is None else read_keys([config.admin_key], "server.admin_key")
        self._admin = [_digest(key) for key in admin]

    def client(self, request: web.Request) -> str:
        """The tenant: a hash of the API key, "" when no keys are asked for. Raises AuthenticationError."""
        if not self._keys:
            return ""
        given = _given(request)
        if not (_matches(given, self._keys) or _matches(given, self._admin)):
            raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY")
        return given.hex()[:16] if given else ""

    def admin(self, request: web.Request) -> str:
        """Who changes something, for the log. Raises AuthenticationError or NotAllowedError."""
        if self._admin:
            if not _matches(_given(request), self._admin):
                raise AuthenticationError("the admin key is needed: Authorization: Bearer KEY")
            return "admin key"
        if not _is_loopback(request.remote) or any(name in request.headers for name in FORWARDED):
            raise NotAllowedError("without --admin-key this is open to loopback only")
        if not _is_local_name(_host_of(f"//{request.headers.get('Host', '')}")):
            raise NotAllowedError("without --admin-key this must be asked for by a loopback name (Host header)")
        origin = request.headers.get("Origin")
        if origin is not None and not _is_local_name(_host_of(origin)):
            raise NotAllowedError(f"requests from pages of {shorten(origin)!r} are not allowed")
        return f"loopback {request.remote}"

    def page(self, request: web.Request) -> None:
        """For the frame of an admin page (`contexts.Route`). Raises NotAllowedError."""
        if not self._admin:
            self.admin(request)


def _digest(key: str) -> bytes:
    """Of any text: bytes that are no UTF-8 reach us, from headers and from the command line, as lone surrogates."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _given(request: web.Request) -> bytes | None:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return _digest(key.strip()) if scheme.lower() == "bearer" and key.strip() else None


def _matches(given: bytes | None, known: list[bytes]) -> bool:
    """In a time that tells nothing."""
    matched = False
    for digest in known:
        matched |= given is not None and hmac.compare_digest(given, digest)
    return matched


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_local_name(host: str | None) -> bool:
    return host is not None and (host in LOOPBACK_NAMES or _is_loopback(host))


def _is_loopback(address: str | None) -> bool:
    try:
        return ipaddress.ip_address(address or "").is_loopback
    except ValueError:
        return False
