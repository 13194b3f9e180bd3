"""`text_offset` of completions: the place in the returned text where a token's text begins, or would stand."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tokenbus.core.api.logprobs import prompt_offsets
from tokenbus.core.front.detokenizer import decode_all
from tokenbus.core.front.token_bytes import byte_alphabet
from tokenbus.core.front.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

START, END, PAD = 258, 259, 260
TEXTS = ["abc", "a<|pad|>b<|im_end|>", "<|im_start|>the<|pad|><|pad|>", "příliš 👩‍👩 the", "<|pad|>👩"]


def check(text: str, logprobs: dict, hidden: frozenset[str]) -> None:
    """Each shown token's text stands at its offset; tokens side by side; parts of characters and hidden tokens between the two."""
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for index, (name, offset) in enumerate(zip(logprobs["tokens"], offsets, strict=True)):
        assert 0 <= offset <= len(text)
        if name in hidden or name.startswith("bytes:"):
            continue
        assert text.startswith(name, offset), (name, offset, text)
        following = [o for n, o in zip(logprobs["tokens"][index + 1 :], offsets[index + 1 :], strict=True) if n not in hidden]
        assert not following or following[0] == offset + len(name)


@pytest.mark.parametrize(
    ("text", "as_ids", "skip", "echo"), list(itertools.product(TEXTS, (False, True), (False, True), (False, True)))
)
async def test_offsets_in_every_combination(api, text, as_ids, skip, echo):
    ids = api.tokenizer.encode_now(text)
    api.outputs("xé<|pad|>the👩")
    body = {"prompt": ids if as_ids else text, "logprobs": 1, "echo": echo, "skip_special_tokens": skip}
    answer = await api.complete(body.pop("prompt"), **body)
    logprobs = answer.choice["logprobs"]
    shown = decode_all(api.tokenizer, ids, skip_special=skip) if as_ids else text
    output = "xéthe👩" if skip else "xé<|pad|>the👩"
    assert answer.text == (shown if echo else "") + output
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert len(tokens) == (len(ids) if echo else 0) + 9
    start = len(shown) if echo else 0
    assert offsets[-9:] == [start + o for o in ([0, 1, 1, 2, 2, 5, 5, 5, 5] if skip else [0, 1, 1, 2, 9, 12, 12, 12, 12])]
    if echo:
        prompt = {name: values[:-9] for name, values in logprobs.items()}
        check(shown, prompt, frozenset(api.tokenizer.markers) if as_ids and skip else frozenset())
    events = await api.stream("/v1/completions", {"prompt": ids if as_ids else text, **body})
    pieces = [chunk["choices"][0]["logprobs"] for chunk in events.chunks]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == offsets


async def test_an_added_start_token_stands_where_it_would(serve, bos_tokenizer):
    async with serve(tokenizer=bos_tokenizer) as api:
        api.outputs("x")
        for prompt, offsets in (("ab", [0, 0, 1, 2]), ("<|im_start|>ab", [0, 12, 13, 14]), ([START, 97, 98], [0, 0, 1, 2])):
            answer = await api.complete(prompt, echo=True, logprobs=0, max_tokens=1)
            assert answer.choice["logprobs"]["text_offset"] == offsets


async def test_tokens_of_a_stop_string_stand_where_they_would(api):
    api.outputs("one two")
    for fields in ({"stop": " t"}, {"stop": " t", "include_stop_str_in_output": True}):
        answer = await api.complete("ab", echo=True, logprobs=0, **fields)
        assert answer.text.startswith("abone")
        assert answer.choice["logprobs"]["text_offset"] == list(range(7))


async def test_a_character_that_is_cut_off(api):
    """C3 begins a character of two bytes: A cuts it off, it is shown as U+FFFD and A stands behind it."""
    api.engine.answer = lambda admitted: [0xC3, PAD, 65, 0xE2, 0x82, 66, 0xC3]
    answer = await api.complete([0xC3, 97, 0xC3], echo=True, logprobs=0)
    assert answer.text == "\ufffda\ufffd" + "\ufffdA\ufffdB\ufffd"
    assert answer.choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 3, 4, 5, 5, 6, 7]


def test_a_tokenizer_that_changes_texts():
    """Lower case and NFC: the tokens don't spell the text, so the tokenizer's own offsets count."""
    chars = {byte: char for char, byte in byte_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab={chars[byte]: byte for byte in range(256)}, merges=[]))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {})
    text = "Ae\u0301x"
    ids = tokenizer.encode_now(text)
    assert ids == [97, 0xC3, 0xA9, 120]
    assert prompt_offsets(tokenizer, ids, text, skip_special=True) == [0, 1, 1, 3]
    assert prompt_offsets(tokenizer, [97, 98], text, skip_special=True) == [0, 0]
