"""What a Python caller gets wrong is the same error as over HTTP: class and field. No engine runs here but where one is needed."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from tokenbus import SamplingParams
from tokenbus.core.config import CacheConfig, Config
from tokenbus.core.errors import ConfigError, FieldError
from tokenbus.core.front.chat import ChatOptions
from tokenbus.core.front.startup import check_pool
from tokenbus.core.host import make_host
from tokenbus.core.kv.sizing import plan
from tokenbus.core.offline import LLM, _fields, _ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": []}, "temperature"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": -(10**5000)}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"seed": 1.0}, "seed"),
        ({"timeout": "1"}, "timeout"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
        ({"features": ["prefix_cache"]}, "features"),
        ({"features": {"prefix_cache": "off"}}, "features.prefix_cache"),
        ({"features": {"x" * 1000: True}}, None),
        ({"extra": None}, "extra"),
    ],
)
def test_wrong_values_name_the_field(fields, param):
    with pytest.raises(FieldError) as found:
        SamplingParams(**fields)
    assert found.value.param is not None
    assert param is None or found.value.param == param
    assert len(found.value.message) < 500


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [True], [[1]], 5, None, {"a": 1}])
def test_prompts_that_are_none(prompt):
    with pytest.raises(FieldError, match="prompt"):
        _ids(prompt)


def test_nesting_and_long_names():
    deep: list = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(FieldError, match="64 levels"):
        _fields(SamplingParams(extra={"mine": deep}))
    with pytest.raises(FieldError, match="64 levels"):
        ChatOptions(template_kwargs={"mine": deep})
    with pytest.raises(FieldError, match="unknown field"):
        _fields(SamplingParams(extra={"x" * 1000: 1}))
    with pytest.raises(FieldError, match="a field of its own"):
        ChatOptions(template_kwargs={"messages": []})


def test_a_pool_larger_than_memory():
    cache = Config.__struct_defaults__[1]
    assert plan(10**9, 1000, 5, type(cache)(num_blocks=62_500), 512).num_blocks == 62_500
    assert plan(0, 1000, 5, type(cache)(num_blocks=62_500), 512).num_blocks == 62_500  # nothing is known about this machine
    with pytest.raises(ConfigError, match=r"cache\.num_blocks.*62,501 blocks.*enough for 62,500"):
        plan(10**9, 1000, 5, type(cache)(num_blocks=62_501), 512)
    with pytest.raises(ConfigError, match=r"cache\.num_blocks"):
        check(10**12)
    check(8)
    check(None)
    check(10**12, "quantization.kv_int8")  # how large K/V is then, the engine knows


def check(num_blocks: int | None, *enable: str) -> None:
    config = Config(cache=CacheConfig(num_blocks=num_blocks))
    host = make_host("front", config)
    check_pool(config, host, host.start_switches(enable))


def test_it_is_found_before_anything_starts(monkeypatch):
    monkeypatch.setattr("tokenbus.core.offline.EngineClient", None)
    monkeypatch.setattr("tokenbus.core.offline.structlog.is_configured", lambda: True)
    with pytest.raises(ConfigError, match=r"cache\.num_blocks"):
        LLM("demo", num_blocks=10**12)


def command(*words: bytes | str, stdin: bytes = b"", **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tokenbus", *words], input=stdin, capture_output=True, timeout=100, check=False,
        env={"PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1", **environment},
    )  # fmt: skip
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    ("words", "stdin", "environment"),
    [
        (("generate",), b"ab\xff\n", {"PYTHONIOENCODING": "utf-8:strict"}),
        (("generate",), b"ab\xff\n", {"PYTHONIOENCODING": "utf-8:surrogateescape"}),
        (("generate", b"ab\xff"), b"", {}),
        (("chat", "--system", b"\xff"), b"", {}),
        (("generate", "--temperature", "-1", "x"), b"", {}),
        (("generate", "--config", b"\xff"), b"", {}),
    ],
)
def test_commands_say_in_one_line_what_is_wrong(words, stdin, environment):
    code, shown = command(*words, stdin=stdin, **environment)
    assert code == 1
    assert shown.startswith("tokenbus: ")
    assert shown.count("\n") == 1
