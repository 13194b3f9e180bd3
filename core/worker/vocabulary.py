"""The served model's tokens for plugins in the worker, which itself needs no tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..contexts import Vocabulary

if TYPE_CHECKING:
    from ..front.tokenizer import Tokenizer
    from ..models.base import ModelSpec


class LazyVocabulary:
    """Gives the vocabulary; the tokenizer is loaded when that is first asked for. Safe on any thread."""

    def __init__(self, model: str, spec: Callable[[], ModelSpec]) -> None:
        """model: as in `[model] model`. spec: the loaded model's; called after it was loaded."""
        self._model = model
        self._spec = spec
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None

    def __call__(self) -> Vocabulary:
        """ModelError when there is no tokenizer that can be loaded."""
        from ..front.tokenizer import load_tokenizer
        from ..models.resolve import resolve

        spec = self._spec()
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(resolve(self._model))
            return self._tokenizer.vocabulary(spec.vocab_size, spec.eos_token_ids)
