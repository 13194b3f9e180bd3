"""The front against transformers' whole processors: ids of the prompt, where media stand in it, and the tensors that go to the tower."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import media_kit as kit
import numpy as np
import pytest
import torch
from served_kit import REAL, SERVED, VIEWS, ServedFolder, noise, talk

from tokenbus.core.front.chat import ChatOptions, ChatTemplate, check_messages, load_template
from tokenbus.core.front.media import media_of
from tokenbus.core.front.tokenizer import load_tokenizer
from tokenbus.core.media import MediaItem, PreparedMedia
from tokenbus.core.models.resolve import resolve
from tokenbus.plugins.multimodal.families import family_of
from tokenbus.plugins.multimodal.images import RefusedError
from tokenbus.plugins.multimodal.job_main import done_of
from tokenbus.plugins.multimodal.jobs import Job
from tokenbus.plugins.multimodal.sources import source_of

PICTURES = [name for name, served in SERVED.items() if served.images is not None]
MANY_TILES = {"idefics3", "smolvlm"}
SIZES = [(40, 30), (1, 1), (3, 5), (300, 30), (29, 301)]
LARGE = [(2000, 1500), (1, 1), (3, 5), (28, 28), (336, 336), (337, 335), (90, 900), (1999, 1499), (2500, 250), (640, 481)]


def by_size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def fast(name: str) -> dict[str, str]:
    """What an image processor is called by folders that were saved with torchvision at hand."""
    served = SERVED[name]
    assert served.images is not None
    return {"image_processor_type": served.images[0].removesuffix("Pil") + "Fast"}


class Front:
    """What the front does with a conversation, without its processes."""

    def __init__(self, folder: ServedFolder) -> None:
        model = resolve(str(folder.path))
        self.tokenizer = load_tokenizer(model)
        template, family = load_template(model, self.tokenizer, None), family_of(model.path, model.config)
        assert template is not None
        assert family is not None
        self.template: ChatTemplate = template
        self.family = family
        self.family.load()

    def encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], tuple[MediaItem, ...]]:
        checked = check_messages(messages, 100)
        prepared = []
        for part in media_of(checked):
            source = source_of(part, 1 << 26, 1 << 26)
            job = Job(
                kind=part.kind, form="base64", data=source.data, declared=source.declared, max_bytes=1 << 26, max_pixels=1 << 26,
                max_seconds=100.0,
            )  # fmt: skip
            done = done_of(job, self.family)
            assert done.item is not None
            marker, placeholder = self.family.markers[part.kind], self.family.placeholders[part.kind]
            prepared.append(PreparedMedia(done.item, marker, done.text, placeholder, done.rows))

        async def encode() -> Any:
            return await self.template.encode(checked, ChatOptions(), prepared)

        found = anyio.run(encode)
        return found.token_ids, found.media


def tensors_of(item: MediaItem) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape).copy())
        for name, tensor in item.tensors.items()
    }


def check(folder: ServedFolder, front: Front, *turns: Any) -> None:
    """All that the processor gives for the conversation, the front gives as well."""
    given, sent = talk(*turns)
    theirs = folder.inputs(given)
    ids, items = front.encode(sent)
    assert ids == theirs["input_ids"][0].tolist()
    places = [item.start + offset for item in items for offset in item.embeds or range(item.length)]
    assert places == [place for place, token in enumerate(ids) if token == len(folder.processor.tokenizer) - 1]
    assert len(items) == sum(not isinstance(part, str) for parts in turns for part in parts)
    if items:
        for name, tensor in folder.family.join([tensors_of(item) for item in items]).items():
            assert torch.equal(like_theirs(tensor, theirs[name]), theirs[name]), name


def like_theirs(tensor: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Qwen-VL's patches are sent with one of their two frames, which are the same."""
    if tensor.dim() == 2 and theirs.shape[1] == 2 * tensor.shape[1]:
        tensor = tensor.view(len(tensor), 3, 1, -1).repeat(1, 1, 2, 1).flatten(1)
    return tensor.to(theirs.dtype)


@pytest.fixture(scope="module")
def fronts(served: Any) -> Any:
    """fronts(name, **settings): a folder of the family, and a front of it."""
    made: dict[str, tuple[ServedFolder, Front]] = {}

    def get(name: str, **settings: Any) -> tuple[ServedFolder, Front]:
        key = f"{name} {settings}"
        if key not in made:
            made[key] = (folder := served(name, **settings)), Front(folder)
        return made[key]

    return get


@pytest.mark.parametrize("name", SERVED)
def test_a_conversation_without_media(name: str, fronts: Any) -> None:
    check(*fronts(name), ["\nthe first\n\n"], ["Then\n"], ["the second?"])


@pytest.mark.parametrize("size", SIZES, ids=by_size)
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_any_size(name: str, size: tuple[int, int], fronts: Any) -> None:
    check(*fronts(name), ["What is\n", kit.noise(*size), "\n\nthe?"])


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_among_texts_and_turns(name: str, fronts: Any) -> None:
    first, second, third = kit.noise(40, 30), kit.noise(9, 70, seed=1), kit.noise(64, 64, seed=2)
    check(*fronts(name), [first, "and\n", second, second], ["\n\nthe same "], [third, "?"])


@pytest.mark.parametrize("size", [(1000, 700), *(pytest.param(size, marks=pytest.mark.long) for size in LARGE)], ids=by_size)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in MANY_TILES else n for n in PICTURES])
def test_a_picture_as_published_checkpoints_take_it(name: str, size: tuple[int, int], fronts: Any) -> None:
    check(*fronts(name, **REAL[name]), ["What is\n", kit.noise(*size), "\n\nthe?"])


WHOLE = {"do_image_splitting": False}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, its fast processor": (name, {"says": fast(name)}) for name in PICTURES},
    "idefics3 in one piece": ("idefics3", {"says": WHOLE, "call": {"images_kwargs": WHOLE}}),
    "smolvlm in one piece": ("smolvlm", {"says": WHOLE, "call": {"images_kwargs": WHOLE}}),
    "qwen2-vl with its limits in pixels": ("qwen2-vl", {"says": {"size": None, "min_pixels": 128, "max_pixels": 1024}}),
    "llava without a class token": (
        "llava",
        {
            "config": {"vision_config": {"model_type": "siglip_vision_model"}, "vision_feature_select_strategy": "full"},
            "images": ("SiglipImageProcessorPil", {"size": {"height": 16, "width": 16}}),
            "options": {"patch_size": 4, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
        },
    ),
}
"""Ways in which the families' checkpoints have been written."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_folders_as_they_are_found(variant: str, fronts: Any) -> None:
    name, settings = VARIANTS[variant]
    check(*fronts(name, **settings), ["What is\n", kit.noise(90, 40), "and", kit.noise(20, 50), "\n\nthe?"])


@pytest.mark.parametrize("size", SIZES, ids=by_size)
def test_further_views_of_gemma_3(size: tuple[int, int], fronts: Any) -> None:
    folder, front = fronts("gemma3", **VIEWS)
    check(folder, front, ["What is\n", kit.noise(*size), "and", kit.noise(30, 90), "\n\nthe?"])


@pytest.mark.parametrize("seconds", [0.1, 0.31, 1.0, 7.77, 30.0])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (16_000, 2), (8_000, 1), (22_050, 2), (44_100, 1), (48_000, 3)])
def test_a_sound_of_any_length_and_rate(seconds: float, rate: int, channels: int, fronts: Any) -> None:
    check(*fronts("qwen2-audio"), ["What is ", noise(seconds, rate, channels), "the?"])


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "ogg"])
def test_a_sound_of_any_form(form: str, fronts: Any) -> None:
    check(*fronts("qwen2-audio"), [noise(1.234, 44_100, 2, form), "?"])


@pytest.mark.parametrize("kind", ["PCM_U8", "PCM_24", "DOUBLE", "ULAW", "IMA_ADPCM"])
def test_a_wav_of_any_kind(kind: str, fronts: Any) -> None:
    check(*fronts("qwen2-audio"), [noise(1.234, 8_000, subtype=kind), "?"])


def test_sounds_among_texts_and_turns(fronts: Any) -> None:
    first, second = noise(0.5), noise(1.5, seed=1)
    check(*fronts("qwen2-audio"), [first, "and\n", second, second], ["\n\nthe same "], [first, "?"])


def test_the_start_token_is_there_once(served: Any) -> None:
    for name in ("llava", "idefics3"):
        front = Front(folder := served(name))
        bos = folder.processor.tokenizer.bos_token
        for text in ("a text", f"one that spells {bos}", bos):
            ids, _ = front.encode([{"role": "user", "content": text}])
            assert (ids[0], ids.count(ids[0])) == (folder.processor.tokenizer.bos_token_id, 1)


def test_a_tower_of_an_unknown_kind_is_named(served: Any) -> None:
    folder = served("llava", config={"vision_config": {"model_type": "pixtral"}})
    with pytest.raises(ValueError, match="its tower is of the kind 'pixtral'; there are clip_vision_model, siglip"):
        Front(folder)


@pytest.mark.parametrize(
    ("name", "says"), [("qwen2-vl", "absolute aspect ratio"), ("llava", "one of its sides is 333 times the other")]
)
def test_a_picture_too_long_for_a_family_is_the_clients_fault(name: str, says: str, fronts: Any) -> None:
    _, front = fronts(name)
    with pytest.raises(RefusedError, match=f"can't be read by this model: {says}"):
        front.encode(talk([kit.noise(1000, 3)])[1])


@pytest.mark.parametrize("name", ["llava-next", "idefics3", "smolvlm", "gemma3"])
def test_others_take_it(name: str, fronts: Any) -> None:
    check(*fronts(name), [kit.noise(1000, 3), "?"])


def test_where_the_chat_template_is_found(served: Any) -> None:
    folder = served("gemma3")
    (folder.path / "chat_template.jinja").unlink()

    def source() -> str | None:
        model = resolve(str(folder.path))
        found = load_template(model, load_tokenizer(model), None)
        return None if found is None else found.source

    def add(name: str, text: str) -> None:
        place = folder.path / name
        known = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
        place.write_text(json.dumps({**known, "chat_template": text}), encoding="utf-8")

    assert source() is None
    for name in ("tokenizer_config.json", "processor_config.json", "chat_template.json"):
        add(name, f"from {name}")
        assert source() == f"from {name}"
    (folder.path / "chat_template.jinja").write_text("from a file of its own", encoding="utf-8")
    assert source() == "from a file of its own"


def test_who_adds_the_start_token(served: Any, tmp_path: Path) -> None:
    folder = served("llava")
    model = resolve(str(folder.path))
    tokenizer = load_tokenizer(model)
    (other := tmp_path / "other.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    text = dataclasses.replace(model, config=model.config["text_config"])
    cases = [(model, None, True), (model, str(other), True), (text, None, False), (text, str(other), False)]
    for reads, override, adds in cases:
        template = load_template(reads, tokenizer, override)
        assert template is not None
        encode = partial(template.encode, [{"role": "user", "content": "a"}])
        assert (anyio.run(encode, ChatOptions()).token_ids[0] == tokenizer.bos_id) is adds
        for asked in (True, False):
            assert (anyio.run(encode, ChatOptions(add_special_tokens=asked)).token_ids[0] == tokenizer.bos_id) is asked
