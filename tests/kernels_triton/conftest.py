"""Triton kernels run in Triton's interpreter here: on the CPU, slowly, and without any GPU; unless the environment says otherwise."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
