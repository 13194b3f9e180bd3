"""Pictures and sounds in prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl

if TYPE_CHECKING:
    from ...core.models.media import MediaCheckpoint, MediaEncoder


class Multimodal(Plugin):
    info = PluginInfo(
        name="multimodal",
        summary="pictures and sounds in prompts, for models that read them",
        scope="step",
        lossless=False,
        claims={"media"},
        resident=True,
    )

    @hookimpl
    def media_encoder(self, checkpoint: MediaCheckpoint) -> MediaEncoder | None:
        from .towers import tower_encoder

        return tower_encoder(checkpoint)
