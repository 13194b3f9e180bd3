"""From a recording and wishes to an answer: recorded, simulated as recorded, and simulated as wished, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..host import PluginHost
from ..plugin import Plugin
from .file import RecordingError
from .history import History
from .report import numbers
from .simulate import Simulation, recorded
from .step_time import Fit, StepTimes
from .what_if import Questions

RECORDED, SAME, WISHED = "recorded", "simulated as recorded", "simulated as asked"


@dataclass
class Answer:
    columns: dict[str, dict[str, float]]
    """Numbers (report.py) of each run: RECORDED, SAME and, with wishes, WISHED. How far SAME is from RECORDED is the simulation's own
    error; what WISHED differs from SAME is the answer."""
    fit: Fit
    wishes: list[str]
    notices: list[str]

    def as_json(self) -> dict[str, Any]:
        return {"set": self.wishes, "runs": self.columns, "step_times": asdict(self.fit), "notices": self.notices}


def simulate(history: History, wishes: Sequence[str], catalogue: Mapping[str, type[Plugin]]) -> Answer:
    """Raises RecordingError when the recording can't answer, ConfigError for a value out of bounds."""
    host = PluginHost("engine")
    host.catalogue.update(catalogue)
    questions = Questions(history.header, host)
    asked = questions.ask(wishes)
    if not history.steps:
        raise RecordingError("the recording has no step: there is nothing to fit step times from")
    times = StepTimes(history.steps)
    columns = {RECORDED: numbers(recorded(history))}
    notices = list(history.notices)
    for name, ask in ((SAME, questions.as_recorded()), *(((WISHED, asked),) if wishes else ())):
        course = Simulation(history, ask, times, catalogue).run()
        columns[name] = numbers(course)
        if course.guessed:
            notices.append(
                f"{name}: {course.guessed} of {course.steps} steps have more rows than any recorded one ({times.most_rows}); what they "
                "take is a guess"
            )
    if history.header.ahead:
        notices.append(
            "steps were planned while the one before computed; the simulation plans them one after the other, so in it a request joins "
            "a step earlier, and no step runs tokens in vain"
        )
    budgets = {one.step.budget for one in history.steps}
    told = any("scheduler.token_budget" in change.values for change in history.changes)
    if len(budgets) > 1 and not told:  # by a version that didn't write such changes down
        notices.append(
            f"the token budget was changed while this was recorded, between {min(budgets)} and {max(budgets)}; the simulation keeps to the "
            "one that was set at the start"
        )
    if partial := sum(life.partial for life in history.lives.values()):
        notices.append(
            f"{partial} requests were under way when the recording began: the simulation runs their prompts again, and their own times "
            "are left out"
        )
    return Answer(columns, times.fit, list(wishes), notices)
