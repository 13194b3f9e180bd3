"""From what the user wrote after --model to a plain Hugging Face folder. Used by the front (tokenizer) and the engine (weights)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import demo

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    path: Path
    """A folder with config.json and the tokenizer's files; the weights too, unless `gguf`."""
    name: str
    config: dict[str, Any]
    """config.json; `eos_token_id` holds generation_config.json's ids as well."""
    gguf: Path | None = None
    """The GGUF file the folder was made from. Its weights are dequantised when the model is loaded, by `gguf_file.weights`."""


def resolve(model: str) -> ResolvedModel:
    """Find, or fetch and convert, `model`: "demo", a folder, a .gguf file, or a hub id.

    Imports torch only when a GGUF file's tokenizer is converted for the first time; the result is cached.
    Raises ModelError, saying what was looked for, when there is no such model."""
    if model == "demo":
        return _gguf(demo.fetch_demo(), demo.NAME)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{model} is a file, but not a .gguf file; give a GGUF file, a folder, a hub id or 'demo'")
        return _gguf(path.resolve(), path.stem)
    if path.is_dir():
        return _folder(path.resolve(), path.resolve().name)
    if model.endswith(".gguf") or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no file or folder {model}")
    return _folder(_from_hub(model), model)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file; ModelError when it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return data


def _folder(path: Path, name: str, gguf: Path | None = None) -> ResolvedModel:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: not a Hugging Face model folder")
    config = read_json(path / "config.json")
    if (path / "generation_config.json").is_file():
        more = read_json(path / "generation_config.json").get("eos_token_id")
        config["eos_token_id"] = sorted({*_ids(config.get("eos_token_id")), *_ids(more)})
    return ResolvedModel(path, name, config, gguf)


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or ())


def _gguf(path: Path, name: str) -> ResolvedModel:
    from .gguf_file import convert

    return _folder(convert(path), name, path)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except HFValidationError:
        raise ModelError(f"{model!r} is neither a file, a folder, 'demo', nor a hub id (owner/name)") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{model} is not in the local hub cache, and the hub can't be reached (or HF_HUB_OFFLINE is set)"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(f"{model} can't be had from the hub: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise ModelError(f"{model} can't be had from the hub: {error}") from None
