"""Jump-forward: text that a grammar forces is proposed as drafts (after SGLang's compressed automata, Zheng et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl
from . import STATE

if TYPE_CHECKING:
    from ...core.worker.side import StepRan


class JumpForward(Plugin):
    info = PluginInfo(
        name="structured.jump_forward",
        summary="drafts of what a grammar forces",
        scope="request",
        lossless=True,
        default=True,
    )

    @hookimpl(tryfirst=True)
    def drafts_after_step(self, step: StepRan) -> dict[str, list[int]]:
        states = {run.request.request_id: (run.request, run.request.stash.get(STATE)) for run in step.runs if run.sampled}
        return {
            name: state.forced(request.tokens[request.num_prompt_tokens :], step.most)
            for name, (request, state) in states.items()
            if state is not None
        }
