"""Tiny random multimodal models of every family, made with transformers, and items for them as their processors would make them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tokenbus.core.media import MediaItem, TensorBytes

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "api")]  # the kits

from served_kit import SERVED, ServedFolder

TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 32,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
PLACEHOLDER = 250
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One family's tiny model: how it is configured, what its items look like, how transformers is given them."""

    config_class: str
    model_class: str
    config: dict[str, Any]
    item: Callable[[int, torch.Generator], tuple[Tensors, int, tuple[int, ...] | None]]
    """(size, random numbers) -> tensors of one item, rows, grid."""
    join: Callable[[list[Tensors]], Tensors]
    """Several items as transformers takes them in one prompt."""
    kind: Any = "image"
    bidirectional: bool = False
    types: str | None = None
    """The argument by which transformers is told which tokens are media."""
    markers: tuple[int, ...] = ()
    """A token between two rows of one item, so that its span has other tokens in it."""


def _noise(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _llava_item(_size: int, generator: torch.Generator) -> tuple[Tensors, int, None]:
    return {"pixel_values": _noise(1, 3, 16, 16, generator=generator)}, 16, None


def _gemma_item(_size: int, generator: torch.Generator) -> tuple[Tensors, int, None]:
    return {"pixel_values": _noise(1, 3, 32, 32, generator=generator)}, 16, None


def _views_item(_size: int, generator: torch.Generator) -> tuple[Tensors, int, None]:
    return {"pixel_values": _noise(2, 3, 32, 32, generator=generator)}, 32, None


def _qwen_item(size: int, generator: torch.Generator) -> tuple[Tensors, int, tuple[int, ...]]:
    grid = (1, *((4, 6), (2, 4), (8, 2))[size % 3])
    tensors = {
        "pixel_values": _noise(math.prod(grid), 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([grid]),
    }
    return tensors, math.prod(grid) // 4, grid


def _idefics_item(size: int, generator: torch.Generator) -> tuple[Tensors, int, None]:
    tiles = (1, 3, 2)[size % 3]
    mask = torch.ones(1, tiles, 16, 16, dtype=torch.int64)
    mask[:, -1, :, 12:] = 0
    return (
        {"pixel_values": _noise(1, tiles, 3, 16, 16, generator=generator), "pixel_attention_mask": mask},
        4 * tiles,
        None,
    )


def _next_item(size: int, generator: torch.Generator) -> tuple[Tensors, int, None]:
    height, width = ((16, 16), (30, 14), (13, 32))[size % 3]
    tiles, rows = ((2, 4 * 4 + 4 * 5), (3, 4 * 4 + 8 * 5), (3, 4 * 4 + 4 * 9))[size % 3]
    tensors = {
        "pixel_values": _noise(1, tiles, 3, 16, 16, generator=generator),
        "image_sizes": torch.tensor([[height, width]]),
    }
    return tensors, rows, None


def _audio_item(size: int, generator: torch.Generator) -> tuple[Tensors, int, None]:
    frames = (40, 23, 31)[size % 3]
    mask = (torch.arange(100) < frames).long()[None]
    rows = ((frames - 1) // 2 + 1 - 2) // 2 + 1
    return {"input_features": _noise(1, 8, 100, generator=generator), "feature_attention_mask": mask}, rows, None


def _stack(dim: int = 0) -> Callable[[list[Tensors]], Tensors]:
    def join(items: list[Tensors]) -> Tensors:
        return {name: torch.cat([item[name] for item in items], dim=dim) for name in items[0]}

    return join


def _pad(items: list[Tensors]) -> Tensors:
    """LLaVA-NeXT: pictures of fewer tiles are filled up with zeros."""
    most = max(item["pixel_values"].shape[1] for item in items)
    padded = [
        torch.cat([t, t.new_zeros(1, most - t.shape[1], *t.shape[2:])], dim=1) for t in (item["pixel_values"] for item in items)
    ]
    return {"pixel_values": torch.cat(padded), "image_sizes": torch.cat([item["image_sizes"] for item in items])}


def _mrope(section: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}


FAMILIES: dict[str, Family] = {
    "llava": Family(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {"vision_config": CLIP, "text_config": {**TEXT, "model_type": "llama"}, "image_token_index": PLACEHOLDER},
        _llava_item,
        _stack(),
    ),
    "llava-next": Family(
        "LlavaNextConfig",
        "LlavaNextForConditionalGeneration",
        {
            "vision_config": CLIP,
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "image_token_index": PLACEHOLDER,
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
        },
        _next_item,
        _pad,
    ),
    "idefics3": Family(
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        {
            "vision_config": {**SIGLIP, "model_type": "idefics3_vision"},
            "text_config": {**TEXT, "model_type": "llama"},
            "image_token_id": PLACEHOLDER,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        _idefics_item,
        _stack(1),
        markers=(7,),
    ),
    "smolvlm": Family(
        "SmolVLMConfig",
        "SmolVLMForConditionalGeneration",
        {
            "vision_config": {**SIGLIP, "model_type": "smolvlm_vision"},
            "text_config": {**TEXT, "model_type": "llama"},
            "image_token_id": PLACEHOLDER,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        _idefics_item,
        _stack(1),
        markers=(7, 9),
    ),
    "qwen2-vl": Family(
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        {
            "vision_config": {**QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            "text_config": {**TEXT, "rope_parameters": _mrope([2, 3, 3])},
            "image_token_id": PLACEHOLDER,
        },
        _qwen_item,
        _stack(),
        types="mm_token_type_ids",
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "vision_config": {
                **QWEN_VISION,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "text_config": {**TEXT, "rope_parameters": _mrope([4, 2, 2])},
            "image_token_id": PLACEHOLDER,
        },
        _qwen_item,
        _stack(),
        types="mm_token_type_ids",
    ),
    "qwen3-vl": Family(
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {
            "vision_config": {
                **QWEN_VISION,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            "text_config": {**TEXT, "head_dim": 16, "rope_parameters": _mrope([4, 2, 2])},
            "image_token_id": PLACEHOLDER,
        },
        _qwen_item,
        _stack(),
        types="mm_token_type_ids",
    ),
    "qwen3-vl-moe": Family(
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        {
            "vision_config": {
                **QWEN_VISION,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 48,
                "mlp_only_layers": [1],
                "rope_parameters": _mrope([4, 2, 2]),
                "tie_word_embeddings": False,  # its class's default is a tied one
            },
            "tie_word_embeddings": False,
            "image_token_id": PLACEHOLDER,
        },
        _qwen_item,
        _stack(),
        types="mm_token_type_ids",
    ),
    "gemma3": Family(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": {**SIGLIP, "vision_use_head": False, "image_size": 32},
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "tie_word_embeddings": False,
                "head_dim": 16,
                "query_pre_attn_scalar": 40,
                "sliding_window": 9,
                "sliding_window_pattern": 3,
            },
            "tie_word_embeddings": False,  # a tied one of random weights only repeats the last token
            "mm_tokens_per_image": 16,
            "image_token_index": PLACEHOLDER,
        },
        _gemma_item,
        _stack(),
        bidirectional=True,
        types="token_type_ids",
    ),
    "qwen2-audio": Family(
        "Qwen2AudioConfig",
        "Qwen2AudioForConditionalGeneration",
        {
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 8,
                "max_source_positions": 50,
            },
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_token_index": PLACEHOLDER,
        },
        _audio_item,
        _stack(),
        kind="audio",
    ),
}
FAMILIES["gemma3-views"] = dataclasses.replace(FAMILIES["gemma3"], item=_views_item, markers=(7,))
"""Two views of each picture ("pan and scan"), with text between them."""


@dataclass
class Prompt:
    tokens: list[int]
    media: tuple[MediaItem, ...]
    tensors: list[Tensors]


class TinyMedia:
    """A saved checkpoint, transformers' own model of it, and prompts for both."""

    def __init__(self, name: str, path: Path, reference: Any) -> None:
        self.name = name
        self.family = FAMILIES[name]
        self.path = path
        self.reference = reference

    def prompt(self, sizes: list[int], seed: int = 0, text: int = 6) -> Prompt:
        """Text, an item, text, ... with an item of each size; `text` tokens and some more before each."""
        generator = torch.Generator().manual_seed(seed)
        family = self.family

        def words(count: int) -> list[int]:
            return torch.randint(10, 240, (count,), generator=generator).tolist()

        tokens, media, given = words(text), [], []
        for index, size in enumerate(sizes):
            tensors, rows, grid = family.item(size, generator)
            span = [PLACEHOLDER] * rows
            for k, marker in enumerate(family.markers):
                span.insert(rows * (k + 1) // (len(family.markers) + 1) + k, marker)
            embeds = tuple(i for i, t in enumerate(span) if t == PLACEHOLDER) if family.markers else ()
            media.append(
                MediaItem(
                    kind=family.kind,
                    digest=digest(tensors),
                    start=len(tokens),
                    length=len(span),
                    embeds=embeds,
                    bidirectional=family.bidirectional,
                    tensors={name: as_bytes(t) for name, t in tensors.items()},
                    grid=grid,
                )
            )
            tokens += span + words(text + index)
            given.append(tensors)
        return Prompt(tokens, tuple(media), given)

    def items_like(self, media: tuple[MediaItem, ...], seed: int) -> list[MediaItem]:
        """Others of the first size, in the same places."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for item in media:
            tensors, rows, _ = self.family.item(0, generator)
            assert rows == item.rows
            given = {name: as_bytes(t) for name, t in tensors.items()}
            found.append(msgspec.structs.replace(item, digest=digest(tensors), tensors=given))
        return found

    def truth(self, prompt: Prompt, more: list[int] | None = None) -> torch.Tensor:
        """transformers' logits [n, vocab] of the prompt and `more` tokens behind it."""
        ids = torch.tensor([prompt.tokens + (more or [])])
        given: dict[str, Any] = self.family.join(prompt.tensors) if prompt.tensors else {}
        if self.family.types:
            given[self.family.types] = (ids == PLACEHOLDER).long()
        if self.family.kind == "audio":
            given["attention_mask"] = torch.ones_like(ids)
        with torch.no_grad():
            return self.reference(input_ids=ids, use_cache=False, **given).logits[0].float()


def as_bytes(tensor: torch.Tensor) -> TensorBytes:
    return TensorBytes(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), data=tensor.numpy().tobytes())


def digest(tensors: Tensors) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def tiny_config(name: str, changes: dict[str, Any] | None = None) -> Any:
    """transformers' configuration. changes: to the family's; those to an inner one are merged with it."""
    import transformers

    values = json.loads(json.dumps(FAMILIES[name].config))
    for key, value in (changes or {}).items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return getattr(transformers, FAMILIES[name].config_class)(**values)


def make_tiny(name: str, folder: Path, std: float = 0.3, changes: dict[str, Any] | None = None) -> TinyMedia:
    """Weights from a normal distribution wide enough that attention is peaked, norms about 1 (or 0 where 1 is added). changes: see
    `tiny_config`."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    family = FAMILIES[name]
    config = tiny_config(name, changes)
    model = getattr(transformers, family.model_class)(config).eval()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and key.endswith("weight")
        parameter.data = parameter.data + 0.3 * noise if is_norm else noise * std
    path = folder / name
    model.save_pretrained(path)
    return TinyMedia(name, path, model)


@pytest.fixture(scope="session")
def tiny_media(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """tiny_media(name): its TinyMedia, made once a session."""
    return functools.cache(lambda name: make_tiny(name, tmp_path_factory.mktemp("media")))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ServedFolder]:
    """served(name, **settings): a new folder with all that a server needs; without weights until `add_weights`."""

    def make(name: str, **settings: Any) -> ServedFolder:
        served = dataclasses.replace(SERVED[name], **settings)
        return ServedFolder(name, served, tmp_path_factory.mktemp("served"), sys.modules[__name__])

    return make
