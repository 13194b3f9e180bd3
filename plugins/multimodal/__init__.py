"""Images and sounds in messages: OpenAI's content parts `image_url` and `input_audio`.

front   prepare_media   where is the file (sources.py), get it (fetch.py), limits and cache (intake.py), then decoded and processed by the
                        model's own processor in a process that can be killed (processes.py, job_main.py, images.py, sounds.py)
worker  media_encoder   the checkpoint's tower, and what projects its output to the decoder (towers.py)

What a family of models needs is a small file in `families/` (family.py says what is in it).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...core.errors import FieldError, TokenbusError
from ...core.plugin import Plugin, PluginInfo, hookimpl
from .families import family_of
from .settings import MultimodalSettings

if TYPE_CHECKING:
    from ...core.contexts import FrontContext
    from ...core.media import MediaPart, PreparedMedia
    from ...core.models.media import MediaCheckpoint, MediaEncoder
    from ...core.plugin import Role
    from .intake import Intake


class Multimodal(Plugin):
    """The field `media` is core's: the number of a request's images and sounds, when there are any."""

    info = PluginInfo(
        name="multimodal",
        summary="images and sounds in messages: image_url, input_audio",
        scope="step",
        lossless=False,
        claims={"media"},
        default=True,
        resident=True,
    )
    Settings = MultimodalSettings

    def __init__(self, settings: MultimodalSettings, role: Role) -> None:
        super().__init__(settings, role)
        self._front: FrontContext | None = None
        self._lock = threading.Lock()
        self._model: tuple[str, Intake | None] | None = None
        """The served model's name, and None for one that reads text only."""
        self._closers: list[Callable[[], None]] = []
        """What `front_stopped` has to call."""

    # ---- front ------------------------------------------------------------------------------------------------------------------

    @hookimpl
    def front_started(self, front: FrontContext) -> None:
        from ...core.front.events import EngineStarted

        self._front = front
        if front.main:  # media are never prepared elsewhere
            self._closers.append(front.bus.listen(self._warm_up, EngineStarted).close)

    @hookimpl
    def front_stopped(self) -> None:
        with self._lock:
            self._model = None
            for close in self._closers:
                close()
            self._closers.clear()

    @hookimpl
    def prepare_media(self, parts: Sequence[MediaPart]) -> Sequence[PreparedMedia]:
        name, intake = self.intake()
        if intake is None:
            raise FieldError(parts[0].where, f"the model {name!r} reads text only")
        return intake.prepare(parts)

    def intake(self) -> tuple[str, Intake | None]:
        """For the model that is served, made when first needed; blocking."""
        with self._lock:
            if self._model is None:
                self._model = self._make()
            return self._model

    def _make(self) -> tuple[str, Intake | None]:
        from ...core.models.resolve import resolve
        from .fetch import Fetcher
        from .intake import Intake
        from .processes import Processes

        assert self._front is not None
        settings: MultimodalSettings = self.settings
        model = resolve(self._front.config.model.model)
        name = self._front.config.model.served_model_name or model.name
        family = None if model.gguf is not None else family_of(model.path, model.config)
        if family is None:
            return name, None
        processes = Processes(
            folder=str(model.path),
            config=model.config,
            count=settings.processes,
            cpu_seconds=settings.item_seconds,
            memory_mb=settings.item_memory_mb,
        )
        fetcher = Fetcher(settings)
        self._closers += [processes.close, fetcher.close]
        return name, Intake(settings, family, name, processes, fetcher)

    def _warm_up(self, _event: object) -> None:
        """For a model that reads media the processes are started before the first of them comes, beside everything else."""
        threading.Thread(target=self._warm_up_now, name="media-warm-up", daemon=True).start()

    def _warm_up_now(self) -> None:
        try:
            _, intake = self.intake()
        except TokenbusError:
            return  # whoever sends media is told
        if intake is not None:
            intake.warm_up()

    # ---- worker -----------------------------------------------------------------------------------------------------------------

    @hookimpl
    def media_encoder(self, checkpoint: MediaCheckpoint) -> MediaEncoder | None:
        from .towers import tower_encoder

        return tower_encoder(checkpoint)
