"""Structured output: answers that fit a JSON schema, a regular expression, a grammar, or a list of choices.

front   check_fields    which of them, and is it well-formed          (fields.py)
        prepare_fields  each keyword enforced or refused (schema.py), then compiled by a process that can be killed (compiler.py)
worker  compiled again, beside the first step, and cached             (masks.py)
        adjust_logits   ids that the grammar does not allow are banned, after every bias
        drafts_after_step   the next mask is begun, to be made while the engine plans and the next step computes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ...core.errors import FieldError, RequestError
from ...core.plugin import Plugin, PluginInfo, StashKey, hookimpl
from .compiler import Compiler, GrammarError
from .fields import source_of, wish_of

if TYPE_CHECKING:
    import torch

    from ...core.contexts import AdmissionContext, WorkerContext
    from ...core.plugin import Role
    from ...core.worker.side import StepRan
    from ...core.worker.state import SampleRow, WorkerRequestState
    from .masks import Grammars, Progress

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class StructuredSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_chars: PositiveInt = 65536
    """Characters of a schema (as compact JSON), regular expression, grammar, or of all choices together."""
    max_choices: PositiveInt = 1024
    compile_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 1.0
    """CPU time that compiling one grammar may take; what takes longer is killed, and refused."""
    compile_memory_mb: Annotated[int, msgspec.Meta(ge=16)] = 512
    """MiB that compiling one grammar may take."""
    cache_entries: PositiveInt = 256
    """Grammars that are kept compiled, and refusals that are remembered."""


STATE: StashKey[Progress] = StashKey("structured")


class Structured(Plugin):
    """Hands on the claimed field as {"grammar": text in the library's form}, or nothing when any text will do."""

    info = PluginInfo(
        name="structured",
        summary="response_format, structured_outputs: JSON schema, regex, grammar, choice",
        scope="step",
        lossless=False,
        claims={"response_format", "structured_outputs"},
        enforces=True,
        default=True,
    )
    Settings = StructuredSettings

    def __init__(self, settings: StructuredSettings, role: Role) -> None:
        super().__init__(settings, role)
        self.compiler = Compiler(
            seconds=settings.compile_seconds, memory_mb=settings.compile_memory_mb, cache_entries=settings.cache_entries
        )
        self.grammars: Grammars | None = None
        """The worker's."""
        self._ahead = ThreadPoolExecutor(1, "masks")

    # ---- front ------------------------------------------------------------------------------------------------------------------

    @hookimpl
    def front_stopped(self) -> None:
        self.compiler.close()

    @hookimpl
    def check_fields(self, fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any] | None:
        wish = wish_of(fields)
        if wish is None:
            return {}
        if not request.eos_token_ids:
            raise FieldError(wish.field, "this model has no end token, so no answer could end where its form does")
        return None

    @hookimpl
    def prepare_fields(self, fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any] | None:
        wish = wish_of(fields) if fields else None
        if wish is None:
            return None
        source = source_of(wish, self.settings.max_chars, self.settings.max_choices)
        vocabulary = request.vocabulary()
        if not vocabulary.exact:
            raise FieldError(
                wish.field, "this model's tokenizer has tokens without fixed bytes: their text can't be constrained"
            )
        try:
            grammar = self.compiler.compile(source, vocabulary)
        except GrammarError as error:
            raise FieldError(wish.field, str(error)) from None
        return {name: {"grammar": grammar} for name in fields}

    # ---- worker -----------------------------------------------------------------------------------------------------------------

    @hookimpl
    def worker_request_added(self, request: WorkerRequestState, worker: WorkerContext) -> None:
        from .masks import Grammars, Progress

        if self.grammars is None:
            self.grammars = Grammars(worker.vocabulary, self.settings.cache_entries)
        field = next(name for name in ("response_format", "structured_outputs") if name in request.fields)
        request.stash[STATE] = Progress(self.grammars, request.fields[field]["grammar"])

    @hookimpl(trylast=True)
    def adjust_logits(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        import numpy as np

        from .masks import DeadEndError

        seen: set[str] = set()
        for row, values in zip(rows, logits.numpy(), strict=True):
            request = row.request
            try:
                mask = request.stash[STATE].mask(row.tokens[request.num_prompt_tokens :])
            except DeadEndError as error:
                if request.request_id not in seen:
                    raise RequestError(str(error)) from None
                mask = np.zeros(len(values), dtype=np.bool_)
            if mask is None and request.request_id not in seen:
                raise RequestError("what was written so far doesn't fit the grammar, so it can't be held to it any more")
            if mask is None:  # a draft that breaks the grammar: the row will not be used
                continue
            np.copyto(values, -math.inf, where=~mask)
            if request.request_id not in seen and values.max() == -math.inf:
                raise RequestError(
                    f"after {row.position - request.num_prompt_tokens} tokens, every token that the grammar allows is banned by other "
                    "fields: by min_tokens, if the text is complete here, else by bad_words, allowed_token_ids or logit_bias"
                )
            seen.add(request.request_id)
            self.grammars.rows += 1  # pyright: ignore[reportOptionalMemberAccess]

    @hookimpl(trylast=True)
    def drafts_after_step(self, step: StepRan) -> None:
        """Proposes nothing: the next masks are made meanwhile."""
        for run in step.runs:
            if run.sampled:
                request = run.request
                request.stash[STATE].look_ahead(request.tokens[request.num_prompt_tokens :], self._ahead)
