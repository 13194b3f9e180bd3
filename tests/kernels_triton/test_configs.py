from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from tokenbus.kernels.triton import configs
from tokenbus.kernels.triton.attention import Tiling
from tokenbus.kernels.triton.configs import candidates, config, config_for, file_name, is_tuned, load, parse

TABLES = sorted(path.stem for path in configs.FOLDER.glob("*.json"))
PRODUCTS = ["matmul", "int8_matmul", "fp8_matmul", "int8_weight_matmul", "int4_weight_matmul"]
ROW_KERNELS = ["quantize_activations", "kv_write", "rms_norm", "rope", "gated", "embed", "softcap", "sampling", "verify"]
ATTENTION = ["attention_invariant", "attention_decode", "attention_prompt"]
INVARIANTS = ["matmul_invariant", "fp8_matmul_invariant", "int8_weight_matmul_invariant", "int4_weight_matmul_invariant"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of tables, with the default one in it."""
    (tmp_path / "default.json").write_text((configs.FOLDER / "default.json").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    yield tmp_path
    configs.load.cache_clear()
    configs._find.cache_clear()


@pytest.fixture(autouse=True)
def _fresh():
    configs.load.cache_clear()
    configs._find.cache_clear()


def table(kernels, status="tuned"):
    return json.dumps({"device": "NVIDIA Test 1", "status": status, "kernels": kernels})


def test_every_table_that_is_shipped_can_be_read():
    assert "default" in TABLES
    assert all(load(name) is not None for name in TABLES)


def test_the_default_serves_every_kernel_at_every_size_and_says_that_it_is_untuned():
    default = load("default")
    assert default is not None
    assert not default.tuned
    assert set(default.kernels) == {*PRODUCTS, *INVARIANTS, *ROW_KERNELS, *ATTENTION}
    for kernel, rules in default.kernels.items():
        assert not rules[-1].when, f"{kernel}: the last rule must be for the rest"
        assert all(rule.when for rule in rules[:-1]), f"{kernel}: rules after one for everything are never used"
        assert config_for("", kernel) == dict(rules[-1].use)  # nothing is known of the call
        assert not is_tuned("", kernel)


def test_sizes_follow_the_shape_and_the_first_rule_that_fits():
    small, middle, large = (config_for("", "matmul", m=m, n=4096, k=4096, bits=16) for m in (16, 17, 65))
    assert [tile["BLOCK_M"] for tile in (small, middle, large)] == [16, 64, 128]
    assert config_for("", "matmul", m=1, n=1, k=1, bits=32)["BLOCK_K"] == 32
    small["BLOCK_M"] = 0
    assert config_for("", "matmul", m=16, n=4096, k=4096, bits=16)["BLOCK_M"] == 16  # the caller's own dict


def test_every_default_fits_the_shared_memory_of_every_card_since_ampere():
    for bits in (16, 32):
        for kernel in PRODUCTS + INVARIANTS:
            for m in (1, 64, 4096):
                tile = config_for("", kernel, n=100_000, k=4096, bits=bits, **({} if kernel in INVARIANTS else {"m": m}))
                depth = tile.get("BLOCK_K", 128)
                x_bytes = 1 if kernel.startswith(("int8_matmul", "fp8")) else bits // 8
                weight_bytes = x_bytes if kernel.startswith("matmul") else 0.5 if kernel.startswith("int4") else 1
                used = tile["num_stages"] * depth * (tile["BLOCK_M"] * x_bytes + tile["BLOCK_N"] * weight_bytes)
                assert used <= 99 * 1024, (kernel, bits, m)


def test_invariant_kernels_are_never_told_how_many_rows_there_are():
    default = load("default")
    assert default is not None
    for kernel in INVARIANTS:
        assert all("m" not in rule.when for rule in default.kernels[kernel])
        assert len({tuple(config_for("", kernel, m=m, n=512, k=512, bits=16).items()) for m in (1, 16, 64, 9999)}) == 1
    with pytest.raises(ValueError, match="number of rows"):
        parse(table({"matmul_invariant": [{"when": {"m": 16}, "use": {"BLOCK_M": 16}}]}), "x.json")


def test_a_device_of_its_own_comes_first_and_the_default_has_the_rest(folder):
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"
    assert file_name("") == "default"
    Path(folder, "nvidia_test_1.json").write_text(
        table({"matmul": [{"when": {"m": 8}, "use": {"BLOCK_M": 32}}]}), encoding="utf-8"
    )
    assert config_for("NVIDIA Test 1", "matmul", m=8, bits=16) == {"BLOCK_M": 32}
    assert config_for("NVIDIA Test 1", "matmul", m=9, bits=16) == config_for("", "matmul", m=9, bits=16)
    assert config_for("NVIDIA Test 1", "int8_matmul", m=8) == config_for("", "int8_matmul", m=8)
    assert config_for("NVIDIA Test 2", "matmul", m=8, bits=16) == config_for("", "matmul", m=8, bits=16)
    assert is_tuned("NVIDIA Test 1", "matmul")
    assert not is_tuned("NVIDIA Test 1", "int8_matmul")
    assert not is_tuned("NVIDIA Test 2", "matmul")


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match=r"'matmull'.*matmul"):
        config("matmull")
    for name in ("attention", "rope_invariant", "attention_decode_invariant"):
        with pytest.raises(ValueError, match="no candidates"):
            list(candidates(name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "x.json is no table"),
        ("[]", "x.json is no table"),
        ("{}", "'status'"),
        (table({}, status="new"), "'new'"),
        (table({"matmul": [{"when": {"m": 1}}]}), "'use'"),
        (table({"matmul": [{"use": {}, "if": {}}]}), "'if'"),
        (table({"matmul": [{"use": {"BLOCK_M": 48}}]}), "power of two"),
        (table({"matmul": [{"use": {"num_warps": 3}}]}), "power of two"),
        (table({"matmul": [{"use": {"BLOCK_M": "16"}}]}), "positive integer"),
        (table({"matmul": [{"use": {"num_stages": 0}}]}), "positive integer"),
        (table({"matmul": [{"when": {"m": True}, "use": {}}]}), "positive integer"),
        (table({"matmul": 3}), "x.json is no table"),
    ],
)
def test_malformed_tables_are_errors_that_name_the_file(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text, "x.json")


def test_every_default_tiling_of_attention_fits_the_shared_memory_of_every_card_since_ampere():
    """Queries, and K and V once for every two stages from the third on (test_compile_attention.py sees what it really is)."""
    for kernel in ATTENTION:
        for bits, head_dim, m in itertools.product((16, 32), (64, 128, 256), (4, 32, 4096)):
            shape = {"bits": bits, "kv_bits": bits, "head_dim": head_dim}
            tile = config_for("", kernel, **shape, **({} if kernel == "attention_invariant" else {"m": m}))
            copies = max(1, (tile["num_stages"] + 1) // 2)
            assert bits // 8 * head_dim * (tile["block_m"] + 2 * copies * tile["tile"]) <= 99 * 1024, (kernel, shape, m)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", ATTENTION)
def test_candidates_of_attention_are_tilings(kernel, head_dim):
    found = list(candidates(kernel, head_dim=head_dim, kv_bits=8))
    assert 10 < len(found) < 200
    for tile in found:
        Tiling.choose(head_dim, 8, torch.bfloat16, tile, one_byte=True)
    parse(table({kernel: [{"use": tile} for tile in found]}), "x.json")
    assert config_for("", kernel, head_dim=head_dim, bits=16, kv_bits=8, m=64) in found


@pytest.mark.parametrize("kernel", [*PRODUCTS, *INVARIANTS, *ROW_KERNELS])
def test_candidates_have_what_the_kernel_takes_and_fit(kernel):
    found = list(candidates(kernel))
    assert 5 < len(found) < 500
    assert len({tuple(tile.items()) for tile in found}) == len(found)
    names = set(config_for("", kernel, n=4096, k=4096, bits=16))
    assert all(set(tile) == names for tile in found)
    parse(table({kernel: [{"use": tile} for tile in found]}), "x.json")
    if kernel not in ROW_KERNELS:
        assert len(list(candidates(kernel, shared_bytes=48 * 1024))) < len(found)
