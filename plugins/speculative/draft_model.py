"""A smaller model with the same vocabulary proposes what the served one may say (Leviathan et al. 2023; Chen et al. 2023).

It draws with the served model's own random numbers, position by position: where both find the same token likely, they choose the same. Its
K/V lives in the same blocks as the served model's (drafter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from ...core.errors import ModelError
from ...core.models.linears import Refusal
from ...core.plugin import Plugin, PluginInfo, hookimpl

if TYPE_CHECKING:
    from ...core.models.sizing import ModelSize
    from ...core.plugin import Role
    from ...core.worker.side import StepRan
    from ...core.worker.state import WorkerRequestState
    from .drafter import Drafter

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class DraftModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str | None = None
    """The smaller model: a Hugging Face directory, a hub id, or a .gguf file. There is no default."""
    max_drafts: PositiveInt = 8
    """Drafts of a request in one step at most."""
    adaptive: bool = True
    """Fewer drafts, or none, where they are seldom right; False: always `max_drafts`."""
    catch_up_tokens: PositiveInt = 512
    """Tokens a step, beside those that the served model ran, over which the smaller model may catch up: with a prefix whose K/V it has not
    got, or with what was generated while it did not draft. A request gets no drafts until that is done."""


class DraftModel(Plugin):
    info = PluginInfo(
        name="speculative.draft_model",
        summary="drafts from a smaller model with the same vocabulary",
        scope="request",
        lossless=True,
        resident=True,
    )
    Settings = DraftModelSettings

    def __init__(self, settings: DraftModelSettings, role: Role) -> None:
        super().__init__(settings, role)
        self.drafter: Drafter | None = None
        """The worker's."""

    @hookimpl
    def side_model(self, block_size: int, size_of: Callable[[str], ModelSize]) -> Drafter | Refusal:
        name = self.settings.model
        if name is None:
            return Refusal(f'it needs a smaller model to draft with: [plugins."{self.info.name}"] model = "..."')
        from .drafter import Drafter

        try:
            size = size_of(name)
        except ModelError as error:
            return Refusal(f"it can't draft with {name!r}: {error.message}")
        self.drafter = Drafter(name, self.settings, block_size, size)
        return self.drafter

    @hookimpl
    def worker_request_added(self, request: WorkerRequestState) -> None:
        assert self.drafter is not None
        self.drafter.add(request)

    @hookimpl
    def drafts_after_step(self, step: StepRan) -> Mapping[str, Sequence[int]]:
        assert self.drafter is not None
        return self.drafter.draft(step)
