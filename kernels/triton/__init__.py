"""Triton kernels, for GPUs. Nothing is imported here: each module says what it holds."""
