"""Swaps the modules of a transformers model for bit-invariant ones, where their meaning is known or can be checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...kernels.torch_ops.elementwise import layer_norm, rms_norm
from ...kernels.torch_ops.linear import TiledLinear
from .rope import RopeTable

if TYPE_CHECKING:
    from collections.abc import Callable

HARMLESS = (nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList, nn.Sequential)
"""Exact per element, or only containers."""
ACTIVATIONS = {
    "GELU", "GELUActivation", "GELUTanh", "NewGELUActivation", "FastGELUActivation", "QuickGELUActivation",
    "SiLU", "SiLUActivation", "ReLU", "ReLUSquaredActivation", "Sigmoid", "Tanh",
}  # fmt: skip
LANES = 64
"""A multiple of what any vector loop takes at once."""
PIECE = 16384
"""Elements that an activation computes at once: few enough for one thread, a multiple of LANES."""


@dataclass(slots=True)
class Replaced:
    unknown: list[str] = field(default_factory=list)
    """Class names of modules left as they are whose results may depend on the batch."""
    parameters: int = 0
    linear_parameters: int = 0


class _Linear(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.inner = TiledLinear(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _LayerNorm(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class _RmsNorm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float, *, unit_offset: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.unit_offset = weight, eps, unit_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)


class _Elementwise(nn.Module):
    """An activation over small pieces, padded: no element is ever the odd one at the end of a vector loop."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.old = old

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        padded = nn.functional.pad(flat, (0, -len(flat) % LANES))
        done = torch.cat([self.old(piece) for piece in padded.split(PIECE)])
        return done[: len(flat)].view(x.shape)


class _Rotary(nn.Module):
    def __init__(self, frequencies: torch.Tensor, scale: float, *, interleaved: bool) -> None:
        super().__init__()
        self.table = RopeTable(frequencies, frequencies.device, scale)
        self.interleaved = interleaved

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = int(position_ids.max()) + 1
        pair = self.table.rows(position_ids.reshape(-1), length)
        whole = (t.repeat_interleave(2, -1) if self.interleaved else torch.cat([t, t], -1) for t in pair)
        cos, sin = (t.to(x.dtype) for t in whole)
        return cos.view(*position_ids.shape, -1), sin.view(*position_ids.shape, -1)


def replace_modules(model: nn.Module, *, linears: bool = True) -> Replaced:
    """Replace in place, deepest modules first. Says what was left and how large the model is. linears: if not, linear layers stay as they
    are, and are not counted as left."""
    done = Replaced()
    seen: set[int] = set()
    for parameter in model.parameters():
        if parameter.data_ptr() not in seen:
            seen.add(parameter.data_ptr())
            done.parameters += parameter.numel()
    _walk(model, done, linears)
    done.unknown = sorted(set(done.unknown))
    return done


def _walk(parent: nn.Module, done: Replaced, linears: bool) -> None:
    for name, child in list(parent.named_children()):
        if not linears and _is_linear(child):
            done.linear_parameters += child.weight.numel()  # pyright: ignore[reportCallIssue]
            continue
        new = _substitute(child, done)
        if new is not None:
            setattr(parent, name, new)
        elif isinstance(child, nn.MultiheadAttention):  # it reads its layers' weights itself
            done.unknown.append(type(child).__name__)
        elif not isinstance(child, HARMLESS):
            if next(child.parameters(recurse=False), None) is not None or not any(True for _ in child.children()):
                done.unknown.append(type(child).__name__)
            _walk(child, done, linears)
        else:
            _walk(child, done, linears)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _substitute(child: nn.Module, done: Replaced) -> nn.Module | None:
    kind = type(child).__name__
    if _is_linear(child):
        weight, bias = child.weight, child.bias
        done.linear_parameters += weight.numel()  # pyright: ignore[reportCallIssue]
        return _Linear(weight.detach() if isinstance(child, nn.Linear) else weight.detach().t().contiguous(), _detached(bias))  # pyright: ignore[reportCallIssue,reportArgumentType]
    if kind.endswith("Norm"):
        return _norm(child)
    if kind.endswith("RotaryEmbedding"):
        return _rotary(child)
    if kind in ACTIVATIONS:
        return _Elementwise(child)
    return None


def _detached(bias: Any) -> torch.Tensor | None:
    return None if bias is None else bias.detach()


def _norm(child: Any) -> nn.Module | None:
    """A norm over the last dimension, by its name; which kind it is, or none that we know, is found by running it."""
    eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
    weight, bias = getattr(child, "weight", None), getattr(child, "bias", None)
    if eps is None or weight is None or weight.dim() != 1:
        return None
    weight, bias = weight.detach(), _detached(bias)
    candidates: list[nn.Module] = [_LayerNorm(weight, bias, eps)]
    if bias is None:
        candidates += [_RmsNorm(weight, eps, unit_offset=offset) for offset in (False, True)]
    x = torch.linspace(-3, 5, 4 * len(weight), device=weight.device).view(4, -1).to(weight.dtype)
    return _first_equal(candidates, lambda m: m(x), child(x))


def _rotary(child: Any) -> nn.Module | None:
    frequencies = getattr(child, "inv_freq", None)
    if frequencies is None:
        return None
    x = torch.zeros(1, device=frequencies.device)
    positions = torch.arange(0, 640, 10, device=frequencies.device)[None]
    scale = float(getattr(child, "attention_scaling", 1.0))
    candidates = [_Rotary(frequencies, scale, interleaved=i) for i in (False, True)]
    try:
        wanted = torch.stack(child(x, positions))
    except (TypeError, ValueError, RuntimeError):
        return None
    return _first_equal(candidates, lambda m: torch.stack(m(x, positions)), wanted)


def _first_equal(candidates: list[Any], run: Callable[[Any], torch.Tensor], wanted: torch.Tensor) -> nn.Module | None:
    """The first candidate that gives `wanted`, to rounding."""
    limit = max(1e-5, 4 * torch.finfo(wanted.dtype).eps) * float(wanted.abs().max())
    for candidate in candidates:
        found = run(candidate)
        if found.shape == wanted.shape and float((found - wanted).abs().max()) <= limit:
            return candidate
    return None
