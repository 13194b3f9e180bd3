"""What hooks were called, by whom, with what, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.host import Impl, PluginHost
from ..core.plugin import Role


@dataclass(frozen=True, slots=True)
class HookCall:
    role: Role
    plugin: str
    hook: str
    arguments: Mapping[str, Any]
    """As given: core's own objects, which have lived on since."""
    answer: Any
    error: Exception | None
    seconds: float
    """Wall time, dispatch and the check of the answer included."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of the requests that it was about; empty for an engine-wide hook, and in the front before a request has an id."""
        if (rows := self.arguments.get("rows")) is not None:
            return tuple(dict.fromkeys(row.request.request_id for row in rows))
        request_id = getattr(self.arguments.get("request"), "request_id", None)
        return () if request_id is None else (request_id,)

    def __repr__(self) -> str:
        about = f" of {', '.join(self.request_ids)}" if self.request_ids else ""
        ended = f"raised {self.error!r}" if self.error is not None else f"-> {self.answer!r:.60}"
        return f"{self.role}: {self.plugin}.{self.hook}{about} {ended}"


class TracingHost(PluginHost):
    """A plugin host whose every hook call is noted in `calls`, in order."""

    def __init__(self, role: Role, settings: Mapping[str, Mapping[str, Any]] | None = None, *, calls: list[HookCall]) -> None:
        super().__init__(role, settings)
        self.calls = calls

    def _resolve(self, hook: str, features: frozenset[str], fields: frozenset[str] | None) -> tuple[Impl, ...]:
        return tuple(_TracedImpl(impl, self) for impl in super()._resolve(hook, features, fields))


class _TracedImpl(Impl):
    __slots__ = ("_host",)

    def __init__(self, impl: Impl, host: TracingHost) -> None:
        super().__init__(impl.hook, impl.info, impl._call)
        self._host = host

    def __call__(self, **arguments: Any) -> Any:
        answer, failed = None, None
        started = time.perf_counter()
        try:
            answer = super().__call__(**arguments)
        except Exception as error:
            failed = error
            raise
        finally:
            seconds = time.perf_counter() - started
            call = HookCall(self._host.role, self.plugin, self.hook, arguments, answer, failed, seconds)
            self._host.calls.append(call)
        return answer


def only(calls: Sequence[HookCall], *, hook: str | None = None, plugin: str | None = None) -> list[HookCall]:
    """Those of one hook, or of one plugin, or both."""
    return [call for call in calls if hook in {None, call.hook} and plugin in {None, call.plugin}]
