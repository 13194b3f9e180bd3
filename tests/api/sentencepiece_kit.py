"""Tokenizers of SentencePiece's kind, as Llama, Gemma and Mistral spell them: spaces as U+2581, unknown characters as bytes <0xAB>."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

STYLES = ("llama", "gemma", "metaspace")
WORDS = ["▁the", "▁", "th", "he", "▁t", '▁"', '":', "▁{", '{"', "é", "▁é", "日", "true", "\n", "null", "▁1"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ASCII = [chr(code) for code in range(0x21, 0x7F)]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, *ASCII, *[word for word in WORDS if word not in ASCII]]
SPACES = ["▁▁", "▁▁▁"]
"""Added tokens that are not special: Gemma has its runs of spaces so."""
SIZE = len(PIECES) + len(SPACES)


def sentencepiece(style: str) -> tokenizers.Tokenizer:
    """Ids: <unk>, <s>, </s>, 256 bytes, ASCII, words, runs of spaces. `</s>` is the end."""
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    merges = [
        ("t", "h"),
        ("h", "e"),
        ("▁", "t"),
        ("▁t", "he"),
        ("▁", '"'),
        ('"', ":"),
        ("▁", "{"),
        ("{", '"'),
        ("▁", "é"),
        ("▁", "1"),
    ]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replaced = decoders.Replace("▁", " ")
    match style:
        case "llama":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            backend.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        case "gemma":
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse()])
        case "metaspace":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            backend.decoder = decoders.Sequence(
                [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
            )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken(run, normalized=False, special=False) for run in SPACES])
    return backend
