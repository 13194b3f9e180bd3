"""What an answer looks like: whole, and piece by piece. One object for each API request; it keeps what has been shown of each choice."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from ..front.admission import Prompt
from ..front.detokenizer import decode_all
from ..front.generation import Choice, Delta, Generation
from ..front.reader import CallDelta
from ..front.tokenizer import Tokenizer
from ..plan import TokenLogprobs
from .logprobs import CompletionLogprobs, chat_entries, prompt_entries, prompt_offsets


class Shape(msgspec.Struct, kw_only=True):
    """What the client asked to see."""

    model: str
    logprobs: int | None = None
    """Alternatives shown for each token; 0: the chosen one only; None: no logprobs."""
    prompt_logprobs: bool = False
    """The `prompt_logprobs` extension."""
    echo: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class Answer(ABC):
    object_name: str
    chunk_name: str

    def __init__(self, shape: Shape, generation: Generation, tokenizer: Tokenizer) -> None:
        self.shape = shape
        self.generation = generation
        self.tokenizer = tokenizer
        self._head = {"id": generation.group, "created": int(time.time()), "model": shape.model}
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._shown: set[int] = set()
        """Choices of which something has been sent."""

    # ---- whole ------------------------------------------------------------------------------------------------------------------

    def whole(self, texts: list[str], deltas: list[list[Delta]]) -> dict[str, Any]:
        """The body of an answer that isn't streamed. texts, deltas: by choice."""
        choices = [
            self._choice(choice, texts[index], _joined(deltas[index])) for index, choice in enumerate(self.generation.choices)
        ]
        return {
            **self._head, "object": self.object_name, "choices": choices, "usage": self.usage(), "tokenbus": self.applied(),
        }  # fmt: skip

    # ---- streamed ---------------------------------------------------------------------------------------------------------------

    def chunks(self, batch: list[tuple[Choice, Delta]]) -> list[dict[str, Any]]:
        """The events for what became ready at one time: none for a choice whose text is held back."""
        chunks = []
        for choice, delta in batch:
            if self._nothing_to_say(choice, delta):
                continue
            chunk = {**self._head, "object": self.chunk_name, "choices": [self._piece(choice, delta)]}
            self._shown.add(choice.index)
            if self.shape.continuous_usage:
                chunk["usage"] = self.usage()
            elif self.shape.include_usage:
                chunk["usage"] = None
            chunks.append(chunk)
        if chunks and not self.generation.open:
            chunks[-1]["tokenbus"] = self.applied()
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_name, "choices": [], "usage": self.usage()}

    def _nothing_to_say(self, choice: Choice, delta: Delta) -> bool:
        """Notes prompt logprobs of a silent delta for the next one."""
        if delta.prompt_logprobs:
            self._prompt_logprobs.setdefault(choice.index, []).extend(delta.prompt_logprobs)
        shows = delta.text or delta.reasoning or delta.calls or delta.finished
        return not (shows or (delta.logprobs and self.shape.logprobs is not None))

    # ---- both -------------------------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Totals so far. A prompt counts once, however many choices it has."""
        parsed = self.generation.admission.parsed
        first = self.generation.choices[:: parsed.n]
        prompt_tokens = sum(len(choice.request.prompt) for choice in first)
        output = sum(choice.output_tokens for choice in self.generation.choices)
        cached = sum(choice.finish.cached_tokens for choice in first if choice.finish)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output,
            "total_tokens": prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def applied(self) -> dict[str, Any]:
        """The body's `tokenbus` object: what really applied to this request."""
        admission = self.generation.admission
        ends = [choice.finish for choice in self.generation.choices if choice.finish]
        seeds = admission.seeds
        info: dict[str, Any] = {
            "features": list(ends[0].features if ends and ends[0].features else admission.features),
            "arm": admission.arm or "default",
            "seed": seeds[0],
            "cached_tokens": self.usage()["prompt_tokens_details"]["cached_tokens"],
            "notes": {name: note for end in ends for name, note in end.notes.items()},
        }
        if len(seeds) > 1:
            info["seeds"] = seeds
        if resumed := max((choice.stream.resumptions for choice in self.generation.choices), default=0):
            info["resumed"] = resumed
        return info

    def _end(self, choice: Choice) -> dict[str, Any]:
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _prompt_part(self, choice: Choice) -> dict[str, Any]:
        """The extension's field, where asked for and not shown before."""
        if not self.shape.prompt_logprobs or choice.index in self._shown:
            return {}
        return {"prompt_logprobs": prompt_entries(self.tokenizer, self._prompt_logprobs.get(choice.index, ()))}

    @abstractmethod
    def _choice(self, choice: Choice, text: str, whole: Delta) -> dict[str, Any]:
        """An entry of `choices` of a whole answer."""

    @abstractmethod
    def _piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The one entry of `choices` of a chunk."""


def _joined(deltas: list[Delta]) -> Delta:
    whole = Delta(text="", tokens=[], logprobs=[], prompt_logprobs=[])
    assert whole.logprobs is not None
    assert whole.prompt_logprobs is not None
    for delta in deltas:
        whole.tokens += delta.tokens
        whole.logprobs += delta.logprobs or ()
        whole.prompt_logprobs += delta.prompt_logprobs or ()
        whole.reasoning += delta.reasoning
        for call in delta.calls:
            if call.index < len(whole.calls):
                whole.calls[call.index].arguments += call.arguments
            else:
                whole.calls.append(CallDelta(call.index, call.call_id, call.name, call.arguments))
    return whole


def _call(call: CallDelta, *, whole: bool) -> dict[str, Any]:
    """A call, or what a streamed one gained: its id, type and name come once, first."""
    shown: dict[str, Any] = {} if whole else {"index": call.index}
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is not None:
        shown |= {"id": call.call_id, "type": "function"}
        function = {"name": call.name, **function}
    return {**shown, "function": function}


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _choice(self, choice: Choice, text: str, whole: Delta) -> dict[str, Any]:
        self._prompt_logprobs[choice.index] = whole.prompt_logprobs or []
        return {
            "index": choice.index,
            "message": self._message(text, whole),
            "logprobs": self._logprobs(whole),
            **self._end(choice),
            **self._prompt_part(choice),
        }

    def _message(self, text: str, whole: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if whole.calls or whole.reasoning else "")}
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if whole.calls:
            message["tool_calls"] = [_call(call, whole=True) for call in whole.calls]
        return message

    def _piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if choice.index not in self._shown:
            shown = {"role": "assistant", "content": None if delta.calls or delta.reasoning else ""}
        if delta.text:
            shown["content"] = delta.text
        if delta.reasoning:
            shown["reasoning_content"] = delta.reasoning
        if delta.calls:
            shown["tool_calls"] = [_call(call, whole=False) for call in delta.calls]
        end = self._end(choice) if delta.finished else {"finish_reason": None}
        return {
            "index": choice.index, "delta": shown, "logprobs": self._logprobs(delta), **end, **self._prompt_part(choice),
        }  # fmt: skip

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self.shape.logprobs is None:
            return None
        return {"content": chat_entries(self.tokenizer, delta.logprobs or (), self.shape.logprobs), "refusal": None}


class CompletionAnswer(Answer):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, shape: Shape, generation: Generation, tokenizer: Tokenizer) -> None:
        super().__init__(shape, generation, tokenizer)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._skips = generation.admission.parsed.skip_special_tokens

    def _nothing_to_say(self, choice: Choice, delta: Delta) -> bool:
        silent = super()._nothing_to_say(choice, delta)
        return silent and not (self.shape.echo and choice.index not in self._shown)

    def _choice(self, choice: Choice, text: str, whole: Delta) -> dict[str, Any]:
        self._prompt_logprobs[choice.index] = whole.prompt_logprobs or []
        echoed = self._echoed(choice)
        return {
            "index": choice.index,
            "text": echoed + text,
            "logprobs": self._pieces(choice, whole),
            **self._end(choice),
            **self._prompt_part(choice),
        }

    def _piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        first = choice.index not in self._shown
        end = self._end(choice) if delta.finished else {"finish_reason": None}
        return {
            "index": choice.index,
            "text": (self._echoed(choice) if first else "") + delta.text,
            "logprobs": self._pieces(choice, delta),
            **end,
            **self._prompt_part(choice),
        }

    def _echoed(self, choice: Choice) -> str:
        if not self.shape.echo:
            return ""
        prompt = self._prompt_of(choice)
        if prompt.text is not None:
            return prompt.text
        return decode_all(self.tokenizer, prompt.token_ids, skip_special=self._skips)

    def _prompt_of(self, choice: Choice) -> Prompt:
        parsed = self.generation.admission.parsed
        return parsed.prompts[choice.index // parsed.n]

    def _pieces(self, choice: Choice, delta: Delta) -> dict[str, list[Any]] | None:
        """`logprobs` of a piece; the first piece of an echoed prompt has the prompt's tokens too, the first of them without a value."""
        if self.shape.logprobs is None:
            return None
        builder = self._logprobs.get(choice.index)
        if builder is not None:
            return builder.piece(delta.tokens, delta.logprobs or ())
        prompt = choice.request.prompt
        builder = self._logprobs[choice.index] = CompletionLogprobs(
            self.tokenizer, self.shape.logprobs, skip_special=self._skips, context=prompt, start=len(self._echoed(choice))
        )
        if not self.shape.echo:
            return builder.piece(delta.tokens, delta.logprobs or ())
        offsets = prompt_offsets(self.tokenizer, prompt, self._prompt_of(choice).text, skip_special=self._skips)
        echoed = (prompt, offsets, self._prompt_logprobs.get(choice.index, ()))
        return builder.piece(delta.tokens, delta.logprobs or (), echoed)
