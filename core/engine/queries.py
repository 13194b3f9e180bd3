"""What the engine answers when it is asked (messages.Query): at any time, also while steps are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from .. import live_settings
from ..bus import Bus
from ..config import Config
from ..errors import FieldError, NotFoundError
from ..host import PluginHost
from ..messages import PlansReply
from ..plan import StepPlan
from ..scheduling.scheduler import Scheduler
from .watch import StepWatch


class Queries:
    def __init__(
        self, bus: Bus, scheduler: Scheduler, host: PluginHost, config: Callable[[], Config], step_id: Callable[[], int]
    ) -> None:
        """config: the present one. step_id: of the step that computes, or did last."""
        self._scheduler, self._host = scheduler, host
        self._config, self._step_id = config, step_id
        self._watch = StepWatch(bus, scheduler)
        self._plans: deque[StepPlan] = deque(maxlen=config().scheduler.plan_history)
        bus.listen(self._plans.append, StepPlan)

    def ask(self, what: str, args: Mapping[str, Any]) -> Any:
        """The answer; NotFoundError, FieldError."""
        match what:
            case "plans":
                last = args.get("last", len(self._plans))
                if not isinstance(last, int) or last < 0:
                    raise FieldError("last", f"must be a number of plans, got {last!r}")
                return PlansReply(list(self._plans)[max(0, len(self._plans) - last) :])
            case "integrity":
                return self._integrity()
            case "stats":
                return self._stats()
            case "watch":
                return self._watch.look(slow=args.get("slow") is True)
        raise NotFoundError(f"the engine can't be asked for {what!r}; it answers: plans, integrity, stats, watch")

    def _integrity(self) -> dict[str, Any]:
        try:
            self._scheduler.check_integrity()
        except RuntimeError as error:
            return {"ok": False, "problem": str(error)}
        return {"ok": True, "problem": ""}

    def _stats(self) -> dict[str, Any]:
        scheduler, pool = self._scheduler, self._scheduler.pool
        return {
            "step_id": self._step_id(),
            "open": len(scheduler.requests),
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "free_blocks": pool.num_available,
            "retained_blocks": pool.num_retained,
            "num_blocks": pool.num_blocks,
            "allocation_failures": pool.allocation_failures,
            "on": scheduler.switches.names(),
            "loaded": sorted(self._host.loaded),
            "settings": live_settings.live_values(self._config(), self._host),
        }
