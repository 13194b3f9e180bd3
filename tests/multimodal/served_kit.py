"""Model folders as a server finds them: random weights, a tokenizer, a chat template and the family's own processor.

The processors are transformers' own, whole: they write the reference prompts and tensors. Those of the Qwen-VL families and SmolVLM want
a video processor, which needs torchvision; here they do without one.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import media_kit as kit
import numpy as np
import tokenizers
import torch
import transformers
from demo_process import DemoServer, serve_demo
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import TokenizersBackend

from tokenbus.core.front.token_bytes import byte_alphabet

LETTERS = byte_alphabet()
NEWLINE = "\u010a"
"""As byte-level tokenizers spell it."""
MERGES = [(NEWLINE, NEWLINE), ("t", "h"), ("th", "e")]
"""Two newlines are one token, as in the real ones: texts around a picture meet newlines that belong to it."""
SIDE = {"height": 16, "width": 16}
QWEN = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 128, "longest_edge": 1024}}
IDEFICS = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True}
CROPS = [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UTTERANCES = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<end_of_utterance>\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True)
class Served:
    """What a family's folder has besides weights."""

    processor: str
    template: str
    tokens: Sequence[str]
    """Control tokens; the last is the placeholder."""
    placeholder_keys: Sequence[str]
    """What config.json calls the placeholder's id."""
    images: tuple[str, dict[str, Any]] | None = None
    sounds: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)
    """Tokens that the processor asks the tokenizer for."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the processor."""
    bos: str | None = None
    adds_bos: bool = False
    """The tokenizer writes the start token, and the template does not."""
    config: dict[str, Any] = field(default_factory=dict)
    """Changes to the conftest's config.json."""
    says: dict[str, Any] = field(default_factory=dict)
    """What the folder says further about its processor of pictures or sounds; None: it does not say so."""
    call: dict[str, Any] = field(default_factory=dict)
    """What transformers' processor has to be told at each call."""
    older: bool = False
    """The processor's files are as older versions of transformers wrote them, which most checkpoints of the family have."""


SERVED: dict[str, Served] = {
    "llava": Served(
        "LlavaProcessor",
        "{% for message in messages %}{{ message['role'] | upper }}: {% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        ["<s>", "<image>"],
        ["image_token_index"],
        images=("CLIPImageProcessorPil", {"size": {"shortest_edge": 16}, "crop_size": SIDE}),
        options={"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        bos="<s>",
        adds_bos=True,
        older=True,
    ),
    "llava-next": Served(
        "LlavaNextProcessor",
        "{% for message in messages %}{{ '[INST] ' if message['role'] == 'user' else ' ' }}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{{ ' [/INST]' if message['role'] == 'user' else '' }}{% endfor %}",
        ["<s>", "<image>"],
        ["image_token_index"],
        images=(
            "LlavaNextImageProcessorPil",
            {"size": {"shortest_edge": 16}, "crop_size": SIDE, "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]]},
        ),
        options={"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        bos="<s>",
        adds_bos=True,
        older=True,
    ),
    "idefics3": Served(
        "Idefics3Processor",
        "{{ bos_token }}" + UTTERANCES,
        ["<|begin_of_text|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", *CROPS, "<image>"],
        ["image_token_id"],
        images=("Idefics3ImageProcessorPil", IDEFICS),
        options={"image_seq_len": 4},
        bos="<|begin_of_text|>",
        older=True,
    ),
    "smolvlm": Served(
        "SmolVLMProcessor",
        "<|im_start|>" + UTTERANCES,
        ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", *CROPS, "<image>"],
        ["image_token_id"],
        images=("SmolVLMImageProcessorPil", IDEFICS),
        options={"image_seq_len": 4},
        bos="<|im_start|>",
        older=True,
    ),
    "gemma3": Served(
        "Gemma3Processor",
        "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ["<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        ["image_token_index"],
        images=("Gemma3ImageProcessorPil", {"size": {"height": 32, "width": 32}}),
        names={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        options={"image_seq_length": 16},
        bos="<bos>",
    ),
    "qwen2-audio": Served(
        "Qwen2AudioProcessor",
        "{% set count = namespace(value=0) %}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'audio' %}{% set count.value = count.value + 1 %}"
        "{{ 'Audio ' ~ count.value ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ["<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"],
        ["audio_token_index"],
        sounds={"feature_size": 8},
        config={"audio_config": {"max_source_positions": 1500}},
    ),
}
PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
VIEWS: dict[str, Any] = {"says": PAN_AND_SCAN, "call": {"images_kwargs": PAN_AND_SCAN}}
"""Gemma 3 with further views of long pictures, which transformers' processor has to be told of each time."""
SERVED |= {
    name: Served(
        processor,
        CHATML,
        ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|image_pad|>"],
        ["image_token_id"],
        images=("Qwen2VLImageProcessorPil", QWEN),
        older=name != "qwen3-vl",
    )
    for name, processor in (
        ("qwen2-vl", "Qwen2VLProcessor"),
        ("qwen2.5-vl", "Qwen2_5_VLProcessor"),
        ("qwen3-vl", "Qwen3VLProcessor"),
    )
}


WIDE = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
CLIP = {"image_size": 336, "patch_size": 14}
CLIP_OPTIONS = {**SERVED["llava"].options, "patch_size": 14}
QWEN2 = {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056}
REAL: dict[str, dict[str, Any]] = {
    "llava": {"config": {"vision_config": CLIP}, "images": ("CLIPImageProcessorPil", WIDE), "options": CLIP_OPTIONS},
    "llava-next": {
        "config": {"vision_config": CLIP, "image_grid_pinpoints": PINPOINTS},
        "images": ("LlavaNextImageProcessorPil", {**WIDE, "image_grid_pinpoints": PINPOINTS}),
        "options": CLIP_OPTIONS,
    },
    "idefics3": {
        "config": {"vision_config": {"image_size": 364, "patch_size": 14}},
        "images": ("Idefics3ImageProcessorPil", {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}}),
        "options": {"image_seq_len": 169},
    },
    "smolvlm": {
        "config": {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
        "images": ("SmolVLMImageProcessorPil", {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}),
        "options": {"image_seq_len": 64},
    },
    "gemma3": {
        "config": {"vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256},
        "images": ("Gemma3ImageProcessorPil", {"size": {"height": 896, "width": 896}}),
        "options": {"image_seq_length": 256},
    },
    "qwen2-vl": {"config": {"vision_config": {"patch_size": 14}}, "images": ("Qwen2VLImageProcessorPil", QWEN2)},
    "qwen2.5-vl": {"config": {"vision_config": {"patch_size": 14}}, "images": ("Qwen2VLImageProcessorPil", QWEN2)},
    "qwen3-vl": {
        "config": {"vision_config": {"patch_size": 16}},
        "images": (
            "Qwen2VLImageProcessorPil",
            {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        ),
    },
}
"""Of the families' published checkpoints: sizes of pictures, tiles and patches."""


def tokenizer_of(served: Served) -> TokenizersBackend:
    """A token for each byte, some pairs, and the control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*letters, *("".join(pair) for pair in MERGES)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in served.tokens])
    if served.adds_bos:
        assert served.bos is not None
        backend.post_processor = processors.TemplateProcessing(
            single=f"{served.bos} $A", special_tokens=[(served.bos, backend.token_to_id(served.bos))]
        )
    return TokenizersBackend(tokenizer_object=backend, bos_token=served.bos, extra_special_tokens=served.names)


def processor_of(served: Served) -> Any:
    """transformers' processor, without videos."""
    cls: Any = getattr(transformers, served.processor)
    own = [name for name in cls.get_attributes() if name != "video_processor"]
    made = type(cls.__name__, (cls,), {"get_attributes": classmethod(lambda _: own), "__init__": cls.__init__})
    parts: dict[str, Any] = {"tokenizer": tokenizer_of(served), "chat_template": served.template, **served.options}
    if served.images is not None:
        name, options = served.images
        parts["image_processor"] = getattr(transformers, name)(**options)
    if served.sounds is not None:
        parts["feature_extractor"] = transformers.WhisperFeatureExtractor(**served.sounds)
    if "video_processor" in cls.get_attributes():
        parts["video_processor"] = None
    if cls is transformers.SmolVLMProcessor:
        module: Any = importlib.import_module(cls.__module__)
        module.num2words = module.num2words or str  # a package that only descriptions of videos need
        made.video_processor = SimpleNamespace(num_frames=None, fps=None)
    return made(**parts)


@dataclass(frozen=True)
class Sound:
    """A file."""

    data: bytes
    form: str = "wav"


Parts = Sequence[str | Image.Image | Sound]


def talk(*turns: Parts) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Turns of user and assistant, of texts, pictures and sounds: as transformers' processors take them, and as clients send them."""
    given, sent = [], []
    for index, parts in enumerate(turns):
        role = "assistant" if index % 2 else "user"
        given.append({"role": role, "content": [_given(part) for part in parts]})
        sent.append({"role": role, "content": [_sent(part) for part in parts]})
    return given, sent


def _given(part: str | Image.Image | Sound) -> dict[str, Any]:
    if isinstance(part, str):
        return kit.text_part(part)
    if isinstance(part, Image.Image):
        return {"type": "image", "image": part}
    return {"type": "audio", "path": kit.data_url(part.data, f"audio/{part.form}")}


def _sent(part: str | Image.Image | Sound) -> dict[str, Any]:
    if isinstance(part, str):
        return kit.text_part(part)
    return kit.image_part(kit.encoded(part)) if isinstance(part, Image.Image) else kit.sound_part(part.data, part.form)


def noise(seconds: float, rate: int = 16_000, channels: int = 1, form: str = "wav", seed: int = 0, **options: Any) -> Sound:
    """A sound of `seconds` (rounded up to whole samples) at `rate` Hz."""
    import soundfile

    count = math.ceil(seconds * rate)
    samples = 0.1 * np.random.default_rng(seed).standard_normal((count, channels))
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.astype(np.float32), rate, format=form.upper(), **options)
    return Sound(buffer.getvalue(), form)


class ServedFolder:
    """A folder to serve, and transformers' processor, and model, of it."""

    def __init__(self, name: str, served: Served, folder: Path, tiny: Any) -> None:
        """tiny: the conftest."""
        self.name, self.served, self._tiny = name, served, tiny
        self.family = tiny.FAMILIES[name]
        self.processor = processor_of(served)
        vocab = len(self.processor.tokenizer)
        self._changes = {
            **served.config,
            "text_config": {"vocab_size": vocab, **served.config.get("text_config", {})},
            **dict.fromkeys(served.placeholder_keys, vocab - 1),
        }
        self._folder = folder
        self.path = folder / name
        self.model: Any = None
        """transformers', after `add_weights`."""
        tiny.tiny_config(name, self._changes).save_pretrained(self.path)
        self.processor.save_pretrained(self.path)
        self._rewrite()

    def add_weights(self) -> None:
        self.model = self._tiny.make_tiny(self.name, self._folder, changes=self._changes).reference

    def inputs(self, conversation: list[dict[str, Any]]) -> Any:
        """The prompt's ids and tensors, by transformers' processor."""
        return self.processor.apply_chat_template(
            conversation,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=dict(self.served.call),
        )

    def answer(self, conversation: list[dict[str, Any]], count: int) -> tuple[list[int], list[int], list[float]]:
        """(prompt, greedy ids, their logprobs)."""
        inputs = self.inputs(conversation)
        prompt = inputs["input_ids"][0].tolist()
        with torch.no_grad():
            found = self.model.generate(
                **inputs, do_sample=False, max_new_tokens=count, return_dict_in_generate=True, output_logits=True
            )
        ids = found.sequences[0, len(prompt) :].tolist()
        logprobs = torch.stack(found.logits)[:, 0].float().log_softmax(-1)
        return prompt, ids, logprobs[torch.arange(len(ids)), ids].tolist()

    def token_bytes(self, token_id: int) -> bytes:
        """As the API's logprobs show it; no two tokens have the same."""
        text = self.processor.tokenizer.convert_ids_to_tokens(token_id)
        return bytes(LETTERS[char] for char in text) if set(text) <= LETTERS.keys() else text.encode()

    def _rewrite(self) -> None:
        place = self.path / "processor_config.json"
        config = json.loads(place.read_text(encoding="utf-8"))
        kind = "feature_extractor" if self.served.sounds else "image_processor"
        config[kind] = {key: value for key, value in {**config[kind], **self.served.says}.items() if value is not None}
        if self.served.older:
            (self.path / "preprocessor_config.json").write_text(json.dumps(config.pop(kind)), encoding="utf-8")
            template = self.path / "chat_template.jinja"
            written = json.dumps({"chat_template": template.read_text(encoding="utf-8")})
            (self.path / "chat_template.json").write_text(written, encoding="utf-8")
            template.unlink()
        place.write_text(json.dumps(config), encoding="utf-8")


COUNT = 12
"""Tokens of an answer."""


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: list[bytes]
    logprobs: list[float]
    usage: dict[str, Any]


def ask(server: DemoServer, messages: list[dict[str, Any]], **fields: Any) -> Answer:
    """A greedy answer of COUNT tokens."""
    status, body = server.call("/v1/chat/completions", _body(messages, **fields))
    assert status == 200, body
    choice = body["choices"][0]
    entries = choice["logprobs"]["content"]
    tokens = [bytes(entry["bytes"]) for entry in entries]
    return Answer(choice["message"]["content"], tokens, [entry["logprob"] for entry in entries], body["usage"])


def ask_streamed(server: DemoServer, messages: list[dict[str, Any]]) -> Answer:
    """The same, as it comes in."""
    body = _body(messages, stream=True, stream_options={"include_usage": True})
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, entries, usage = "", [], {}
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                entries += (choice.get("logprobs") or {}).get("content") or []
    return Answer(text, [bytes(entry["bytes"]) for entry in entries], [entry["logprob"] for entry in entries], usage)


def _body(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "logprobs": True}
    return {**body, "skip_special_tokens": False, **fields}


def check_answer(folder: ServedFolder, server: DemoServer, *turns: Parts) -> Answer:
    """The server's prompt, answer and logprobs are those of transformers, as a whole and in a stream."""
    given, sent = talk(*turns)
    prompt, ids, logprobs = folder.answer(given, COUNT)
    status, body = server.call("/tokenize", {"messages": sent})
    assert (status, body.get("tokens")) == (200, prompt), body
    answer = ask(server, sent)
    assert answer.tokens == [folder.token_bytes(token_id) for token_id in ids]
    assert np.abs(np.subtract(answer.logprobs, logprobs)).max() < TOLERANCE
    assert answer.usage["prompt_tokens"] == len(prompt)
    streamed = ask_streamed(server, sent)
    assert (streamed.text, streamed.tokens, streamed.logprobs) == (answer.text, answer.tokens, answer.logprobs)
    assert streamed.usage["prompt_tokens"] == len(prompt)
    return answer


TOLERANCE = 2e-4
"""Between logprobs, in float32."""


@contextmanager
def serving(folder: ServedFolder, *flags: str) -> Iterator[DemoServer]:
    with serve_demo("--model", str(folder.path), "--max-model-len", "1024", *flags) as server:
        yield server
