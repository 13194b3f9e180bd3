"""The front's side of each family: what a picture or sound becomes fits the tower, and its text is what transformers' processor writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tokenbus.core.media import MediaItem, TensorBytes
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.plugins.multimodal.families import family_of
from tokenbus.plugins.multimodal.families.llava_next import without_padding
from tokenbus.plugins.multimodal.family import Sound
from tokenbus.plugins.multimodal.towers import TOWERS, tower_encoder

SIDE = {"height": 16, "width": 16}
QWEN = (
    "Qwen2VLImageProcessorPil",
    {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 128, "longest_edge": 1024}},
)
IDEFICS = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 16}, "crop_size": SIDE}),
    "llava-next": (
        "LlavaNextImageProcessorPil",
        {"size": {"shortest_edge": 16}, "crop_size": SIDE, "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]]},
    ),
    "idefics3": ("Idefics3ImageProcessorPil", IDEFICS),
    "smolvlm": ("SmolVLMImageProcessorPil", IDEFICS),
    "qwen2-vl": QWEN,
    "qwen2.5-vl": QWEN,
    "qwen3-vl": QWEN,
    "qwen3-vl-moe": QWEN,
    "gemma3": ("Gemma3ImageProcessorPil", {"size": {"height": 32, "width": 32}}),
}
SIZES = [(16, 16), (50, 20), (21, 64), (7, 9), (200, 90)]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def item_of(processed: Any, kind: Any) -> MediaItem:
    return MediaItem(
        kind=kind,
        digest="",
        start=0,
        length=processed.rows,
        bidirectional=processed.bidirectional,
        tensors={
            name: TensorBytes(dtype=str(t.dtype), shape=t.shape, data=np.ascontiguousarray(t).tobytes())
            for name, t in processed.tensors.items()
        },
        grid=processed.grid,
    )


@pytest.fixture(scope="module")
def sides(tiny_media: Any) -> Any:
    """sides(name): the family's object for the front, loaded, the tower's encoder, and the folder's image processor."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            path = tiny_media(name).path
            if name in PROCESSORS:
                cls, options = PROCESSORS[name]
                getattr(transformers, cls)(**options).save_pretrained(path)
            else:
                transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(path)
            resolved = resolve(str(path))
            family = family_of(path, resolved.config)
            assert family is not None
            family.load()
            beside = load(resolved, kernels="torch").beside
            assert beside is not None
            made[name] = family, tower_encoder(beside)
        return made[name]

    return get


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_picture_of_any_size_fits_the_tower(name: str, sides: Any) -> None:
    family, encoder = sides(name)
    for index, size in enumerate(SIZES):
        processed = family.process("image", picture(*size, seed=index))
        assert processed.text.count(family.placeholders["image"]) == processed.rows
        item = item_of(processed, "image")
        rows = encoder.encode(item).rows
        assert rows.shape == (processed.rows, 64)
        assert rows.isfinite().all()
        if (places := encoder.places(item)) is not None:
            assert places[0].shape == (3, processed.rows)


def transformers_text(name: str, processor: Any, image: Image.Image, family: Any) -> str:
    """What the processor of the whole model puts in place of its marker."""
    made = processor(image, return_tensors="np", **({"return_row_col_info": True} if name in {"idefics3", "smolvlm"} else {}))
    if name in {"idefics3", "smolvlm"}:
        me = SimpleNamespace(
            fake_image_token="<fake_token_around_image>",
            image_token="<image>",
            global_image_tag="<global-img>",
            image_seq_len=4,
        )
        return transformers.Idefics3Processor.replace_image_token(me, made, 0)  # pyright: ignore[reportArgumentType]
    if name == "llava-next":
        me = SimpleNamespace(image_processor=processor, patch_size=4, num_additional_image_tokens=1)
        me._get_unpadded_features = transformers.LlavaNextProcessor._get_unpadded_features.__get__(me)
        height, width = (int(size) for size in made["image_sizes"][0])
        count = transformers.LlavaNextProcessor._get_number_of_features(me, height, width, 16, 16)  # pyright: ignore[reportArgumentType]
        return "<image>" * (count - 1)
    if name == "gemma3":
        return "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
    grid = made["image_grid_thw"][0]
    return "<|image_pad|>" * (int(grid.prod()) // processor.merge_size**2)


@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "llava"])
def test_the_text_is_transformers_own(name: str, sides: Any) -> None:
    family, _ = sides(name)
    for index, size in enumerate(SIZES):
        image = picture(*size, seed=index)
        assert family.process("image", image).text == transformers_text(name, family._images.processor, image, family)


def test_rows_without_padding_are_those_that_the_model_keeps() -> None:
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    for height in range(3, 90, 7):
        for width in range(3, 90, 5):
            for lines, columns in ((24, 48), (48, 24), (8, 4), (72, 24)):
                kept = unpad_image(torch.empty(1, lines, columns), torch.tensor([height, width])).shape[1:]
                assert without_padding(height, width, lines, columns) == tuple(kept), (height, width, lines, columns)


@pytest.mark.parametrize("seconds", [0.05, 0.31, 0.999, 1.0])
def test_a_sound_of_any_length_fits_the_tower(seconds: float, sides: Any) -> None:
    family, encoder = sides("qwen2-audio")
    samples = np.random.default_rng(0).standard_normal(int(16000 * seconds)).astype(np.float32) * 0.1
    processed = family.process("audio", Sound(samples, 16000))
    assert processed.text == "<|AUDIO|>" * processed.rows
    assert encoder.encode(item_of(processed, "audio")).rows.shape == (processed.rows, 64)


def test_a_sound_that_is_too_long_or_too_short_is_said_to_be(sides: Any) -> None:
    family, _ = sides("qwen2-audio")
    with pytest.raises(ValueError, match=r"lasts 1\.2 s, and may last 1 s"):
        family.process("audio", Sound(np.zeros(19200, np.float32), 16000))
    with pytest.raises(ValueError, match="too short"):
        family.process("audio", Sound(np.zeros(200, np.float32), 16000))


def test_each_tower_has_a_family_and_each_family_a_tower() -> None:
    from tokenbus.plugins.multimodal.families import FAMILIES

    assert FAMILIES.keys() == TOWERS.keys()
