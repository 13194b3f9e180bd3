"""Quantised weights and K/V: quantised checkpoints, int8, packed GGUF, int8 and float8 K/V. Each is chosen at start."""
