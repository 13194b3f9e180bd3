"""What the tests of tools and reasoning share: templates, tools, and an answer that is the same with and without streaming."""

from __future__ import annotations

from typing import Any

from tokenbus.core.errors import FieldError
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl

HERMES = '{# <tool_call> {"name": NAME, "arguments": OBJECT} #}'
BODY = (
    "{% for tool in tools or [] %}{{ '(' + tool.function.name + ')' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{{ think }}{% endif %}"
)
THINK = "{# <think></think> #}" + HERMES + BODY
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
GET = {"type": "function", "function": {"name": "get"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": [2]}'


def prompt_of(api: Any, index: int = -1) -> str:
    return b"".join(api.tokenizer.bytes[token] for token in api.engine.admitted[index].prompt).decode()


def joined(events: Any, index: int = 0) -> dict[str, Any]:
    """The message that a stream adds up to, as clients add it up."""
    message: dict[str, Any] = {}
    for chunk in events.chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    for piece in value:
                        _add_call(message.setdefault("tool_calls", []), piece)
                else:
                    message[key] = value if message.get(key) is None else message[key] + value if value else message[key]
    return message


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    if piece["index"] == len(calls):
        assert piece["id"]
        assert piece["type"] == "function"
        assert piece["function"]["name"]
        calls.append({key: value for key, value in piece.items() if key != "index"})
    else:
        assert piece.keys() == {"index", "function"}
        assert piece["function"].keys() == {"arguments"}
        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": [{**call, "id": None} for call in message.get("tool_calls", [])]}


async def both(api: Any, output: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """Message and finish reason, the same with and without streaming."""
    api.outputs(output)
    whole = await api.chat("hi", **fields)
    events = await api.stream_chat("hi", **fields)
    assert events.done
    reasons = [reason for reason in events.reasons() if reason is not None]
    assert reasons == [whole.choice["finish_reason"]]
    assert without_ids(joined(events)) == without_ids(whole.choice["message"])
    return whole.choice["message"], whole.choice["finish_reason"]


def function(**fields: Any) -> dict[str, Any]:
    """A tool of a client's, well made but for what is given."""
    return {"type": "function", "function": {"name": "f", **fields}}


class Structured(Plugin):
    """Claims what a plugin with grammars would; the engine here writes what it is told to anyway."""

    info = PluginInfo(name="test.structured", summary="x", scope="step", lossless=False, claims={"structured_outputs"})

    @hookimpl
    def check_fields(self, fields, request):
        (schema,) = fields["structured_outputs"].values()
        if "properties" in schema and "odd" in schema["properties"]:
            raise FieldError("structured_outputs.json.properties", "structured_outputs can't have it")


def switch_on(api: Any, plugin: type[Plugin], *, off: tuple[str, ...] = ()) -> None:
    """A plugin of a test's, in a harness that runs."""
    host = api.engine.host
    host.add(plugin)
    api.engine.switches = host.change_switches(api.engine.switches, {**dict.fromkeys(off, False), plugin.info.name: True})
    host.load({plugin.info.name})
