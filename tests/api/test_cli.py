from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tokenbus.core import cli, settings_cli
from tokenbus.core.config import Config
from tokenbus.core.errors import ConfigError


def config(*argv: str) -> Config:
    return settings_cli.make_config(cli.make_parser().parse_args(["serve", *argv]))


def test_defaults():
    assert config() == Config()


def test_every_field_has_a_flag_of_its_own():
    flags = {
        action.dest: action.option_strings
        for action in cli.make_parser()._subparsers._group_actions[0].choices["serve"]._actions
    }
    wanted = {
        f"{section}.{field.name}"
        for section, struct in settings_cli.sections().items()
        for field in msgspec.structs.fields(struct)
        if field.name not in settings_cli.SWITCHES
    }
    assert wanted <= flags.keys()
    assert {*settings_cli.sections(), "plugins", "experiments"} == {field.name for field in msgspec.structs.fields(Config)}
    names = [name for options in flags.values() for name in options]
    assert len(names) == len(set(names))


def test_flags_are_typed():
    made = config(
        "--model", "a/b", "--port", "0", "--max-model-len", "64", "--kv-memory-fraction", "0.5", "--api-key", "x", "--api-key", "y",
        "--dtype", "bfloat16", "--served-model-name", "12",
    )  # fmt: skip
    assert (made.model.model, made.server.port, made.model.max_model_len, made.cache.kv_memory_fraction) == ("a/b", 0, 64, 0.5)
    assert (made.server.api_key, made.model.dtype, made.model.served_model_name) == (("x", "y"), "bfloat16", "12")


@pytest.mark.parametrize(
    "argv", [("--port", "x"), ("--port", "70000"), ("--dtype", "int3"), ("--threads", "0"), ("--max-n", "1.5")]
)
def test_a_malformed_value_names_its_flag(argv):
    with pytest.raises(ConfigError, match=argv[0]):
        config(*argv)


def test_file_then_flags(tmp_path):
    path = tmp_path / "tokenbus.toml"
    path.write_text(
        '[server]\nport = 1\nhost = "::1"\n[features]\ndisable = ["metrics", "prefix_cache"]\n[plugins.chunked_prefill]\nmode = "fixed"\n'
    )
    made = config("--config", str(path), "--port", "2", "--enable", "metrics", "--plugin-setting", "chunked_prefill.size=64")
    assert (made.server.port, made.server.host) == (2, "::1")
    assert (made.features.enable, made.features.disable) == (("metrics",), ("prefix_cache",))
    assert made.plugins == {"chunked_prefill": {"mode": "fixed", "size": 64}}
    path.write_text("[server]\nprot = 1\n")
    with pytest.raises(ConfigError, match=r"tokenbus.toml.*prot"):
        config("--config", str(path))


def test_the_later_switch_wins():
    made = config("--enable", "a", "--disable", "a,b", "--enable", "b", "--disable", "c")
    assert (made.features.enable, made.features.disable) == (("b",), ("a", "c"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("p.mode=fixed", "fixed"), ("p.mode=3", 3), ('p.mode="3"', "3"), ("p.mode=[1, 2]", [1, 2]), ("p.mode=true", True)],
)
def test_plugin_settings(text, value):
    assert config("--plugin-setting", text).plugins == {"p": {"mode": value}}


def test_plugin_setting_of_a_dotted_name():
    assert config("--plugin-setting", "sampling.logprobs.mode=processed").plugins == {
        "sampling.logprobs": {"mode": "processed"}
    }


@pytest.mark.parametrize("text", ["p.mode", "mode=1", "=1"])
def test_malformed_plugin_setting(text):
    with pytest.raises(ConfigError, match=r"PLUGIN\.NAME=VALUE"):
        config("--plugin-setting", text)


def test_plugins_command(capsys):
    assert cli.main(["plugins", "--json", "--disable", "prefix_cache"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["plugins"]}
    assert (rows["prefix_cache"]["on"], rows["prefix_cache"]["because"]) == (False, "switched off at start")
    assert rows["chunked_prefill"]["scope"] == "request"
    assert "stop" in rows["sampling.stops"]["claims"]
    assert cli.main(["plugins"]) == 0
    assert "chunked_prefill" in capsys.readouterr().out


def test_start_up_errors_are_one_line(capsys):
    assert cli.main(["plugins", "--enable", "prefix_cach"]) == 1
    assert capsys.readouterr().err.startswith("tokenbus: no plugin is called 'prefix_cach'; did you mean")
    assert cli.main(["serve", "--port", "x"]) == 1
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "plugins", "plan-memory", "selftest", "chat", "generate"])
def test_help_tells_every_flag(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([command, "--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert "--enable" in shown or command == "plan-memory"
    if command == "serve":
        assert "Tokens a step runs at most" in shown


def test_settings_that_python_can_not_read(tmp_path):
    assert config("--plugin-setting", "p.size=" + "9" * 5000).plugins == {"p": {"size": "9" * 5000}}
    path = tmp_path / "tokenbus.toml"
    for text in ("[server]\nport = " + "9" * 5000, "x = " + "[" * 5000):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"tokenbus\.toml"):
            config("--config", str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"tokenbus\.toml"):
        config("--config", str(path))


def test_output_that_can_not_be_written_is_one_line(monkeypatch, capsys):
    from tokenbus.core.commands import plugins

    for error, words in (
        (UnicodeEncodeError("ascii", "\u00e9", 0, 1, "ordinal not in range"), "can't be written as ascii"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "byte 0xff invalid start byte"),
        (OSError(28, "No space left on device"), "No space left"),
    ):

        def fail(*_: object, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(plugins, "run", fail)
        assert cli.main(["plugins"]) == 1
        shown = capsys.readouterr().err
        assert shown.startswith("tokenbus: ")
        assert words in shown
        assert shown.count("\n") == 1


def test_the_settings_page_tells_of_sections_not_of_their_base_class():
    page = (Path(settings_cli.__file__).parents[1] / "docs" / "reference" / "settings.md").read_text()
    assert "base class" not in page
    assert "Bounds on one API request" in page
    assert len(page.splitlines()) < 260
