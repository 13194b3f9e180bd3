"""One experiment: what it decides about a request, what it sees of it, how it stands. Touches no disk and switches nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConflictError, TokenbusError, status_of
from ..front.admission import ParsedRequest
from ..front.events import RequestRecord
from ..front.media import FIELD as MEDIA
from ..host import PluginHost
from ..params import asks_for_nothing
from .assign import arm_of, slice_arm, slice_at, takes_part, unit_of
from .config import EXCLUDED, ExperimentConfig
from .guard import Window
from .plan import SETTING, Plan
from .records import MOST_GAPS, Event, Row
from .state import State, settings_hash
from .writer import RowWriter

SHARED_STEPS = (
    "requests of different arms ran in the same engine steps, so what one arm costs the others felt too: differences in latency and "
    "throughput are understated; compare by time slices for those"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What an experiment has decided about an API request, as its rows say it."""

    experiment: str
    run: int
    arm: str
    weight: float
    unit: str
    slice: int | None
    washout: bool
    slice_ends: float | None
    """Unix seconds."""
    excluded: str
    traffic: float
    config: str
    own: dict[str, bool]
    """Switches of the arm that go with the request."""
    label: str
    """NAME/ARM as clients, logs and metrics see it: the arm whose switches it has, or "excluded"."""
    engine: str = ""
    """The arm whose engine it goes to; "": the server's own, which is the control's."""


@dataclass(frozen=True, slots=True)
class Life:
    """What is the engine's, as an open request's row will say it."""

    engine_pid: int = 0
    engine: int = 0
    allocation_failures: int | None = None


@dataclass(slots=True)
class Tally:
    """Rows of an arm since this server began."""

    counted: int = 0
    washout: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    failed: int = 0


class Experiment:
    def __init__(
        self, name: str, config: ExperimentConfig, host: PluginHost, state: State, secret: bytes, writer: RowWriter
    ) -> None:
        self.name = name
        self.config = config
        self.state = state
        self.writer = writer
        self.changed_at = 0.0
        """Unix seconds: when everybody's switches last changed for it, or the engine was started anew."""
        self.applied: dict[str, Any] = {}
        """How everybody's switches and settings stand that it changes, as far as nobody else has changed them."""
        self.restore: dict[str, Any] = {}
        """Switches and settings to be put back as they were; it has been stopped."""
        self.failing = ""
        """Why the switches of the present slice can't be applied."""
        self.unrecorded = 0
        """Requests that were left out because there was no room for their rows."""
        self.events: list[Event] = []
        """Not yet written."""
        self.unsaved = False
        self._host = host
        self._secret = secret
        self.begin()

    def begin(self, stands: Callable[[str], Any] = lambda _: None) -> None:
        """A run begins, or goes on after a restart: nothing has been seen of it yet. stands: how a live switch or setting stands."""
        arms = list(self.config.arms)
        self._windows = {arm: Window(self.config.guard) for arm in arms}
        self._tallies = {arm: Tally() for arm in arms}
        self._counts = {arm: int(settings.weight) for arm, settings in self.config.arms.items()}
        self._claims: frozenset[str] = frozenset()
        self._switches: frozenset[str] = frozenset()
        if (plan := self.state.plan) is not None:
            self.applied = {name: stands(name) for name in plan.live}
            self._switches = frozenset().union(*plan.arms.values())
            own = [name for name in self._switches - frozenset(plan.live) if name in self._host.catalogue]
            self._claims = frozenset().union(*(self._host.info(name).claims for name in own))

    @property
    def running(self) -> bool:
        return self.state.status == "running"

    @property
    def plan(self) -> Plan:
        """Of the run. RuntimeError before the first."""
        if self.state.plan is None:
            raise RuntimeError(f"experiment {self.name!r} was never started")
        return self.state.plan

    @property
    def shared_steps(self) -> bool:
        return not (self.config.sliced or self.config.own_engines)

    def resume(self, make: Callable[[], Plan]) -> str:
        """Go on with a run after a restart of the server, with the plan that would be made now; or why that can't be."""
        if self.state.settings != settings_hash(self.config):
            return "its settings were changed while the server was down: start it again"
        try:
            fresh = make()
        except ConflictError as error:
            return f"it can't go on: {error.message}"
        if fresh.arms != self.plan.arms or fresh.live != self.plan.live:
            return "the server's own switches are others than before: its arms would be, too"
        self.state.plan = fresh
        return ""

    # ---- deciding ---------------------------------------------------------------------------------------------------------------

    def slice_now(self, now: float) -> int:
        return slice_at(now, self.state.started, self.config.slice_seconds)

    def slice_end(self, index: int) -> float:
        return self.state.started + (index + 1) * self.config.slice_seconds

    def in_force(self, arm: str) -> str:
        """The arm whose switches a unit of `arm` gets: its own, or the control's when it was switched off."""
        return self.config.control_arm if arm in self.state.off else arm

    def everybodys(self, now: float) -> dict[str, Any]:
        """How the switches and settings that are everybody's should stand; empty where there are none."""
        if not (self.running and self.plan.live):
            return {}
        return self.plan.everybodys(self.in_force(self._sliced_arm(self.slice_now(now))))

    def _sliced_arm(self, index: int) -> str:
        return slice_arm(self.name, self.config.salt, self.state.run, index, self._counts)

    def decide(self, parsed: ParsedRequest, stands: Callable[[str], Any], now: float) -> Decision | None:
        """None: the request is not in the experiment. stands: how a live switch or setting stands."""
        plan, state, config = self.plan, self.state, self.config
        index, washout, ends, unit = None, False, None, ""
        if config.sliced:
            index = self.slice_now(now)
            arm, ends = self._sliced_arm(index), self.slice_end(index)
            washout = now < max(ends - config.slice_seconds, self.changed_at) + config.washout_seconds
        else:
            value = self._value(parsed)
            if not value or not takes_part(self.name, config.salt, value, state.traffic):
                return None
            arm, unit = arm_of(self.name, config.salt, value, plan.shares), unit_of(self._secret, self.name, value)
            if plan.engines:
                index, washout = self.slice_now(now), now < self.changed_at + config.washout_seconds
        given = self.in_force(arm)
        own = plan.own(given)
        excluded = self._excluded(parsed, stands, given, washout=washout) or ("tripped" if given != arm else "")
        left_out = excluded not in {"", "tripped"}
        return Decision(
            experiment=self.name,
            run=state.run,
            arm=arm,
            weight=0.0 if given != arm else plan.shares[arm],
            unit=unit,
            slice=index,
            washout=washout,
            slice_ends=ends,
            excluded=excluded,
            traffic=state.traffic,
            config=plan.config(given),
            own={} if left_out else own,
            label=f"{self.name}/{EXCLUDED if left_out else given}",
            engine=given if plan.engines and not left_out and given != config.control_arm else "",
        )

    def _value(self, parsed: ParsedRequest) -> str:
        """What the split goes by; "": the request has none of it."""
        match self.config.split:
            case "request":
                return parsed.group
            case "key":
                return parsed.tenant
            case "user":
                user = parsed.fields.get("user")
                return user if isinstance(user, str) else ""
        return parsed.headers.get(self.config.header or "", "")

    def _excluded(self, parsed: ParsedRequest, stands: Callable[[str], Any], given: str, *, washout: bool) -> str:
        if not self._switches.isdisjoint(parsed.features):
            return "client"
        if self._claims and any(
            name in self._claims and not asks_for_nothing(name, value) for name, value in parsed.fields.items()
        ):
            return "claims"
        if MEDIA in self._claims and any(prompt.media for prompt in parsed.prompts):
            return "claims"
        if any(stands(name) != wish for name, wish in self.plan.everybodys(given).items()) and not washout:
            return "failed"
        return ""

    # ---- seeing -----------------------------------------------------------------------------------------------------------------

    def ended(self, decision: Decision, record: RequestRecord, life: Life) -> Row:
        """The row of a choice that has ended, noted."""
        gaps = record.gaps
        row = self._row(
            decision, record.arrival, record.arrival + record.e2e, life,
            request_id=record.request_id, group=record.group, endpoint=record.endpoint, prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens, completion_tokens=record.output_tokens, ttft=record.ttft, gap_count=len(gaps),
            gap_mean=_ms(sum(gaps) / len(gaps)) if gaps else None, gap_max=_ms(max(gaps)) if gaps else None,
            gaps=[_ms(gap) for gap in gaps[:MOST_GAPS]], e2e=record.e2e, finish_reason=record.finish_reason, error=record.error_kind,
            status=status_of(record.error_kind) if record.error_kind else 0, preemptions=record.preemptions,
            draft_tokens=record.draft_tokens, accepted_tokens=record.accepted_tokens, resumptions=record.resumptions,
        )  # fmt: skip
        self._note(row, gaps)
        return row

    def refused(self, decision: Decision, parsed: ParsedRequest, error: TokenbusError, now: float, life: Life) -> Row:
        """The row of an API request that was refused after its arm was decided, noted."""
        row = self._row(
            decision, parsed.arrival, now, life,
            group=parsed.group, endpoint=parsed.endpoint, prompt_tokens=sum(len(prompt.token_ids) for prompt in parsed.prompts),
            e2e=now - parsed.arrival, finish_reason="refused", error=type(error).__name__, status=error.status,
        )  # fmt: skip
        self._note(row, ())
        return row

    def _row(self, decision: Decision, arrival: float, ended: float, life: Life, **seen: Any) -> Row:
        return Row(
            experiment=decision.experiment,
            run=decision.run,
            arm=decision.arm,
            control=decision.arm == self.config.control_arm,
            weight=decision.weight,
            split=self.config.split,
            shared_steps=self.shared_steps,
            own_engine=self.config.own_engines,
            unit=decision.unit,
            slice=decision.slice,
            washout=decision.washout or (decision.slice_ends is not None and ended > decision.slice_ends),
            excluded=decision.excluded,
            traffic=decision.traffic,
            config=decision.config,
            arrival=arrival,
            ended=ended,
            engine_pid=life.engine_pid,
            engine=life.engine,
            allocation_failures=life.allocation_failures,
            **seen,
        )

    def _note(self, row: Row, gaps: Iterable[float]) -> None:
        if row.run != self.state.run:
            return
        tally = self._tallies[row.arm]
        if row.excluded:
            tally.excluded[row.excluded] = tally.excluded.get(row.excluded, 0) + 1
            return
        tally.washout += row.washout
        tally.counted += row.counts
        tally.failed += row.failed
        self._windows[row.arm].note(row.ended, failed=row.failed, ttft=row.ttft, gaps=gaps)

    def passed_limits(self, now: float) -> dict[str, str]:
        """Arms to be switched off, and why."""
        arms = [arm for arm in self.config.arms if arm != self.config.control_arm and arm not in self.state.off]
        control = self._windows[self.config.control_arm]
        return {arm: why for arm in arms if (why := self._windows[arm].problem(now, control)) is not None}

    def view(self, now: float) -> dict[str, Any]:
        """How it stands, as the API shows it."""
        state, config = self.state, self.config
        shown: dict[str, Any] = {
            "status": state.status, "run": state.run, "split": config.split, "engines": config.engines, "traffic": state.traffic,
            "control": config.control_arm, "shared_steps": self.shared_steps,
            "arms": {arm: self._arm_view(arm, now) for arm in config.arms},
            "rows": {"written": self.writer.written, "pending": self.writer.pending, "bytes": self.writer.bytes},
            "unrecorded": self.unrecorded,
        }  # fmt: skip
        if self.shared_steps:
            shown["note"] = SHARED_STEPS
        told = {"reason": state.reason, "failing": self.failing, "rows_problem": self.writer.problem}
        shown |= {key: text for key, text in told.items() if text}
        if state.run:
            shown["started"] = state.started
        if not self.running and state.stopped:
            shown["stopped"] = state.stopped
        if self.running and config.sliced:
            index = self.slice_now(now)
            ends_in = round(self.slice_end(index) - now, 3)
            shown["slice"] = {"index": index, "arm": self._sliced_arm(index), "ends_in": ends_in}
        return shown

    def _arm_view(self, arm: str, now: float) -> dict[str, Any]:
        plan, tally = self.state.plan, self._tallies[arm]
        config = self.config.arms[arm]
        whole = {} if plan is None else plan.arms.get(arm, {})
        shown: dict[str, Any] = {
            "share": round(self.config.shares()[arm], 6),
            "features": {name: wish for name, wish in whole.items() if not name.startswith(SETTING)} or config.features,
            "settings": {k.removeprefix(SETTING): v for k, v in whole.items() if k.startswith(SETTING)} or config.settings,
            "counted": tally.counted,
            "washout": tally.washout,
            "excluded": dict(tally.excluded),
            "failed": tally.failed,
        }
        shown["recent"] = self._windows[arm].summary(now)
        if arm in self.state.off:
            shown["off"] = self.state.off[arm]
        return shown


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
