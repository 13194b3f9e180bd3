"""The worker's side: each request's place in its grammar, and the mask that follows from it.

State follows the tokens of the row that is asked for, never the number of calls: a row may end with drafts that are rejected later, and
after a preemption or a restart everything is built again from the tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .compile_process import compiled, make_tokenizer

if TYPE_CHECKING:
    from ...core.contexts import Vocabulary


class DeadEndError(Exception):
    """Nothing may follow here, not even the end; the message says why."""


class Grammars:
    """Compiled grammars, by their text. One thread compiles, while the worker's goes on. Safe on any thread."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], cache_entries: int) -> None:
        self._load = vocabulary
        self._cache_entries = cache_entries
        self._cache: OrderedDict[str, Future[Any]] = OrderedDict()
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._words: tuple[Any, Vocabulary] | None = None
        self.compiled = 0
        """Grammars compiled so far."""
        self.rows = 0
        """Rows that were masked so far."""

    def get(self, grammar: str) -> Future[Any]:
        """A matcher before its first token, to be copied; it is being compiled, or was before."""
        with self._lock:
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
        with self._lock:
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
        self._made: deque[tuple[list[int], np.ndarray]] = deque(maxlen=2)
        """Outputs and masks of late."""
        self._pending: Future[Any] | None = None
        """A mask in the making: nothing else is to be asked before it is done."""
        self._ended = False
        """The last output followed is a complete text and an end token."""

    def mask(self, output: Sequence[int]) -> np.ndarray | None:
        """Which ids may follow `output` (the request's tokens without the prompt): bool [vocab_size], not to be changed. None when `output`
        does not fit the grammar itself. DeadEndError when nothing may follow."""
        self._settle()
        output = list(output)
        known = next((mask for at, mask in self._made if at == output), None)
        return self._mask(output) if known is None else known

    def _mask(self, output: Sequence[int]) -> np.ndarray | None:
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
        mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=size, bitorder="little").view(np.bool_)
        self._made.append((list(output), mask))
        return mask

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """For drafts: tokens that should follow `output`, at most `most`; asking changes nothing. A text that is forced is spelled as the
        tokenizer would. Its last token may be the beginning of a longer one, which reaches behind the forced text: it is left out, unless
        no other may stand there."""
        self._settle()
        try:
            if not self._follow(output) or self._ended:
                return []
        except DeadEndError:  # the mask will say so
            return []
        text = self._matcher.compute_ff_bytes()
        if not text and not self._matcher.is_accepting():
            return []
        spelled = self._spelled(text)
        if len(spelled) > most:
            return spelled[:most]
        sure, last = spelled[:-1], spelled[-1:]
        allowed = self._allowed([*output, *sure]) if len(sure) < most else []
        return [*sure, *allowed] if len(allowed) == 1 and last in ([], allowed) else sure

    def _settle(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def look_ahead(self, output: Sequence[int], pool: Executor) -> None:
        """Have the mask behind `output` made on a thread of the pool, for `mask` to find, unless it is there."""
        if not any(at == output for at, _ in self._made):
            self._pending = pool.submit(self._allowed, list(output))

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
            mask = self._mask(output)
        except DeadEndError:
            return []
        return [] if mask is None else np.flatnonzero(mask).tolist()

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
