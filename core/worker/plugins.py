"""The worker's plugins: which are loaded, for whom, and which attention backend is active."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from ..errors import TokenbusError, plain_text
from ..host import HookTable, Impl, PluginHost
from ..models.slot import choose_encoder, choose_layout, choose_linears, choose_sides
from ..plan import WorkerRequest
from .attention import AttentionBackend, AttentionBatch, AttentionParams, KVLayout
from .default_attention import default_attention
from .device import device_broke, out_of_memory
from .state import WorkerRequestState

if TYPE_CHECKING:
    import torch

    from ..models.linears import Linears, ModelToLoad
    from ..models.media import MediaCheckpoint, MediaEncoder
    from .side import SideModel

log = structlog.get_logger(__name__)


class WorkerPlugins:
    """Keeps a plugin loaded while it is switched on or an open request was admitted with it."""

    def __init__(self, host: PluginHost, features: tuple[str, ...]) -> None:
        self.host = host
        self.features = frozenset(features)
        self._of_request: dict[str, frozenset[str]] = {}
        self._holder: str | None = None
        self._backend: AttentionBackend | None = None
        self.slot_error: TokenbusError | None = None
        """Why the attention slot's holder could not give a backend; core's computes in its place."""
        self._residents: frozenset[str] = frozenset()
        self.sides: list[SideModel] = []
        """What runs beside the served model."""

    @property
    def order(self) -> HookTable:
        """All loaded plugins' hooks: the order in which batches are shown to them."""
        return self.host.table(frozenset(self.host.loaded))

    def start(self) -> None:
        self._residents = self.host.residents(self.features)
        self.host.load(self.features | self._residents)

    def make_sides(self, model: str, dtype: str, block_size: int, device: str = "cpu") -> None:
        """Fill `sides`; nothing of theirs is loaded yet. device: the kind that the model is on."""
        self.sides = choose_sides(self.host, self._residents, model, dtype, block_size, device)

    def encoder(self, checkpoint: MediaCheckpoint) -> MediaEncoder | None:
        """What encodes the model's media; see `slot.choose_encoder`."""
        return choose_encoder(self.host, self._residents, checkpoint)

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

    def configure(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Settings that were changed live, as written, by plugin."""
        for name, values in settings.items():
            self.host.set_settings(name, values, msgspec.convert(values, self.host.catalogue[name].Settings))

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
        if self.host.loaded.keys() - self.features - self._residents:
            self.host.release_unused((self.features | self._residents).union(*self._of_request.values()))

    def linears(self, model: ModelToLoad) -> Linears | None:
        """Who makes the model's matrix products; see `slot.choose_linears`."""
        return choose_linears(self.host, self.features, model)

    def kv_layout(self, model: str, layout: KVLayout) -> KVLayout:
        return choose_layout(self.host, self.features, model, layout)

    def attention(self, layout: KVLayout) -> AttentionBackend:
        """The slot's backend; core's (Triton on a GPU, else torch) when the slot is empty, or its holder can't serve or raises (with a loud
        log). A plugin's backend that raises in a step raises PluginError."""
        holder = self.host.holder("attention", self.features)
        if self._backend is None or holder != self._holder:
            self.slot_error = None
            self._backend = self._from_plugin(holder, layout) or default_attention(layout)
            self._holder = holder
        return self._backend

    def attention_beside(self, layout: KVLayout) -> AttentionBackend:
        """What serves a side model's layout: the slot's present holder, or core's backend."""
        holder = self.host.holder("attention", self.features)
        return self._from_plugin(holder, layout, beside=True) or default_attention(layout)

    def _from_plugin(self, holder: str | None, layout: KVLayout, *, beside: bool = False) -> AttentionBackend | None:
        for impl in self.host.table(frozenset({holder} if holder else ())).attention_backend:
            try:
                backend = impl(layout=layout)
            except TokenbusError as error:
                log.exception("attention_backend_failed", plugin=holder)
                if not beside:
                    self.slot_error = error
                return None
            if backend is not None and layout.quantized and not backend.quantized_kv:
                self.slot_error = impl.failure(
                    f"{backend.name!r} can't read the {layout.stored} K/V cache that another plugin asks for"
                )
                log.error("attention_backend_refused", plugin=holder, error=self.slot_error.message)
                return None
            if backend is not None and layout.looks_ahead and not backend.looks_ahead:
                log.warning("attention_backend_not_used", plugin=holder, reason="the model's media attend in both directions")
                return None
            if backend is not None:
                return GuardedAttention(backend, impl)
            log.warning("attention_backend_declined", plugin=holder, side_model=beside)
        return None


class GuardedAttention(AttentionBackend):
    """A plugin's backend; what it raises (but for want of memory and a GPU that broke, which it may just be the first to hear of), and an
    output of another shape or dtype than the queries', becomes a PluginError."""

    def __init__(self, backend: AttentionBackend, impl: Impl) -> None:
        self._backend = backend
        self._impl = impl
        self.name = backend.name  # pyright: ignore[reportAttributeAccessIssue]
        self.invariant = backend.invariant
        self.capturable = backend.capturable  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def inner(self) -> AttentionBackend:
        return self._backend

    def prepare(self, batch: AttentionBatch) -> Any:
        try:
            return self._backend.prepare(batch)
        except Exception as error:
            if out_of_memory(error) or device_broke(error):
                raise
            raise self._impl.failure(f"prepare: {type(error).__name__}: {plain_text(error)}") from error

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> torch.Tensor:
        try:
            out = self._backend.attend(q, k, v, k_cache, v_cache, batch, params)
            fits = out.shape == q.shape and out.dtype == q.dtype
        except Exception as error:
            if out_of_memory(error) or device_broke(error):
                raise
            raise self._impl.failure(f"attend: {type(error).__name__}: {plain_text(error)}") from error
        if not fits:
            raise self._impl.failure(f"attend: gave {out.dtype} {tuple(out.shape)} for {q.dtype} {tuple(q.shape)}")
        return out
