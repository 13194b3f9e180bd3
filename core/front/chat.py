"""Chat messages to prompt ids, by the model's own Jinja template in a sandbox.

Control markers inside message contents stay plain text: they are hidden behind private placeholders while the template runs, and the
rendered text is encoded with the placeholders' texts taken literally. Without markers in the contents the ids are those of an
ordinary encoding of the rendered text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from ..errors import ConfigError, FieldError, RequestError, shorten
from ..media import Kind, MediaItem, MediaPart, PreparedMedia
from ..models.media_config import is_multimodal
from ..models.resolve import ResolvedModel, read_json
from .content_form import ContentForm, form_of
from .media import PART_TYPES, expand, media_part, place, text_chars
from .tokenizer import Tokenizer
from .tools import check_calls, kind_of
from .values import check_depth, check_texts

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content"})
"""What a message may have; all of it is handed to the template. Other keys are refused unless null."""
PART_KEYS = frozenset({"type", "text"})
INLINE_CHARS = 20_000
"""Templates whose messages hold more characters are rendered on a pool thread."""
INLINE_TOOLS = 8
"""So are those that show more tools."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    token_ids: list[int]
    template_seconds: float
    tokenize_seconds: float
    media: tuple[MediaItem, ...] = ()
    """Where it has placeholders, and for what."""
    media_seconds: float = 0.0
    """Until what stands there was fetched and processed."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """Let the tokenizer add its start token. It is never there twice. None: as the template's `adds_special` says."""
    trusted_content: bool = False
    """Control markers inside contents become control tokens."""
    tools: Sequence[Any] | None = None
    """Tool definitions that the prompt offers to the model, as in the API's field `tools`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Called chat_template_kwargs in errors: that is its name in the API."""

    def __post_init__(self) -> None:
        """FieldError for template values that can't be meant."""
        if not isinstance(self.template_kwargs, Mapping):
            raise FieldError("chat_template_kwargs", "must be an object")
        for name, value in self.template_kwargs.items():
            check_depth(f"chat_template_kwargs.{name}", value)
            check_texts(f"chat_template_kwargs.{name}", value)
        if reserved := self.template_kwargs.keys() & {"messages", "add_generation_prompt", "tools", "documents"}:
            raise FieldError(f"chat_template_kwargs.{min(reserved)}", "has a field of its own")


class ChatTemplate:
    def __init__(
        self, source: str, tokenizer: Tokenizer, *, tools_source: str | None = None, adds_special: bool = False
    ) -> None:
        """tools_source: the template for requests with tools, when the model has one of its own for them. ConfigError when one of the two
        does not compile."""
        self.source = source
        self.adds_special = adds_special
        """The tokenizer adds what it adds to any text, unless the rendered one begins with its start token. So it is for models that read
        media: many of their templates leave that token to the tokenizer, as transformers' processors have it add one; those of text models
        write it themselves."""
        self._tools_source = source if tools_source is None else tools_source
        self._tokenizer = tokenizer
        self._template, takes_tools = _compile(source)
        self._for_tools = self._template
        if tools_source is not None:
            self._for_tools, takes_tools = _compile(tools_source)
        self._forms: dict[bool, ContentForm] = {}
        self.takes_tools = takes_tools
        """The model has a template that shows tools."""

    def source_for(self, tools: Any) -> str:
        """The source of the template that makes the prompt of a request with these tools, or without any."""
        return self._tools_source if tools else self.source

    async def encode(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, media: Sequence[PreparedMedia] = ()
    ) -> ChatPrompt:
        """Prompt ids of a conversation. `messages` are as `check_messages` returns them, `media` what became of their media parts.
        FieldError when the template refuses them."""
        if options.continue_final_message and (not messages or messages[-1].get("role") != "assistant"):
            raise FieldError("continue_final_message", "the last message must be the assistant's")
        if options.tools and not self.takes_tools:
            raise FieldError(
                "tools",
                "this model's chat template has no place for tools: leave them out, or start the server with a --chat-template that has",
            )
        started = time.perf_counter()
        markers: dict[Kind, str] = {one.item.kind: one.marker for one in media}
        text, literals = await self._render_somewhere(messages, options, markers)
        if media:
            text = expand(text, media)
        rendered = time.perf_counter()
        add = options.add_special_tokens
        if add is None:
            bos = self._tokenizer.bos_token
            add = self.adds_special and not (bos and text.startswith(bos))
        if literals:
            ids = await self._tokenizer.encode_with_literals(text, literals, add_special_tokens=add)
        else:
            ids = await self._tokenizer.encode(text, add_special_tokens=add)
        placed = place(ids, media, self._tokenizer.token_id) if media else ()
        return ChatPrompt(ids, rendered - started, time.perf_counter() - rendered, placed)

    async def _render_somewhere(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, markers: Mapping[Kind, str]
    ) -> tuple[str, dict[str, str]]:
        if text_chars(messages) <= INLINE_CHARS and len(options.tools or ()) <= INLINE_TOOLS:
            return self._render(messages, options, markers)
        return await anyio.to_thread.run_sync(self._render, messages, options, markers)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, markers: Mapping[Kind, str]
    ) -> tuple[str, dict[str, str]]:
        """The rendered text, and what the placeholders in it stand for."""
        nonce = secrets.token_hex(8)
        literals: dict[str, str] = {}
        kwargs: Any = dict(options.template_kwargs)
        kwargs["tools"] = list(options.tools) if options.tools else None

        def hide(value: Any) -> Any:
            return value if options.trusted_content else self._hidden(value, nonce, literals)

        form = self._form(for_tools=bool(options.tools))
        shown: list[Any] = [
            {key: form.content(value, hide, markers) if key == "content" else hide(value) for key, value in message.items()}
            for message in messages
        ]
        kwargs = hide(kwargs)
        end = f"End{nonce}x"
        if options.continue_final_message:
            shown[-1]["content"] = _with_end(shown[-1]["content"], end)
        text = self._run(shown, kwargs, options)
        if options.continue_final_message:
            text, found, _ = text.rpartition(end)
            if not found:
                raise FieldError(
                    "continue_final_message", "this model's chat template does not show the final message as it is"
                )
        return text, literals

    def _form(self, *, for_tools: bool) -> ContentForm:
        if for_tools not in self._forms:
            template = self._for_tools if for_tools else self._template
            self._forms[for_tools] = form_of(template, self._tokenizer.special_names)
        return self._forms[for_tools]

    def _hidden(self, value: Any, nonce: str, literals: dict[str, str]) -> Any:
        if isinstance(value, str):
            return self._tokenizer.hide_markers(value, nonce, literals)
        if isinstance(value, dict):
            return {self._hidden(key, nonce, literals): self._hidden(item, nonce, literals) for key, item in value.items()}
        if isinstance(value, list):
            return [self._hidden(item, nonce, literals) for item in value]
        return value

    def _run(self, messages: list[Any], kwargs: dict[str, Any], options: ChatOptions) -> str:
        generation_prompt = options.add_generation_prompt and not options.continue_final_message
        values = {"documents": None, **self._tokenizer.special_names, **kwargs}
        template = self._for_tools if options.tools else self._template
        try:
            return template.render(values, messages=messages, add_generation_prompt=generation_prompt)
        except RequestError:
            raise
        except Exception as error:
            raise FieldError("messages", f"this model's chat template refuses them: {shorten(error, 400)}") from None


def _with_end(content: Any, end: str) -> Any:
    if isinstance(content, str):
        return content + end
    if content and content[-1]["type"] == "text":
        return [*content[:-1], {"type": "text", "text": content[-1]["text"] + end}]
    return [*content, {"type": "text", "text": end}]


def check_messages(messages: Any, limit: int, *, own: bool = False) -> list[dict[str, Any]]:
    """Messages as plain dicts with contents that are strings, or lists of strings and MediaParts where there are media. FieldError names
    what is wrong. own: the caller is this process's own, so that media may be objects and files."""
    if not isinstance(messages, list):
        raise FieldError("messages", "must be a list")
    if not messages:
        raise FieldError("messages", "must hold at least one message")
    if len(messages) > limit:
        raise FieldError("messages", f"{len(messages)} messages; at most {limit} are allowed")
    return [_check_message(message, f"messages[{index}]", own=own) for index, message in enumerate(messages)]


def _check_message(message: Any, where: str, *, own: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise FieldError(where, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise FieldError(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    kept = {key: value for key, value in message.items() if not _absent(key, value)}
    if unknown := next((key for key in kept if key not in MESSAGE_KEYS), None):
        raise FieldError(f"{where}.{unknown}", "unknown field")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in kept and not isinstance(kept[key], str):
            raise FieldError(f"{where}.{key}", f"must be a string, got {kind_of(kept[key])}")
    if "tool_calls" in kept:
        if role != "assistant":
            raise FieldError(f"{where}.tool_calls", "only the assistant's messages have calls")
        kept["tool_calls"] = check_calls(kept["tool_calls"], f"{where}.tool_calls")
    if role == "developer":
        kept["role"] = "system"
    kept["content"] = _content(message.get("content"), f"{where}.content", may_be_absent=role == "assistant", own=own)
    for key, value in kept.items():
        check_texts(f"{where}.{key}", value)
    return kept


def _absent(key: Any, value: Any) -> bool:
    """What clients send for nothing: null; an empty list where lists stand, and in fields that we don't know."""
    return value is None or (value == [] and (key == "tool_calls" or key not in MESSAGE_KEYS))


def _content(content: Any, where: str, *, may_be_absent: bool, own: bool) -> str | list[str | MediaPart]:
    if isinstance(content, str):
        return content
    if content is None:
        if may_be_absent:
            return ""
        raise FieldError(where, "is required")
    if not isinstance(content, list):
        raise FieldError(where, "must be a string or a list of parts")
    parts: list[str | MediaPart] = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and (media := media_part(part, f"{where}[{index}]", own=own)) is not None:
            parts.append(media)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
            shown = shorten(kind) if isinstance(kind, str) else kind_of(part)
            raise FieldError(f"{where}[{index}]", f"parts are of type text, {' or '.join(PART_TYPES)}, not {shown!r}")
        if unknown := next((key for key, value in part.items() if key not in PART_KEYS and not _absent(key, value)), None):
            raise FieldError(f"{where}[{index}].{unknown}", "unknown field")
        parts.append(part["text"])
    if any(isinstance(part, MediaPart) for part in parts):
        return parts
    return "".join(part for part in parts if isinstance(part, str))


def load_template(model: ResolvedModel, tokenizer: Tokenizer, override: str | None) -> ChatTemplate | None:
    """The model's chat template, or the file given instead; None when the model has none (then chat is refused)."""
    adds_special = is_multimodal(model.config)
    if override is not None:
        try:
            source = Path(override).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: can't read {override}: {error}") from None
        return ChatTemplate(source, tokenizer, adds_special=adds_special)
    source, for_tools = _processors_template(model.path), None
    if source is None:
        source = tokenizer.settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source, for_tools = named.get("default"), named.get("tool_use")
    if not isinstance(source, str):
        return None
    tools_source = for_tools if isinstance(for_tools, str) else None
    return ChatTemplate(source, tokenizer, tools_source=tools_source, adds_special=adds_special)


def _processors_template(folder: Path) -> Any:
    """The one in a file of its own, or in the files of the model's processor, where older checkpoints of models that read media have it."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json"):
        if (path := folder / name).is_file() and (found := read_json(path).get("chat_template")) is not None:
            return found
    return None


def _compile(source: str) -> tuple[Any, bool]:
    """The template, and whether it looks at `tools`."""
    import jinja2
    from jinja2 import nodes

    environment = _environment()
    try:
        names = environment.parse(source).find_all(nodes.Name)
        return environment.from_string(source), any(name.name == "tools" for name in names)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template can't be used: {error}") from None


def _environment() -> Any:
    """What templates written for transformers rely on: trimmed blocks, loop controls, tojson without HTML escapes, three globals."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_extension(), loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = time.strftime
    return environment


def _generation_extension() -> Any:
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is just its contents."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2's own way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    import json

    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
