"""What a hook may answer: a check for each hook that answers something, applied by the plugin host to every answer that isn't None.

A check gets the answer and the hook's arguments and says what is wrong, or None. It may raise: an answer that can't even be looked at is
wrong too. The host makes a PluginError of it that names plugin and hook, so that nonsense ends what the hook is about and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from .contexts import Implied, PrefixMatch, Route
from .media import MediaItem, PreparedMedia
from .models.linears import Linears, Refusal
from .models.media import MediaEncoder
from .plan import TokenLogprobs
from .plugin import PluginInfo
from .policy import SchedulingPolicy
from .request import StopRule
from .worker.attention import AttentionBackend, KVLayout
from .worker.side import SideModel
from .worker.state import FusedFilters

Check = Callable[[Any, Mapping[str, Any], PluginInfo], str | None]

_encoder = msgspec.msgpack.Encoder()
_entries = msgspec.msgpack.Decoder(list[TokenLogprobs | None], strict=True)


def plain_data_problem(value: Any) -> str | None:
    """Why a value can't go to another process as it is; None when it can: None, bool, int of 64 bits, float, str, bytes, and lists, tuples
    and dicts (keys: str or int) of those."""
    try:
        _encoder.encode(value)
    except RecursionError:
        return "is nested too deeply"
    except OverflowError:
        return "has an integer beyond 64 bits"
    except (TypeError, ValueError) as error:
        return f"is not plain data ({error})"
    return None if (kind := _foreign(value)) is None else f"is not plain data (there is a {kind} in it)"


def _foreign(value: Any) -> str | None:
    """The first type that would arrive as another one."""
    if isinstance(value, dict):
        keys = next(
            (f"key of type {type(key).__name__}" for key in value if type(key) is not int and not isinstance(key, str)), None
        )
        return keys or next((kind for item in value.values() if (kind := _foreign(item)) is not None), None)
    if isinstance(value, (list, tuple)):
        return next((kind for item in value if (kind := _foreign(item)) is not None), None)
    return None if value is None or isinstance(value, (bool, int, float, str, bytes)) else type(value).__name__


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_fields(answer: Any, arguments: Mapping[str, Any], info: PluginInfo) -> str | None:
    if not isinstance(answer, dict):
        return f"answered a {type(answer).__name__}, not a dict of fields"
    given = arguments["fields"]
    for name, value in answer.items():
        if name not in info.claims:
            return f"gave back the field {name!r}, which it does not claim"
        if (name not in given or value is not given[name]) and (problem := plain_data_problem(value)):
            return f"gave back a value for {name!r} that {problem}"
    return None


def _implied_fields(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if not isinstance(answer, Implied) or not isinstance(answer.fields, dict):
        return f"answered {answer!r:.80}, not an Implied with a dict of fields"
    if not (
        isinstance(answer.by, str) and isinstance(answer.plugin, str) and all(isinstance(name, str) for name in answer.fields)
    ):
        return "names of fields and plugins must be texts"
    problems = ((name, plain_data_problem(value)) for name, value in answer.fields.items())
    return next((f"implied a value for {name!r} that {problem}" for name, problem in problems if problem), None)


def _prepare_media(answer: Any, arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    parts = arguments["parts"]
    if not isinstance(answer, (list, tuple)) or not all(isinstance(one, PreparedMedia) for one in answer):
        return f"answered a {type(answer).__name__}, not a list of PreparedMedia"
    if len(answer) != len(parts):
        return f"prepared {len(answer)} of {len(parts)} parts"
    for one, part in zip(answer, parts, strict=True):
        if not isinstance(one.item, MediaItem) or one.item.kind != part.kind:
            return f"made no {part.kind} of {part.where}"
        if not (is_int(one.rows) and one.rows > 0 and one.placeholder and one.text.count(one.placeholder) == one.rows):
            return f"the text for {part.where} does not hold its placeholder {one.rows!r:.20} times"
        if not one.marker:
            return f"gave no marker for {part.where}"
        _encoder.encode(one.item)
    return None


def _text_filter(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    return None if callable(getattr(answer, "feed", None)) else f"answered a {type(answer).__name__}, which has no `feed`"


def filtered_text_problem(answer: Any) -> str | None:
    """What is wrong with what a text filter's `feed` gave; None when nothing is."""
    if not (isinstance(answer, tuple) and len(answer) == 2):
        return f"`feed` gave a {type(answer).__name__}, not (text, reason)"
    text, reason = answer
    if not isinstance(text, str) or not (reason is None or isinstance(reason, str)):
        return f"`feed` gave ({type(text).__name__}, {type(reason).__name__}), not (str, str or None)"
    return None


def _output_parser(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if not callable(getattr(answer, "feed", None)):
        return f"answered a {type(answer).__name__}, which has no `feed`"
    special = getattr(answer, "special_tokens", None)
    if not isinstance(special, frozenset) or not all(isinstance(token, str) for token in special):
        return f"the parser's special_tokens must be a frozenset of str, got {special!r:.80}"
    return None


def _http_routes(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
        return f"answered a {type(answer).__name__}, not a sequence of Route"
    for route in answer:
        if not isinstance(route, Route):
            return f"there is a {type(route).__name__} among its routes"
        if not (
            isinstance(route.method, str) and route.method.isupper() and isinstance(route.path, str) and route.path[:1] == "/"
        ):
            return f"{route.method!r} {route.path!r} is no method and path"
        if not callable(route.handler):
            return f"the handler of {route.path!r} can't be called"
    return None


def _scheduling_policy(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if not isinstance(answer, SchedulingPolicy):
        return f"answered a {type(answer).__name__}, not a SchedulingPolicy"
    return f"the new policy is not empty: it holds {len(answer)}" if len(answer) else None


def _stop_rule(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if not isinstance(answer, StopRule):
        return f"answered a {type(answer).__name__}, not a StopRule"
    if not isinstance(answer.token_ids, (frozenset, set)) or not all(map(is_int, answer.token_ids)):
        return f"token_ids must be a set of ints, got {answer.token_ids!r:.80}"
    if not is_int(answer.min_tokens) or answer.min_tokens < 0:
        return f"min_tokens must be an int of 0 or more, got {answer.min_tokens!r:.80}"
    return None


def _wants_prompt_logits(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    return None if isinstance(answer, bool) else f"answered a {type(answer).__name__}, not a bool"


def _match_prefix(answer: Any, arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if not isinstance(answer, PrefixMatch) or not isinstance(answer.blocks, (list, tuple)):
        return f"answered {answer!r:.80}, not a PrefixMatch with a list of blocks"
    pool, known, blocks = arguments["pool"], len(arguments["request"].tokens), answer.blocks
    if (
        not is_int(answer.num_tokens)
        or answer.num_tokens != len(blocks) * pool.block_size
        or answer.num_tokens >= max(known, 1)
    ):
        return f"{answer.num_tokens!r:.40} tokens in {len(blocks)} blocks for {known} tokens"
    for block in blocks:
        if not is_int(block) or not 0 <= block < pool.num_blocks:
            return f"{block!r:.40} is no block of the pool"
        if not (pool.refs(block) or pool.is_retained(block)):
            return f"block {block} is free: it holds nothing"
    return f"a block stands twice in {blocks!r:.80}" if len(set(blocks)) != len(blocks) else None


def _limit_chunk(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if type(answer) is int and answer >= 0:
        return None
    return f"answered {answer!r:.40}, not a number of tokens (an int of 0 or more)"


def _propose_drafts(answer: Any, arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if not isinstance(answer, (list, tuple)):
        return f"answered a {type(answer).__name__}, not a list of token ids"
    if len(answer) > arguments["most"]:
        return f"proposed {len(answer)} drafts where {arguments['most']} was the most"
    wrong = next((token for token in answer if type(token) is not int or not 0 <= token < 1 << 31), None)
    return None if wrong is None else f"proposed {wrong!r:.40}, which is no token id"


def _drafts_after_step(answer: Any, arguments: Mapping[str, Any], info: PluginInfo) -> str | None:
    if not isinstance(answer, Mapping):
        return f"answered a {type(answer).__name__}, not a mapping of request ids to token ids"
    step = arguments["step"]
    asked = {run.request.request_id: run for run in step.runs}
    for request_id, drafts in answer.items():
        if request_id not in asked:
            return f"proposed drafts for {request_id!r:.80}, which is none of its requests in this step"
        if problem := _propose_drafts(drafts, {"most": step.most if asked[request_id].sampled else 0}, info):
            return problem
    return None


def _side_model(answer: Any, _arguments: Mapping[str, Any], info: PluginInfo) -> str | None:
    if isinstance(answer, Refusal):
        return _refusal(answer)
    if not isinstance(answer, SideModel):
        return f"answered a {type(answer).__name__}, neither a SideModel nor a Refusal"
    sizes = (answer.weights_bytes, answer.kv_bytes_per_token, answer.fixed_bytes)
    if not all(is_int(size) and size >= 0 for size in sizes):
        return f"a side model's sizes must be numbers of bytes, got {sizes!r:.80}"
    return None if info.resident else "only a plugin that is `resident` may have a side model"


def _media_encoder(answer: Any, _arguments: Mapping[str, Any], info: PluginInfo) -> str | None:
    if isinstance(answer, Refusal):
        return _refusal(answer)
    if not isinstance(answer, MediaEncoder):
        return f"answered a {type(answer).__name__}, neither a MediaEncoder nor a Refusal"
    if not (is_int(answer.weights_bytes) and answer.weights_bytes >= 0):
        return f"an encoder's size must be a number of bytes, got {answer.weights_bytes!r:.80}"
    return None if info.resident else "only a plugin that is `resident` may have an encoder"


def _quantization(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if isinstance(answer, Refusal):
        return _refusal(answer)
    return None if isinstance(answer, Linears) else f"answered a {type(answer).__name__}, neither a Linears nor a Refusal"


def _kv_layout(answer: Any, arguments: Mapping[str, Any], info: PluginInfo) -> str | None:
    if isinstance(answer, Refusal):
        return _refusal(answer)
    if not isinstance(answer, KVLayout):
        return f"answered a {type(answer).__name__}, neither a KVLayout nor a Refusal"
    if info.scope != "engine":
        return f"only a plugin of scope 'engine' may change the K/V layout; this one's is {info.scope!r}"
    given = arguments["layout"]
    changed = [f.name for f in fields(KVLayout) if f.name != "stored" and getattr(answer, f.name) != getattr(given, f.name)]
    return f"changed {', '.join(changed)} of the K/V layout" if changed else None


def _refusal(answer: Refusal) -> str | None:
    return None if isinstance(answer.reason, str) else f"refused with a {type(answer.reason).__name__}, not a text"


def _attention_backend(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if not isinstance(answer, AttentionBackend):
        return f"answered a {type(answer).__name__}, not an AttentionBackend"
    if not (isinstance(getattr(answer, "name", None), str) and isinstance(getattr(answer, "invariant", None), bool)):
        return "the backend must have a `name` (str) and say whether it is `invariant` (bool)"
    return None


def _fused_filters(answer: Any, _arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    if not isinstance(answer, FusedFilters):
        return f"answered a {type(answer).__name__}, not a FusedFilters"
    if not is_int(answer.top_k) or not 0 <= answer.top_k < 1 << 63:
        return f"top_k must be an int of 0 or more, got {answer.top_k!r:.40}"
    shares = ((name, getattr(answer, name)) for name in ("top_p", "min_p"))
    return next((f"{name} must be from 0 to 1, got {x!r:.40}" for name, x in shares if not _is_share(x)), None)


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _token_logprobs(answer: Any, arguments: Mapping[str, Any], _info: PluginInfo) -> str | None:
    rows = len(arguments["rows"])
    if not isinstance(answer, (list, tuple)):
        return f"answered a {type(answer).__name__}, not a list"
    if len(answer) != rows:
        return f"gave {len(answer)} entries for {rows} rows"
    if (foreign := next((e for e in answer if e is not None and not isinstance(e, TokenLogprobs)), None)) is not None:
        return f"there is a {type(foreign).__name__} among its entries"
    try:
        _entries.decode(_encoder.encode(answer))
    except (TypeError, OverflowError, ValueError) as error:
        return f"an entry is not made of plain ints and floats: {error}"
    return None


CHECKS: dict[str, Check] = {
    "reasoning_parser": _output_parser,
    "tool_parser": _output_parser,
    "http_routes": _http_routes,
    "implied_fields": _implied_fields,
    "check_fields": _check_fields,
    "prepare_fields": _check_fields,
    "prepare_media": _prepare_media,
    "text_filter": _text_filter,
    "scheduling_policy": _scheduling_policy,
    "stop_rule": _stop_rule,
    "wants_prompt_logits": _wants_prompt_logits,
    "match_prefix": _match_prefix,
    "limit_chunk": _limit_chunk,
    "propose_drafts": _propose_drafts,
    "drafts_after_step": _drafts_after_step,
    "side_model": _side_model,
    "quantized_checkpoint": _quantization,
    "media_encoder": _media_encoder,
    "quantization": _quantization,
    "kv_layout": _kv_layout,
    "attention_backend": _attention_backend,
    "fused_filters": _fused_filters,
    "token_logprobs": _token_logprobs,
}
"""By hook. A hook that isn't here answers nothing."""
