"""What plugins in the worker propose for the next step, once a step is over: calls `drafts_after_step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import TokenbusError
from ..plan import Drafts
from .side import Ran, StepRan

if TYPE_CHECKING:
    from ..host import HookTable, Impl


def propose(step: StepRan, order: HookTable) -> tuple[dict[str, Drafts], dict[str, TokenbusError]]:
    """Drafts and errors by request; `step.runs` are all that ran. order: all loaded plugins' hooks."""
    drafts: dict[str, Drafts] = {}
    errors: dict[str, TokenbusError] = {}
    for impl in order.drafts_after_step:
        runs = [run for run in step.runs if _uses(run, impl) and run.request.request_id not in errors]
        for request_id, tokens in _ask(impl, replace(step, runs=runs), errors).items() if runs else ():
            if tokens:
                drafts.setdefault(request_id, Drafts(impl.plugin, list(tokens)))
    return {name: some for name, some in drafts.items() if name not in errors}, errors


def _uses(run: Ran, impl: Impl) -> bool:
    return any(mine.plugin == impl.plugin for mine in run.request.hooks.drafts_after_step)


def _ask(impl: Impl, step: StepRan, errors: dict[str, TokenbusError]) -> Mapping[str, Sequence[int]]:
    """The plugin's answer; when it raises, what it answers for each request alone."""
    try:
        return impl(step=step) or {}
    except TokenbusError as error:
        if len(step.runs) == 1:
            errors[step.runs[0].request.request_id] = error
            return {}
    answers: dict[str, Sequence[int]] = {}
    for run in step.runs:
        answers.update(_ask(impl, replace(step, runs=[run]), errors))
    return answers
