"""The worker's plugins: which are loaded, for whom, and which attention backend is active."""

from __future__ import annotations

import structlog

from ..errors import TokenbusError
from ..host import HookTable, Impl, PluginHost
from ..plan import WorkerRequest
from .attention import AttentionBackend, KVLayout
from .state import WorkerRequestState

log = structlog.get_logger(__name__)


class WorkerPlugins:
    """Keeps a plugin loaded while it is switched on or an open request was admitted with it."""

    def __init__(self, host: PluginHost, features: tuple[str, ...]) -> None:
        self.host = host
        self.features = frozenset(features)
        self._of_request: dict[str, frozenset[str]] = {}
        self._holder: str | None = None
        self._backend: AttentionBackend | None = None

    @property
    def order(self) -> HookTable:
        """All loaded plugins' hooks: the order in which batches are shown to them."""
        return self.host.table(frozenset(self.host.loaded))

    def start(self) -> None:
        self.host.load(self.features)

    def added(self, order: WorkerRequest) -> HookTable:
        """The request's hooks. Raises PluginLoadError when one of its plugins can't be loaded here."""
        names = frozenset(order.features)
        if not names <= self.host.loaded.keys():
            self.host.load(names)
        self._of_request[order.request_id] = names
        return self.host.table(names, order.fields)

    def removed(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)

    def switch(self, features: tuple[str, ...]) -> frozenset[str]:
        """New switches; returns what was on before, for `move`. PluginLoadError leaves everything as it was."""
        self.host.load(features)
        old, self.features = self.features, frozenset(features)
        return old

    def move(self, request: WorkerRequestState, before: frozenset[str]) -> list[Impl]:
        """Bring a running request from the switches `before` to the present ones, as far as they reach it (`host.after_switch`).

        Returns `worker_request_added` of the plugins that are new to it.
        """
        old = self._of_request[request.request_id]
        names = self.host.after_switch(old, before, self.features, pinned=request.pinned, fields=request.fields)
        if names == old:
            return []
        self._of_request[request.request_id] = names
        request.hooks = self.host.table(names, request.fields)
        return [impl for impl in request.hooks.worker_request_added if impl.plugin not in old]

    def release(self) -> None:
        """Unload what nobody uses any more; cheap when there is nothing to do."""
        if self.host.loaded.keys() - self.features:
            self.host.release_unused(self.features.union(*self._of_request.values()))

    def attention(self, layout: KVLayout) -> AttentionBackend:
        """The slot's backend; core's torch backend when the slot is empty, or its holder can't serve or raises (with a loud log)."""
        holder = self.host.holder("attention", self.features)
        if self._backend is None or holder != self._holder:
            self._backend = self._from_plugin(holder, layout) or _default_backend()
            self._holder = holder
        return self._backend

    def _from_plugin(self, holder: str | None, layout: KVLayout) -> AttentionBackend | None:
        if holder is None:
            return None
        try:
            backend = self.host.table(frozenset({holder})).first("attention_backend", layout=layout)
        except TokenbusError:
            log.exception("attention_backend_failed", plugin=holder)
            return None
        if backend is None:
            log.warning("attention_backend_declined", plugin=holder)
        return backend


def _default_backend() -> AttentionBackend:
    from .torch_attention import TorchAttention

    return TorchAttention()
