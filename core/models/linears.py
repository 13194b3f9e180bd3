"""The contract of the "quantization" slot: what makes a decoder's matrix products, and of which weights. No implementation here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .config import DecoderConfig

Linear = Callable[["torch.Tensor"], "torch.Tensor"]
"""x [M, in_features] of the model's dtype -> [M, out_features] of the same, bit-invariant per row."""

Embedding = Callable[["torch.Tensor"], "torch.Tensor"]
"""int64 token ids [T] -> rows [T, hidden_size] of the model's dtype."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix as a GGUF file stores it."""

    data: np.ndarray
    """uint8 [rows, bytes of a row], contiguous; may be the file's memory: not to be written."""
    type: str
    """GGUF's name of the format: "Q4_1", "Q6_K", "F16", ..."""
    in_features: int
    """Values of a row."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a GGUF file."""

    type: str
    """GGUF's name of the format."""
    nbytes: int
    dims: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a safetensors file."""

    dtype: str
    """As the file's head says: "F32", "BF16", "F8_E4M3", "I32", ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One product of the decoder: the rows of several tensors, one after the other."""

    names: tuple[str, ...]
    """Of the tensors, without ".weight" and ".bias"."""
    rows: int
    columns: int
    bias: bool = False

    @property
    def weights(self) -> int:
        return self.rows * self.columns


def own_spelling(name: str) -> Sequence[str]:
    """Of a module of a text model, which has one name."""
    return (name,)


@dataclass(frozen=True)
class ModelToLoad:
    """What is known of a model before its weights are read."""

    name: str
    config: DecoderConfig | None
    """None: it runs through transformers, whose layers this slot can't replace."""
    dtype: str
    """Of activations, norms, and of weights that nobody quantises: "float32", "bfloat16" or, on a GPU, "float16"."""
    no_cpu_kernels: str
    """Why the model can't run on the C++ kernels of kernels/cpu here; empty when it can."""
    read_formats: Callable[[], Mapping[str, Stored]] | None = None
    """Reads the table of a GGUF file's tensors."""
    read_heads: Callable[[], Mapping[str, Tensor]] | None = None
    """Reads the tables of a checkpoint's safetensors files; of a multimodal model's, what is of the text part."""
    quantization: Mapping[str, Any] | None = None
    """The `quantization_config` of its config.json, if it has one."""
    spellings: Callable[[str], Sequence[str]] = own_spelling
    """The names by which `quantization` may mean a module, from its name in `tensors`. Of the text part of a multimodal model there are
    several, since whole models have been written in several ways; nothing says which of them was meant."""
    device: str = "cpu"
    """Kind of the device that the model will be on: "cpu" or "cuda"."""
    triton: bool = False
    """Its products may be, and with device "cuda" should be, those of kernels/triton, on tensors of `device`."""
    invariant: bool = True
    """Each row's result must depend on that row alone (model.batch_invariant). Where not, a product may choose the faster way."""

    @cached_property
    def stored(self) -> Mapping[str, Stored] | None:
        """A GGUF file's tensors, by Hugging Face's names. None: the model is no GGUF file."""
        return None if self.read_formats is None else self.read_formats()

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """A checkpoint's tensors, by name; empty for a GGUF file. ModelError when its files can't be read."""
        return {} if self.read_heads is None else self.read_heads()

    @property
    def method(self) -> str:
        """How the checkpoint is quantised, by its own word ("awq"); empty when it is not."""
        return "" if self.quantization is None else str(self.quantization.get("quant_method", "unknown"))


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that says no: the server does not start, with this reason. A plugin that is on is never left out in silence."""

    reason: str
    """Completes "MODEL can't be run with PLUGIN: ..."."""


class Weights(Protocol):
    """A checkpoint's tensors by Hugging Face's names ("model.layers.0.mlp.down_proj.weight")."""

    def get(self, name: str) -> torch.Tensor:
        """In the model's dtype, on its device; dequantised where the file holds it packed. May be the file's memory: not to be written.
        Raises ModelError when there is no such tensor."""
        ...

    def packed(self, name: str) -> PackedMatrix:
        """As the file has it, with the rows in Hugging Face's order. Only of a source that was opened for a maker with `reads_packed`;
        raises ModelError when there is no such tensor."""
        ...

    def raw(self, name: str) -> torch.Tensor | None:
        """As the file has it, of whatever dtype, on the model's device; None when there is no such tensor. May be the file's memory.
        Raises ModelError of a source that is a GGUF file."""
        ...


class Linears(ABC):
    """Makes the matrix products of one model, each once, while the decoder is built."""

    invariant: ClassVar[bool] = True
    """A row's result depends on that row alone, bit by bit. If not, the effective state says that nothing is lossless."""
    reads_packed: ClassVar[bool] = False
    """It takes matrices by `Weights.packed`: a GGUF file is then read in place, and is not dequantised as a whole."""
    fused: ClassVar[bool] = False
    """Its products are layers of kernels/cpu (CpuLinear, QuantLinear), its embedding is a Table or HeadRows (core/models/cpu_linears.py):
    the decoder then runs whole steps in C++. If not, they may be any callables, and the decoder runs layer by layer on torch or Triton."""

    @property
    def lossy_reason(self) -> str:
        """Why rows may depend on their batch; empty if `invariant`."""
        return "" if self.invariant else f"matrix products of {type(self).__name__} are not batch invariant"

    def source(self, weights: Weights) -> Weights:
        """What the decoder reads in place of the checkpoint, norms and embedding included. For changes that the model as a whole is
        indifferent to, such as a rotation of the residual stream."""
        return weights

    @abstractmethod
    def one(self, weights: Weights, matrix: Matrix) -> Linear: ...

    @abstractmethod
    def gate_up(self, weights: Weights, matrix: Matrix) -> Linear:
        """The MLP's two matrices, of two tensors or of one that has both: gate's outputs, then up's. If `fused`, an object with `gate`
        and `up`."""

    @abstractmethod
    def embedding(self, weights: Weights, name: str, head: Linear | None) -> Embedding:
        """Of the tensor `name` (as in "model.embed_tokens.weight"); head: the LM head when the model is tied."""

    @abstractmethod
    def nbytes(self, matrix: Matrix) -> int:
        """Memory that the product of `one` or `gate_up` will hold, biases included."""

    @abstractmethod
    def embedding_bytes(self, matrix: Matrix, *, tied: bool) -> int:
        """Memory that `embedding` will hold beside the head."""


def tensors_of(weights: Weights, matrix: Matrix) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The matrix's tensors [N, K], and its biases [N] (none: an empty list), in the model's dtype."""
    tensors = [weights.get(f"{name}.weight") for name in matrix.names]
    return tensors, biases_of(weights, matrix)


def biases_of(weights: Weights, matrix: Matrix) -> list[torch.Tensor]:
    return [weights.get(f"{name}.bias") for name in matrix.names] if matrix.bias else []


ChooseLinears = Callable[[ModelToLoad], "Linears | None"]
"""Who holds the slot for this model; None: nobody. Raises ModelError with the holder's reason."""
