"""The process that compiles grammars for the front, so that a grammar that takes too long can be killed with it.

Run as a file by `compiler.Compiler`, never imported by the engine: it needs llguidance and msgspec only. Frames on stdin and stdout: four
bytes of length (little-endian), then MessagePack. First the vocabulary comes in and "ready" goes out; then one answer for each question:

    {"kind": "json" | "regex" | "lark" | "grammar", "text": str, "seconds": float}   ->   {"grammar": str} or {"error": str}

The process kills itself (SIGPROF) when a question has used `seconds` of its CPU time, so it stops even when nobody is left to kill it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

WHITE_SPACE = r" |\n {0,8}"
"""Between two JSON tokens at most this, once: a model that likes blanks can't fill its answer with them."""
JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITE_SPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrtbf"\\',  # no \u: every string has one spelling, so a key can't be written so that it isn't recognised
    "json_allow_general_unicode_escapes": False,
}
HEADER = '%llguidance {"no_forcing": true}'
"""All tokens that fit are allowed, not only those that the tokenizer itself would choose for a text that is forced: a mask then depends on
the tokens' bytes alone."""

NICENESS = 5
"""Requests that are under way come first; a grammar still has a quarter of a core that is wanted by both."""


def read_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = struct.unpack("<I", head)[0]
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(struct.pack("<I", len(body)) + body)
    stream.flush()


class Words:
    """What llguidance asks a tokenizer for. With HEADER no text is ever tokenised."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], eos_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def make_tokenizer(tokens: list[bytes], special_ids: list[int], eos_token_ids: list[int]) -> Any:
    """The library's tokenizer; some 0.1 s."""
    import llguidance

    wrapper = llguidance.TokenizerWrapper(Words(tokens, special_ids, eos_token_ids))
    return llguidance.LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=eos_token_ids)


def limits() -> Any:
    """llguidance's own bounds on a step, and on a grammar's states (1 to 2 kB each); its error texts stay short."""
    import llguidance

    return llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def source(kind: str, text: str) -> str:
    """The library's own form of a grammar: Lark, spelled out, for it takes a text that begins with "{" for JSON in which anything could
    stand."""
    if kind == "json":
        schema = msgspec.json.decode(text)
        lark = "start: %json " + msgspec.json.encode({**schema, "x-guidance": JSON_OPTIONS}).decode()
    elif kind == "regex":
        from llguidance import LLMatcher

        lark = msgspec.json.decode(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    elif kind == "grammar" and "::=" in text:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        lark = gbnf_to_lark(text).replace("%llguidance {}", "", 1)
    else:
        lark = text
    return msgspec.json.encode({"grammars": [{"lark_grammar": f"{HEADER}\n{lark}"}]}).decode()


def compiled(tokenizer: Any, grammar: str) -> Any:
    """A matcher before its first token. ValueError when the grammar is wrong, or nothing can follow from its start."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error() and (not any(mask) or (matcher.is_stopped() and not matcher.is_accepting())):
            raise ValueError("nothing satisfies it")
    if matcher.is_error():
        raise ValueError(clean(matcher.get_error()))
    return matcher


def clean(message: str) -> str:
    """The library's message without what it says about itself."""
    message = (
        message.split("<non-verbose/>", maxsplit=1)[0]
        .split("\n<state>", maxsplit=1)[0]
        .split("\n<backtrace>", maxsplit=1)[0]
        .strip()
    )
    if message.startswith("panic"):
        return "it is too large for the grammar library"
    if "oneOf constraints are not supported" in message:
        return "'oneOf': its alternatives overlap, or can't be told apart; write 'anyOf'"
    if message.startswith("NoExtension"):
        return "nothing satisfies it"
    return message or "it is too complex"


def answer(tokenizer: Any, kind: str, text: str) -> dict[str, str]:
    try:
        grammar = source(kind, text)
        compiled(tokenizer, grammar)
    except MemoryError:
        raise
    except BaseException as error:  # a panic in the library is no Exception
        return {"error": clean(str(error)) or type(error).__name__}
    return {"grammar": grammar}


def bound_memory(mebibytes: int) -> None:
    """At most this much more than now, where the system can say how much that is."""
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - start-up time
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most := now + mebibytes * 2**20, most))
    except (OSError, ValueError):
        return


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    reader, writer = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    first = read_frame(reader)
    if first is None:
        return
    hello = msgspec.msgpack.decode(first)
    tokenizer = make_tokenizer(hello["tokens"], hello["special_ids"], hello["eos_token_ids"])
    bound_memory(hello["memory_mb"])
    write_frame(writer, msgspec.msgpack.encode("ready"))
    while (frame := read_frame(reader)) is not None:
        question = msgspec.msgpack.decode(frame)
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
        told = answer(tokenizer, question["kind"], question["text"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(writer, msgspec.msgpack.encode(told))


if __name__ == "__main__":
    main()
