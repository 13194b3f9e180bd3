"""`tokenbus chat`: a conversation on the terminal. Ctrl-C ends an answer, Ctrl-D the conversation; /reset forgets it."""

from __future__ import annotations

import argparse
import contextlib
import sys

from ..config import Config
from ..errors import TokenbusError
from ..front.values import check_text
from ..offline import LLM
from ..params import SamplingParams
from .generate import quiet, sampling_params


def run(arguments: argparse.Namespace, config: Config) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if arguments.system:
        check_text("system", arguments.system)
    params = sampling_params(arguments)
    with LLM(config.model.model, config=quiet(config)) as llm:
        print(f"{llm.info.model} ({llm.info.dtype}); /reset forgets the conversation, Ctrl-D ends it", file=sys.stderr)
        _converse(llm, opening, params)
    return 0


def _converse(llm: LLM, opening: list[dict[str, str]], params: SamplingParams) -> None:
    messages = list(opening)
    while (line := _ask()) is not None:
        if line == "/reset":
            messages = list(opening)
        if not line or line == "/reset":
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            answer = _answer(llm, turn, params)
        except TokenbusError as error:
            print(f"tokenbus: {error.message}", file=sys.stderr)
        else:
            messages = [*turn, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """The answer, shown as it comes; what there was of it when Ctrl-C ended it."""
    pieces: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        for piece in llm.stream(llm.chat_ids(messages), params):
            print(piece, end="", flush=True)
            pieces.append(piece)
    print()
    return "".join(pieces)
