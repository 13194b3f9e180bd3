"""What bytes a token stands for, compared with what the tokenizer itself makes of it."""

from __future__ import annotations

import pytest
import sentencepiece_kit as kit
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from tokenbus.core.front.detokenizer import decode_all, make_detokenizer
from tokenbus.core.front.tokenizer import Tokenizer

MADE = {style: Tokenizer(kit.sentencepiece(style), {"eos_token": "</s>"}) for style in kit.STYLES}


@pytest.mark.parametrize("style", kit.STYLES)
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, kit.SIZE - 1), min_size=1, max_size=12))
def test_any_ids_are_decoded_as_the_tokenizer_does(style: str, ids: list[int]):
    tokenizer = MADE[style]
    assert tokenizer.bytes.supported
    pieces = [piece for token in ids if (piece := tokenizer.bytes.shown(token, skip_special=True))]
    text = decode_all(tokenizer, ids, skip_special=True)
    joined = b"".join(pieces).decode(errors="replace")
    assert text == (joined if style == "gemma" else joined.removeprefix(" "))
    broken = "\ufffd" in joined  # the library writes one mark for each byte of a broken character
    all_spaces = style == "metaspace" and pieces and not pieces[0].strip()  # of the first token it drops them all
    if not broken and not all_spaces:
        assert text == tokenizer._backend.decode(ids)


@pytest.mark.parametrize("style", kit.STYLES)
@pytest.mark.parametrize("text", ["the", " the", "  two   spaces    ", '{"é": true}\n', "日本 ☃ 👩‍👩‍👧‍👦", "a\tb", "<0x41> ▁"])
def test_a_text_and_its_ids(style: str, text: str):
    tokenizer = MADE[style]
    ids = tokenizer.encode_now(text, add_special_tokens=False)
    shown = text.replace("▁", " ")  # it has no other spelling for it
    assert decode_all(tokenizer, ids, skip_special=True) == (shown.removeprefix(" ") if style == "metaspace" else shown)
    context = tokenizer.encode_now("x", add_special_tokens=False)
    assert make_detokenizer(tokenizer, skip_special=True, context=context).feed(ids).strip(" ") == shown.strip(" ")


def test_added_tokens():
    for style in kit.STYLES:
        table = MADE[style].bytes
        assert (table[kit.SIZE - 2], table[kit.SIZE - 1]) == (b"  ", b"   ")
        assert (table[2], table.shown(2, skip_special=True)) == (b"</s>", b"")
        assert table[3 + 0xE9] == b"\xe9"
        assert table[kit.SIZE] == b""


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("</w>", " "), decoders.Replace("x", "y"), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    ],
    ids=str,
)
def test_other_decoders_are_asked_themselves(decoder: tokenizers.decoders.Decoder | None):
    backend = kit.sentencepiece("llama")
    backend.decoder = decoder
    assert not Tokenizer(backend, {}).bytes.supported
