"""Where a model runs: the setting `model.device` made concrete, and which settings of [model] go with it. Imports torch only when asked."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .errors import ConfigError
from .kv.sizing import free_memory

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["cpu", "cuda"]
NODES = tuple(map(Path, ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")))
"""One of them is there wherever torch could find a GPU."""
GPU_IS_OFF = "model.batch_invariant is off: matrix products on a GPU depend on the batch"


def resolve_device(setting: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda": the current CUDA device for "cuda", and for "auto" where there is one.

    Raises ConfigError when "cuda" is asked for and torch finds none."""
    import torch

    if setting == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if setting == "cuda":
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no GPU and driver that it can use"
        )
        raise ConfigError(f"model.device is cuda, but {why}: set model.device = cpu, or auto")
    return torch.device("cpu")


def device_kind(setting: str) -> DeviceKind:
    """What `resolve_device` will say, without touching a GPU, and without importing torch where the system has none. Raises no error: a
    "cuda" that can't be had is told where the model is loaded."""
    if setting == "cpu":
        return "cpu"
    if setting == "cuda":
        return "cuda"
    if "torch" not in sys.modules and not any(node.exists() for node in NODES):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def batch_invariant(setting: str, kind: str) -> bool:
    """Whether rows must not depend on their batch. Raises ConfigError for "off" on the CPU, where it would gain nothing."""
    if setting == "off" and kind == "cpu":
        raise ConfigError(
            "model.batch_invariant = off is for GPUs, and the model runs on the CPU, where invariance costs nothing: leave it at auto"
        )
    return setting == "on" or (setting == "auto" and kind == "cpu")


def check_dtype(dtype: str, kind: str) -> None:
    """Raises ConfigError for float16 on the CPU, whose kernels compute in float32 and bfloat16."""
    if dtype == "float16" and kind == "cpu":
        raise ConfigError("model.dtype = float16 needs a GPU: set model.dtype = bfloat16 or float32, or model.device = cuda")


def no_triton(kind: str) -> str:
    """Why Triton kernels can't run on a device of this kind; empty when they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton's kernels run on GPUs (on the CPU only in its interpreter, for tests, with TRITON_INTERPRET=1)"
    return ""


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free: the GPU's, or what this process may still take of the machine's. 0: nothing is known."""
    if device.type != "cuda":
        return free_memory()
    import torch

    return int(torch.cuda.mem_get_info(device)[0])
