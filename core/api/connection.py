"""Below the routes: what the HTTP library itself finds wrong with a connection's bytes is answered and logged like everything else."""

from __future__ import annotations

from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from ..errors import RequestError, ServerFault, TokenbusError, shorten
from ..front.admission import new_id
from .app import error_response, with_status

log = structlog.get_logger(__name__)


class Connection(RequestHandler):
    """JSON for bytes that are no HTTP request; one log line, without a traceback when it is the client's fault."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):  # the client is gone: nobody to answer, nothing to log
            raise exc
        self.log_exception("Error handling request", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent: it can't become an error")
        error: TokenbusError
        if status < 500:
            error = with_status(RequestError(f"this is not a valid HTTP request: {_first_line(message or exc)}"), status)
        else:
            error = ServerFault("the connection failed while the request was handled")
        response = error_response(error, new_id("req"))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        exc = kw.get("exc_info")
        if isinstance(exc, HttpProcessingError):
            log.info("bad_http_request", client=self._remote(), error=_first_line(exc.message))
        elif isinstance(exc, BaseException):
            log.error("connection_failed", client=self._remote(), exc_info=exc)
        else:
            log.error("connection_failed", client=self._remote(), error=shorten(args[0] if args else ""))

    def _remote(self) -> str | None:
        name = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, (tuple, list)) and name else None


def _first_line(message: object) -> str:
    """The library's messages go on with the bytes that it could not read."""
    return shorten(shorten(message, 2000).strip().partition("\n")[0].rstrip(" :") or "it can't be read")


class _Server(web.Server):
    def __init__(self, made: web.Server) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )

    def __call__(self) -> Any:
        return Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    __slots__ = ()

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server())


def make_runner(app: web.Application, shutdown_timeout: float) -> web.AppRunner:
    """A handler is cancelled when its client leaves; no access log: each request has its own line."""
    return _Runner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
