"""The open requests and their blocks: the state that intake, step builder and update share.

requests    every open request, by id (order of intake)
running     those that hold blocks, oldest admission first
line        those that wait
dropped     ids that the worker must forget with the next step
ended       ends that the next output carries
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from ..errors import ErrorInfo, PluginError, TokenbusError, plain_text
from ..host import Impl
from ..kv.pool import BlockPool
from ..messages import Finish
from ..request import Request, Status
from .waiting import WaitingLine

log = structlog.get_logger(__name__)


class Batch:
    def __init__(self, pool: BlockPool, on_plugin_failure: Callable[[str, PluginError], None]) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.line = WaitingLine(on_plugin_failure)
        self.distrusted: set[str] = set()
        """Plugins whose engine-wide hook failed: what they know of the pool may be out of date, so they are not asked for prefixes."""
        self.counters: dict[str, float] = {}
        """Increments for the next report, by "plugin.name"."""
        self.lingering: set[str] = set()
        """Plugins that are off and stay loaded for open requests; `users_left` is set when one of those requests ends."""
        self.users_left = False
        self._on_plugin_failure = on_plugin_failure
        self._dropped: list[str] = []
        self._ended: dict[str, Finish] = {}

    # ---- sizes ------------------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose K/V the whole pool can hold."""
        return self.pool.num_blocks * self.block_size

    def soon(self, request: Request) -> int:
        """Blocks it will need, all in all, for its known tokens and one more block's worth (never more than its own limit), or for what
        the policy reserves; never more than the pool can have. The last token of an output is never run."""
        most = max(request.num_prompt, request.limit - 1)
        wanted = max(min(len(request.tokens) + self.block_size, most), self.line.reserve(request))
        return min(self.blocks_for(wanted), self.pool.num_blocks)

    def headroom(self, request: Request) -> int:
        """Blocks that a running request will soon want beside those it holds."""
        return max(0, self.soon(request) - len(request.blocks))

    # ---- the life of a request ----------------------------------------------------------------------------------------------------

    def admit(self, request: Request, now: float) -> None:
        """The head of the line joins the batch. Its blocks are already in its table."""
        self.line.admit(request, now)
        request.status = Status.RUNNING
        self.running.append(request)

    def grow(self, request: Request, blocks: list[int]) -> None:
        request.blocks.extend(blocks)
        request.capacity += len(blocks) * self.block_size

    def shrink(self, request: Request) -> None:
        """Blocks that a running request's tokens do not need (they were taken for drafts) go back."""
        keep = self.blocks_for(len(request.tokens))
        if len(request.blocks) > keep:
            self.pool.release(request.blocks[keep:])
            del request.blocks[keep:]
            request.capacity = keep * self.block_size

    def preempt(self, request: Request, now: float) -> None:
        """Back to the line without blocks; all its tokens, the generated ones too, are run again later."""
        self.running.remove(request)
        self._take_blocks(request)
        request.computed = 0
        request.status = Status.WAITING
        request.preemptions += 1
        self._forget_on_worker(request)
        self.line.add(request, preempted=True, now=now)

    def end(
        self,
        request: Request,
        reason: str,
        now: float,
        *,
        error: ErrorInfo | None = None,
        stop_token: int | None = None,
        keep_in_running: bool = False,
    ) -> None:
        """A request's one end, whatever its state. With `keep_in_running` the caller calls `sweep` afterwards (for many at once)."""
        try:
            for impl in request.hooks.request_removed:
                impl(request=request)
        except TokenbusError as failure:
            log.exception("request_removed_failed", request_id=request.request_id, error=failure.message)
            if reason not in {"error", "cancelled"}:
                reason, error, stop_token = "error", failure.to_wire(), None
        if request.status is Status.RUNNING:
            if not keep_in_running:
                self.running.remove(request)
        elif request in self.line:
            self.line.remove(request, now)
        self._take_blocks(request)
        request.status = Status.FINISHED
        request.finish = reason
        self._forget_on_worker(request)
        self.requests.pop(request.request_id, None)
        if self.lingering and not self.lingering.isdisjoint(request.features):
            self.users_left = True
        self._ended[request.request_id] = Finish(
            reason=reason,  # pyright: ignore[reportArgumentType]
            stop_token=stop_token,
            error=error,
            cached_tokens=request.cached_tokens or 0,
            preemptions=request.preemptions,
            draft_tokens=request.draft_tokens,
            accepted_tokens=request.accepted_tokens,
            notes=_notes(request),
            features=tuple(sorted(request.features)),
        )

    def refuse(self, request_id: str, error: ErrorInfo, features: tuple[str, ...] = ()) -> None:
        """The end of a request that never became one."""
        self._ended[request_id] = Finish(reason="error", error=error, features=features)

    def sweep(self) -> None:
        """Take those that have ended out of `running`, all in one pass."""
        self.running = [request for request in self.running if request.status is Status.RUNNING]

    def _take_blocks(self, request: Request) -> None:
        if request.blocks:
            self.pool.release(request.blocks)
            request.blocks = []
            request.capacity = 0

    def _forget_on_worker(self, request: Request) -> None:
        if request.worker_knows:
            request.worker_knows = False
            self._dropped.append(request.request_id)

    # ---- what goes out ----------------------------------------------------------------------------------------------------------

    def take_dropped(self) -> list[str]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_ended(self) -> dict[str, Finish]:
        ended, self._ended = self._ended, {}
        return ended

    # ---- engine-wide hooks ------------------------------------------------------------------------------------------------------

    def call_engine_wide(self, impl: Impl, **arguments: Any) -> None:
        """Call a hook that is not about one request; a failure is the plugin's, not the step's."""
        try:
            impl(**arguments)
        except TokenbusError as error:
            failure = error if isinstance(error, PluginError) else PluginError(str(error), plugin=impl.plugin, hook=impl.hook)
            self.distrusted.add(impl.plugin)
            self.tell_failure(impl.plugin, failure)

    def tell_failure(self, plugin: str, error: PluginError) -> None:
        self._on_plugin_failure(plugin, error)

    # ---- checks -----------------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        self.pool.check_integrity([request.blocks for request in self.running])
        self.line.check_integrity()
        problems = []
        waiting = {request.request_id for request in self.line}
        running = {request.request_id for request in self.running}
        if waiting & running or waiting | running != self.requests.keys() or len(running) != len(self.running):
            problems.append("a request is in two places or in none")
        for request in self.requests.values():
            size, held = len(request.tokens), len(request.blocks) * self.block_size
            expected = Status.RUNNING if request.request_id in running else Status.WAITING
            if request.status is not expected:
                problems.append(f"{request!r} has the wrong status")
            if request.capacity != held or request.computed > held or request.computed >= size:
                problems.append(f"{request!r}: {request.computed} computed, {held} held, {request.capacity} noted")
            if expected is Status.WAITING and (request.blocks or request.computed or request.worker_knows):
                problems.append(f"{request!r} waits and holds something")
        if problems:
            raise RuntimeError("scheduler: " + "; ".join(problems))


def _notes(request: Request) -> dict[str, str]:
    """What plugins noted, as text whatever they put there."""
    notes = request.notes
    if not notes:
        return {}
    if not isinstance(notes, dict):
        return {"": plain_text(notes)}
    return {plain_text(name): plain_text(note) for name, note in notes.items()}
