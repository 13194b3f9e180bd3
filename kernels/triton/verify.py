"""Speculative verification on the device: how many drafts of each request are right, and the tokens it gets.

The rule is core/worker/sampling.py's, which changes no token: a row samples for every draft and one more, each with its own counted random
numbers, and a draft is right when it is the token sampled at its place and all before it are right. A request gets its right drafts and
the token sampled behind them. (Speculative sampling, https://arxiv.org/abs/2211.17192, accepts more by another rule, and gives another
token than a run without drafts; with counted numbers this one gives the same.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import configs
from .launch import check_ids, launch, sizes


@triton.jit
def verify_kernel(drafts, draft_start, sampled, accepted, last, tokens, BLOCK: tl.constexpr):
    """One request: drafts from draft_start[r] on, rows of `sampled` from draft_start[r] + r on."""
    request = tl.program_id(0)
    start = tl.load(draft_start + request).to(tl.int64)
    count = (tl.load(draft_start + request + 1).to(tl.int64) - start).to(tl.int32)
    drafts = drafts + start
    sampled = sampled + start + request
    tokens = tokens + start + request
    right = count
    first = 0
    while first < count:
        i = first + tl.arange(0, BLOCK)
        draft = tl.load(drafts + i, mask=i < count, other=0).to(tl.int64)
        token = tl.load(sampled + i, mask=i < count, other=0).to(tl.int64)
        right = tl.minimum(right, tl.min(tl.where((i < count) & (draft != token), i, count), axis=0))
        first += BLOCK
    first = 0
    while first <= count:
        i = first + tl.arange(0, BLOCK)
        token = tl.load(sampled + i, mask=i <= count, other=0)
        tl.store(tokens + i, tl.where(i <= right, token, -1).to(token.dtype), mask=i <= count)
        first += BLOCK
    tl.store(accepted + request, right)
    tl.store(last + request, tl.load(sampled + right))


@dataclass(frozen=True, slots=True)
class Verified:
    """Outcome of `verify` for B requests with D drafts, on the drafts' device."""

    accepted: torch.Tensor
    """int32 [B]: drafts that are right; the request gets one token more."""
    last: torch.Tensor
    """[B], sampled's dtype: the token behind them, which the request's next step begins with. -1 if its row could not be sampled: rows
    behind a wrong draft don't count, whatever they hold."""
    tokens: torch.Tensor
    """[D + B], sampled's dtype: `sampled`, with -1 in each place behind a wrong draft."""


def verify(
    drafts: torch.Tensor, draft_start: torch.Tensor, sampled: torch.Tensor, *, config: Mapping[str, int] | None = None
) -> Verified:
    """Compare B requests' drafts with the tokens sampled at their places.

    drafts: int32 or int64 [D], all requests' behind each other. draft_start: int32 or int64 [B + 1]: request r's are
    draft_start[r] : draft_start[r + 1], maybe none; rising from 0 to D, which is not checked. sampled: int32 or int64 [D + B]: request
    r's tokens, one for each draft and one more, from draft_start[r] + r on; greedy or drawn, -1 where there is none.
    config: sizes in place of the stored ones; BLOCK: drafts that a program looks at together. Raises ValueError for other shapes, dtypes,
    devices or sizes. Waits for nothing.
    """
    use = sizes(configs.config("verify"), config)
    count = draft_start.numel() - 1
    if count < 0:
        raise ValueError("draft_start is empty; expected [B + 1], beginning with 0")
    draft_start = check_ids("draft_start", draft_start, (count + 1,), drafts.device)
    drafts = check_ids("drafts", drafts, (drafts.numel(),), drafts.device)
    sampled = check_ids("sampled", sampled, (len(drafts) + count,), drafts.device)
    accepted = torch.empty(count, dtype=torch.int32, device=drafts.device)
    last = torch.empty(count, dtype=sampled.dtype, device=drafts.device)
    tokens = torch.empty_like(sampled)
    launch(verify_kernel, (count,), drafts, draft_start, sampled, accepted, last, tokens, **use)
    return Verified(accepted, last, tokens)
