"""logit_bias, bad_words and allowed_token_ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core.contexts import AdmissionContext
from ...core.errors import FieldError, shorten
from ...core.plugin import Plugin, PluginInfo, StashKey, hookimpl
from . import checks

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ...core.worker.state import SampleRow, WorkerRequestState


class Masks:
    """A request's bias and bans as arrays."""

    def __init__(self, fields: dict[str, Any]) -> None:
        import numpy as np

        bias = fields.get("logit_bias", ())
        self.bias_ids = np.array([i for i, _ in bias], dtype=np.int64)
        self.bias_values = np.array([b for _, b in bias], dtype=np.float32)
        words = fields.get("bad_words", ())
        self.banned = np.array([w[0] for w in words if len(w) == 1], dtype=np.int64)
        self.phrases = [(w[:-1], w[-1]) for w in words if len(w) > 1]
        self.reach = max((len(prefix) for prefix, _ in self.phrases), default=0)
        """Tokens at the end of the output that a phrase may look at."""
        allowed = fields.get("allowed_token_ids")
        self.allowed = None if allowed is None else np.array(allowed, dtype=np.int64)

    def apply(self, row: np.ndarray, output: Sequence[int]) -> None:
        """Change a float32 row in place. output: the end of the output, the last `reach` tokens at least."""
        row[self.bias_ids] += self.bias_values
        if self.allowed is not None:
            kept = row[self.allowed]
            row.fill(-math.inf)
            row[self.allowed] = kept
        row[self.banned] = -math.inf
        for prefix, last in self.phrases:
            if list(output[-len(prefix) :]) == prefix:
                row[last] = -math.inf


MASKS = StashKey[Masks]("sampling.bias")


class Bias(Plugin):
    """logit_bias: added to the logits, after the penalties. allowed_token_ids: everything else is banned. bad_words: each word is tokenised
    as it stands and with a leading space; the last id of such a sequence is banned where the output ends with the ids before it.

    Hands on: logit_bias as [[id, bias], ...], bad_words as lists of ids, allowed_token_ids sorted.
    """

    info = PluginInfo(
        name="sampling.bias",
        summary="logit_bias, bad_words, allowed_token_ids",
        scope="step",
        lossless=False,
        claims={"logit_bias", "bad_words", "allowed_token_ids"},
        enforces=True,
        default=True,
    )

    @hookimpl
    def check_fields(self, fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any]:
        checked: dict[str, Any] = {}
        if "logit_bias" in fields:
            checked["logit_bias"] = _logit_bias(fields["logit_bias"], request)
        if "bad_words" in fields:
            checked["bad_words"] = _bad_words(fields["bad_words"], request)
        if "allowed_token_ids" in fields:
            limit = request.limits.max_allowed_token_ids
            checked["allowed_token_ids"] = checks.token_ids(
                "allowed_token_ids", fields["allowed_token_ids"], limit, request.vocab_size
            )
        if not checks.leaves_something(checked, request.vocab_size):
            raise FieldError("allowed_token_ids" if "allowed_token_ids" in checked else "bad_words", "every token is banned")
        return checked

    @hookimpl
    def worker_request_added(self, request: WorkerRequestState) -> None:
        request.stash[MASKS] = Masks(request.fields)

    @hookimpl
    def adjust_logits(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        for row, values in zip(rows, logits.numpy(), strict=True):
            masks = row.request.stash[MASKS]
            start = max(row.request.num_prompt_tokens, row.position - masks.reach)
            masks.apply(values, row.tokens[start:])


def _logit_bias(value: Any, request: AdmissionContext) -> list[list[int | float]]:
    if not isinstance(value, dict):
        raise FieldError("logit_bias", f"must be an object of token ids and numbers, got {type(value).__name__}")
    if len(value) > (limit := request.limits.max_logit_bias):
        raise FieldError("logit_bias", f"has {len(value)} entries, the limit is {limit}")
    found: dict[int, float] = {}
    for key, bias in value.items():
        token = checks.token_id("logit_bias", _as_id(key), request.vocab_size)
        if token in found:
            raise FieldError("logit_bias", f"token id {token} stands in it twice")
        found[token] = checks.number("logit_bias", bias, -100, 100)
    return [[token, found[token]] for token in sorted(found)]


def _as_id(key: Any) -> Any:
    """JSON's keys are strings: the plain decimal form of an id counts as that id."""
    if not isinstance(key, str):
        return key
    digits = key.removeprefix("-")
    if len(digits) > 20 or not (digits.isascii() and digits.isdigit()) or str(int(key)) != key:
        raise FieldError("logit_bias", f"keys must be token ids, got {key[:40]!r}")
    return int(key)


def _bad_words(value: Any, request: AdmissionContext) -> list[list[int]]:
    words = checks.sequence("bad_words", value, request.limits.max_bad_words)
    if (chars := sum(len(word) for word in words if isinstance(word, str))) > request.limits.max_bad_words_chars:
        raise FieldError("bad_words", f"{chars} characters in all; at most {request.limits.max_bad_words_chars} are allowed")
    sequences: dict[tuple[int, ...], None] = {}
    for item in words:
        word = checks.text("bad_words", item, request.limits.max_stop_chars)
        forms = [tuple(request.tokenize(form)) for form in (word, " " + word)]
        if not forms[0]:
            raise FieldError("bad_words", f"{shorten(word)!r} has no tokens")
        sequences.update(dict.fromkeys(forms))
    return [list(ids) for ids in sequences if ids]
