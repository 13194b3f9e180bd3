"""From a choice's text to what its message shows: the parsers of its request, one behind the other, each reading what those before it
left as content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..contexts import ParserContext
from ..errors import FieldError, plain_text
from ..host import HookTable, Impl
from ..output import CallArguments, CallEnd, CallStart, Content, OutputEvent, OutputParser, Reasoning
from ..request import AdmittedRequest
from .admission import Admission
from .chat import ChatTemplate
from .detokenizer import decode_all
from .tokenizer import Tokenizer

PROMPT_END = 16
"""Tokens of the prompt's end that parsers are shown."""


class CallDelta(msgspec.Struct):
    """What a tool call gained. The first of a call has `call_id` and `name`."""

    index: int
    """Place among the message's calls."""
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


class Read(msgspec.Struct):
    """What one piece of text was read as."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []
    """At most one for each call, in order."""
    ended: bool = False
    """The one call that was allowed has been made: the answer ends here."""


class OutputReader:
    """State of one choice."""

    def __init__(self, parsers: Sequence[tuple[OutputParser, Impl]], request_id: str, *, one_call: bool) -> None:
        self._parsers = parsers
        self._request_id = request_id
        self._one_call = one_call
        self._open = False
        self._started = 0
        self.made = 0
        """Calls that are complete."""

    def special_ids(self, markers: Mapping[str, int]) -> dict[int, str]:
        """The control tokens, by id, that must be shown in the text."""
        wanted = frozenset[str]().union(*(parser.special_tokens for parser, _ in self._parsers))
        return {token_id: text for text, token_id in markers.items() if text in wanted}

    def feed(self, text: str, *, final: bool) -> Read:
        """PluginError when a parser fails."""
        read = Read()
        for parser, impl in self._parsers:
            if not (text or final):
                break
            try:
                events = parser.feed(text, final=final)
            except Exception as error:
                raise impl.failure(f"{type(error).__name__}: {plain_text(error)}") from error
            text = self._take(events, read, impl)
        read.text = text
        return read

    def _take(self, events: Sequence[OutputEvent], read: Read, impl: Impl) -> str:
        """Enter events into `read`; returns the content among them."""
        if not isinstance(events, (list, tuple)):
            raise impl.failure(f"`feed` gave a {type(events).__name__}, not a list of events")
        texts: list[str] = []
        for event in events:
            if read.ended:
                break
            match event:
                case Content(text=str(text)):
                    texts.append(text)
                case Reasoning(text=str(text)):
                    read.reasoning += text
                case CallStart(name=str(name), call_id=None | str() as call_id):
                    self._start(name, call_id, read)
                case CallArguments(text=str(text)) if self._open:
                    self._delta(read).arguments += text
                case CallEnd() if self._open:
                    self._open, self.made = False, self.made + 1
                    read.ended = self._one_call
                case _:
                    raise impl.failure(f"`feed` gave {event!r:.120}, which makes no sense here")
        return "".join(texts)

    def _start(self, name: str, call_id: str | None, read: Read) -> None:
        index, self._open = self._started, True
        self._started += 1
        read.calls.append(CallDelta(index, call_id or f"call_{self._request_id.partition('-')[2]}-{index}", name))

    def _delta(self, read: Read) -> CallDelta:
        index = self._started - 1
        if not read.calls or read.calls[-1].index != index:
            read.calls.append(CallDelta(index))
        return read.calls[-1]


def make_readers(admission: Admission, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[OutputReader | None]:
    """One for each of the admission's requests; None for those whose text is shown as it is: no plugin has a parser for it, or it is no
    chat. FieldError when there are tools whose calls nobody can read."""
    parsed = admission.parsed
    table = admission.table
    if parsed.endpoint != "chat" or template is None or not (table.reasoning_parser or table.tool_parser or parsed.tools):
        return [None] * len(admission.requests)
    prompt_end = decode_all(tokenizer, parsed.prompts[0].token_ids[-PROMPT_END:], skip_special=False)
    contexts = [
        ParserContext(
            request_id=request.request_id,
            choice=request.choice,
            fields=request.fields,
            tools=parsed.tools,
            chat_template=template.source_for(parsed.tools),
            added_tokens=tokenizer.added_tokens,
            prompt_end=prompt_end,
        )
        for request in admission.requests
    ]
    return [_reader(table, context, request) for context, request in zip(contexts, admission.requests, strict=True)]


def _reader(table: HookTable, context: ParserContext, request: AdmittedRequest) -> OutputReader | None:
    parsers = [_first(table.reasoning_parser, context)]
    if context.tools:
        parsers.append(made := _first(table.tool_parser, context))
        if made is None:
            raise FieldError(
                "tools",
                "how this model writes tool calls can't be told from its chat template: start the server with the parser that fits, "
                "such as --enable tools.hermes",
            )
    there = [parser for parser in parsers if parser is not None]
    one_call = request.fields.get("parallel_tool_calls") is False
    return OutputReader(there, request.request_id, one_call=one_call) if there else None


def _first(impls: Sequence[Impl], context: ParserContext) -> tuple[OutputParser, Impl] | None:
    for impl in impls:
        if (made := impl(request=context)) is not None:
            return made, impl
    return None
