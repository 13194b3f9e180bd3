"""Any other causal model: transformers' module, with its attention, linears, norms and activations replaced by ours.

What makes that sound, in this order, before the first request: the configuration and the class are checked (no state but K/V, plain
causal attention through transformers' attention interface); one token is run to record what each layer asks of attention; then a
short prompt is run through transformers' own eager attention and through ours, and the model is refused when the logits
differ; last, the same prompt is run token by token, and the model counts as lossless only when every bit is the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..device import GPU_IS_OFF
from ..errors import ModelError
from ..worker.attention import AttentionBatch, AttentionParams, KVLayout
from ..worker.batch import Piece, ragged
from ..worker.default_attention import default_attention
from ..worker.paged import make_cache
from .base import CausalModel, ForwardBatch, KVCache, ModelSpec
from .replace import replace_modules

if TYPE_CHECKING:
    from ..worker.attention import AttentionBackend
    from .resolve import ResolvedModel

STATIC_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
"""RoPE types whose frequencies do not depend on the length of the sequence."""
PROBE_TOKENS = 24
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest difference from eager attention in the self-check, as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class PlainShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_heads: int
    hidden_size: int
    vocab_size: int
    max_model_len: int


@dataclass(slots=True)
class _Call:
    """What one attention layer asks for, as recorded."""

    params: AttentionParams
    num_kv_heads: int
    head_dim: int


def read_config(resolved: ResolvedModel) -> Any:
    """transformers' configuration object; ModelError when the model can't be one that we run, for a reason its config.json tells."""
    from transformers import AutoConfig

    data, name = resolved.config, resolved.name
    if quantised := data.get("quantization_config"):
        method = quantised.get("quant_method", "unknown")
        raise _refuse(name, f"its weights are quantised ({method}); use an unquantised checkpoint or a GGUF file")
    if "auto_map" in data and data.get("model_type") not in _known_types():
        raise _refuse(name, "it needs code from its own repository, which is never run")
    try:
        config = AutoConfig.from_pretrained(resolved.path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _refuse(name, f"transformers does not know it: {str(error).splitlines()[0]}") from None
    _check_config(config, name)
    return config


def _known_types() -> set[str]:
    from transformers import CONFIG_MAPPING

    return set(CONFIG_MAPPING.keys())


def _refuse(name: str, reason: str) -> ModelError:
    return ModelError(f"{name} can't be run: {reason}")


def _check_config(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(name, f"{config.model_type} is an encoder-decoder model")
    if config.get_text_config() is not config:
        raise _refuse(name, f"{config.model_type} takes more than text (images or sound)")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise _refuse(name, "ALiBi positions are not supported")
    if getattr(config, "use_bidirectional_attention", False):
        raise _refuse(name, "its attention is bidirectional")
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        raise _refuse(name, f"it has {min(odd)!r} layers, which keep other state than K/V or mask in another way")
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [r for r in rope.values() if isinstance(r, dict)] or [rope]
    kinds = {r.get("rope_type", "default") for r in nested} - STATIC_ROPE
    if kinds:
        raise _refuse(name, f"RoPE type {min(kinds)!r} is not supported")


def causal_class(config: Any, name: str) -> type[nn.Module]:
    """The model's class; ModelError when it is not one that we can drive."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refuse(name, f"{config.model_type} is not a causal language model")
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(cls, "_is_stateful", False):
        raise _refuse(name, f"{cls.__name__} keeps recurrent state (state space or linear attention)")
    if not getattr(cls, "_supports_attention_backend", False):
        raise _refuse(name, f"{cls.__name__} does not use transformers' attention interface")
    if "position_ids" not in inspect.signature(cls.forward).parameters:
        raise _refuse(name, f"{cls.__name__} takes no position_ids")
    return cls


def plain_shape(resolved: ResolvedModel) -> PlainShape:
    """Sizes from the configuration, for planning memory; refuses what `load_fallback` would refuse for its configuration."""
    config = read_config(resolved)
    causal_class(config, resolved.name)
    try:
        heads = config.num_attention_heads
        return PlainShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            num_heads=heads,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_model_len=config.max_position_embeddings,
        )
    except AttributeError as error:
        raise _refuse(resolved.name, f"its configuration says nothing about its size ({error})") from None


def load_fallback(
    resolved: ResolvedModel, dtype: torch.dtype, device: torch.device, *, invariant: bool = True
) -> FallbackModel:
    """Load, check, replace, check again: see the module. Raises ModelError. The weights are read into the host's memory as a whole, and go
    to the device from there. invariant: if not, transformers' own linear layers stay (on a GPU: cuBLAS's), and nothing is promised."""
    name = resolved.name
    shape = plain_shape(resolved)
    config = read_config(resolved)
    model = _load(causal_class(config, name), resolved, config, dtype).to(device)
    tokens = torch.arange(7, 7 + 31 * PROBE_TOKENS, 31, device=device) % shape.vocab_size
    try:
        wanted = model(input_ids=tokens[None], position_ids=_positions(tokens)[None], use_cache=False).logits[0].float()
        ours = FallbackModel(model, resolved, shape, dtype, device, invariant=invariant)
        found = _run(ours, tokens, [PROBE_TOKENS])
        single = _run(ours, tokens, [1] * PROBE_TOKENS)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, IndexError) as error:
        raise _refuse(name, f"{type(model).__name__} can't be driven ({type(error).__name__}: {error})") from error
    limit = TOLERANCE[dtype] * float(wanted.abs().max())
    errors = (found - wanted).abs().amax(dim=-1)
    # in bfloat16 a token may go to another expert; that attention differs shows in most rows
    if not float(errors.max() if dtype == torch.float32 else errors.median()) <= limit:
        raise _refuse(name, f"{type(model).__name__} does something in attention that its interface does not tell us")
    if ours.spec.lossless and not torch.equal(found, single):
        ours.mark_lossy("a token's result depends on what else is in its batch")
    return ours


def _load(cls: type[nn.Module], resolved: ResolvedModel, config: Any, dtype: torch.dtype) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, info = cls.from_pretrained(  # pyright: ignore[reportAttributeAccessIssue]
            resolved.path,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{resolved.name} can't be loaded: {str(error).splitlines()[0]}") from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{resolved.name} can't be loaded: its checkpoint has no tensor {missing[0]}")
    return model.eval().requires_grad_(requires_grad=False)


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(tokens), device=tokens.device)


class FallbackModel(CausalModel):
    def __init__(
        self,
        model: Any,
        resolved: ResolvedModel,
        shape: PlainShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        invariant: bool = True,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.invariant = invariant
        self._name = resolved.name
        self._order: dict[int, int] = {}
        """id(attention module) -> index of its K/V."""
        self._calls: list[_Call] = []
        self._step: tuple[AttentionBatch, KVCache, AttentionBackend] | None = None
        replaced = replace_modules(model, linears=invariant)
        self._base = getattr(model, model.base_model_prefix)
        self._given = _Given()
        setattr(model, model.base_model_prefix, self._given)
        self._model = model
        self._attach(model)
        self._record(len(getattr(model.config, "layer_types", None) or ()), model.config)
        head = model.get_output_embeddings()
        reason = "" if not replaced.unknown else f"{', '.join(replaced.unknown)} not replaced by invariant kernels"
        reason = reason if invariant else GPU_IS_OFF
        head_params = shape.vocab_size * shape.hidden_size if head is not None else 0
        eos = resolved.config.get("eos_token_id")
        self.spec = ModelSpec(
            architecture=type(model).__name__,
            vocab_size=shape.vocab_size,
            max_model_len=shape.max_model_len,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            weights_bytes=replaced.parameters * dtype.itemsize,
            step_bytes=replaced.parameters * dtype.itemsize,
            head_bytes=head_params * dtype.itemsize,
            linear_params=replaced.linear_parameters - head_params,
            head_params=head_params,
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
            lossless=not reason,
            lossless_reason=reason,
        )

    def mark_lossy(self, reason: str) -> None:
        self.spec = dataclasses.replace(self.spec, lossless=False, lossless_reason=reason)

    def kv_layout(self, block_size: int) -> KVLayout:
        heads = tuple(c.num_kv_heads for c in self._calls)
        dims = tuple(c.head_dim for c in self._calls)
        return KVLayout(len(self._calls), heads, dims, block_size, self.dtype, self.device, invariant=self.invariant)

    def forward(self, batch: ForwardBatch, kv: KVCache, attention: AttentionBackend) -> torch.Tensor:
        self._step = (batch.attention, kv, attention)
        try:
            return self._hidden(batch.token_ids, batch.positions)
        finally:
            self._step = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.hidden = hidden[None]
        with torch.inference_mode():
            return self._model(input_ids=hidden.new_zeros(1, 1, dtype=torch.int64)).logits[0].float()

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            output = self._base(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        self._given.output_type = type(output)
        return output.last_hidden_state[0]

    def _attach(self, model: Any) -> None:
        """Register our attention under a name of this model's own, as long as it lives; a name without a mask function gets no mask."""
        from transformers import AttentionInterface

        name = f"tokenbus_{id(self):x}"
        attend = weakref.WeakMethod(self._attend)

        def forward_to_us(*args: Any, **more: Any) -> Any:
            return _alive(attend)(*args, **more)

        AttentionInterface.register(name, forward_to_us)
        weakref.finalize(self, AttentionInterface._global_mapping.pop, name, None)
        model.set_attn_implementation(name)

    def _record(self, num_typed: int, config: Any) -> None:
        self._hidden(
            torch.zeros(1, dtype=torch.int64, device=self.device), torch.zeros(1, dtype=torch.int64, device=self.device)
        )
        if len(self._calls) != config.num_hidden_layers:
            raise _refuse(
                self._name, f"{len(self._calls)} of its {config.num_hidden_layers} layers use the attention interface"
            )
        windows = [c.params.window for c in self._calls]
        types = config.layer_types if num_typed else []
        if any(t == "sliding_attention" and not w for t, w in zip(types, windows, strict=False)) or (
            not types and getattr(config, "sliding_window", None) and not any(windows)
        ):
            raise _refuse(self._name, "it has a sliding window that its attention interface does not pass on")

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention function. query: [1, heads, T, head_dim]; returns [1, T, heads, head_dim]."""
        if self._step is None:
            sinks = more.get("s_aux")
            if sinks is not None:
                raise _refuse(self._name, "attention sinks are not supported")
            if attention_mask is not None or more.get("position_bias") is not None:
                raise _refuse(self._name, "it gives attention a mask or a bias of its own")
            if not getattr(module, "is_causal", True) or more.get("is_causal") is False:
                raise _refuse(self._name, "its attention is not causal")
            if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
                raise _refuse(self._name, "its K and V have different sizes")
            scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
            self._order[id(module)] = len(self._calls)
            self._calls.append(_Call(AttentionParams(scale, sliding_window, softcap), key.shape[1], key.shape[3]))
            return torch.zeros_like(query).transpose(1, 2), None
        batch, kv, backend = self._step
        index = self._order[id(module)]
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        found = backend.attend(q, k, v, kv.k[index], kv.v[index], batch, self._calls[index].params)
        return found[None], None


def _alive(method: weakref.WeakMethod[Any]) -> Any:
    found = method()
    if found is None:
        raise RuntimeError("a module outlived its FallbackModel")
    return found


class _Given(nn.Module):
    """Stands where the decoder was inside the causal model, so that its own code turns hidden states into logits."""

    def __init__(self) -> None:
        super().__init__()
        self.output_type: Any = None
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output_type(last_hidden_state=self.hidden)


def _run(model: FallbackModel, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Logits [n, vocab_size] of one sequence, run in chunks over a cache of its own, with core's attention."""
    layout = model.kv_layout(16)
    blocks = list(range(-(-len(tokens) // layout.block_size)))
    kv, backend, ids, rows, start = make_cache(layout, len(blocks)), default_attention(layout), tokens.tolist(), [], 0
    for n in chunks:
        batch = ragged([Piece(ids[start : start + n], start, blocks)], layout)
        rows.append(model.logits(model.forward(batch, kv, backend)))
        start += n
    return torch.cat(rows)
