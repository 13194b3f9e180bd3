"""A photo to a model, through a server, from beginning to end: `python examples/photo/photo.py [PICTURE]`.

Makes a tiny LLaVA with random weights in a temporary folder, serves it, and asks about the portrait of Grace Hopper that matplotlib
brings along (`pip install "tokenbus[report]"`), or about the picture given. The model has learnt nothing, so its answer means nothing:
what is shown is the way. With a real model it is the same: `tokenbus serve --model FOLDER`, and `ask` as it stands here.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SIDE, PATCH = 64, 8
"""Pixels of what the tower sees, and of one patch: 64 tokens a picture."""
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
)


def portrait() -> Path:
    """A photo that a package on PyPI has in it."""
    import matplotlib as mpl

    return Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"


def make_model(folder: Path, hidden: int = 64, layers: int = 2, tower_layers: int = 2) -> None:
    """All that a server needs of a model: weights, config.json, tokenizer, chat template, image processor."""
    import tokenizers
    import torch
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    text = {"model_type": "llama", "vocab_size": len(letters) + 1, "max_position_embeddings": 1024, **sizes}
    text |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    vision = {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, **sizes}
    vision["num_hidden_layers"] = tower_layers
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=len(letters)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


def ask(server: str, picture: Path, question: str) -> dict[str, Any]:
    """The answer to a chat request with a picture in it, in OpenAI's form; any client that speaks it would do."""
    kind = mimetypes.guess_type(picture.name)[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"
    parts = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 24}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def wait_ready(server: str, process: subprocess.Popen[bytes]) -> None:
    """RuntimeError when the server ends instead."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server ended with status {process.returncode}")


def main(picture: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        server = f"http://127.0.0.1:{port}"
        words = ["serve", "--model", folder, "--dtype", "float32", "--port", str(port), "--served-model-name", "tiny-llava"]
        process = subprocess.Popen([sys.executable, "-m", "tokenbus", *words])
        try:
            wait_ready(server, process)
            answer = ask(server, picture, "What is this? ")
        finally:
            process.terminate()
            process.wait(30)
    print(
        f"{picture.name}: {answer['usage']['prompt_tokens']} prompt tokens, {SIDE // PATCH}x{SIDE // PATCH} of them the picture's"
    )
    print(f"the model says: {answer['choices'][0]['message']['content']!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else portrait())
