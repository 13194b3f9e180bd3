"""Where each open request is - in the engine, or held back here - and what becomes of all of them when an engine dies.

    held ──(no suspects)── all that may run together ───────> in the engine ──> ends
     ^  └──(suspects)── one suspect, alone, for one token ──>  │      │
     │                                                         │      │
     └───────── died, or its one token has come ───────────────┴──────┘     (two, where steps are planned ahead)

A held request has lost nothing: its journal entry says where its answer stands, and the next engine goes on from there. New requests are
held too while there are suspects (see quarantine.py); apart.py says who may run together. Knows nothing of streams or processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ..errors import DeadlineError, EngineDiedError, TokenbusError, TooLargeError, UnavailableError
from ..host import PluginHost
from ..ipc import FrameError
from ..messages import Add, Finish, StepBegins
from ..plan import TokenLogprobs
from ..request import AdmittedRequest
from .apart import Apart
from .journal import Journal, OpenRequest
from .quarantine import TAKEN_IN, Quarantine, Run
from .stream import failed


class Recovery:
    """Told of everything that happens to open requests; `advance` then hands to the engine what may go there."""

    def __init__(self, journal: Journal, host: PluginHost, post: Callable[[Add], bool]) -> None:
        """post: False when no engine takes messages; FrameError when this one can't be sent."""
        self.quarantine = Quarantine()
        self.apart = Apart()
        self._journal = journal
        self._host = host
        self._post = post
        self._up = False
        self._held: set[str] = set()
        self._inside: set[str] = set()
        self._running: dict[str, Run] = {}
        """The steps in flight, as far as they are known: which tokens of each of their requests they run."""
        self._steps = 1
        """How many they may be."""
        self._to_clear: dict[str, int] = {}
        """Tokens that suspects have yet to give before they are cleared: as many as steps may have been in flight when the engine died. It
        may have died in the last of them, and what the others gave may not have come out."""
        self._not_taken: deque[str] = deque()
        """Handed to the engine, which has not said yet that it took them in."""
        self._taken = 0

    def submit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Take over newly admitted requests, all or none. TooLargeError when they can't be sent, UnavailableError without an engine."""
        if self.quarantine:
            self._held.update(request.request_id for request in requests)
            return
        try:
            taken = self._post(Add(list(requests)))
        except FrameError as error:
            raise TooLargeError(f"the request can't be handed to the engine: {error}") from error
        if not taken:
            raise UnavailableError("the engine does not take requests now")
        for request in requests:
            self._went_in(request.request_id)

    def holds(self, request_id: str) -> bool:
        """Whether no engine has it: whoever ends it need tell nobody."""
        return request_id in self._held

    def switched(self, old: frozenset[str], new: frozenset[str]) -> None:
        """Live switches reach open requests by the rule that the engine follows (`PluginHost.after_switch`)."""
        for entry in self._journal:
            admitted = entry.admitted
            entry.features = self._host.after_switch(entry.features, old, new, pinned=admitted.pinned, fields=admitted.fields)

    # ---- what the engine says ---------------------------------------------------------------------------------------------------

    def started(self) -> None:
        """An engine is ready."""
        self._up = True

    def step_begins(self, step: StepBegins) -> None:
        self._running, self._steps = dict(step.runs), step.steps
        for _ in range(min(step.taken - self._taken, len(self._not_taken))):
            self._not_taken.popleft()
        self._taken = step.taken
        for request_id, cached in step.cached.items():
            if (entry := self._journal.get(request_id)) is not None and entry.cached_tokens is None:
                entry.cached_tokens = cached
        for request_id in step.preempted:
            if (entry := self._journal.get(request_id)) is not None:
                entry.preemptions += 1

    def emitted(self, request_id: str, tokens: Sequence[int], prompt_logprobs: Sequence[TokenLogprobs] | None) -> None:
        entry = self._journal.emit(request_id, tokens, len(prompt_logprobs or ()))
        if tokens:
            if request_id in self._running:
                self._running[request_id] = (entry.num_known - 1, entry.num_known - 1 + self._steps)
            missing = self._to_clear.get(request_id, 1) - len(tokens)
            if missing > 0:
                self._to_clear[request_id] = missing
            else:
                self._clear(request_id)

    def _clear(self, request_id: str) -> None:
        self.quarantine.clear(request_id)
        self._to_clear.pop(request_id, None)

    def step_ended(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """One step gave these."""
        self.apart.survived({request_id for request_id, new in tokens.items() if new})

    def finished(self, request_id: str, finish: Finish) -> Finish | None:
        """How a request ends that the engine has ended; None when it only gives it back, as it was asked to: then it is held again."""
        entry = self._journal.get(request_id)
        if entry is None or entry.until is None or finish.reason != "length" or len(entry.tokens) < entry.until:
            return finish
        entry.preemptions, entry.notes = finish.preemptions, finish.notes
        self._come_out(request_id)
        if entry.cancel_reason is not None:  # its Cancel will find nothing to end
            return self.cancelled(request_id)
        self._held.add(request_id)
        return None

    def ended(self, request_id: str) -> None:
        """It is open no more."""
        self._come_out(request_id)
        self._held.discard(request_id)
        self._clear(request_id)
        self.apart.ended(request_id)

    def died(self, reason: str) -> dict[str, Finish]:
        """An engine has ended, or could not start. What must end because of that, and how; all else waits for the next one."""
        suspects = {request_id: run for request_id, run in self._running.items() if request_id in self._inside}
        for request_id in self._not_taken:
            if request_id in self._inside:
                suspects.setdefault(request_id, TAKEN_IN)
        self._to_clear |= dict.fromkeys(suspects, self._steps)
        culprit = self.quarantine.blame(suspects)
        self.apart.died(suspects)
        ends: dict[str, Finish] = {}
        held: set[str] = set()
        for entry in self._journal:
            request_id = entry.admitted.request_id
            finish = self._end_at_death(entry, reason, blamed=request_id == culprit)
            if finish is None:
                held.add(request_id)
                entry.resumptions += request_id in self._inside
            else:
                ends[request_id] = finish
        self._held, self._up, self._taken = held, False, 0
        self._inside.clear()
        self._running, self._steps = {}, 1
        self._not_taken.clear()
        return ends

    def _end_at_death(self, entry: OpenRequest, reason: str, *, blamed: bool) -> Finish | None:
        request_id = entry.admitted.request_id
        if entry.cancel_reason is not None:
            return self.cancelled(request_id)
        if blamed:
            return failed(
                EngineDiedError(
                    f"the engine died twice at the same position while it ran this request alone: {reason}",
                    request_id=request_id,
                )
            )
        begun = entry.tokens or entry.prompt_logprobs
        if request_id in self._inside and begun and (name := self._forgetful(entry)) is not None:
            return failed(
                EngineDiedError(
                    f"the engine died, and plugin {name!r} can't rebuild what it knew of this request: {reason}",
                    request_id=request_id,
                    plugin=name,
                )
            )
        return None

    def _forgetful(self, entry: OpenRequest) -> str | None:
        """A plugin that the request needs, and that can't go on in another engine."""
        for name in sorted(entry.features):
            info = self._host.info(name)
            if not info.resumable and (not info.claims or info.claims & entry.admitted.fields.keys()):
                return name
        return None

    # ---- ends that no engine sees -----------------------------------------------------------------------------------------------

    def cancelled(self, request_id: str) -> Finish:
        """How a request ends that was given up while no engine had it."""
        entry = self._journal.get(request_id)
        assert entry is not None
        return Finish(
            reason="stop" if entry.cancel_reason == "stop" else "cancelled",
            cached_tokens=entry.cached_tokens or 0,
            preemptions=entry.preemptions,
            notes=entry.notes,
            features=tuple(sorted(entry.features)),
        )

    def expired(self, now: float) -> dict[str, Finish]:
        """Held requests whose deadline has passed, and how they end."""
        ends: dict[str, Finish] = {}
        for request_id in self._held:
            entry = self._journal.get(request_id)
            if entry is not None and entry.admitted.deadline is not None and entry.admitted.deadline <= now:
                waited = now - entry.admitted.arrival
                words = f"the request's time was up after {waited:.1f} s, with {len(entry.tokens)} tokens generated"
                ends[request_id] = failed(
                    DeadlineError(f"{words}; it was held back, as the engine had died", request_id=request_id)
                )
        return ends

    # ---- handing over -----------------------------------------------------------------------------------------------------------

    def advance(self) -> dict[str, TokenbusError]:
        """Hand to the engine what may go there now. Those that can't be sent, and why: they must be ended."""
        if not (self._held and self._up):
            return {}
        suspect = self.quarantine.next()
        if suspect is not None and self._inside:
            return {}
        refused: dict[str, TokenbusError] = {}
        for entry in self._journal:  # in order of admission
            request_id = entry.admitted.request_id
            if request_id not in self._held or (suspect is not None and request_id != suspect):
                continue
            if not self.apart.may_join(request_id, self._inside):
                continue
            alone = suspect is not None and len(self.quarantine) > 1  # the last one need not be given back
            until = len(entry.tokens) + self._to_clear.get(request_id, 1)
            entry.until = until if alone and until < entry.admitted.max_tokens else None
            try:
                if not self._post(Add([entry.as_sent()])):
                    break  # the engine is going: its death will be told
            except FrameError as error:
                refused[request_id] = TooLargeError(
                    f"the request can't be handed to the engine: {error}", request_id=request_id
                )
                continue
            self._held.remove(request_id)
            self.apart.joins(request_id, self._inside)
            self._went_in(request_id)
        return refused

    def _went_in(self, request_id: str) -> None:
        entry = self._journal.get(request_id)
        assert entry is not None
        entry.begun = True
        self._inside.add(request_id)
        self._not_taken.append(request_id)

    def _come_out(self, request_id: str) -> None:
        self._inside.discard(request_id)
        self._running.pop(request_id, None)
        if entry := self._journal.get(request_id):
            entry.until = None
