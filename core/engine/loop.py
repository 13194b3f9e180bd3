"""EngineCore: the loop at the centre. An actor: it owns scheduler and KV pool, and is reached only through its mailbox.

    socket ─> reader ─> mailbox ─> [ take in ─> schedule ─> publish plan ─> execute ──────────────> update ─> publish result ]
                                                               │               │  └─ worker (thread or process)
                                                               │               └─ send the last step's output ─> socket
                                                               └─ StepBegins, where it says anything new ─> socket

Planning takes 0.01 to 0.1 ms of a step; what takes longer, encoding and sending, is done while the worker computes. With `info.ahead` so is
planning: when a step has been sent, the next one is planned and sent too, and then the loop waits for the first one's result. Where that
can't be (scheduling/ahead.py says when), the next plan is made when the result is there.
While a step computes, the heartbeat goes on beating and the reader goes on receiving: new requests join the line at once. Between two
results cancels and questions are dealt with; what changes switches or settings, or ends the engine, waits until no step is in flight.
A full mailbox makes the reader stop reading, and so, in the end, the front wait. A listener of the bus that must lose nothing and is far
behind makes the loop hold new requests; it never makes a step wait.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from collections.abc import Set as AbstractSet

import anyio
import anyio.lowlevel
import structlog

from .. import live_settings, logs
from ..actors import Mailbox
from ..bus import Bus
from ..config import Config
from ..contexts import EngineContext
from ..errors import ErrorInfo, StepMemoryError, TokenbusError, TooLargeError, plain_text
from ..host import PluginHost, Switches
from ..ipc import Channel, FrameError, WireError
from ..kv.pool import BlockPool
from ..messages import (
    Add,
    Cancel,
    EngineInfo,
    EngineMessage,
    Failed,
    FrontMessage,
    Heartbeat,
    Hello,
    Query,
    Reply,
    SetFeatures,
    SetSettings,
    Shutdown,
    StepBegins,
    StepOutput,
)
from ..plan import StepInput, StepPlan, StepResult
from ..request import AdmittedRequest
from ..scheduling.scheduler import Scheduler
from ..worker.base import Worker
from .in_flight import InFlight
from .queries import Queries
from .switchboard import Switchboard

log = structlog.get_logger(__name__)

MAILBOX = 1024
"""Messages from the front that may wait for the end of a step."""
BEAT_SECONDS = 1.0
CLOSE_SECONDS = 2.0
"""What the worker gets to close by itself; the front kills the process group after a while."""
STALLED_SECONDS = 0.01
"""Pause when there is work but no step could be planned, or new requests are held."""
ANY_TIME = Add | Cancel | Query | None
"""What may be applied while steps are in flight."""
CAUGHT_UP = 0.5
"""Backlog of the bus at which held requests are taken in again."""


class EngineCore:
    def __init__(
        self,
        *,
        config: Config,
        info: EngineInfo,
        host: PluginHost,
        switches: Switches,
        worker: Worker,
        channel: Channel[FrontMessage, EngineMessage],
        bus: Bus,
    ) -> None:
        """worker: loaded, with its K/V allocated. Loads and starts the plugins of `switches`: PluginLoadError when one can't."""
        self.bus = bus
        self.pool = BlockPool(info.num_blocks, info.block_size)
        self._ready = False
        self._context = EngineContext(bus=bus, config=config, pool=self.pool, info=info, switches=self._switches)
        self._switchboard = Switchboard(host, self._context)
        self._switchboard.start(switches)
        self.scheduler = Scheduler(
            config,
            max_model_len=info.max_model_len,
            eos_token_ids=frozenset(info.eos_token_ids),
            pool=self.pool,
            host=host,
            switches=switches,
            on_plugin_failure=self._switchboard.note_failure,
            start_plugin=self._switchboard.revive,
            encodes_in_pieces=info.encodes_in_pieces,
        )
        self._ready = True
        self._host = host
        self._worker = worker
        self._steps = InFlight(worker)
        self._depth = 2 if info.ahead else 1
        """Steps that the worker has at most."""
        self._queries = Queries(bus, self.scheduler, host, lambda: self._context.config, lambda: self._steps.pulse()[0])
        self._channel = channel
        self._mailbox: Mailbox[FrontMessage] = Mailbox(MAILBOX)
        self._next: FrontMessage | None = None
        """Out of the mailbox, and waits until no step is in flight."""
        self._gone = False
        """The front is."""
        self._held: deque[AdmittedRequest] = deque()
        """Requests that are taken in when a listener that must lose nothing has caught up."""
        self._congested = False
        self._idle = True
        """Nothing could be planned: wait for news before trying again."""
        self._stopping = False
        self._work_left = False
        """There was work when the last step ended."""
        self._taken = 0
        """Requests taken in so far."""
        self._told: tuple[int, AbstractSet[str]] = (0, frozenset())
        """`taken` and the requests in the last StepBegins."""
        self._output: StepOutput | None = None
        """The last step's: it goes out once the next step computes, or ahead of any other message."""

    async def run(self) -> bool:
        """Serve until the front says Shutdown (True) or is gone (False). After an error that is the engine's own, a Failed message is sent
        and the error raised: the process can't go on."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read)
                tasks.start_soon(beat, self._send, self._pulse)
                await self._loop()
                tasks.cancel_scope.cancel()
        except Exception as group:
            error = _innermost(group)
            log.exception("engine_failed")
            with anyio.move_on_after(1):
                await self._send(Failed(describe(error)))
            raise error from None
        finally:
            self._mailbox.destroy()
            await self._steps.abandon()
        self._switchboard.stop()
        with anyio.move_on_after(CLOSE_SECONDS):
            await self._worker.close()
        with anyio.move_on_after(CLOSE_SECONDS):
            while self.bus.backlog > 0:  # noqa: ASYNC110 - on other threads' work
                await anyio.sleep(STALLED_SECONDS)
        return self._stopping

    # ---- the loop ---------------------------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        steps = self._steps
        while await self._take_in():
            planned = self._plan()
            if planned is not None:
                await self._begin(*planned)
                if len(steps) < self._depth:
                    continue  # plan the next one while this one computes
            if steps:
                await self._send(None)  # done while the worker computes
                await self._land()
            else:
                await self._send(self._published(self.scheduler.flush(time.time())))
        await self._send(None)

    def _plan(self) -> tuple[StepPlan, StepInput] | None:
        """The next step, if it can be planned now."""
        scheduler, now = self.scheduler, time.time()
        if not self._steps:
            planned = scheduler.schedule(now)
            self._idle = planned is None
            return planned
        if len(self._steps) >= self._depth or self._gone:
            return None
        if self._next is not None or self._switchboard.failures_noted:
            scheduler.wait("message" if self._next is not None else "plugin")
            return None
        return scheduler.schedule_ahead(now)

    async def _begin(self, plan: StepPlan, order: StepInput) -> None:
        self.bus.publish(plan)
        self.bus.publish(order)
        await self._tell(plan, order)
        self._steps.send(plan, order)
        await anyio.lowlevel.checkpoint()  # the worker has its order now

    async def _land(self) -> None:
        """Wait for the oldest step's result and take it in."""
        (plan, order, *_), result, seconds = await self._steps.land()
        if isinstance(result, TokenbusError):
            output = self._step_failed(plan, order, result)
        else:
            gap = result.phases.pop("idle", 0.0) if self._work_left else 0.0
            self._switchboard.step_done(self.scheduler, order, result)
            output = self.scheduler.update(plan, result, time.time(), seconds, gap)
            self.bus.publish(result)
        self._work_left = self.scheduler.has_work()
        self._output = self._published(output)

    def _switches(self) -> Switches | None:
        return self.scheduler.switches if self._ready else None

    def _published(self, output: StepOutput | None) -> StepOutput | None:
        if output is not None:
            self.bus.publish(output)
        return output

    async def _take_in(self) -> bool:
        """Apply what waits and may be applied now; without work, first wait for a message or the next deadline. False: stop."""
        await anyio.lowlevel.checkpoint()
        self._admit_held()
        try:
            if self._idle:
                await self._wait()
            while (message := self._take_message()) is not None:
                await self._apply(message)
        except anyio.EndOfStream:
            self._gone = True
        self.scheduler.expire(time.time())
        if self._steps:
            return True
        if self._gone:
            return False
        for notice in self._switchboard.settle(self.scheduler):
            await self._send(notice)
        return not self._stopping

    def _take_message(self) -> FrontMessage | None:
        """The next message that may be applied now. Raises EndOfStream when the front is gone."""
        message, self._next = self._next or self._mailbox.take(), None
        if self._steps and not isinstance(message, ANY_TIME):
            message, self._next = None, message
        return message

    async def _wait(self) -> None:
        deadline, now = self.scheduler.next_deadline(), time.time()
        seconds = math.inf if deadline is None else max(0.0, deadline - now)
        if self.scheduler.has_work() or self._held:
            seconds = min(seconds, STALLED_SECONDS)
        with anyio.move_on_after(seconds):
            await self._apply(await self._mailbox.receive())

    async def _tell(self, plan: StepPlan, order: StepInput) -> None:
        """Have the front know which requests run before they do. Costs nothing while the same ones go on decoding."""
        running = plan.concerns | self._steps.request_ids() if self._steps else plan.concerns
        if not plan.num_prompt_tokens and not plan.preempted and self._told == (self._taken, running):
            return
        self._told = self._taken, running
        requests = self.scheduler.requests
        begun = [new.request_id for new in order.new]
        if plan.encodes_for is not None:  # it may have joined, and is not new to the worker yet
            begun.append(plan.encodes_for)
        await self._send(
            StepBegins(
                step_id=plan.step_id,
                runs=self.scheduler.runs(running),
                taken=self._taken,
                cached={name: hit for name in begun if (hit := requests[name].cached_tokens) is not None},
                preempted=plan.preempted,
                steps=self._depth,
            )
        )

    def _step_failed(self, plan: StepPlan, order: StepInput, error: TokenbusError) -> StepOutput:
        if isinstance(error, StepMemoryError):
            tokens = sum(plan.num_tokens.values())
            log.warning("step_without_memory", step_id=plan.step_id, requests=len(plan.num_tokens), tokens=tokens)
            self._switchboard.step_done(self.scheduler, order, StepResult(step_id=plan.step_id, sampled={}))
            return self.scheduler.relieve(plan, error.to_wire(), time.time())
        log.error("step_failed", step_id=plan.step_id, requests=len(plan.num_tokens), error=error.message)
        output = self.scheduler.fail_step(plan, error.to_wire(), time.time())
        self._switchboard.step_failed(self.scheduler, order, error)
        return output

    # ---- what the front says ----------------------------------------------------------------------------------------------------

    async def _apply(self, message: FrontMessage) -> None:
        now = time.time()
        match message:
            case Add():
                self._held.extend(message.requests)
                self._taken += len(message.requests)
                self._admit_held()
            case Cancel():
                self._admit_held(message.request_ids)
                for request_id in message.request_ids:
                    self.scheduler.cancel(request_id, message.reason, now)
            case SetFeatures():
                await self._answer(message.call_id, lambda: self._switch(message))
            case SetSettings():
                await self._answer(message.call_id, lambda: self._configure(message))
            case Query():
                await self._answer(
                    message.call_id, lambda: Reply(message.call_id, self._queries.ask(message.what, message.args))
                )
            case Shutdown():
                self._stopping = True
            case Hello():
                raise WireError("a second Hello")

    def _admit_held(self, only: Collection[str] = ()) -> None:
        """Take in new requests, unless somebody who must lose nothing is far behind: then they are held until its backlog is half of what
        it can take. Those of `only`, which are to be cancelled, and those whose time is up are taken in nevertheless."""
        if not self._held:
            return
        now = time.time()
        self._congested = self.bus.backlog >= (CAUGHT_UP if self._congested else 1.0)
        held, self._held = self._held, deque()
        for request in held:
            over = request.deadline is not None and request.deadline <= now
            if not self._congested or over or request.request_id in only:
                self.scheduler.add(request, now)
            else:
                self._held.append(request)

    async def _answer(self, call_id: int, call: Callable[[], Reply]) -> None:
        await self._send(None)  # what goes wrong below is the answer's fault, not the waiting output's
        try:
            await self._send(call())
        except TokenbusError as error:
            await self._send(Reply(call_id, error=error.to_wire()))
        except FrameError as error:
            await self._send(Reply(call_id, error=TooLargeError(f"the answer can't be sent: {error}").to_wire()))

    def _switch(self, message: SetFeatures) -> Reply:
        return Reply(message.call_id, switches=self._switchboard.change(self.scheduler, message.changes))

    def _configure(self, message: SetSettings) -> Reply:
        values = live_settings.check(self._context.config, self._host, message.values)
        self._context.config = config = live_settings.with_values(self._context.config, values)
        self.scheduler.configure(config.scheduler, live_settings.apply_to_plugins(config, self._host, values))
        logs.set_level(config.server.log_level)
        self.bus.publish(SetSettings(message.call_id, values))
        return Reply(message.call_id)

    # ---- beside the loop --------------------------------------------------------------------------------------------------------

    async def _send(self, message: EngineMessage | None) -> None:
        """Send the last step's output if it has not gone out yet, then the message."""
        waiting, self._output = self._output, None
        try:
            for one in (waiting, message):
                if one is not None:
                    await self._channel.send(one)
        except OSError:
            self._mailbox.close()  # the front is gone; the loop finds out when it takes in

    async def _read(self) -> None:
        """New requests join the line also while a step computes, with all that their plugins do about it; what changes running ones,
        and whatever comes after that, waits in the mailbox for the end of the step, or for all that are in flight."""
        try:
            async for message in self._channel:
                if isinstance(message, Add) and self._steps and self._next is None and not len(self._mailbox):
                    await self._apply(message)
                else:
                    await self._mailbox.put(message)
        finally:
            self._mailbox.close()

    def _pulse(self) -> tuple[int, float, str]:
        return *self._steps.pulse(), ""


async def beat(
    send: Callable[[Heartbeat], Awaitable[None]], pulse: Callable[[], tuple[int, float, str]], every: float = BEAT_SECONDS
) -> None:
    """A Heartbeat every so many seconds, for ever; `loop_lag` is how late this task woke. pulse: (step_id, step_age, phase)."""
    lag = 0.0
    while True:
        step_id, age, phase = pulse()
        await send(Heartbeat(step_id, age, lag, phase, time.process_time()))
        due = time.monotonic() + every
        await anyio.sleep(every)
        lag = max(0.0, time.monotonic() - due)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> ErrorInfo:
    """Any error as plain data; one that isn't from our tree becomes a ServerFault with its type in the message."""
    if isinstance(error, TokenbusError):
        return error.to_wire()
    return ErrorInfo(kind="ServerFault", message=f"{type(error).__name__}: {plain_text(error)}")
