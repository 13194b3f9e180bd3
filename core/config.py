"""Every setting, in one table: frozen, composed, documented in place. `tokenbus.toml`, the command line and Python use these names.

    [model]                    --model, --dtype, ...          (command-line names are the field names with dashes)
    model = "demo"
    [scheduler]
    token_budget = 2048
    [features]
    disable = ["prefix_cache"]
    [plugins.chunked_prefill]  a plugin's own settings
    mode = "fixed"

An unknown name or a malformed value is a ConfigError that says where it stands.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .errors import ConfigError
from .experiments.config import ExperimentConfig

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelConfig(Section, frozen=True):
    model: str = "demo"
    """A Hugging Face directory, a hub id, a .gguf file, or "demo" (SmolLM2-135M-Instruct)."""
    served_model_name: str | None = None
    """The name clients use; default: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights, activations and KV. auto: the checkpoint's own, GGUF: bfloat16. float16 is for GPUs: on the CPU auto makes it
    float32."""
    max_model_len: PositiveInt | None = None
    """Tokens of prompt plus output at most; default: what the model declares."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. auto: on a GPU where torch finds one. cuda: an error where it doesn't."""
    kernels: Literal["auto", "cpu", "torch", "triton"] = "auto"
    """What the decoder's layers run on. cpu: the C++ kernels; triton: those for GPUs; an error where they can't be had. auto: the
    device's own where they can, else torch."""
    batch_invariant: Literal["auto", "on", "off"] = "auto"
    """Whether a request's tokens must not depend on the rest of the batch. auto: on for the CPU, where it costs nothing, off on a GPU,
    where it costs speed. off: on a GPU only. on: an error where the model's matrix products can't."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Small steps on a GPU are recorded and replayed. auto: where the model and the attention backend allow it. on: an error where not."""
    threads: PositiveInt | None = None
    """Threads that compute; default: the cores this process may use."""
    cores: str | None = None
    """CPUs that the engine process may use, such as "0-3,8"; default: those it was started with."""
    worker: Literal["thread", "process"] = "thread"
    """Where the model runs: a thread of the engine process, or a process of its own."""
    chat_template: str | None = None
    """A Jinja file that replaces the model's own template."""
    trust_remote_code: Literal[False] = False


class CacheConfig(Section, frozen=True):
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    """Tokens per KV block."""
    kv_memory_mb: PositiveInt | None = None
    """MiB for K/V; default: `kv_memory_fraction` of what is free after the weights."""
    kv_memory_fraction: Annotated[float, Meta(gt=0, le=0.95)] | None = None
    """Of what is free after the weights (on a GPU: and beside the largest step); default: 0.25 on the CPU, 0.9 on a GPU."""
    num_blocks: PositiveInt | None = None
    """Blocks in the pool, instead of a size in bytes (for tests)."""
    encoder_memory_mb: PositiveInt = 256
    """MiB for what encoders made of pictures and sounds, which are found again by content. Taken only with a model that reads media."""


class SchedulerConfig(Section, frozen=True):
    token_budget: PositiveInt = 2048
    """Tokens a step runs at most (a whole prompt may pass it when chunked prefill is off)."""
    encoder_budget: PositiveInt = 4096
    """Tokens of pictures and sounds that begin in a step at most, which is what it may have to encode; one larger one runs alone. Prompts
    are cut before the next, where they may be cut at all."""
    encoder_slice_ms: NonNegative = 20.0
    """On a CPU: milliseconds that a step encodes a picture or sound beside the tokens it runs, until that is done; 0: each is encoded as a
    whole, in the step that runs its first token."""
    max_running: PositiveInt = 256
    """Requests that hold blocks at the same time."""
    max_drafts: Annotated[int, Meta(ge=0)] = 32
    """Drafts of one request that a step verifies at most, whatever its plugins propose."""
    max_waiting: PositiveInt = 1024
    """Requests that wait; one more is answered 429."""
    request_timeout: Positive = 600.0
    """Seconds from admission until a request ends with a timeout error; a client may ask for less."""
    ahead: Literal["auto", "on", "off"] = "auto"
    """Plan a step and send it to the worker while the one before it computes, so that the worker never waits. auto: where the worker says
    that it gains by it."""
    plan_history: PositiveInt = 1024
    """Plans kept for /v1/tokenbus/plans."""


class ServerConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: any free port, printed at start."""
    api_key: tuple[str, ...] = ()
    """Keys clients may use; "@FILE" reads one a line. Empty: no key is asked for."""
    admin_key: str | None = None
    """Key of the admin surface; "@FILE" reads it. None: loopback only."""
    drain_seconds: NonNegative = 30.0
    """After SIGTERM: how long running requests may go on."""
    stream_comment_seconds: Positive = 10.0
    """A stream that has begun and had nothing to send for so long gets a comment line, so that nobody on the way closes the connection."""
    client_features: tuple[str, ...] = (
        "chunked_prefill",
        "prefix_cache",
        "reasoning",
        "speculative.draft_model",
        "speculative.ngram",
        "speculative.suffix",
        "structured.jump_forward",
    )
    """Request-scope plugins that a client may switch in the body: off for its request, and on where the server has them off."""
    audit_file: str | None = None
    """Where every live change of switches and settings is written, as JSON lines; None: kept in memory only."""
    audit_file_mb: PositiveInt = 16
    """MiB at which the file is set aside as FILE.1, and a new one begun."""
    audit_files_kept: Annotated[int, Meta(ge=0, le=1000)] = 4
    """Files set aside that are kept."""
    state_dir: str | None = None
    """Folder for what outlives the server: the state and the rows of experiments, which need it. One server at a time may use it."""
    log_format: Literal["auto", "console", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class SupervisionConfig(Section, frozen=True):
    step_deadline: Positive = 120.0
    """Seconds after which a step that has not ended counts as the engine's death."""
    start_deadline: Positive = 600.0
    """Seconds an engine may take to become ready."""
    heartbeat_deadline: Positive = 20.0
    """Seconds without a sign of life after which the engine is killed."""
    restart_backoff: Positive = 0.5
    """Seconds before the first restart; doubles with each death in a row, up to `restart_backoff_max`."""
    restart_backoff_max: Positive = 30.0
    resume_starts: PositiveInt = 5
    """Starts in a row that may fail after a death before the requests that wait for one end with an error; starting is tried on."""


class LimitsConfig(Section, frozen=True):
    """Bounds on one API request. Each is answered 400 (413 for the body) with the limit in the message."""

    max_body_bytes: PositiveInt = 32 * 1024 * 1024
    max_prompts: PositiveInt = 64
    """Prompts in one completions request."""
    max_n: PositiveInt = 16
    max_choices: PositiveInt = 128
    """Prompts times n."""
    max_stop: PositiveInt = 16
    max_stop_chars: PositiveInt = 256
    max_stop_token_ids: PositiveInt = 128
    max_logit_bias: PositiveInt = 1024
    max_bad_words: PositiveInt = 64
    max_bad_words_chars: PositiveInt = 1024
    """Characters of all bad_words together: they are tokenised while other streams wait."""
    max_allowed_token_ids: PositiveInt = 8192
    max_logprobs: PositiveInt = 20
    max_messages: PositiveInt = 2048
    max_tools: PositiveInt = 128
    max_tools_bytes: PositiveInt = 256 * 1024
    """Bytes of a request's tools as JSON, all together: names, descriptions and the schemas of their parameters."""
    max_request_id_chars: PositiveInt = 128
    max_media_mb: Annotated[int, Meta(ge=1, le=192)] = 192
    """MiB of a request's processed pictures and sounds, times its choices: what goes to the engine. The largest picture that Qwen-VL's
    published settings allow has 192."""
    max_open_media_mb: PositiveInt = 1024
    """MiB of processed media of all open requests; the front keeps them for an engine that has to be started anew. Requests beyond are
    answered 429."""


class FeaturesConfig(Section, frozen=True):
    enable: tuple[str, ...] = ()
    """Plugins on, beside those that are on by default; the later of enable and disable on the command line wins."""
    disable: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    """Plugins that are not installed as packages, as "module:Class"; found like those with an entry point."""


class Config(Section, frozen=True):
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    limits: LimitsConfig = LimitsConfig()
    features: FeaturesConfig = FeaturesConfig()
    plugins: dict[str, dict[str, Any]] = {}
    """Settings of each plugin by its name, checked by the plugin's own type when it is loaded."""
    experiments: dict[str, ExperimentConfig] = {}
    """Traffic split over sets of switches, by name."""


def from_mapping(data: dict[str, Any], where: str) -> Config:
    """A Config from nested plain data; ConfigError names `where` and the path of what is wrong."""
    try:
        return msgspec.convert(data, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None


def load_toml(path: str | Path) -> dict[str, Any]:
    """The file as nested plain data; ConfigError when it can't be read or parsed."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML's own error, bytes that are no UTF-8, numbers of thousands of digits
        raise ConfigError(f"{path}: {error}") from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top, table by table. Neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
