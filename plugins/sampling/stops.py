"""When generation stops: stop strings, stop ids, the end-of-sequence token, and not before min_tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core.contexts import AdmissionContext, OutputContext
from ...core.errors import FieldError
from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.request import StopRule
from . import checks

if TYPE_CHECKING:
    import torch

    from ...core.request import Request
    from ...core.worker.state import FusedFilters, SampleRow, WorkerRequestState


class Stops(Plugin):
    """stop_token_ids end generation like the model's own end tokens (which ignore_eos switches off); none of them is sampled before
    min_tokens new tokens. Stop strings are looked for in the text and do not wait for min_tokens.

    Hands on: stop as a list of strings, stop_token_ids sorted, min_tokens as {"count": n, "banned": ids that may not come before}.
    """

    info = PluginInfo(
        name="sampling.stops",
        summary="stop, stop_token_ids, ignore_eos, min_tokens, include_stop_str_in_output",
        scope="step",
        lossless=False,
        claims={"stop", "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output"},
        enforces=True,
        default=True,
    )

    @hookimpl
    def check_fields(self, fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any]:
        limits = request.limits
        checked: dict[str, Any] = {}
        if "stop" in fields:
            value = fields["stop"]
            strings = [value] if isinstance(value, str) else checks.sequence("stop", value, limits.max_stop)
            checked["stop"] = list(dict.fromkeys(checks.text("stop", s, limits.max_stop_chars) for s in strings))
        if "stop_token_ids" in fields:
            checked["stop_token_ids"] = checks.token_ids(
                "stop_token_ids", fields["stop_token_ids"], limits.max_stop_token_ids, request.vocab_size
            )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if name in fields and checks.boolean(name, fields[name]):
                checked[name] = True
        if "min_tokens" in fields:
            count = checks.integer("min_tokens", fields["min_tokens"], 0, request.max_tokens, what="the request's max_tokens")
            if count:
                ends = end_ids(checked, request.eos_token_ids)
                if not checks.leaves_something(request.fields, request.vocab_size, ends):
                    asked = next(
                        (name for name in ("allowed_token_ids", "bad_words") if name in request.fields), "stop_token_ids"
                    )
                    raise FieldError(asked, "with min_tokens every token is banned: those that are left end the answer")
                checked["min_tokens"] = {"count": count, "banned": sorted(ends)}
        return checked

    @hookimpl
    def stop_rule(self, request: Request, eos_token_ids: frozenset[int]) -> StopRule:
        minimum = request.fields.get("min_tokens", {"count": 0})["count"]
        return StopRule(end_ids(request.fields, eos_token_ids), minimum)

    @hookimpl(trylast=True)
    def adjust_logits(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        for index, row in enumerate(rows):
            minimum = row.request.fields.get("min_tokens")
            if minimum and row.position - row.request.num_prompt_tokens < minimum["count"]:
                logits[index, minimum["banned"]] = -math.inf

    @hookimpl
    def fused_filters(self, request: WorkerRequestState) -> FusedFilters | None:
        from ...core.worker.state import FusedFilters

        return None if "min_tokens" in request.fields else FusedFilters()

    @hookimpl
    def text_filter(self, request: OutputContext) -> StopStrings | None:
        strings = request.fields.get("stop")
        if not strings:
            return None
        return StopStrings(strings, include=request.fields.get("include_stop_str_in_output", False))


def end_ids(fields: dict[str, Any], eos_token_ids: Sequence[int] | frozenset[int]) -> frozenset[int]:
    own = frozenset(fields.get("stop_token_ids", ()))
    return own if fields.get("ignore_eos") else own.union(eos_token_ids)


class StopStrings:
    """Ends text before (or, with `include`, behind) the first stop string that is complete in it.

    "First" is the match that ends earliest; of several that end at the same character, the longest. So the result depends on the text
    only, not on how it is cut into pieces, and generation ends as soon as any stop string stands. What is held back is exactly the
    longest end of the text that could still become a match.
    """

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._firsts = frozenset(s[0] for s in strings)
        self._reach = max(len(s) for s in strings) - 1
        """Characters that can be held at most."""
        self._held = ""

    def feed(self, text: str, *, final: bool) -> tuple[str, str | None]:
        text = self._held + text
        self._held = ""
        if match := self._match(text):
            start, string = match
            return text[: start + len(string) if self._include else start], string
        if final:
            return text, None
        cut = self._first_possible(text)
        self._held = text[cut:]
        return text[:cut], None

    def _match(self, text: str) -> tuple[int, str] | None:
        """Start and string of the first complete match."""
        found = [(start + len(s), start, s) for s in self._strings if (start := text.find(s)) >= 0]
        if not found:
            return None
        _, start, string = min(found)
        return start, string

    def _first_possible(self, text: str) -> int:
        """The first place from which on the text is the beginning of a stop string; len(text) if there is none."""
        for place in range(max(0, len(text) - self._reach), len(text)):
            if text[place] in self._firsts and any(s.startswith(text[place:]) for s in self._strings):
                return place
        return len(text)
