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
        """New switches. PluginLoadError leaves everything as it was.

        Returns the plugins whose change reaches running requests (`move`): lossless ones that are not switched by request.
        """
        self.host.load(features)
        changed = self.features ^ frozenset(features)
        self.features = frozenset(features)
        infos = (self.host.info(name) for name in changed)
        return frozenset(info.name for info in infos if info.lossless and info.scope != "request")

    def move(self, request: WorkerRequestState, changed: frozenset[str]) -> list[Impl]:
        """Give a running request the present state of the `changed` plugins, but leave it those that honour a field it uses.

        Returns `worker_request_added` of those that are new to it.
        """
        old = self._of_request[request.request_id]
        kept = {name for name in old & changed if not self.host.info(name).claims.isdisjoint(request.fields)}
        names = (old - changed) | (changed & self.features) | kept
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
