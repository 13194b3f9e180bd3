"""The HTTP server's frame: one table of routes (core's and the plugins'), access, body limits, and errors in OpenAI's form, always JSON."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import structlog
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from ..contexts import Route
from ..errors import (
    FieldError,
    MethodNotAllowedError,
    NotFoundError,
    RequestError,
    ServerFault,
    TokenbusError,
    TooLargeError,
    UnavailableError,
    shorten,
)
from ..front.admission import new_id
from ..front.events import RequestRefused
from ..front.service import Service
from ..host import Impl
from ..plugin import Plugin
from .auth import Gate

log = structlog.get_logger(__name__)

Access = Literal["open", "client", "admin", "page"]
Handler = Callable[["Call"], Awaitable[web.StreamResponse]]

SERVICE = web.AppKey("service", Service)
BROKEN_BODY = (web.RequestPayloadError, HttpProcessingError)
"""What reading a body raises when it can't be decompressed, or its chunks are malformed."""
MOST_MESSAGE = 2000
"""Characters of an error's message."""


@dataclass(slots=True)
class Call:
    """One HTTP request on its way to an answer."""

    request: web.Request
    service: Service
    request_id: str
    """The client's own x-request-id, or ours."""
    who: str = ""
    """The tenant, or for admin routes whoever may change things."""
    generates: str = ""
    """The endpoint's name in records, for those that make text."""
    admitted: bool = False
    """A record will be published for it."""

    async def body(self) -> bytes:
        """TooLargeError when it passes the limit, RequestError when it isn't what its headers say (compression, chunks)."""
        limit = self.service.config.limits.max_body_bytes
        try:
            return await self.request.read()
        except web.HTTPRequestEntityTooLarge:
            raise TooLargeError(f"the body is larger than {limit} bytes") from None
        except BROKEN_BODY as error:
            raise _broken_body(error) from None


@dataclass(frozen=True, slots=True)
class Endpoint:
    handler: Handler
    access: Access = "client"
    generates: str = ""


class Routes:
    """Core's routes are fixed; a plugin's are there while the plugin is on."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._fixed: dict[str, dict[str, Endpoint]] = {}
        self._prefixes: dict[str, dict[str, Endpoint]] = {}
        self._plugins: dict[str, dict[str, Endpoint]] = {}
        self._given: dict[str, tuple[Plugin, Sequence[Route]]] = {}
        """By name: a plugin that is on, and the routes that it gave when it was asked, once."""

    def add(self, method: str, path: str, endpoint: Endpoint) -> None:
        """A path that ends in "/*" stands for everything below it."""
        table = self._prefixes if path.endswith("/*") else self._fixed
        table.setdefault(path.removesuffix("*"), {})[method] = endpoint

    def find(self, method: str, path: str) -> Endpoint:
        """NotFoundError, or MethodNotAllowed for a path that has other methods."""
        methods = self._fixed.get(path) or self._below(path) or self._of_plugins().get(path)
        if methods is None:
            raise NotFoundError(f"there is no {shorten(path)} here")
        endpoint = methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            takes = ", ".join(sorted(methods))
            raise MethodNotAllowedError(f"{shorten(path)} takes {takes}, not {shorten(method)}", tuple(sorted(methods)))
        return endpoint

    def _below(self, path: str) -> dict[str, Endpoint] | None:
        return next((methods for prefix, methods in self._prefixes.items() if path.startswith(prefix)), None)

    def _of_plugins(self) -> dict[str, dict[str, Endpoint]]:
        host = self._service.host
        impls = host.table(self._service.client.switches.on).http_routes
        now = {impl.plugin: host.loaded[impl.plugin] for impl in impls}
        if now != {name: plugin for name, (plugin, _) in self._given.items()}:
            old = self._given
            self._given = {
                impl.plugin: old[impl.plugin]
                if impl.plugin in old and old[impl.plugin][0] is now[impl.plugin]
                else (now[impl.plugin], _ask_for_routes(impl))
                for impl in impls
            }
            self._plugins = _table(routes for _, routes in self._given.values())
        return self._plugins


def _ask_for_routes(impl: Impl) -> Sequence[Route]:
    try:
        return impl() or ()
    except TokenbusError as error:
        log.exception("plugin_failed", plugin=impl.plugin, hook="http_routes", error=error.message)
        return ()


def _table(given: Iterable[Sequence[Route]]) -> dict[str, dict[str, Endpoint]]:
    table: dict[str, dict[str, Endpoint]] = {}
    for routes in given:
        for route in routes:
            access: Access = "admin" if route.admin else "page" if route.page else "client"
            table.setdefault(route.path, {})[route.method] = Endpoint(_plain(route.handler), access)
    return table


def _plain(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Handler:
    async def call(call: Call) -> web.StreamResponse:
        return await handler(call.request)

    return call


def make_app(service: Service, routes: Routes, gate: Gate) -> web.Application:
    async def dispatch(request: web.Request) -> web.StreamResponse:
        call = Call(request, service, "")
        try:
            call.request_id = _request_id(request, service)
            return await _answer(call, routes, gate)
        except TokenbusError as error:
            if call.generates and not call.admitted:
                service.bus.publish(RequestRefused(call.generates, error.status, type(error).__name__))
            return error_response(error, call.request_id)
        except web.HTTPException as error:
            return error_response(_from_aiohttp(error), call.request_id)
        except BROKEN_BODY as error:
            return error_response(_broken_body(error), call.request_id)
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("request_failed", path=request.path, id=call.request_id)
            return error_response(ServerFault(f"{type(error).__name__} while the request was handled"), call.request_id)

    app = web.Application(client_max_size=service.config.limits.max_body_bytes, middlewares=[_json_errors])
    app[SERVICE] = service
    app.router.add_route("*", "/{path:.*}", dispatch, expect_handler=_expect)
    return app


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """For what never gets to a route: "OPTIONS *" and the like."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return error_response(_from_aiohttp(error), new_id("req"))


async def _expect(request: web.Request) -> web.StreamResponse | None:
    if request.version < HttpVersion11:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        reason = "the only expectation that can be met is 100-continue"
        return error_response(with_status(RequestError(reason, param="Expect"), 417), new_id("req"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer itself has not begun
    return None


def _from_aiohttp(error: web.HTTPException) -> RequestError:
    """What the HTTP library itself found wrong with a request."""
    return with_status(RequestError(error.reason), error.status)


def with_status(error: RequestError, status: int) -> RequestError:
    """With a status of HTTP's own that no class of the tree has."""
    error.status = status  # pyright: ignore[reportAttributeAccessIssue]
    return error


def _broken_body(error: Exception) -> RequestError:
    return RequestError(f"the body can't be read as its headers say (Content-Encoding, Transfer-Encoding): {shorten(error)}")


async def _answer(call: Call, routes: Routes, gate: Gate) -> web.StreamResponse:
    request = call.request
    endpoint = routes.find(request.method, request.path)
    call.generates = endpoint.generates
    if endpoint.access == "admin":
        call.who = gate.admin(request)
    elif endpoint.access == "page":
        gate.page(request)
    elif endpoint.access == "client":
        call.who = gate.client(request)
    if (length := request.content_length) and length > call.service.config.limits.max_body_bytes:
        raise TooLargeError(f"the body has {length} bytes; at most {call.service.config.limits.max_body_bytes} are allowed")
    response = await endpoint.handler(call)
    if not response.prepared:
        response.headers.setdefault("x-request-id", call.request_id)
    return response


def _request_id(request: web.Request, service: Service) -> str:
    """What the client calls this request: only ever echoed and logged, never a key."""
    given = request.headers.get("x-request-id")
    if not given:
        return new_id("req")
    limit = service.config.limits.max_request_id_chars
    if len(given) > limit or not (given.isascii() and given.isprintable()):
        raise FieldError("x-request-id", f"must be at most {limit} printable ASCII characters")
    return given


def error_body(error: TokenbusError) -> dict[str, Any]:
    """OpenAI's form. `code` is the class in the error tree."""
    param = None if error.param is None else shorten(error.param)
    message = shorten(error.message, MOST_MESSAGE)
    body: dict[str, Any] = {"message": message, "type": error.type, "param": param, "code": type(error).__name__}
    if error.plugin is not None:
        body["plugin"], body["hook"] = error.plugin, error.hook
    return {"error": body}


def error_response(error: TokenbusError, request_id: str = "") -> web.Response:
    headers = {"x-request-id": request_id} if request_id else {}
    if error.retry_after is not None or isinstance(error, UnavailableError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1.0)))
    if isinstance(error, MethodNotAllowedError):
        headers["Allow"] = ", ".join(error.allowed)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), status=error.status, headers=headers)


def json_response(data: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), status=status, content_type="application/json", headers=headers)
