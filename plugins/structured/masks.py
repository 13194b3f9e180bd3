"""The worker's side: each request's place in its grammar, and the mask that follows from it.

State follows the tokens of the row that is asked for, never the number of calls: a row may end with drafts that are rejected later, and
after a preemption or a restart everything is built again from the tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .compile_process import compiled, make_tokenizer

if TYPE_CHECKING:
    from ...core.contexts import Vocabulary


class DeadEndError(Exception):
    """Nothing may follow here, not even the end; the message says why."""


class Grammars:
    """Compiled grammars, by their text. One thread compiles, while the worker's goes on."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], cache_entries: int) -> None:
        self._load = vocabulary
        self._cache_entries = cache_entries
        self._cache: OrderedDict[str, Future[Any]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._words: tuple[Any, Vocabulary] | None = None
        self.compiled = 0
        """Grammars compiled so far."""
        self.rows = 0
        """Rows that were masked so far."""

    def get(self, grammar: str) -> Future[Any]:
        """A matcher before its first token, to be copied; it is being compiled, or was before."""
        future = self._cache.get(grammar)
        if future is None:
            future = self._cache[grammar] = self._thread.submit(self._compile, grammar)
            while len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(grammar)
        return future

    def forget(self, grammar: str, matcher: Future[Any]) -> None:
        """This matcher is spoilt: copies share the library's states, and its error about them. Whoever asks next gets another one."""
        if self._cache.get(grammar) is matcher:
            del self._cache[grammar]

    def _compile(self, grammar: str) -> Any:
        tokenizer = self.words()[0]
        self.compiled += 1
        return compiled(tokenizer, grammar)

    def words(self) -> tuple[Any, Vocabulary]:
        """The library's tokenizer and the vocabulary it was made from."""
        if self._words is None:
            vocabulary = self._load()
            tokenizer = make_tokenizer(list(vocabulary.tokens), sorted(vocabulary.special_ids), list(vocabulary.eos_token_ids))
            self._words = (tokenizer, vocabulary)
        return self._words


class Progress:
    """One request's place in its grammar."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._prototype = grammars.get(grammar)
        self._matcher: Any = None
        self._consumed: list[int] = []
        """Output tokens that the matcher has seen."""
        self._ended = False
        """The last output followed is a complete text and an end token."""

    def mask(self, output: Sequence[int]) -> np.ndarray | None:
        """Which ids may follow `output` (the request's tokens without the prompt): bool [vocab_size]. None when `output` does not fit the
        grammar itself. DeadEndError when nothing may follow."""
        if not self._follow(output):
            return None
        vocabulary = self._grammars.words()[1]
        size = len(vocabulary.tokens)
        if self._ended:
            return _only(vocabulary.eos_token_ids, size)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._replay(list(self._consumed))
            bits = self._matcher.compute_bitmask()
        if self._matcher.is_error() or (self._matcher.is_stopped() and not self._matcher.is_accepting()):
            self._give_up()
        return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=size, bitorder="little").view(np.bool_)

    def forced(self, output: Sequence[int], most: int) -> tuple[list[int], int]:
        """Tokens that should follow `output`, at most `most`; and how many of them, from the first, certainly do: no other id may stand
        there, whatever the model says. The rest is the usual way to write a text that is forced, which the model may write in other
        tokens. For drafts; asking changes nothing."""
        certain: list[int] = []
        while len(certain) < most:
            allowed = self._allowed([*output, *certain])
            if len(allowed) != 1:
                break
            certain.append(allowed[0])
            if self._is_end(allowed[0]):
                return certain, len(certain)
        rest: list[int] = []
        with suppress(DeadEndError):
            if len(certain) < most and self._follow([*output, *certain]) and not self._ended:
                rest = self._spelled(self._matcher.compute_ff_bytes())
        return [*certain, *rest][:most], len(certain)

    def _spelled(self, text: bytes) -> list[int]:
        """The tokenizer's own tokens for a text, as far as it gives back its bytes."""
        vocabulary = self._grammars.words()[1]
        ids = vocabulary.tokenize(text.decode("utf-8", "ignore"))
        place, taken = 0, 0
        for token in ids:
            piece = vocabulary.tokens[token]
            if token in vocabulary.special_ids or not piece or not text.startswith(piece, place):
                break
            place, taken = place + len(piece), taken + 1
        return ids[:taken]

    def _allowed(self, output: Sequence[int]) -> list[int]:
        try:
            mask = self.mask(output)
        except DeadEndError:
            return []
        return [] if mask is None else np.flatnonzero(mask).tolist()

    def _is_end(self, token: int) -> bool:
        return token in self._grammars.words()[1].eos_token_ids

    def _follow(self, output: Sequence[int]) -> bool:
        """Bring the matcher behind `output`; False when that is no beginning of a text of the grammar."""
        self._prototype.result()  # first, so that the thread that compiles also loads the vocabulary
        ends = self._grammars.words()[1].eos_token_ids
        known = len(self._consumed)  # no end tokens among them
        first = known if list(output[:known]) == self._consumed else 0
        stop = next((i for i in range(first, len(output)) if output[i] in ends), len(output))
        text, after = list(output[:stop]), output[stop:]
        self._go_back(text)
        fresh = text[len(self._consumed) :]
        if fresh:
            taken = self._matcher.try_consume_tokens(fresh)
            self._consumed += fresh[:taken]
            if taken < len(fresh):
                self._matcher.compute_bitmask()  # tells an error from a token that doesn't fit
                if not self._matcher.is_error() or self._replay(text) < len(text):
                    return False
        self._ended = bool(after)
        return not after or (all(token in ends for token in after) and self._matcher.is_accepting())

    def _replay(self, text: list[int]) -> int:
        """Follow `text` anew, with new states, in the steps in which it was written; how many of its tokens fit.

        The library bounds the work of a step and the states that copies of a matcher share: an error may have come from what others have
        written, or from following many tokens at once. So only this one counts: DeadEndError when that too is too complex."""
        self._grammars.forget(self._grammar, self._prototype)
        self._prototype = self._grammars.get(self._grammar)
        self._matcher = self._prototype.result().deep_copy()
        del self._consumed[:]
        for token in text:
            self._matcher.compute_bitmask()
            taken = self._matcher.try_consume_tokens([token])
            if not taken:
                self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._give_up()
            if not taken:
                break
            self._consumed.append(token)
        return len(self._consumed)

    def _give_up(self) -> NoReturn:
        if self._matcher.is_error():
            self._grammars.forget(self._grammar, self._prototype)
        self._matcher = None
        del self._consumed[:]
        raise DeadEndError("the grammar allows nothing here: it can't be satisfied any more, or has become too complex")

    def _go_back(self, text: list[int]) -> None:
        """To the longest common beginning of `text` and what was consumed."""
        known = self._consumed
        common = len(known)
        if text[:common] != known:
            common = next((i for i, (a, b) in enumerate(zip(text, known, strict=False)) if a != b), min(len(text), len(known)))
        if self._matcher is not None and (common == len(known) or self._matcher.rollback(len(known) - common)):
            del known[common:]
            return
        self._matcher = self._prototype.result().deep_copy()
        del known[:]


def _only(ids: Sequence[int], size: int) -> np.ndarray:
    mask = np.zeros(size, dtype=np.bool_)
    mask[[token for token in ids if token < size]] = True
    return mask
