"""A metrics exporter: StatsD datagrams about requests and steps, told by the front's bus. It never touches a request.

pip install ./examples/plugin-statsd
tokenbus serve --enable metrics.statsd --plugin-setting metrics.statsd.port=8125

tokenbus.requests.stop:1|c     a request ended; the finish reason is part of the name
tokenbus.ttft:81.204|ms        from arrival to the first token
tokenbus.output_tokens:40|c
tokenbus.running:3|g           beside waiting and free_blocks, at most every `interval` seconds
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tokenbus import Plugin, PluginInfo, hookimpl
from tokenbus.core.front.events import RequestRecord
from tokenbus.core.messages import StepReport

if TYPE_CHECKING:
    from tokenbus.core.bus import Listener
    from tokenbus.core.contexts import FrontContext


class StatsdSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """Numeric address: no name is looked up, which could take long."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8125
    prefix: str = "tokenbus"
    interval: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Seconds between two datagrams of gauges."""


class Statsd(Plugin):
    info = PluginInfo(
        name="metrics.statsd",
        summary="StatsD datagrams about requests and steps (an example)",
        scope="step",
        lossless=True,
        api_version=(1, 1),
    )
    Settings = StatsdSettings

    def __init__(self, settings: Any, role: Any) -> None:
        super().__init__(settings, role)
        self._socket: socket.socket | None = None
        self._listener: Listener | None = None
        self._gauges_at = 0.0

    @hookimpl
    def front_started(self, front: FrontContext) -> None:
        """Raises OSError for a host that is no numeric address: then the plugin can't be switched on."""
        where = (self.settings.host, self.settings.port)
        family, kind, protocol, _, address = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self._socket.connect(address)
        self._listener = front.bus.listen(self._told, RequestRecord, StepReport)

    @hookimpl
    def front_stopped(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._listener = None

    def _told(self, event: RequestRecord | StepReport) -> None:
        if isinstance(event, RequestRecord):
            self._send(request_lines(event))
        elif event.started + event.duration >= self._gauges_at + self.settings.interval:
            self._gauges_at = event.started + event.duration
            self._send(gauge_lines(event))

    def _send(self, lines: list[str]) -> None:
        """Whoever does not listen, or not fast enough, misses something: nobody waits for it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send("\n".join(f"{self.settings.prefix}.{line}" for line in lines).encode())


def request_lines(record: RequestRecord) -> list[str]:
    lines = [
        f"requests.{record.finish_reason}:1|c",
        f"output_tokens:{record.output_tokens}|c",
        f"e2e:{1000 * record.e2e:.3f}|ms",
    ]
    return lines if record.ttft is None else [*lines, f"ttft:{1000 * record.ttft:.3f}|ms"]


def gauge_lines(report: StepReport) -> list[str]:
    return [f"{name}:{getattr(report, name)}|g" for name in ("running", "waiting", "free_blocks")]
