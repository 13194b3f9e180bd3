"""Files for tests of media: a folder of a tiny LLaVA (no weights), pictures of every odd kind, sounds, and servers to fetch from."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from aiohttp import web
from PIL import Image

PATCH, SIDE = 8, 32
ROWS = (SIDE // PATCH) ** 2
"""Encoder rows of one image."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'audio' %}{{ '<audio>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llava_folder(path: Path) -> Path:
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 261,
        "vision_feature_select_strategy": "default",
        "vision_config": {"model_type": "clip_vision_model", "patch_size": PATCH, "image_size": SIDE},
        "text_config": {"model_type": "llama", "vocab_size": 270},
    }
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_resize": True, "do_center_crop": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 3, "rescale_factor": 1 / 255,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


TEXT = {
    "model_type": "llama", "vocab_size": 262, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": SIDE, "patch_size": PATCH, "projection_dim": 32,
}  # fmt: skip


def llava_checkpoint(path: Path) -> Any:
    """`llava_folder` with tokenizer, template and random weights; transformers' own model of it."""
    import torch
    from tiny_tokenizer import tiny_tokenizer
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    llava_folder(path)
    tiny_tokenizer(special=("<image>",))._backend.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=TEXT, vision_config=VISION, image_token_index=261)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(path)
    return model


def noise(width: int = 40, height: int = 30, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture without two equal corners."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1, "CMYK": 4, "LA": 2}[mode]
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    values[: height // 2, : width // 2, 0] = 0
    values[height // 2 :, width // 2 :, 0] = 255
    return Image.fromarray(values if channels > 1 else values[:, :, 0], mode=None if mode != "CMYK" else mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, media_type)}}


def sound_part(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """A PNG of a few KB that declares so many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


@asynccontextmanager
async def listening(handler, host="127.0.0.1"):
    """A server; `hits` are the paths that were asked for, connections to it without a request included as ""."""
    hits: list[str] = []

    async def answer(request):
        hits.append(request.path)
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    port = runner.addresses[0][1]
    try:
        yield SimpleNamespace(hits=hits, port=port, url=f"http://{host}:{port}", host=host, at=f"{host}:{port}")
    finally:
        await runner.cleanup()
