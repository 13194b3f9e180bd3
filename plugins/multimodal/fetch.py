"""Files from http(s) URLs that clients send: only from hosts the operator lists, only from public addresses, and no more than fits.

Each hop (the URL, and each redirect) is checked by itself: scheme, host and port against the list, every address the name resolves to; the
connection is made to the addresses that were checked, no other. Nothing is sent but the request itself: no cookies, no credentials, no
proxy from the environment. Bodies are read as they come, and reading stops where the limit is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from ...core.errors import FieldError, shorten

if TYPE_CHECKING:
    from .settings import MultimodalSettings

REDIRECTS = (301, 302, 303, 307, 308)
CHUNK = 1 << 16
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Budget:
    """Bytes that the files of one request may still have, together."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def take(self, count: int, where: str) -> None:
        """FieldError when there are not so many left."""
        self.left -= count
        if self.left < 0:
            raise FieldError(where, f"the request's media have more than {self.most} bytes; at most these are allowed together")


class Fetcher:
    """Fetches on an event loop of its own, on a thread of its own, which is started when first needed."""

    def __init__(self, settings: MultimodalSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def begin(self, url: str, where: str, kind: str, max_bytes: int, budget: Budget) -> Future[bytes]:
        """Its result is the file; FieldError, naming `where`, when it can't be had. kind: "image" or "audio", which the answer's
        Content-Type has to be, if it says anything. budget: of the whole request; what is read is taken from it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="media-fetch", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(self._fetch(url, where, kind, max_bytes, budget), self._loop)

    def close(self) -> None:
        """Stop all that is under way."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(5.0)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5.0)
            loop.close()

    async def _fetch(self, text: str, where: str, kind: str, max_bytes: int, budget: Budget) -> bytes:
        seconds = self._settings.fetch_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._follow(_parsed(text, where), where, kind, max_bytes, budget)
        except TimeoutError:
            raise FieldError(where, f"could not be fetched within {seconds:g} s") from None
        except _NotPublicError as error:
            raise FieldError(where, f"can't be fetched: {error}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise FieldError(where, f"can't be fetched ({type(error).__name__}: {shorten(error, 120)})") from None

    async def _follow(self, url: URL, where: str, kind: str, max_bytes: int, budget: Budget) -> bytes:
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(private=self._settings.fetch_private), use_dns_cache=False, force_close=True
        )
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False,
            headers={"Accept-Encoding": "identity", "Accept": f"{kind}/*"},
        ) as session:  # fmt: skip
            for _ in range(self._settings.fetch_redirects + 1):
                self._check(url, where)
                async with session.get(url, allow_redirects=False) as answer:
                    if answer.status not in REDIRECTS:
                        return await _body(answer, where, kind, max_bytes, budget)
                    if (location := answer.headers.get("Location")) is None:
                        raise FieldError(where, "can't be fetched: it redirects to nowhere")
                    url = url.join(URL(location))
        raise FieldError(where, f"can't be fetched: it redirects more than {self._settings.fetch_redirects} times")

    def _check(self, url: URL, where: str) -> None:
        """FieldError unless this hop is one that may be made."""
        if url.scheme not in ("http", "https") or not url.host:
            raise FieldError(where, f"can't be fetched: only http and https URLs are, not {shorten(url.scheme or 'this')!r}")
        if url.user is not None or url.password is not None:
            raise FieldError(where, "can't be fetched: a URL with a user or password")
        host = url.host.lower().rstrip(".")
        if not any(_fits(host, url.port, one) for one in self._settings.fetch_hosts):
            raise FieldError(where, f"can't be fetched: this server fetches nothing from {shorten(host)!r}, port {url.port}")
        if (literal := _literal(host)) is not None and not self._settings.fetch_private:
            _check_public(literal, host)


def _parsed(text: str, where: str) -> URL:
    try:
        return URL(text)
    except ValueError as error:
        raise FieldError(where, f"is no URL ({shorten(error, 120)})") from None


def _fits(host: str, port: int | None, listed: str) -> bool:
    """Whether an entry of `fetch_hosts` allows it."""
    name, _, allowed = listed.lower().partition(":") if listed.count(":") == 1 else (listed.lower(), "", "")
    if str(port) not in ((allowed,) if allowed else ("80", "443")):
        return False
    return name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]))


class _NotPublicError(Exception):
    pass


class _CheckedResolver(AbstractResolver):
    """Resolves a name by the system, and refuses it when any of its addresses is not public: aiohttp connects to these and no others."""

    def __init__(self, *, private: bool) -> None:
        self._private = private

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys((one[0], str(one[4][0])) for one in found))
        if not self._private:
            for _, address in addresses:
                _check_public(ipaddress.ip_address(address.partition("%")[0]), host)
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for kind, address in addresses
        ]

    async def close(self) -> None:
        return


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _check_public(address: Address, host: str) -> None:
    for one in _meant(address):
        if not one.is_global or one.is_multicast or one.is_reserved or one.is_unspecified:
            raise _NotPublicError(f"{shorten(host)!r} leads to an address that is not public")


def _meant(address: Address) -> Sequence[Address]:
    """What a connection to it reaches: of a mapped (RFC 4291) or translated (RFC 6052) IPv4 address that one, of 6to4 and Teredo both."""
    if isinstance(address, ipaddress.IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address in NAT64:
        return (ipaddress.IPv4Address(int(address) & 0xFFFFFFFF),)
    return [one for one in (address, address.sixtofour, *(address.teredo or ())) if one is not None]


async def _body(answer: aiohttp.ClientResponse, where: str, kind: str, max_bytes: int, budget: Budget) -> bytes:
    if answer.status != 200:
        raise FieldError(where, f"can't be fetched: the server answers {answer.status}")
    check_type(answer.headers.get("Content-Type", ""), where, kind)
    if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise FieldError(where, "can't be fetched: the server compresses what it sends, though asked not to")
    too_large = FieldError(where, f"has more than {max_bytes} bytes; at most these are allowed")
    if (answer.content_length or 0) > max_bytes:
        raise too_large
    data = bytearray()
    async for chunk in answer.content.iter_chunked(CHUNK):
        data += chunk
        if len(data) > max_bytes:
            raise too_large
        budget.take(len(chunk), where)
    return bytes(data)


def check_type(media_type: str, where: str, kind: str) -> None:
    """FieldError when a type says that it is something else. What it is in truth is for the decoder to say."""
    name = media_type.partition(";")[0].strip().lower()
    if name and not name.startswith(f"{kind}/") and name not in ("application/octet-stream", "binary/octet-stream"):
        raise FieldError(where, f"is of type {shorten(name)!r}, not {kind}/...")


async def _cancel_all() -> None:
    tasks: list[asyncio.Task[Any]] = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
