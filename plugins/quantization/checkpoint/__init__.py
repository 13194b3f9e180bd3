"""`quantization.checkpoint`: runs checkpoints whose weights are quantised already, as their config's `quantization_config` says.

config.json --`plugin`--> Format (awq, gptq, compressed, fp8) --`Format.survey` of the files' heads--> Survey (scheme by module)
--> Linears that read modules as StoredWeight: dequantised (dequantized.py), or on kernels/triton (triton_products.py)."""

from __future__ import annotations

from .plugin import QuantizedCheckpoints

__all__ = ["QuantizedCheckpoints"]
