"""Convolutions as matrix products: torch's results, whatever the sizes, and the same bits with any number of threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenbus.plugins.multimodal.convolutions import Convolution, replace_convolutions

CASES = [
    (nn.Conv1d(8, 32, 3, padding=1), (1, 8, 48)),
    (nn.Conv1d(5, 7, 3, stride=2, padding=1, bias=False), (2, 5, 31)),
    (nn.Conv2d(3, 12, 4, stride=4), (2, 3, 18, 14)),
    (nn.Conv2d(3, 12, (4, 2), stride=(2, 3), padding=(1, 0)), (1, 3, 9, 11)),
    (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
]


@pytest.mark.parametrize(("conv", "shape"), CASES, ids=str)
def test_equals_torch_with_any_number_of_threads(conv: nn.Module, shape: tuple[int, ...]) -> None:
    x, ours, before = torch.randn(shape, generator=torch.Generator().manual_seed(0)), Convolution(conv), torch.get_num_threads()
    with torch.inference_mode():
        wanted, found = conv(x), ours(x)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(ours(x), found)
        finally:
            torch.set_num_threads(before)


def test_only_plain_ones_are_replaced() -> None:
    model = nn.ModuleList([nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same")])
    replace_convolutions(model)
    assert [type(child) is Convolution for child in model] == [True, False, False]
