"""Sampling on the device: what core/sampler.py does with a row of logits, without copying it to the host. How: sampling_kernels.py.

A row's result does not depend on the other rows. Block sizes are untuned, and how fast this is is not yet measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from . import configs
from .launch import FLOATS, launch, power_of_two, sizes
from .sampling_kernels import filter_kernel, sample_kernel

OK, NOTHING_FINITE, NOT_A_NUMBER = 0, 1, 2
"""A row's state: no logit above -inf (of the model, or after top-k, top-p and min-p); a logit that is NaN or +inf."""
LOGPROBS: dict[str | None, int] = {None: 0, "raw": 1, "processed": 2}


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What each of B rows is sampled with: tensors [B] on the logits' device, int64 or float64 (so that bounds are the client's own)."""

    temperature: torch.Tensor
    """float64; below 1e-5: greedy."""
    top_k: torch.Tensor
    """int64; 0 or less: all."""
    top_p: torch.Tensor
    """float64, 0 to 1; 1: all."""
    min_p: torch.Tensor
    """float64, 0 to 1; 0: all."""
    seed: torch.Tensor
    """int64: the seed's low 64 bits."""
    position: torch.Tensor
    """int64: index of the token to draw in its sequence."""
    choice: torch.Tensor
    """int64."""

    @classmethod
    def make(
        cls,
        temperature: Sequence[float],
        seed: Sequence[int],
        position: Sequence[int],
        *,
        choice: Sequence[int] | None = None,
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """From plain numbers, a copy to the device for each tensor. What is left out is neutral."""
        n = len(temperature)

        def integers(values: Sequence[int] | None) -> torch.Tensor:
            return torch.tensor([_signed(v) for v in values or [0] * n], dtype=torch.int64).to(device)

        def floats(values: Sequence[float] | None, neutral: float) -> torch.Tensor:
            return torch.tensor([neutral] * n if values is None else list(values), dtype=torch.float64).to(device)

        return cls(
            floats(temperature, 1.0), integers(top_k), floats(top_p, 1.0), floats(min_p, 0.0), integers(seed),
            integers(position), integers(choice),
        )  # fmt: skip

    def check(self, rows: int, device: torch.device) -> None:
        """Raises ValueError unless all are as described, for so many rows."""
        for name in self.__slots__:
            x = getattr(self, name)
            dtype = torch.float64 if name in {"temperature", "top_p", "min_p"} else torch.int64
            if x.dtype is not dtype or tuple(x.shape) != (rows,) or x.device != device or not x.is_contiguous():
                raise ValueError(
                    f"{name} is {x.dtype} {list(x.shape)} on {x.device}; expected {dtype} [{rows}] on {device}, contiguous"
                )


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Outcome of `sample`, on the logits' device."""

    tokens: torch.Tensor
    """int64 [B]; -1 for a row that has none."""
    logprobs: torch.Tensor | None
    """float32 [B], less than 1e-5 from a float64 log-softmax; NaN for a row without a token. None when not asked for."""
    states: torch.Tensor
    """int32 [B]: OK, NOTHING_FINITE or NOT_A_NUMBER."""


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    *,
    logprobs: Literal["raw", "processed"] | None = None,
    config: Mapping[str, int] | None = None,
) -> SampledRows:
    """Draw one token for each row of logits: temperature, then top_k, top_p and min_p, each on what the one before left, then Gumbel-max.

    logits: [B, vocabulary], float32, bfloat16 or float16, rows of any stride; not changed: masks, biases and penalties are in them already.
    Greedy rows (temperature below 1e-5) give the most likely token, the lowest id among equals, whatever the other parameters.
    logprobs: of the drawn token, by the given logits ("raw"), or by what was drawn from ("processed"; greedy rows: raw).
    config: sizes in place of the stored ones; BLOCK, the ids that a program looks at together, is a power of two from 16 on. Waits for
    nothing: a row's failure is in `states`.
    Raises ValueError for other shapes, dtypes or names.
    """
    use = _checked(logits, rows, config)
    if logprobs not in LOGPROBS:
        raise ValueError(f"logprobs is {logprobs!r}; expected 'raw', 'processed' or None")
    count, size = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    states = torch.empty(count, dtype=torch.int32, device=logits.device)
    values = torch.empty(count, dtype=torch.float32, device=logits.device)
    launch(
        sample_kernel,
        (count,),
        logits,
        logits.stride(0),
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.position,
        rows.choice,
        tokens,
        values,
        states,
        size=size,
        LOGPROBS=LOGPROBS[logprobs],
        **use,
    )
    return SampledRows(tokens, None if logprobs is None else values, states)


def filter_logits(logits: torch.Tensor, rows: SamplingRows, *, config: Mapping[str, int] | None = None) -> torch.Tensor:
    """What `sample` draws from: (logits - max) / temperature, float32 [B, vocabulary], -inf where top_k, top_p or min_p removed a token.

    Greedy rows, and rows from which nothing can be drawn, are copied as they are. Arguments and errors as in `sample`."""
    use = _checked(logits, rows, config)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    parameters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    launch(filter_kernel, (len(logits),), logits, logits.stride(0), *parameters, out, size=logits.shape[1], **use)
    return out


def _checked(logits: torch.Tensor, rows: SamplingRows, config: Mapping[str, int] | None) -> dict[str, int]:
    if logits.dtype not in FLOATS or logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; expected float32, bfloat16 or float16 [B, vocabulary]"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError("each row of logits must be in one piece (stride 1)")
    rows.check(len(logits), logits.device)
    use = sizes(configs.config("sampling", n=logits.shape[1]), config)
    if use["BLOCK"] < 16 or use["BLOCK"] & (use["BLOCK"] - 1):
        raise ValueError(f"BLOCK is {use['BLOCK']}; expected a power of two from 16 on")
    return {**use, "BLOCK": min(use["BLOCK"], max(16, power_of_two(logits.shape[1])))}


def _signed(value: int) -> int:
    """The int64 with the same low 64 bits."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value
