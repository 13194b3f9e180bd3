"""The kit for plugin authors: it does what a real engine does, and finds what it is there to find."""

from __future__ import annotations

import pytest

import tokenbus.testing
from tokenbus.core.contexts import PrefixMatch
from tokenbus.core.errors import ConfigError, FeatureOffError, FieldError, PluginError
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.selftest.stand import StandError
from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.testing import EOS, VOCABULARY, HookCall, Request, TinyEngine, assert_lossless
from tokenbus.testing.model import VOCAB_SIZE, detokenize, greedy, tokenize


class Ban(Plugin):
    """The field `ban` names a character that may not come."""

    info = PluginInfo(name="ban", summary="", scope="request", lossless=False, claims={"ban"})

    @hookimpl
    def check_fields(self, fields):
        if len(fields["ban"]) != 1:
            raise FieldError("ban", "must be one character")

    @hookimpl
    def prepare_fields(self, fields, request):
        return {"ban": request.vocabulary().tokenize(fields["ban"])[0]}

    @hookimpl
    def adjust_logits(self, logits, rows):
        for i, row in enumerate(rows):
            logits[i, row.request.fields["ban"]] = float("-inf")


class Until(Plugin):
    """The field `until` ends an answer before a character."""

    info = PluginInfo(name="until", summary="", scope="request", lossless=False, claims={"until"})

    @hookimpl
    def text_filter(self, request):
        return Cut(request.fields["until"])


class Cut:
    def __init__(self, end):
        self.end = end

    def feed(self, text, *, final):
        shown, found, _ = text.partition(self.end)
        return shown, ("found" if found else None)


class Raises(Plugin):
    info = PluginInfo(name="raises", summary="", scope="request", lossless=False, claims={"raise_in"})

    @hookimpl
    def request_added(self, request):
        if request.fields.get("raise_in") == "engine":
            raise ValueError("no good")

    @hookimpl
    def text_filter(self, request):
        return Cut(5)


class WrongBlocks(Plugin):
    """Says it is lossless, and gives away blocks whose contents it did not look at."""

    info = PluginInfo(name="wrong_blocks", summary="", scope="request", lossless=True)

    def __init__(self, settings, role):
        super().__init__(settings, role)
        self.kept = []

    @hookimpl
    def blocks_filled(self, request, first, last, pool):
        for block in request.blocks[first:last]:
            pool.retain(block)
            self.kept.append(block)

    @hookimpl
    def block_evicted(self, block_id):
        self.kept.remove(block_id)

    @hookimpl
    def match_prefix(self, request, pool):
        if self.kept and len(request.tokens) > pool.block_size:
            return PrefixMatch([self.kept[0]], pool.block_size)
        return None


class Nudge(Plugin):
    info = PluginInfo(name="nudge", summary="", scope="step", lossless=True)

    @hookimpl
    def adjust_logits(self, logits, rows):
        logits[:, ::2] += 1.0


class Idle(Plugin):
    info = PluginInfo(name="idle", summary="", scope="step", lossless=True)


class Fixed(Plugin):
    info = PluginInfo(name="fixed", summary="", scope="engine", lossless=True)


def test_public_names():
    assert tokenbus.testing.__all__ == [
        "EOS",
        "VOCABULARY",
        "Answer",
        "FakeModel",
        "HookCall",
        "Request",
        "TinyEngine",
        "TracingHost",
        "assert_lossless",
    ]
    assert all(hasattr(tokenbus.testing, name) for name in tokenbus.testing.__all__)


def test_every_character_is_a_token():
    text = "".join(map(chr, range(32, 127)))
    assert detokenize(tokenize(text)) == text
    assert len(VOCABULARY.tokens) == VOCAB_SIZE == 96
    assert b"".join(VOCABULARY.tokens[1:]).decode() == text
    with pytest.raises(ValueError, match="not found"):
        tokenize("é")


def test_greedy_answers_are_those_of_the_table_and_end_at_the_end_token():
    engine = TinyEngine()
    prompt = next(letter for letter in "abcdefghijklmnopqrstuvwxyz" if EOS in greedy(tokenize(letter), 100)[5:])
    expected = greedy(tokenize(prompt), 100)
    expected = expected[: expected.index(EOS)]
    answer = engine.generate(prompt, max_tokens=100)
    assert answer.tokens == expected
    assert (answer.text, answer.finish_reason) == (detokenize(expected), "stop")
    assert engine.generate(prompt, max_tokens=3).finish_reason == "length"


def test_admission_is_the_real_one():
    engine = TinyEngine(Ban)
    banned = engine.generate("hello").text[2]
    answer = engine.generate("hello", max_tokens=40, fields={"ban": banned})
    assert banned not in answer.text
    with pytest.raises(FieldError, match="one character"):
        engine.generate("x", fields={"ban": "two"})
    with pytest.raises(FieldError, match="did you mean 'ban'"):
        engine.generate("x", fields={"bam": "a"})
    with pytest.raises(FeatureOffError, match="'ban'"):
        engine.generate("x", fields={"ban": "a"}, features={"ban": False})
    with pytest.raises(FeatureOffError, match="switched off for this run"):
        engine.run([Request("x", fields={"ban": "a"})], off=("ban",))
    assert engine.generate("hello").text[2] == banned


def test_text_filters_end_the_text():
    engine = TinyEngine(Until)
    plain = engine.generate("hello")
    answer = engine.generate("hello", fields={"until": plain.text[3]})
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (plain.text[:3], "stop", "found")
    assert answer.tokens == plain.tokens


def test_a_hook_that_raises_says_so():
    engine = TinyEngine(Raises)
    with pytest.raises(StandError, match="'raises' failed in request_added: ValueError: no good"):
        engine.generate("x", fields={"raise_in": "engine"})
    with pytest.raises(PluginError, match="'raises' failed in text_filter"):
        engine.generate("x", fields={"raise_in": "text"})


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"plugins\.chunked_prefill"):
        TinyEngine(settings={"chunked_prefill": {"mode": "sometimes"}})
    with pytest.raises(ConfigError, match="no plugin is called 'nobody'"):
        TinyEngine(settings={"nobody": {}})


def test_the_tracer_sees_all_three_roles():
    engine = TinyEngine(Ban)
    engine.run([Request("hello", 3), Request("hello", 3, fields={"ban": "a"})])
    calls = engine.called(plugin="ban")
    assert {(call.role, call.hook) for call in calls} == {
        ("front", "check_fields"),
        ("front", "prepare_fields"),
        ("worker", "adjust_logits"),
    }
    check = engine.called("check_fields", plugin="ban")
    assert [dict(call.arguments["fields"]) for call in check] == [{"ban": "a"}]
    assert check[0].seconds >= 0
    logits = engine.called("adjust_logits", plugin="ban")
    assert len(logits) == 3
    assert len({call.request_ids for call in logits}) == 1
    assert "worker: ban.adjust_logits of " in repr(logits[0])
    assert all(isinstance(call, HookCall) for call in engine.calls)
    with pytest.raises(FieldError):
        engine.generate("x", fields={"ban": ""})
    failed = engine.called("check_fields", plugin="ban")[-1]
    assert isinstance(failed.error, FieldError)
    assert "raised FieldError" in repr(failed)
    engine.clear_calls()
    assert engine.calls == []


def test_small_pools_preempt_and_live_switches_happen():
    engine = TinyEngine()
    requests = [Request("abcdef" * k, 30, fields={"ignore_eos": True}) for k in range(1, 5)]
    plain = [engine.run([request])[0].tokens for request in requests]
    answers = engine.run(requests, blocks=16, changes={3: {"prefix_cache": False}, 6: {"prefix_cache": True}})
    assert engine.outcome.preempted > 0
    assert sum(answer.preemptions for answer in answers) == engine.outcome.preempted
    assert [answer.tokens for answer in answers] == plain
    assert engine.run(requests[:1])[0].tokens == plain[0]


@pytest.mark.parametrize("name", ["chunked_prefill", "prefix_cache", "speculative.ngram", "scheduling.static"])
def test_what_is_lossless_passes(name):
    assert_lossless(TinyEngine(enable=(name,)), name)


@pytest.mark.parametrize("liar", [WrongBlocks, Nudge])
def test_a_plugin_that_changes_answers_is_found(liar):
    engine = TinyEngine(liar)
    requests = [Request("some text here", 12), Request("another text", 12, at_step=3)]
    with pytest.raises(AssertionError, match=f"with '{liar.info.name}' on"):
        assert_lossless(engine, liar.info.name, requests)


@pytest.mark.parametrize(
    ("plugin", "words"), [(Ban, "does not declare"), (Fixed, "chosen at start"), (Idle, "no hook of 'idle' was called")]
)
def test_a_check_that_would_show_nothing_is_none(plugin, words):
    with pytest.raises(AssertionError, match=words):
        assert_lossless(TinyEngine(plugin), plugin.info.name)


def test_a_model_with_weights_takes_the_fake_ones_place(tmp_path):
    engine = TinyEngine(enable=("attention.torch",), model=str(make_tiny(tmp_path)))
    requests = [Request([20 + k, *range(30, 30 + 9 * k)], 6, fields={"logprobs": 1}) for k in range(1, 4)]
    alone = [engine.run([request])[0] for request in requests]
    together = engine.run(requests, chunk=5)
    assert engine.called("attention_backend", plugin="attention.torch")
    assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]
    assert all(answer.tokens for answer in alone)


def test_plugins_are_told_of_start_and_stop():
    told = []

    class Listens(Plugin):
        info = PluginInfo(name="listens", summary="", scope="step", lossless=True)

        @hookimpl
        def front_started(self, front):
            front.bus.listen(told.append, str)
            told.append(front.info().model)

        @hookimpl
        def front_stopped(self):
            told.append("stopped")

    engine = TinyEngine(Listens)
    engine.bus.publish("hello")
    assert engine.plugin("listens", "front").role == "front"
    engine.close()
    assert told == ["fake", "hello", "stopped"]
