from __future__ import annotations

import pytest

from tokenbus.core.config import Config, from_mapping, load_toml, merge
from tokenbus.core.errors import ConfigError


def test_defaults_and_toml(tmp_path):
    path = tmp_path / "tokenbus.toml"
    path.write_text('[model]\nmodel = "x"\n[features]\ndisable = ["prefix_cache"]\n[plugins.chunked_prefill]\nmode = "fixed"\n')
    config = from_mapping(load_toml(path), str(path))
    assert config.model.model == "x"
    assert config.features.disable == ("prefix_cache",)
    assert config.plugins == {"chunked_prefill": {"mode": "fixed"}}
    assert config.scheduler == Config().scheduler


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"scheduler": {"token_budjet": 3}}, "token_budjet"),
        ({"scheduler": {"token_budget": "many"}}, r"\$.scheduler.token_budget"),
        ({"scheduler": {"token_budget": 0}}, r"\$.scheduler.token_budget"),
        ({"shedule": {}}, "shedule"),
        ({"model": {"dtype": "int3"}}, r"\$.model.dtype"),
    ],
)
def test_a_wrong_setting_is_an_error_that_says_where(data, says):
    with pytest.raises(ConfigError, match=says):
        from_mapping(data, "tokenbus.toml")


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="can't read"):
        load_toml(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_toml(bad)


def test_merge_is_by_table_and_changes_nothing():
    base = {"a": {"x": 1, "y": 2}, "b": 1}
    over = {"a": {"y": 3}, "c": 4}
    assert merge(base, over) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}
    assert base == {"a": {"x": 1, "y": 2}, "b": 1}
