"""How a weight in 4 bits is laid out for `quantized_matmul.int4_matmul`, and how the layouts of AWQ and GPTQ checkpoints become it.

w[n, k] = (q[n, k] - zero[group of k, n]) * scale[group of k, n], q in 0..15, groups of 32, 64 or 128 inputs. Two q share a byte, those of
the first half of a group with those of its second half:

    byte of a row     0          1         ...   H-1               H ...             (H = group_size / 2)
    low 4 bits        k = 0      k = 1           k = H-1           k = 2H ...
    high 4 bits       k = H      k = H + 1       k = 2H - 1        k = 3H ...

so that a kernel reads a run of bytes and multiplies it with two runs of activations, without shuffling either.

AWQ: Lin et al., arXiv 2306.00978 (layout: AutoAWQ's "gemm" version). GPTQ: Frantar et al., arXiv 2210.17323 (layout: AutoGPTQ's).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP_SIZES = (128, 64, 32)
SYMMETRIC_ZERO = 8
"""What is subtracted where there are no zeros."""
EIGHT_ONES = 0x11111111
"""1 in each 4 bits of a word."""
AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ puts the outputs 8c, 8c + 1 ... 8c + 7 in a word: 4 bits from bit 4 * AWQ_COLUMNS[i]."""


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A weight [out_features, in_features] in 4 bits (see the module). Raises ValueError for tensors that aren't of its shapes."""

    data: torch.Tensor
    """uint8 [out_features, groups * group_size / 2], rows contiguous; groups = ceil(in_features / group_size)."""
    scales: torch.Tensor
    """float32, bfloat16 or float16 [groups, out_features], contiguous."""
    zeros: torch.Tensor | None
    """uint8 [groups, out_features], contiguous. None: 8 everywhere."""
    group_size: int
    in_features: int
    order: torch.Tensor | None = None
    """int64 [in_features]: which input the k-th of `data` belongs to, where a quantiser sorted them (GPTQ's act-order). None: the k-th."""

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"groups of 32, 64 or 128 inputs can be packed, not of {self.group_size}")
        groups, outputs = self.groups, self.data.shape[0]
        if self.data.dtype != torch.uint8 or self.data.shape != (outputs, groups * self.group_size // 2):
            raise ValueError(
                f"{self.in_features} inputs take uint8 [N, {groups * self.group_size // 2}], not {self.data.dtype} {list(self.data.shape)}"
            )
        if self.data.stride(1) != 1 and self.data.shape[1] > 1:
            raise ValueError("the rows of data must be contiguous")
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and (tensor.shape != (groups, outputs) or not tensor.is_contiguous()):
                raise ValueError(f"{name} must be [{groups}, {outputs}] and contiguous, not {list(tensor.shape)}")
        if self.zeros is not None and self.zeros.dtype != torch.uint8:
            raise ValueError(f"zeros must be uint8, not {self.zeros.dtype}")
        if self.scales.dtype not in {torch.float32, torch.bfloat16, torch.float16}:
            raise ValueError(f"scales must be float32, bfloat16 or float16, not {self.scales.dtype}")
        if self.order is not None and self.order.shape != (self.in_features,):
            raise ValueError(f"order must be [{self.in_features}], not {list(self.order.shape)}")

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def out_features(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.data, self.scales, self.zeros, self.order) if t is not None)

    def dequantized(self) -> torch.Tensor:
        """float32 [out_features, in_features], inputs in their own order: what the kernel computes with."""
        zeros = SYMMETRIC_ZERO if self.zeros is None else self._spread(self.zeros)
        weight = (unpack(self.data, self.in_features, self.group_size).float() - zeros) * self._spread(self.scales)
        if self.order is None:
            return weight
        own = torch.empty_like(weight)
        own[:, self.order] = weight
        return own

    def _spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        """[groups, N] -> float32 [N, in_features]."""
        return of_groups.float().T.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]


def pack(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """q, uint8 [N, K] in 0..15, as `Int4Weight.data`. The last group is filled up with zeros, which meet no input."""
    outputs, inputs = values.shape
    groups = -(-inputs // group_size)
    padded = torch.nn.functional.pad(values, (0, groups * group_size - inputs))
    halves = padded.reshape(outputs, groups, 2, group_size // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(outputs, groups * group_size // 2).contiguous()


def unpack(data: torch.Tensor, in_features: int, group_size: int) -> torch.Tensor:
    """The inverse of `pack`: uint8 [N, in_features]."""
    grouped = data.reshape(data.shape[0], -1, group_size // 2)
    return torch.cat([grouped & 15, grouped >> 4], dim=2).reshape(data.shape[0], -1)[:, :in_features]


def quantize_int4(weight: torch.Tensor, group_size: int = 128) -> Int4Weight:
    """A float weight [N, K] rounded to the nearest of 15 levels, -7..7 times max|w| / 7 of the group: without zeros, and without what AWQ
    and GPTQ do for accuracy. Scales are float32."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group_size)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group_size - inputs)).view(outputs, groups, group_size)
    scales = padded.abs().amax(dim=2) / 7
    levels = torch.round(padded / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, :, None]) + SYMMETRIC_ZERO
    values = levels.to(torch.uint8).view(outputs, groups * group_size)
    return Int4Weight(pack(values, group_size), scales.T.contiguous(), None, group_size, inputs)


def int4_from_awq(qweight: torch.Tensor, qzeros: torch.Tensor | None, scales: torch.Tensor, group_size: int) -> Int4Weight:
    """An AWQ checkpoint's tensors of a linear layer.

    qweight: int32 [K, N / 8], eight outputs a word, in AWQ's order. qzeros: int32 [groups, N / 8], the same; None when the checkpoint has
    no zero points. scales: [groups, N]. group_size: as the checkpoint says, -1 for one group. Raises ValueError for tensors of other
    shapes, and groups that are no multiple of 32."""
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    size, groups = _groups(inputs, group_size)
    _check("qweight", qweight, (inputs, outputs // 8))
    _check("scales", scales, (groups, outputs))
    if qzeros is not None:
        _check("qzeros", qzeros, (groups, outputs // 8))
    order = torch.tensor(AWQ_COLUMNS, device=qweight.device)
    values = _nibbles(qweight)[:, :, order].reshape(inputs, outputs).T
    zeros = None if qzeros is None else _nibbles(qzeros)[:, :, order].reshape(groups, outputs)
    return _assembled(values, zeros, scales, size, None)


def int4_from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    group_size: int,
    g_idx: torch.Tensor | None = None,
    *,
    zeros_less_one: bool = True,
) -> Int4Weight:
    """A 4-bit GPTQ checkpoint's tensors of a linear layer.

    qweight: int32 [K / 8, N], eight inputs a word. qzeros: int32 [groups, N / 8], eight outputs a word; None for symmetric weights. scales:
    [groups, N]. group_size: as the checkpoint says, -1 for one group. g_idx: [K], the group of each input; where they are sorted by
    activation (act-order, `desc_act`) the result has an `order`. zeros_less_one: the zero points are stored less one, as in
    `checkpoint_format: gptq`, where GPTQModel takes 1 from each of a word's eight by one subtraction (so that a 0 borrows from the next).
    In "gptq_v2" they are stored as they are: False.
    Raises ValueError for tensors of other shapes, groups that are no multiple of 32, and a g_idx whose groups have other sizes."""
    inputs, outputs = qweight.shape[0] * 8, qweight.shape[1]
    size, groups = _groups(inputs, group_size)
    _check("qweight", qweight, (inputs // 8, outputs))
    _check("scales", scales, (groups, outputs))
    values = _nibbles(qweight).permute(1, 0, 2).reshape(outputs, inputs)
    zeros = None
    if qzeros is not None:
        _check("qzeros", qzeros, (groups, outputs // 8))
        zeros = _nibbles(qzeros + EIGHT_ONES if zeros_less_one else qzeros).reshape(groups, outputs)
    order = None if g_idx is None else _order(g_idx.long(), inputs, size)
    if order is not None:
        values = values[:, order]
    return _assembled(values, zeros, scales, size, order)


def int4_from_values(
    values: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    group_size: int,
    g_idx: torch.Tensor | None = None,
) -> Int4Weight:
    """Of unpacked numbers: values uint8 [N, K] in 0..15, zeros uint8 [groups, N] (None: 8 everywhere), scales [groups, N], g_idx and
    group_size as in `int4_from_gptq`. Raises ValueError for others."""
    outputs, inputs = values.shape
    size, groups = _groups(inputs, group_size)
    if scales.shape != (groups, outputs) or (zeros is not None and zeros.shape != (groups, outputs)):
        raise ValueError(f"scales and zeros must be [{groups}, {outputs}], not {list(scales.shape)}")
    order = None if g_idx is None else _order(g_idx.long(), inputs, size)
    return _assembled(values if order is None else values[:, order], zeros, scales, size, order)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [A, B] -> uint8 [A, B, 8], lowest bits first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return (words[:, :, None] >> shifts & 15).to(torch.uint8)


def _groups(inputs: int, group_size: int) -> tuple[int, int]:
    """(size, number) of a checkpoint's groups."""
    size = inputs if group_size == -1 else group_size
    if size < 1 or (size < inputs and size % 32):
        raise ValueError(f"groups of a multiple of 32 inputs, or all of them, can be repacked, not of {group_size}")
    return size, -(-inputs // size)


def _order(g_idx: torch.Tensor, inputs: int, size: int) -> torch.Tensor | None:
    """The inputs sorted by their groups; None when they already are."""
    if g_idx.shape != (inputs,):
        raise ValueError(f"g_idx must be [{inputs}], not {list(g_idx.shape)}")
    in_order = torch.arange(inputs, device=g_idx.device) // size
    if torch.equal(g_idx, in_order):
        return None
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order], in_order):
        raise ValueError(f"g_idx does not divide {inputs} inputs into groups of {size}")
    return order


def _assembled(
    values: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, size: int, order: torch.Tensor | None
) -> Int4Weight:
    """values: [N, K]; zeros and scales: [groups of `size`, N]. A group that is larger than ours becomes several with the same scale."""
    inputs = values.shape[1]
    ours = 128 if size >= inputs else next(g for g in GROUP_SIZES if size % g == 0)
    groups = -(-inputs // ours)

    def spread(t: torch.Tensor) -> torch.Tensor:
        repeats = groups if size >= inputs else size // ours
        return t.repeat_interleave(repeats, dim=0)[:groups].contiguous()

    return Int4Weight(pack(values, ours), spread(scales), None if zeros is None else spread(zeros), ours, inputs, order)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    """Scales are floating-point, everything else comes in words of 32 bits."""
    is_right = tensor.is_floating_point() if name == "scales" else tensor.dtype == torch.int32
    if tuple(tensor.shape) != shape or not is_right:
        kind = "floating-point" if name == "scales" else "int32"
        raise ValueError(f"{name} must be {kind} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
