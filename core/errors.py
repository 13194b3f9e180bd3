"""Every error Tokenbus raises on purpose, in one tree.

    TokenbusError                      status  type (OpenAI's word)        whose fault / what happens next
    ├── RequestError                   400     invalid_request_error       the client's: this request ends, nobody else notices
    │   ├── FieldError                 400     invalid_request_error       one named field is wrong; `param` names it
    │   │   └── FeatureOffError        400     invalid_request_error       the field is real, the plugin that honours it is off
    │   ├── ContextLengthError         400     invalid_request_error       prompt (plus max_tokens) can't fit model or KV pool
    │   ├── TooLargeError              413     invalid_request_error       a documented limit on size was passed
    │   ├── AuthenticationError        401     authentication_error        no key, or a wrong one
    │   ├── NotAllowedError           403     permission_error            the key is right, the caller may not do this
    │   ├── NotFoundError              404     not_found_error             no such route, model or feature
    │   └── MethodNotAllowedError      405     invalid_request_error       the route takes other methods; `allowed` names them
    ├── ConflictError                  409     invalid_request_error       the change asked for is refused, with the reason
    ├── OverloadedError                429     rate_limit_error            the queue is full: try again after `retry_after`
    ├── UnavailableError               503     service_unavailable         engine starting, restarting or draining; `retry_after`
    ├── DeadlineError                  504     timeout_error               the request's own deadline passed
    ├── RequestCancelledError          499     request_cancelled           the client left
    ├── ServerFault                    500     server_error                ours: the requests concerned end, the loop goes on
    │   ├── PluginError                500     server_error                a plugin raised; names plugin and hook
    │   ├── EngineDiedError            500     server_error                the engine process ended, and no other can go on with the request
    │   └── WorkerError                500     server_error                a step failed on the worker
    │       └── StepMemoryError        500     server_error                the device had no memory for it: smaller steps are tried first
    └── StartupError                   (exit 1) never reaches a client     the process can't start: message says what to do
        ├── ConfigError                        a setting is malformed, unknown, or contradicts another
        ├── ModelError                         the model can't be loaded or run; names the reason
        ├── PluginLoadError                    a plugin can't be loaded: API version, name, requires/conflicts, bad signature
        └── RecordingError                     a file is no recording, is damaged, or can't answer what is asked of it

Recoverable: everything but StartupError. `to_wire` gives what crosses the process border (`ErrorInfo`), `from_wire` its inverse.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it travels between processes: plain data, no traceback, no object of a peer's choosing."""

    kind: str
    message: str
    param: str | None = None
    request_id: str | None = None
    plugin: str | None = None
    hook: str | None = None
    retry_after: float | None = None


def plain_text(value: object) -> str:
    """`str(value)`, with what can't be encoded replaced; for an object whose `__str__` raises, its type. Never raises."""
    try:
        return str(value).encode("utf-8", "replace").decode()
    except Exception:
        return f"<{type(value).__name__}>"


def shorten(value: object, most: int = 200) -> str:
    """`plain_text`, without its middle when it has more than `most` characters: for what a client wrote."""
    text = plain_text(value)
    return text if len(text) <= most else f"{text[: most - 50]}...{text[-40:]}"


class TokenbusError(Exception):
    """Base of the tree. `message` is written for the person who has to act on it."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        request_id: str | None = None,
        plugin: str | None = None,
        hook: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.request_id = request_id
        self.plugin = plugin
        self.hook = hook
        self.retry_after = retry_after

    def to_wire(self) -> ErrorInfo:
        """Plain data, whatever whoever raised it put in: texts become text that can be encoded."""
        wait = self.retry_after
        return ErrorInfo(
            kind=type(self).__name__,
            message=plain_text(self.message),
            param=None if self.param is None else plain_text(self.param),
            request_id=None if self.request_id is None else plain_text(self.request_id),
            plugin=None if self.plugin is None else plain_text(self.plugin),
            hook=None if self.hook is None else plain_text(self.hook),
            retry_after=wait if isinstance(wait, (int, float)) else None,
        )


class RequestError(TokenbusError):
    status = 400
    type = "invalid_request_error"


class FieldError(RequestError):
    """One field is wrong. `FieldError(field, reason)` reads `'field': reason`; a name that is too long to show is shortened."""

    def __init__(self, field: str, reason: str, **context: str | None) -> None:
        field = shorten(field)
        super().__init__(f"{field!r}: {reason}", param=field, **context)  # pyright: ignore[reportArgumentType]


class FeatureOffError(FieldError):
    pass


class ContextLengthError(RequestError):
    pass


class TooLargeError(RequestError):
    status = 413


class AuthenticationError(RequestError):
    status = 401
    type = "authentication_error"


class NotAllowedError(RequestError):
    status = 403
    type = "permission_error"


class NotFoundError(RequestError):
    status = 404
    type = "not_found_error"


class MethodNotAllowedError(RequestError):
    status = 405

    def __init__(self, message: str, allowed: tuple[str, ...] = (), **context: str | None) -> None:
        super().__init__(message, **context)  # pyright: ignore[reportArgumentType]
        self.allowed = allowed


class ConflictError(TokenbusError):
    status = 409
    type = "invalid_request_error"


class OverloadedError(TokenbusError):
    status = 429
    type = "rate_limit_error"


class UnavailableError(TokenbusError):
    status = 503
    type = "service_unavailable"


class DeadlineError(TokenbusError):
    status = 504
    type = "timeout_error"


class RequestCancelledError(TokenbusError):
    status = 499
    type = "request_cancelled"


class ServerFault(TokenbusError):
    pass


class PluginError(ServerFault):
    """A plugin raised. `plugin` and `hook` say which and where; `__cause__` holds what it raised."""


class EngineDiedError(ServerFault):
    pass


class WorkerError(ServerFault):
    pass


class StepMemoryError(WorkerError):
    """The device had no memory for a step. What its order says of requests, blocks, switches and settings is taken over; no token was run,
    and drafts are forgotten. A client sees it when a request can't run even alone."""


class StartupError(TokenbusError):
    pass


class ConfigError(StartupError):
    pass


class ModelError(StartupError):
    pass


class PluginLoadError(StartupError):
    pass


class RecordingError(StartupError):
    """A file that is no recording, is damaged, or can't answer what was asked."""


def _tree(root: type[TokenbusError]) -> dict[str, type[TokenbusError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def status_of(kind: str) -> int:
    """HTTP status of a class of the tree by its name; 500 for an unknown one."""
    return _tree(TokenbusError).get(kind, ServerFault).status


def from_wire(info: ErrorInfo) -> TokenbusError:
    """The error that `to_wire` was called on, less its traceback. An unknown kind becomes a ServerFault."""
    cls = _tree(TokenbusError).get(info.kind, ServerFault)
    error = cls.__new__(cls)
    TokenbusError.__init__(
        error,
        info.message,
        param=info.param,
        request_id=info.request_id,
        plugin=info.plugin,
        hook=info.hook,
        retry_after=info.retry_after,
    )
    return error
