"""The worker's state follows the tokens it is asked about: forwards, back, through drafts that break the grammar, past the end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import structured_kit as kit
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.core.config import Config
from tokenbus.core.contexts import WorkerContext
from tokenbus.core.errors import RequestError
from tokenbus.core.host import make_host
from tokenbus.core.plan import WorkerRequest
from tokenbus.core.sampler import sample
from tokenbus.core.worker.state import SampleRow, WorkerRequestState
from tokenbus.plugins.structured.masks import DeadEndError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer", "minimum": 3, "maximum": 40}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
TEXT = b'{"name": "al\xc3\xa9", "n":12}'
NAMES = ("sampling.bias", "sampling.penalties", "sampling.stops", "structured")


def ids(mask):
    return set(np.flatnonzero(mask).tolist())


def same(left, right):
    return (left is None and right is None) or (left is not None and right is not None and bool((left == right).all()))


outputs = st.one_of(
    st.integers(0, len(TEXT)).map(lambda n: list(TEXT[:n])),
    st.tuples(st.integers(0, len(TEXT)), st.lists(st.integers(0, kit.SIZE - 1), max_size=4)).map(
        lambda p: [*TEXT[: p[0]], *p[1]]
    ),
    st.lists(st.sampled_from([kit.END, kit.OTHER_END]), max_size=3).map(lambda ends: [*TEXT, *ends]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(outputs, min_size=1, max_size=12))
def test_a_mask_depends_on_the_tokens_only(asked):
    state = kit.progress("json", SCHEMA)
    for output in asked:
        assert same(state.mask(output), kit.progress("json", SCHEMA).mask(output))


def test_steps_are_followed_not_replayed(monkeypatch):
    state = kit.progress("json", SCHEMA)
    built = []
    go_back = type(state)._go_back
    monkeypatch.setattr(type(state), "_go_back", lambda self, text: built.append(self._matcher is None) or go_back(self, text))
    for n in range(len(TEXT) + 1):
        assert state.mask(list(TEXT[:n])) is not None
        assert len(state._consumed) == n
    assert built == [True] + [False] * len(TEXT)


def test_the_end_and_what_follows_it():
    state = kit.progress("regex", "ab?")
    assert ids(state.mask(list(b"a"))) == {ord("b"), kit.END, kit.OTHER_END}
    assert ids(state.mask(list(b"ab"))) == {kit.END, kit.OTHER_END}
    assert ids(state.mask([*b"a", kit.OTHER_END])) == {kit.END, kit.OTHER_END}
    assert ids(state.mask([*b"ab", kit.END, kit.END])) == {kit.END, kit.OTHER_END}
    assert state.mask([*b"a", kit.END, ord("b")]) is None
    assert state.mask([kit.END]) is None
    assert ids(state.mask([])) == {ord("a")}


def test_a_dead_end_says_so_and_the_state_goes_on():
    grammar = 'start: "x" A | "y"\nA: /[^\\s\\S]/'
    state = kit.progress("grammar", grammar)
    with pytest.raises(DeadEndError, match="allows nothing here"):
        state.mask(list(b"x"))
    assert ids(state.mask(list(b"y"))) == {kit.END, kit.OTHER_END}


def test_forced_tokens():
    assert kit.progress("json", SCHEMA).forced([], 20) == []  # "{" may also be the beginning of a longer token
    state = kit.progress("regex", "abc(d|e)fg")
    assert state.forced([], 10) == list(b"abc")
    assert state.forced([], 2) == list(b"ab")
    assert state.forced(list(b"abcd"), 10) == [*b"fg"]  # either end token may come then
    assert state.forced(list(b"abc"), 10) == []
    assert state.forced(list(b"zz"), 10) == []
    tokens = kit.progress("regex", "-0alice").forced([], 10)  # "-0" may be written in one token or in two
    assert b"".join(kit.TOKENS[token] for token in tokens) == b"-0alice"


def test_a_mask_made_ahead_is_the_same():
    state, plain = kit.progress("json", SCHEMA), kit.progress("json", SCHEMA)
    text = list(b'{"name": "ab')
    with ThreadPoolExecutor(1) as pool:
        for size in range(len(text)):
            state.look_ahead(text[:size], pool)
            if size % 3 == 0:
                assert state.forced(text[:size], 5) == plain.forced(text[:size], 5)
            mask, truth = state.mask(text[:size]), plain.mask(text[:size])
            assert mask is not None
            assert truth is not None
            assert (mask == truth).all()
        state.look_ahead([*text, 0], pool)
        assert (state.mask(text) == plain.mask(text)).all()  # what was made ahead was of another text


def test_random_masks_only_ever_lead_to_texts_of_the_grammar():
    state = kit.progress("grammar", 'root ::= item+\nitem ::= "<" [a-c]+ ">" | "(" item ")"')
    drawn = [text for seed in range(20) if (text := kit.draw(state, seed)) is not None]
    assert len(drawn) > 3
    assert all(
        kit.fits(kit.progress("grammar", 'root ::= item+\nitem ::= "<" [a-c]+ ">" | "(" item ")"'), text) for text in drawn
    )


# ---- the hook -------------------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self):
        self.host = make_host("worker", Config())
        self.host.load(NAMES)
        self.plugin = self.host.loaded["structured"]
        self.context = WorkerContext(vocabulary=lambda: kit.VOCABULARY)

    def request(self, kind, value, output=(), request_id="r", temperature=1.0, **fields):
        fields = {"structured_outputs": {"grammar": kit.library_form(kind, value)}, **fields}
        order = WorkerRequest(
            request_id=request_id, tokens=[*b"ask", *output], num_prompt_tokens=3, num_computed=0, blocks=[],
            temperature=temperature, seed=1, choice=0, features=NAMES, fields=fields,
        )  # fmt: skip
        request = WorkerRequestState(order, self.host.table(frozenset(NAMES), fields))
        for impl in request.hooks.worker_request_added:
            impl(request=request, worker=self.context)
        return request

    def sample(self, rows, logits=None):
        logits = torch.zeros(len(rows), kit.SIZE) if logits is None else logits
        return sample(logits, rows, self.host.table(frozenset(self.host.loaded)))


@pytest.fixture
def worker():
    return Worker()


def row(request, drafts=()):
    made = SampleRow(request, len(request.tokens) + len(drafts))
    if not drafts:
        return made

    class WithDrafts:
        def __init__(self):
            self.request, self.position, self.is_prompt = request, made.position, False
            self.tokens = [*request.tokens, *drafts]

    return WithDrafts()


def test_rows_with_drafts(worker):
    request = worker.request("regex", "ab[xy]z")
    rows = [row(request), row(request, b"a"), row(request, b"ab"), row(request, b"aQ"), row(request, b"aQQ")]
    logits = torch.zeros(5, kit.SIZE)
    worker.plugin.adjust_logits(logits, rows)
    allowed = [ids(line.numpy() > -np.inf) for line in logits]
    assert allowed[:3] == [{ord("a")}, {ord("b")}, {ord("x"), ord("y")}]
    assert allowed[3] == allowed[4] == set(range(kit.SIZE))  # not used, not an error
    request.tokens += b"ab"
    assert worker.sample([row(request)]).token_ids[0] in b"xy"
    assert worker.plugin.grammars.rows == 4
    assert worker.plugin.grammars.compiled == 1


def test_after_a_preemption_the_state_is_the_same(worker):
    before = worker.request("json", SCHEMA)
    for token in TEXT[:9]:
        worker.sample([row(before)])
        before.tokens.append(token)
    again = worker.request("json", SCHEMA, output=TEXT[:9], request_id="again")
    found = [worker.sample([row(request)]) for request in (before, again)]
    assert found[0].token_ids == found[1].token_ids
    assert worker.plugin.grammars.compiled == 1


def test_no_bias_brings_a_banned_id_back(worker):
    request = worker.request("regex", "[ab]", logit_bias=[[ord("z"), 100.0]], repetition_penalty=0.01, temperature=0)
    assert worker.sample([row(request)]).token_ids[0] in b"ab"
    lifted = worker.request("regex", "[ab]", logit_bias=[[ord("b"), 100.0]], temperature=0)
    assert worker.sample([row(lifted)]).token_ids[0] == ord("b")


def test_min_tokens_past_the_end_is_that_requests_error(worker):
    minimum = {"count": 5, "banned": [kit.END, kit.OTHER_END]}
    bad = worker.request("regex", "ab?", output=b"ab", min_tokens=minimum)
    good = worker.request("regex", "ab?", output=b"a", request_id="good", min_tokens=minimum)
    found = worker.sample([row(bad), row(good)])
    assert isinstance(found.errors["r"], RequestError)
    assert "by min_tokens, if the text is complete here" in found.errors["r"].message
    assert found.errors.keys() == {"r"}
    assert found.token_ids[1] == ord("b")


def test_a_dead_end_ends_one_request(worker):
    bad = worker.request("grammar", 'start: "x" A | "y"\nA: /[^\\s\\S]/', output=b"x")
    good = worker.request("regex", "ab?", request_id="good")
    found = worker.sample([row(bad), row(good)])
    assert isinstance(found.errors["r"], RequestError)
    assert found.errors.keys() == {"r"}
    assert found.token_ids[1] == ord("a")


def test_what_does_not_fit_is_never_gone_on_with_unmasked(worker):
    bad = worker.request("regex", "ab?", output=b"zz")
    good = worker.request("regex", "ab?", request_id="good")
    found = worker.sample([row(bad), row(good)])
    assert isinstance(found.errors["r"], RequestError)
    assert "doesn't fit the grammar" in found.errors["r"].message
    assert found.errors.keys() == {"r"}
    assert found.token_ids[1] == ord("a")


NESTED = "(((a){1,200}){1,200}){1,200}"


def longest(state):
    """So many letters it follows one by one before it is too complex."""
    for length in range(200):
        try:
            assert ids(state.mask(list(b"a" * length))) >= {ord("a")}
        except DeadEndError:
            return length - 1
    return None


def test_c51_a_regex_that_explodes_ends_where_it_becomes_too_complex_and_for_nobody_else():
    """Its states are made as texts need them, and shared: the library's bound on them, once met, is met by every copy."""
    shared = kit.grammars()
    others = [kit.progress("regex", NESTED, shared) for _ in range(2)]
    assert all(other.mask(list(b"aaaa")) is not None for other in others)
    first = kit.progress("regex", NESTED, shared)
    most = longest(first)
    assert most is not None
    assert most > 10
    for _ in range(2):
        with pytest.raises(DeadEndError, match="too complex"):
            first.mask(list(b"a" * (most + 1)))
        assert others[0].mask(list(b"aaaaa")) is not None
        assert kit.fits(others[1], "a" * 8), "though many tokens at once are more work than one after the other"
        assert kit.fits(kit.progress("regex", NESTED, shared), "a" * most)
        assert others[0].mask(list(b"aab")) is None, "a draft that breaks the grammar"
    assert longest(kit.progress("regex", NESTED, kit.grammars())) == most
