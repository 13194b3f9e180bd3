"""Quantised weights and K/V: int8, packed GGUF, int8 K/V. None is lossless; each is chosen at start."""
