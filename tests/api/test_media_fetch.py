"""Fetching what http(s) URLs of clients point to. Servers that count as public here listen on 127.0.0.2; no other address does."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest
from aiohttp import web
from media_kit import listening

from tokenbus.core.errors import FieldError
from tokenbus.plugins.multimodal import fetch
from tokenbus.plugins.multimodal.fetch import Budget, Fetcher
from tokenbus.plugins.multimodal.settings import MultimodalSettings

pytestmark = pytest.mark.anyio

PUBLIC = "127.0.0.2"
WHERE = "messages[0].content[0].image_url.url"
IMAGE = b"\x89PNG" + bytes(5000)


async def image(request):
    return web.Response(body=IMAGE, content_type="image/png")


@pytest.fixture(autouse=True)
def one_address_is_public(monkeypatch):
    check = fetch._check_public

    def with_one_more(address, host):
        if address != ipaddress.ip_address(PUBLIC):
            check(address, host)

    monkeypatch.setattr(fetch, "_check_public", with_one_more)


@pytest.fixture
def names(monkeypatch):
    """Names that resolve to addresses of the test's choosing; others as ever. Asked: how often each was."""
    table: dict[str, list[str]] = {}
    asked: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        if host in table:
            asked.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in table[host]]
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return SimpleNamespace(table=table, asked=asked)


async def get(url, *, max_bytes=1 << 20, kind="image", budget=None, **settings):
    """The file, or the error's message, which begins with the part's place."""
    fetcher = Fetcher(MultimodalSettings(**settings))
    try:
        future = fetcher.begin(url, WHERE, kind, max_bytes, budget or Budget(1 << 24))
        return await anyio.to_thread.run_sync(future.result, 20)
    except FieldError as error:
        return error.message if error.param == WHERE else f"{error.param} is not the part's place"
    finally:
        await anyio.to_thread.run_sync(fetcher.close)


async def test_a_listed_host_is_fetched_from():
    async with listening(image, PUBLIC) as server:
        assert await get(f"{server.url}/a.png", fetch_hosts=(server.at,)) == IMAGE
        assert await get(f"{server.url}/a.png", fetch_hosts=(f"*:{server.port}",)) == IMAGE
        assert server.hits == ["/a.png"] * 2


async def test_loopback_is_fetched_from_only_when_private_addresses_are_allowed():
    async with listening(image) as server:
        assert "not public" in await get(server.url, fetch_hosts=(server.at,))
        assert server.hits == []
        assert await get(server.url, fetch_hosts=(server.at,), fetch_private=True) == IMAGE


@pytest.mark.parametrize("listed", [(), ("example.com",), ("127.0.0.2",), ("*",), ("*.0.0.2:1",), ("x127.0.0.2:{port}",)])
async def test_other_hosts_and_ports_are_not(listed):
    async with listening(image, PUBLIC) as server:
        hosts = tuple(one.format(port=server.port) for one in listed)
        assert "fetches nothing from '127.0.0.2', port" in await get(server.url, fetch_hosts=hosts)
        assert server.hits == []


@pytest.mark.parametrize(
    ("host", "listed", "fits"),
    [
        ("example.com", "example.com", True),
        ("example.com", "EXAMPLE.com", True),
        ("a.example.com", "example.com", False),
        ("a.example.com", "*.example.com", True),
        ("a.b.example.com", "*.example.com", True),
        ("example.com", "*.example.com", False),
        ("evilexample.com", "*.example.com", False),
        ("example.com.evil.org", "example.com", False),
        ("anything", "*", True),
    ],
)
def test_the_list_of_hosts(host, listed, fits):
    assert fetch._fits(host, 443, listed) is fits
    assert fetch._fits(host, 80, listed) is fits
    assert not fetch._fits(host, 8080, listed)
    assert fetch._fits(host, 8080, f"{listed}:8080") is fits


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "240.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "::127.0.0.1", "2001:db8::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    with pytest.raises(fetch._NotPublicError):
        fetch._check_public(ipaddress.ip_address(address), "host")


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_addresses_that_are(address):
    fetch._check_public(ipaddress.ip_address(address), "host")


@pytest.mark.parametrize("to", ["127.0.0.1", "[::1]", "2130706433", "0x7f000001", "127.1", "localhost"])
async def test_however_an_inward_address_is_written(to):
    async with listening(image) as server:
        said = await get(f"http://{to}:{server.port}/", fetch_hosts=(f"*:{server.port}", f"::1:{server.port}"))
        assert "can't be fetched" in said
        assert server.hits == []


async def test_a_redirect_inward_is_not_followed():
    async with listening(image) as inside:

        async def redirect(request):
            raise web.HTTPFound(f"{inside.url}/latest/meta-data")

        async with listening(redirect, PUBLIC) as outside:
            listed = (outside.at, inside.at)
            assert "leads to an address that is not public" in await get(outside.url, fetch_hosts=listed)
            assert "fetches nothing from '127.0.0.1'" in await get(outside.url, fetch_hosts=(outside.at,))
            assert outside.hits == ["/", "/"]
        assert inside.hits == []


@pytest.mark.parametrize(
    "to", ["file:///etc/passwd", "ftp://127.0.0.2/x", "gopher://127.0.0.2/", "//", "data:image/png;base64,AA=="]
)
async def test_a_redirect_to_another_scheme_is_not_followed(to):
    async def redirect(request):
        return web.Response(status=302, headers={"Location": to})

    async with listening(redirect, PUBLIC) as server:
        assert "can't be fetched" in await get(server.url, fetch_hosts=(server.at,))


async def test_redirects_are_counted_and_relative_ones_work():
    async def redirect(request):
        step = int(request.path[1:])
        return await image(request) if step == 0 else web.Response(status=302, headers={"Location": f"/{step - 1}"})

    async with listening(redirect, PUBLIC) as server:
        assert await get(f"{server.url}/3", fetch_hosts=(server.at,)) == IMAGE
        assert "redirects more than 3 times" in await get(f"{server.url}/4", fetch_hosts=(server.at,))


async def test_a_name_that_resolves_inward_is_refused(names):
    async with listening(image) as server:
        names.table["inward.test"] = ["127.0.0.1"]
        names.table["both.test"] = [PUBLIC, "127.0.0.1"]
        for name in names.table:
            said = await get(f"http://{name}:{server.port}/", fetch_hosts=(f"{name}:{server.port}",))
            assert f"'{name}' leads to an address that is not public" in said
        assert server.hits == []


async def test_the_connection_goes_to_the_address_that_was_checked(names):
    """A name that would resolve to something else when asked again is asked once."""
    async with listening(image, PUBLIC) as server:
        names.table["fickle.test"] = [PUBLIC]
        assert await get(f"http://fickle.test:{server.port}/", fetch_hosts=(f"fickle.test:{server.port}",)) == IMAGE
        assert names.asked == ["fickle.test"]
        assert server.hits == ["/"]


@pytest.mark.parametrize(
    "url", ["http://user:pw@127.0.0.2/", "http:///x", "http://", "https://[::1", "ht tp://x", "javascript:alert(1)"]
)
async def test_urls_that_are_none(url):
    said = await get(url, fetch_hosts=("*",))
    assert "can't be fetched" in said or "is no URL" in said


async def test_a_body_without_end_is_read_up_to_the_limit():
    sent, closed = 0, anyio.Event()

    async def endless(request):
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(100_000))
                sent += 100_000
        except ConnectionError:
            closed.set()
        return response

    async with listening(endless, PUBLIC) as server:
        assert "has more than 1000000 bytes" in await get(server.url, fetch_hosts=(server.at,), max_bytes=1_000_000)
        with anyio.fail_after(5):
            await closed.wait()
        assert sent < 20_000_000


async def test_a_body_that_declares_too_much_is_not_read():
    async def large(request):
        return web.Response(body=bytes(3000), content_type="image/png")

    async with listening(large, PUBLIC) as server:
        assert "has more than 2999 bytes" in await get(server.url, fetch_hosts=(server.at,), max_bytes=2999)
        assert len(await get(server.url, fetch_hosts=(server.at,), max_bytes=3000)) == 3000


async def test_all_files_of_a_request_share_one_budget():
    async def some(request):
        return web.Response(body=bytes(3000), content_type="image/png")

    async with listening(some, PUBLIC) as server:
        budget = Budget(7000)
        for _ in range(2):
            assert len(await get(server.url, fetch_hosts=(server.at,), budget=budget)) == 3000
        assert "more than 7000 bytes" in await get(server.url, fetch_hosts=(server.at,), budget=budget)


async def test_a_server_that_says_nothing_more_is_given_up():
    gone = anyio.Event()

    async def silent(request):
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        await response.prepare(request)
        try:
            await response.write(b"x")
            while request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110 - only the transport knows
                await anyio.sleep(0.01)
        finally:
            gone.set()
        return response

    async with listening(silent, PUBLIC) as server:
        assert "could not be fetched within 0.3 s" in await get(server.url, fetch_hosts=(server.at,), fetch_seconds=0.3)
        with anyio.fail_after(5):
            await gone.wait()


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({"Content-Type": "text/html"}, 200, "is of type 'text/html', not image/..."),
        ({"Content-Type": "image/png", "Content-Encoding": "gzip"}, 200, "compresses what it sends"),
        ({"Content-Type": "image/png"}, 404, "the server answers 404"),
        ({"Content-Type": "image/png"}, 304, "the server answers 304"),
        ({}, 302, "redirects to nowhere"),
    ],
)
async def test_answers_that_are_no_image(headers, status, says):
    async def answer(request):
        response = web.Response(status=status, headers=headers)
        if "Content-Encoding" not in headers and status == 200:
            response.body = IMAGE
        return response

    async with listening(answer, PUBLIC) as server:
        assert says in await get(server.url, fetch_hosts=(server.at,))


async def test_an_audio_part_wants_audio():
    async with listening(image, PUBLIC) as server:
        assert "not audio/..." in await get(server.url, kind="audio", fetch_hosts=(server.at,))


async def test_nothing_listens_there():
    with socket.socket() as sock:
        sock.bind((PUBLIC, 0))
        port = sock.getsockname()[1]
        assert "can't be fetched (" in await get(f"http://{PUBLIC}:{port}/", fetch_hosts=(f"{PUBLIC}:{port}",))


async def test_closing_stops_what_is_under_way():
    begun, over = asyncio.Event(), asyncio.Event()

    async def silent(request):
        begun.set()
        await over.wait()
        return web.Response()

    async with listening(silent, PUBLIC) as server:
        fetcher = Fetcher(MultimodalSettings(fetch_hosts=(server.at,), fetch_seconds=30.0))
        future = fetcher.begin(server.url, WHERE, "image", 1000, Budget(1000))
        await begun.wait()
        await anyio.to_thread.run_sync(fetcher.close)
        over.set()
        assert future.cancelled()
        assert not any(thread.name == "media-fetch" for thread in threading.enumerate())
