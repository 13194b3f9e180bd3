"""Triton kernels run in Triton's interpreter here: on the CPU, slowly, and without any GPU.

With TRITON_INTERPRET=0 in the environment those that run kernels do so on a GPU, and are marked `cuda`:
TRITON_INTERPRET=0 pytest -m cuda."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

try:
    from triton.runtime import interpreter
except ImportError:  # no test of this folder can run
    interpreter = None


def _number(tensor: Any) -> int:
    return int(tensor.handle.data.squeeze())


if interpreter is not None and hasattr(interpreter, "_patch_lang_tensor"):
    _patch = interpreter._patch_lang_tensor

    def _patch_with_numbers(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes a loop's bound a number by `int` of an array of one element, which numpy refuses from 2.4 on."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", _number)

    interpreter._patch_lang_tensor = _patch_with_numbers


ON_A_GPU = os.environ["TRITON_INTERPRET"] != "1"
WITHOUT_ONE = ("test_compile_", "test_configs", "test_attention_plugin")
"""Files that need no GPU: tables, what the compiler makes of the kernels, and a plugin on the CPU (on a GPU: tests/worker)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_A_GPU:
        for item in items:
            if item.path.parent == Path(__file__).parent and not item.path.name.startswith(WITHOUT_ONE):
                item.add_marker(pytest.mark.cuda)
                item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))


@pytest.fixture
def where_kernels_run() -> Iterator[None]:
    """Tensors are made there."""
    with torch.device("cuda" if ON_A_GPU else "cpu"):
        yield
