"""An engine without a model, behind the real client's interface: it repeats the prompt, one token a step, then ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from tokenbus.core.contexts import FrontContext
from tokenbus.core.errors import OverloadedError, TokenbusError, UnavailableError
from tokenbus.core.front.events import ChangeRefused, FeatureChange
from tokenbus.core.front.plugins import FrontPlugins, Hold
from tokenbus.core.front.settings import LiveSettings
from tokenbus.core.front.stream import TokenStream, failed
from tokenbus.core.messages import EngineInfo, Finish
from tokenbus.core.plan import TokenLogprobs
from tokenbus.core.request import AdmittedRequest


class Running:
    def __init__(self, admitted: AdmittedRequest, stream: TokenStream, tokens: list[int]) -> None:
        self.admitted = admitted
        self.stream = stream
        self.tokens = tokens
        self.emitted = 0
        self.cancelled: str | None = None


class FakeEngineClient:
    def __init__(
        self, config, bus, host, switches, *, vocab_size: int, max_model_len: int, eos: int, main: bool = True
    ) -> None:
        self.config, self.bus, self.host, self.switches = config, bus, host, switches
        self.state, self.restarts = "ready", 0
        self.settings = LiveSettings(config, host, bus)
        self.refusing: dict[str, Any] = {}
        self.info: EngineInfo | None = EngineInfo(
            version=1, model="fake", architecture="Fake", dtype="float32", vocab_size=vocab_size, max_model_len=max_model_len,
            block_size=16, num_blocks=64, weights_bytes=0, kv_bytes_per_token=1, eos_token_ids=(eos,), lossless=True,
        )  # fmt: skip
        self.open: dict[str, Running] = {}
        self.admitted: list[AdmittedRequest] = []
        """Everything ever submitted."""
        self.ended: list[tuple[str, str]] = []
        self.answer: Callable[[AdmittedRequest], list[int]] = lambda admitted: list(admitted.prompt)
        self.fail_after: dict[int, TokenbusError] = {}
        """Number of emitted tokens -> the error every request ends with then."""
        self.hold = False
        """While set, no step runs."""
        self.hold_after: int | None = None
        """No request gets more tokens than this."""
        self.cached_tokens = 0
        self._work = anyio.Event()
        self.steps = 0
        self._plugins = FrontPlugins(host, FrontContext(bus=bus, config=config, info=lambda: self.info, main=main))

    @property
    def open_requests(self) -> int:
        return len(self.open)

    async def run(self, *, task_status=anyio.TASK_STATUS_IGNORED) -> None:
        self._plugins.start(self.switches.on)
        task_status.started()
        try:
            while True:
                if not self.step():
                    self._work = anyio.Event()
                    await self._work.wait()
                await anyio.lowlevel.checkpoint()
        finally:
            self._plugins.stop()

    def resume(self) -> None:
        self.hold, self.hold_after = False, None
        self._work.set()

    def step(self) -> bool:
        """One token for each open request; whether anything happened."""
        did = False
        for running in list(self.open.values()):
            did = self._advance(running) or did
        self.steps += did
        return did

    def _advance(self, running: Running) -> bool:
        stream, admitted = running.stream, running.admitted
        if running.cancelled:
            self._finish(running, "stop" if running.cancelled == "stop" else "cancelled")
            return True
        if self.hold or (self.hold_after is not None and running.emitted >= self.hold_after):
            return False
        if (error := self.fail_after.get(running.emitted)) is not None:
            self._end(running, failed(error))
            return True
        if running.emitted == 0 and (top := admitted.fields.get("prompt_logprobs")) is not None:
            stream.push([], None, [self._logprob(token, top) for token in admitted.prompt[1:]])
        if running.emitted >= admitted.max_tokens:
            self._finish(running, "length")
            return True
        token = running.tokens[running.emitted]
        running.emitted += 1
        top = admitted.fields.get("logprobs")
        stream.push([token], None if top is None else [self._logprob(token, top)], None)
        if running.emitted >= admitted.max_tokens:
            self._finish(running, "length")
        elif running.emitted >= len(running.tokens):
            self._finish(running, "stop")
        return True

    def _logprob(self, token: int, top: int) -> TokenLogprobs:
        others = [token, *(t for t in range(top) if t != token)][:top]
        return TokenLogprobs(token, -0.5, 1, others, [-0.5 - i for i in range(len(others))])

    def _finish(self, running: Running, reason: str) -> None:
        admitted = running.admitted
        stop = self.info.eos_token_ids[0] if reason == "stop" and not running.cancelled else None
        self._end(running, Finish(
            reason=reason, stop_token=stop, cached_tokens=self.cached_tokens, features=admitted.features,
            notes={"prefix_cache": "skipped: prompt logprobs"} if "prompt_logprobs" in admitted.fields else {},
        ))  # fmt: skip

    def _end(self, running: Running, finish: Finish) -> None:
        del self.open[running.admitted.request_id]
        self._settle()
        self.ended.append((running.admitted.request_id, finish.reason))
        running.stream.end(finish)

    # ---- the client's interface -------------------------------------------------------------------------------------------------

    def submit(self, requests: list[AdmittedRequest]) -> list[TokenStream]:
        if self.state != "ready":
            raise UnavailableError("the server is shutting down", retry_after=1.0)
        limit = self.settings.capacity
        if len(self.open) + len(requests) > limit:
            raise OverloadedError(f"the queue is full: {len(self.open)} requests are open", retry_after=1.0)
        streams = []
        for admitted in requests:
            assert admitted.request_id not in self.open
            stream = TokenStream(admitted.request_id, self._cancel)
            self.open[admitted.request_id] = Running(admitted, stream, self.answer(admitted))
            self.admitted.append(admitted)
            streams.append(stream)
        self._work.set()
        return streams

    def hold_plugins(self) -> Hold:
        return self._plugins.hold(self._settle)

    def _settle(self) -> None:
        in_use = frozenset().union(*(running.admitted.features for running in self.open.values()))
        self._plugins.settle(self.switches.on, in_use)

    def _cancel(self, request_id: str, reason: str) -> None:
        if request_id in self.open:
            self.open[request_id].cancelled = reason
            self._work.set()

    def ready(self) -> tuple[bool, str]:
        return self.state == "ready", "ok" if self.state == "ready" else f"the engine is {self.state}"

    async def query(self, what: str, **args: Any) -> Any:
        assert what == "plans"
        plans = [
            {"step_id": i, "num_tokens": {"a": 1}, "budget": 8, "free_blocks": 3, "preempted": []} for i in range(self.steps)
        ]
        return {"plans": plans[-args["last"] :]}

    async def set_features(self, changes: Mapping[str, bool], who: str) -> Any:
        try:
            target = self.host.change_switches(self.switches, changes)
        except TokenbusError as error:
            self.bus.publish(ChangeRefused("features", dict(changes), error.message, who, time.time()))
            raise
        self._plugins.prepare(target.on)
        before, self.switches = self.switches, target
        self._settle()
        self.bus.publish(FeatureChange(dict(changes), self.switches, who, time.time(), before))
        return self.switches

    async def set_settings(self, changes: Mapping[str, Any], who: str) -> None:
        message = self.settings.begin(1, changes, who)
        self.settings.answered(message.call_id)
