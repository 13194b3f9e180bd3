"""Towers: transformers' own encoders and projectors, with a checkpoint's weights, run for one item at a time.

A family of models is one entry of TOWERS: which class holds the tower, which of its methods gives an item's rows, and what is special
about their places. The text part of the class is made as small as can be and thrown away: core's decoder has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import ModelError, RequestError
from ...core.models.media import Encoded, MediaCheckpoint, MediaEncoder
from ...core.models.replace import replace_modules
from .convolutions import replace_convolutions

if TYPE_CHECKING:
    from torch import nn

    from ...core.media import MediaItem

Tensors = dict[str, torch.Tensor]
Run = Callable[[Any, Tensors], Encoded]
"""(the class's inner model, an item's tensors) -> its rows."""
Places = Callable[["MediaItem", Mapping[str, Any]], tuple[torch.Tensor, int]]
"""(item, config.json) -> as `MediaEncoder.places`."""
TEXT_PARTS = ("language_model", "text_model")
"""What the classes call their text part."""


def image_features(model: Any, tensors: Tensors) -> Encoded:
    return Encoded(_joined(model.get_image_features(**tensors).pooler_output))


def patch_features(model: Any, tensors: Tensors) -> Encoded:
    """Qwen2-VL and Qwen2.5-VL."""
    return image_features(model, all_frames(model, tensors))


def all_frames(model: Any, tensors: Tensors) -> Tensors:
    """Qwen-VL's towers take several frames for each patch. Those of a picture are the same, so an item may have one of them."""
    embed, pixels = model.visual.patch_embed, tensors["pixel_values"]
    channels, frames, area = embed.in_channels, embed.temporal_patch_size, embed.patch_size**2
    if pixels.shape[1] == channels * area:
        pixels = pixels.view(-1, channels, 1, area).expand(-1, -1, frames, -1).flatten(1)
    return {**tensors, "pixel_values": pixels}


def deepstack_features(model: Any, tensors: Tensors) -> Encoded:
    """Qwen3-VL: further rows for the first layers."""
    found = model.get_image_features(**all_frames(model, tensors))
    return Encoded(_joined(found.pooler_output), tuple(_joined(rows) for rows in found.deepstack_features))


def audio_features(model: Any, tensors: Tensors) -> Encoded:
    """Qwen2-Audio: frames behind the sound's end are hidden from the tower, and are nobody's rows."""
    frames = tensors["feature_attention_mask"].sum(-1)
    _, lengths = model.audio_tower._get_feat_extract_output_lengths(frames)
    kept, features = model.audio_tower._get_feat_extract_output_lengths(frames)[0], tensors["input_features"]
    width = (features.shape[-1] - 2) // 2 + 1
    hidden = torch.arange(width, device=features.device)[None, None, None] >= kept[:, None, None, None]
    mask = torch.zeros(len(features), 1, width, width, dtype=features.dtype, device=features.device)
    mask = mask.masked_fill(hidden, torch.finfo(features.dtype).min)
    found = model.multi_modal_projector(model.audio_tower(features, attention_mask=mask).last_hidden_state)
    return Encoded(torch.cat([rows[:length] for rows, length in zip(found, lengths.tolist(), strict=True)]))


def image_places(item: MediaItem, config: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """Qwen-VL's: time, row and column of each patch once neighbours are merged; text goes on behind the longer side.
    https://arxiv.org/abs/2409.12191, figure 3."""
    time, height, width = item.grid or (0, 0, 0)
    merge = config.get("vision_config", {}).get("spatial_merge_size", 2)
    sizes = (time, height // merge, width // merge)
    if item.length != sizes[0] * sizes[1] * sizes[2]:
        raise RequestError(f"a picture of {item.length} tokens can't have the grid {list(item.grid or ())}")
    axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes]), max(sizes[1:])


@dataclass(frozen=True, slots=True)
class Tower:
    class_name: str
    """transformers' class of the whole model."""
    kinds: Mapping[str, Run] = field(default_factory=lambda: {"image": image_features})
    """By an item's kind."""
    places: Places | None = None
    looks_ahead: bool = False


_QWEN = {"image": patch_features}
TOWERS: dict[str, Tower] = {
    "llava": Tower("LlavaForConditionalGeneration"),
    "llava_next": Tower("LlavaNextForConditionalGeneration"),
    "idefics3": Tower("Idefics3ForConditionalGeneration"),
    "smolvlm": Tower("SmolVLMForConditionalGeneration"),
    "qwen2_vl": Tower("Qwen2VLForConditionalGeneration", _QWEN, image_places),
    "qwen2_5_vl": Tower("Qwen2_5_VLForConditionalGeneration", _QWEN, image_places),
    "qwen3_vl": Tower("Qwen3VLForConditionalGeneration", {"image": deepstack_features}, image_places),
    "qwen3_vl_moe": Tower("Qwen3VLMoeForConditionalGeneration", {"image": deepstack_features}, image_places),
    "gemma3": Tower("Gemma3ForConditionalGeneration", looks_ahead=True),
    "qwen2_audio": Tower("Qwen2AudioForConditionalGeneration", {"audio": audio_features}),
}
"""By `model_type` in config.json."""


def tower_encoder(checkpoint: MediaCheckpoint) -> MediaEncoder | None:
    """The encoder of a family that is known here. Raises ModelError when its weights can't be read."""
    tower = TOWERS.get(str(checkpoint.config.get("model_type")))
    return None if tower is None else TowerEncoder(tower, checkpoint)


class TowerEncoder(MediaEncoder):
    def __init__(self, tower: Tower, checkpoint: MediaCheckpoint) -> None:
        self._tower = tower
        self._config = checkpoint.config
        self._dtype, self._device, self._hidden = checkpoint.dtype, checkpoint.device, checkpoint.hidden_size
        self._model = _load(tower, checkpoint)
        self.weights_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        replace_modules(self._model)  # by layers whose results do not depend on how many threads there are
        replace_convolutions(self._model)
        for module in self._model.modules():
            module.register_forward_pre_hook(lambda _module, _inputs: self.pause())
        self.pauses = True
        self.looks_ahead = tower.looks_ahead  # pyright: ignore[reportAttributeAccessIssue]

    def encode(self, item: MediaItem) -> Encoded:
        run = self._tower.kinds.get(item.kind)
        if run is None:
            raise RequestError(f"this model reads no {item.kind}; it reads {', '.join(sorted(self._tower.kinds))}")
        with torch.inference_mode():
            found = run(self._model, {name: self._tensor(t) for name, t in item.tensors.items()})
        if found.rows.shape != (item.rows, self._hidden):
            raise RequestError(
                f"the {item.kind} at token {item.start} has {item.rows} placeholders, and its tower gives {list(found.rows.shape)}"
            )
        return Encoded(found.rows.to(self._dtype), tuple(rows.to(self._dtype) for rows in found.deep))

    def places(self, item: MediaItem) -> tuple[torch.Tensor, int] | None:
        return None if self._tower.places is None else self._tower.places(item, self._config)

    def _tensor(self, given: Any) -> torch.Tensor:
        dtype = getattr(torch, given.dtype)
        found = torch.frombuffer(bytearray(given.data), dtype=dtype).view(given.shape)
        return found.to(self._device, self._dtype if dtype.is_floating_point else dtype)


def _load(tower: Tower, checkpoint: MediaCheckpoint) -> nn.Module:
    """The class's inner model without its text part. ModelError when weights are missing, or are left over."""
    import transformers
    from transformers.utils import logging

    name = checkpoint.name
    cls: Any = getattr(transformers, tower.class_name, None)
    if cls is None:
        raise ModelError(f"{name} can't read media: this version of transformers has no {tower.class_name}")
    config = cls.config_class.from_dict(copy.deepcopy(dict(checkpoint.config)))
    _shrink(config.get_text_config())
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of what is missing: the text part, always
    try:
        model, info = cls.from_pretrained(
            None, config=config, state_dict=checkpoint.tensors(), dtype=checkpoint.dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{name} can't be loaded: {str(error).splitlines()[0]}") from error
    finally:
        logging.set_verbosity(before)
    missing = [key for key in sorted(info["missing_keys"]) if not _of_text(key)]
    if missing:
        raise ModelError(f"{name} can't be loaded: its checkpoint has no tensor {missing[0]}")
    if left := sorted(info["unexpected_keys"]):
        raise ModelError(f"{name} can't be run: its checkpoint holds {left[0]} ({len(left)} tensors unknown to us)")
    inner = model.model
    for part in TEXT_PARTS:
        if hasattr(inner, part):
            setattr(inner, part, None)
    return inner.to(checkpoint.device).eval().requires_grad_(requires_grad=False)


def _shrink(text: Any) -> None:
    """One small layer and a few tokens; what the projector must fit stays."""
    text.num_hidden_layers, text.vocab_size, text.intermediate_size, text.pad_token_id = 1, 8, 8, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    for name, size in (("num_experts", 1), ("num_experts_per_tok", 1), ("moe_intermediate_size", 8)):
        if getattr(text, name, None):
            setattr(text, name, size)


def _of_text(key: str) -> bool:
    return key.startswith("lm_head.") or any(key.startswith(f"model.{part}.") for part in TEXT_PARTS)


def _joined(found: Any) -> torch.Tensor:
    """[n, hidden_size] of one tensor, or of several behind each other."""
    parts = [found] if isinstance(found, torch.Tensor) else list(found)
    return torch.cat([part.flatten(0, -2) for part in parts])
