"""Qwen2-Audio: half a minute of sound at most, one row for four frames of its spectrogram."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....core.media import Kind
from ..family import Processed, Sound


class Qwen2Audio:
    name = "qwen2_audio"
    model_types = frozenset({"qwen2_audio"})
    markers: Mapping[Kind, str] = {"audio": "<|AUDIO|>"}
    placeholders: Mapping[Kind, str] = {"audio": "<|AUDIO|>"}
    sampling_rate = 16000

    def __init__(self, folder: Path) -> None:
        self.options: Mapping[str, Any] = {}
        self._folder = folder

    def load(self) -> None:
        from transformers import AutoFeatureExtractor

        extractor: Any = AutoFeatureExtractor.from_pretrained(str(self._folder), local_files_only=True)
        if extractor.sampling_rate != self.sampling_rate:
            raise ValueError(f"its feature extractor takes {extractor.sampling_rate} Hz, not {self.sampling_rate}")
        self._extractor = extractor
        self.options = {"processor": type(extractor).__name__, **extractor.to_dict()}

    def process(self, kind: Kind, media: Sound) -> Processed:
        if len(media.samples) > self._extractor.n_samples:
            longest = self._extractor.n_samples / self.sampling_rate
            raise ValueError(
                f"it lasts {len(media.samples) / self.sampling_rate:.1f} s, and may last {longest:g} s: send it in parts"
            )
        made = self._extractor(
            media.samples,
            sampling_rate=self.sampling_rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="np",
        )
        mask = made["attention_mask"]
        rows = ((int(mask.sum()) - 1) // 2 + 1 - 2) // 2 + 1
        if rows < 1:
            raise ValueError("it is too short to be heard")
        tensors = {"input_features": made["input_features"], "feature_attention_mask": mask}
        return Processed(tensors, self.placeholders["audio"] * rows, rows)
