"""The shape of the K/V cache, plain and int8, and its allocation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from worker_fakes import BLOCK, FakeModel, loaded

from tokenbus.core.errors import ConfigError
from tokenbus.core.worker.attention import KVLayout

PLAIN = KVLayout(2, (3, 1), (64, 128), BLOCK, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(("stored", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_bytes_and_shapes(stored, dtype):
    assert PLAIN.bytes_per_token == 2 * 2 * (3 * 64 + 128)
    assert PLAIN.shapes(7) == [(7, BLOCK, 3, 64), (7, BLOCK, 1, 128)]
    assert (PLAIN.quantized, PLAIN.cache_dtype) == (False, torch.bfloat16)
    quantized = dataclasses.replace(PLAIN, stored=stored)
    assert (quantized.quantized, quantized.cache_dtype) == (True, dtype)
    assert quantized.bytes_per_token == 2 * (3 * 68 + 132)
    assert quantized.shapes(7) == [(7, BLOCK, 3, 68), (7, BLOCK, 1, 132)]
    assert quantized.dtype == torch.bfloat16


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_head_sizes_that_would_put_scales_between_words(stored):
    odd = dataclasses.replace(PLAIN, head_dim=(64, 66))
    with pytest.raises(ConfigError, match=rf"{stored} needs a head_dim that is a multiple of 4; this model's is 66"):
        dataclasses.replace(odd, stored=stored)


@pytest.mark.parametrize(("stored", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_the_runner_allocates_what_the_layout_says(stored, dtype):
    class Quantized(FakeModel):
        def kv_layout(self, block_size: int) -> KVLayout:
            return dataclasses.replace(PLAIN, block_size=block_size, stored=stored)

    runner = loaded(model=Quantized())
    assert runner._kv is not None
    for caches in (runner._kv.k, runner._kv.v):
        assert [tuple(cache.shape) for cache in caches] == [(512, BLOCK, 3, 68), (512, BLOCK, 1, 132)]
        for cache in caches:
            assert cache.dtype == dtype
            assert cache.data_ptr() % 64 == 0
            assert not torch.any(cache.view(torch.int8))
    assert runner.load().kv_bytes_per_token == 2 * (3 * 68 + 132)
