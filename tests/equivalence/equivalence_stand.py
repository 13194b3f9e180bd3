"""The self test's stand, with a model and a kernel set by name."""

from __future__ import annotations

from typing import Literal

from tokenbus.core.config import CacheConfig, Config, ModelConfig
from tokenbus.core.selftest import stand
from tokenbus.core.selftest.stand import Answer, Ask, Outcome

__all__ = ["Answer", "Ask", "Outcome", "Stand"]

BLOCK = 16


class Stand(stand.Stand):
    def __init__(
        self,
        model: str,
        kernels: Literal["cpu", "torch"],
        enable: tuple[str, ...] = (),
        dtype: Literal["float32", "bfloat16"] = "float32",
        block_size: int = BLOCK,
    ) -> None:
        config = Config(
            model=ModelConfig(model=model, dtype=dtype, max_model_len=512, kernels=kernels),
            cache=CacheConfig(block_size=block_size),
        )
        super().__init__(config, (f"attention.{kernels}", *enable))
        assert self.info.lossless, self.info.lossless_reason
