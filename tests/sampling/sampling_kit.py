"""Rows without an engine: requests in any state, with the hooks of any set of plugins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tokenbus.core import sampler
from tokenbus.core.config import Config, LimitsConfig
from tokenbus.core.contexts import AdmissionContext
from tokenbus.core.host import PluginHost, make_host
from tokenbus.core.plan import WorkerRequest
from tokenbus.core.worker.state import SampleRow, WorkerRequestState

VOCAB = 1000
SAMPLING = ("sampling.bias", "sampling.logprobs", "sampling.penalties", "sampling.stops", "sampling.truncation")

CONTEXT = AdmissionContext(
    prompt_len=5,
    max_tokens=100,
    vocab_size=VOCAB,
    max_model_len=512,
    eos_token_ids=(0, 1),
    temperature=1.0,
    limits=LimitsConfig(),
    tokenize=lambda text: [ord(c) for c in text],
)


def context(**changes: Any) -> AdmissionContext:
    return replace(CONTEXT, **changes)


class Kit:
    """A host with the sampling plugins (or `features` of them) loaded."""

    def __init__(self, features: tuple[str, ...] = SAMPLING, plugins: dict[str, Any] | None = None) -> None:
        self.features = features
        self.host: PluginHost = make_host("worker", Config(plugins=plugins or {}))
        self.host.load(features)

    def row(self, tokens: list[int], num_prompt: int | None = None, **options: Any) -> SampleRow:
        order = WorkerRequest(
            request_id=options.pop("request_id", "r"),
            tokens=list(tokens),
            num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
            num_computed=0,
            blocks=[],
            temperature=options.pop("temperature", 1.0),
            seed=options.pop("seed", 0),
            choice=options.pop("choice", 0),
            features=self.features,
            fields=options,
        )
        request = WorkerRequestState(order, self.host.table(frozenset(self.features), order.fields))
        for impl in request.hooks.worker_request_added:
            impl(request=request)
        return SampleRow(request, len(tokens))

    def sample(self, logits: np.ndarray, rows: list[SampleRow]) -> sampler.Sampled:
        return sampler.sample(torch.from_numpy(logits.copy()), rows, self.host.table(frozenset(self.host.loaded)))

    def adjust(self, logits: np.ndarray, row: SampleRow) -> np.ndarray:
        """One row after all adjust_logits hooks."""
        changed = torch.from_numpy(logits.copy())[None]
        for impl in row.request.hooks.adjust_logits:
            impl(logits=changed, rows=[row])
        return changed[0].numpy()

    def check(self, name: str, fields: dict[str, Any], /, **changes: Any) -> dict[str, Any]:
        (impl,) = self.host.table(frozenset({name})).check_fields
        return impl(fields=fields, request=context(**changes))


def random_logits(rows: int, seed: int = 0, scale: float = 3.0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())
