from __future__ import annotations

import pytest
from tokenbus_no_repeat_ngram import FIELD, Ngrams, NoRepeatNgram

from tokenbus.core.errors import FieldError
from tokenbus.testing import Request, TinyEngine


@pytest.fixture
def engine():
    engine = TinyEngine(NoRepeatNgram)
    yield engine
    engine.close()


def ngrams(tokens, size):
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_comes_twice(engine, size):
    options = {"max_tokens": 80 if size == 1 else 400, "temperature": 5.0, "seed": 1}
    plain = engine.generate("ab", fields={"ignore_eos": True}, **options)
    assert len(set(ngrams(plain.tokens, size))) < len(ngrams(plain.tokens, size))
    answer = engine.generate("ab", fields={FIELD: size, "ignore_eos": True}, **options)
    whole = Request("ab").tokens + answer.tokens
    assert len(answer.tokens) == options["max_tokens"]
    assert len(set(ngrams(whole, size))) == len(ngrams(whole, size))


def test_chunks_and_preemption_change_nothing(engine):
    requests = [Request("abcabcab" * k, 24, 0.8, k, {FIELD: 3}) for k in range(1, 6)]
    plain = [engine.run([request])[0].tokens for request in requests]
    tight = engine.run(requests, blocks=20, chunk=5)
    assert engine.outcome.preempted > 0
    assert [answer.tokens for answer in tight] == plain


def test_only_those_who_ask(engine):
    plain = engine.generate("abab", max_tokens=6)
    engine.clear_calls()
    with_others = engine.run([Request("abab", 6), Request("abab", 6, fields={FIELD: 2})])
    assert with_others[0].tokens == plain.tokens
    asked = {name for call in engine.called("adjust_logits", plugin="no_repeat_ngram") for name in call.request_ids}
    assert len(asked) == 1


def test_zero_is_off(engine):
    assert engine.generate("abab", fields={FIELD: 0}).tokens == engine.generate("abab").tokens


@pytest.mark.parametrize("value", [-1, 33, 2.0, True, "3"])
def test_nonsense_is_refused_by_name(engine, value):
    with pytest.raises(FieldError, match="whole number") as caught:
        engine.generate("x", fields={FIELD: value})
    assert caught.value.param == FIELD


def test_guesses_are_not_learnt():
    seen = Ngrams(2)
    seen.learn([5, 6, 5])
    assert seen.banned([5, 6, 5]) == {6}
    assert seen.banned([5, 6, 5, 7, 5]) == {6, 7}
    assert seen.banned([5, 6, 5]) == {6}
