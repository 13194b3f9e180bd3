"""Engines of their own for the arms: what each is started with, and what is refused because it can't be had."""

from __future__ import annotations

import pytest

from tokenbus.core.config import from_mapping
from tokenbus.core.errors import ConfigError
from tokenbus.core.experiments import engines
from tokenbus.core.experiments.controller import Experiments
from tokenbus.core.host import make_host
from tokenbus.core.kv.sizing import MIB
from tokenbus.core.models.resolve import resolve
from tokenbus.core.models.sizing import model_size

ARMS = {"a": {}, "b": {}}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Eight CPUs in this order, 8 GiB."""
    monkeypatch.setattr(engines, "cores_in_order", lambda: [0, 4, 1, 5, 2, 6, 3, 7])
    monkeypatch.setattr(engines, "available_cores", lambda: 8)
    monkeypatch.setattr(engines, "free_memory", lambda: 8192 * MIB)


def made(arms=ARMS, experiment=None, **settings):
    x = {"engines": "own", "arms": arms, **(experiment or {})}
    config = from_mapping({"experiments": {"x": x}, **settings}, "test")
    return engines.engine_configs("x", config, make_host("front", config))


def refused(match, arms=ARMS, experiment=None, **settings):
    with pytest.raises(ConfigError, match=match):
        made(arms, experiment, **settings)


def test_cores_and_threads_are_equal_and_disjoint():
    both = made()
    assert {arm: (one.model.cores, one.model.threads) for arm, one in both.items()} == {
        "a": ("0,4,1,5", 4),
        "b": ("2,6,3,7", 4),
    }
    three = made({"a": {}, "b": {}, "c": {}})
    assert [(one.model.cores, one.model.threads) for one in three.values()] == [("0,4", 2), ("1,5", 2), ("2,6", 2)]


def test_the_servers_own_cores_and_threads_are_what_is_shared_out():
    both = made(model={"cores": "1-3,40", "threads": 16})
    assert [(one.model.cores, one.model.threads) for one in both.values()] == [("1", 1), ("2", 1)]
    assert [one.model.threads for one in made(model={"threads": 2}).values()] == [2, 2]


def test_a_cpu_quota_is_shared_out(monkeypatch):
    monkeypatch.setattr(engines, "available_cores", lambda: 4)
    assert [(one.model.cores, one.model.threads) for one in made().values()] == [("0,4,1,5", 2), ("2,6,3,7", 2)]
    monkeypatch.setattr(engines, "available_cores", lambda: 1)
    refused(r"2 engines need 2 cores, and 1 may be used; use split = \"slice\"")


def test_memory_is_shared_out_whatever_it_was_given_as(monkeypatch):
    assert [one.cache.kv_memory_mb for one in made(cache={"kv_memory_mb": 301}).values()] == [150, 150]
    assert [one.cache.num_blocks for one in made(cache={"num_blocks": 65}).values()] == [32, 32]
    size = model_size(resolve("demo"), "auto")
    part = int((8192 * MIB - 2 * size.weights_bytes) * 0.01) // 2 // MIB
    assert [one.cache.kv_memory_mb for one in made(cache={"kv_memory_fraction": 0.01}).values()] == [part, part]
    monkeypatch.setattr(engines, "free_memory", lambda: 1 << 50)
    most = 256 * size.max_model_len * size.kv_bytes_per_token // MIB
    assert [one.cache.kv_memory_mb for one in made().values()] == [most, most]


def test_memory_that_is_not_there_is_refused(monkeypatch):
    refused("asks for more than is free", cache={"kv_memory_mb": 9000})
    refused("num_blocks = 1 can't be shared out", cache={"num_blocks": 1})
    refused("MiB for K/V can't be shared out", cache={"kv_memory_mb": 1})
    monkeypatch.setattr(engines, "free_memory", lambda: 100 * MIB)
    refused("no memory for the weights of 2 engines")


def test_an_arm_has_what_only_an_engines_start_can_give():
    arms = {
        "a": {},
        "b": {
            "features": {"quantization.int8": True, "prefix_cache": False},
            "settings": {"model.kernels": "torch", "cache.block_size": 32, "scheduler.token_budget": 512},
        },
    }
    both = made(arms, features={"disable": ["quantization.int8"], "enable": ["prefix_cache", "recorder"]})
    a, b = both["a"], both["b"]
    assert (a.model.kernels, a.cache.block_size, a.scheduler.token_budget) == ("auto", 16, 2048)
    assert (b.model.kernels, b.cache.block_size, b.scheduler.token_budget) == ("torch", 32, 512)
    assert (b.features.enable, b.features.disable) == (("recorder", "quantization.int8"), ("prefix_cache",))
    assert a.features.enable == ("prefix_cache", "recorder")
    host = make_host("front", b)
    on = host.start_switches(b.features.enable, b.features.disable).on
    assert "quantization.int8" in on
    assert "prefix_cache" not in on


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model.model": "other"}, "can't differ between engines behind one front"),
        ({"model.threads": 1}, "can't differ between engines"),
        ({"cache.kv_memory_mb": 1}, "can't differ between engines"),
        ({"server.log_level": "debug"}, "can't differ between engines"),
        ({"cache.block_sise": 1}, "did you mean 'cache.block_size'"),
        ({"cache.block_size": 1000}, "<= 256"),
        ({"plugins.chunked_prefill.slow_down": "much"}, "slow_down"),
    ],
)
def test_settings_that_an_arm_cannot_have(settings, says):
    refused(says, {"a": {}, "b": {"settings": settings}})


@pytest.mark.parametrize(
    ("experiment", "says"),
    [
        ({"split": "user"}, 'go with split = "request"'),
        ({"split": "slice"}, 'go with split = "request"'),
        ({"traffic": 0.5}, "use weights"),
    ],
)
def test_splits_that_do_not_go_with_them(tmp_path, experiment, says):
    x = {"engines": "own", "arms": ARMS, **experiment}
    config = from_mapping({"server": {"state_dir": str(tmp_path)}, "experiments": {"x": x}}, "test")
    host = make_host("front", config)
    with pytest.raises(ConfigError, match=says):
        Experiments(config, host, None, None)


def test_only_one_experiment_can_have_them():
    x = {"engines": "own", "arms": ARMS}
    config = from_mapping({"experiments": {"x": x, "y": x, "z": {"arms": ARMS}}}, "test")
    with pytest.raises(ConfigError, match=r"experiments\.y\.engines: those of 'x'"):
        engines.experiment_with_engines(config)
    assert engines.experiment_with_engines(from_mapping({"experiments": {"z": {"arms": ARMS}}}, "test")) is None


def test_engines_on_a_gpu_are_refused():
    refused(r"share out the machine's memory and cores, not a GPU's; use split = \"slice\"", model={"device": "cuda"})
