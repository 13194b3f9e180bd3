"""Where a model runs and on what: settings that go together, those that don't, and what is chosen for a GPU without there being one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from tokenbus.core import device
from tokenbus.core.config import Config, ModelConfig, from_mapping
from tokenbus.core.device import GPU_IS_OFF, device_kind, free_bytes, resolve_device
from tokenbus.core.errors import ConfigError, ConflictError, ModelError
from tokenbus.core.front.startup import check_pool
from tokenbus.core.host import make_host
from tokenbus.core.models.cpu_decoder import CpuDecoder
from tokenbus.core.models.decoder import Decoder, TorchLinears
from tokenbus.core.models.linears import ModelToLoad
from tokenbus.core.models.loader import describe, load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.models.triton_decoder import TritonDecoder
from tokenbus.core.models.triton_linears import CublasLinears
from tokenbus.core.recording.identity import layers
from tokenbus.core.worker.attention import KVLayout
from tokenbus.core.worker.default_attention import default_attention
from tokenbus.core.worker.torch_attention import TorchAttention
from tokenbus.core.worker.triton_attention import TritonAttention

from .test_families import limit

CUDA = torch.device("cuda", 0)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def llama(tiny) -> Any:
    return resolve(str(tiny("llama").path))


@no_gpu
def test_auto_is_the_cpu_without_a_gpu_and_cuda_is_refused():
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"model\.device is cuda, but .*: set model\.device = cpu, or auto"):
        resolve_device("cuda")
    assert free_bytes(torch.device("cpu")) > 0


def test_the_front_knows_the_device_without_torch_where_there_is_no_gpu(tmp_path, monkeypatch):
    assert (device_kind("cpu"), device_kind("cuda")) == ("cpu", "cuda")
    code = "import sys; from tokenbus.core import device; device.NODES = (); print(device.device_kind('auto'), 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["cpu", "False"]
    there = tmp_path / "nvidiactl"
    there.touch()
    monkeypatch.setattr(device, "NODES", (there,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_kind("auto") == "cuda"


@no_gpu
def test_a_server_that_wants_a_gpu_does_not_start_without(tmp_path, llama):
    done = subprocess.run(
        [sys.executable, "-m", "tokenbus.core.cli", "plan-memory", "--model", str(llama.path), "--device", "cuda"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "model.device is cuda, but" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "tokenbus.core.cli", "plan-memory", "--model", str(llama.path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["device"] == "cpu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_invariant": "off"}, r"model\.batch_invariant = off is for GPUs.*leave it at auto"),
        (
            {"dtype": "float16"},
            r"model\.dtype = float16 needs a GPU: set model\.dtype = bfloat16 or float32, or model\.device = cuda",
        ),
        (
            {"kernels": "cpu", "device": CUDA},
            r"model\.kernels = cpu runs on the CPU.*set model\.device = cpu, or model\.kernels = auto",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings, message, llama):
    for check in (load, describe):
        with pytest.raises(ConfigError, match=message):
            check(llama, **settings)


def test_triton_kernels_on_the_cpu_need_the_interpreter(llama, monkeypatch):
    assert isinstance(load(llama, kernels="triton"), TritonDecoder)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ModelError, match=r"llama can't be run with model\.kernels = triton: Triton's kernels run on GPUs"):
        load(llama, kernels="triton")
    monkeypatch.setattr(device, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="the package triton is not installed"):
        load(llama, kernels="triton")


def test_triton_kernels_that_a_model_can_not_have(tiny):
    with pytest.raises(ModelError, match=r"gpt2 can't be run with model\.kernels = triton: it runs through transformers"):
        load(resolve(str(tiny("gpt2").path)), kernels="triton")


def test_auto_never_takes_triton_on_the_cpu(llama):
    assert isinstance(load(llama), (CpuDecoder, Decoder))
    assert not isinstance(load(llama), TritonDecoder)
    assert not describe(llama).triton


def test_what_a_gpu_is_given(llama, tiny, tmp_path):
    """Decided before any weights are read, so that it can be seen without a GPU."""
    made = describe(llama, device=CUDA)
    assert (made.device, made.triton, made.invariant, made.dtype) == ("cuda", True, False, "float32")
    assert made.no_cpu_kernels == "they do not run on a GPU"
    assert describe(llama, device=CUDA, batch_invariant="on").invariant
    assert not describe(llama, device=CUDA, kernels="torch").triton
    assert not describe(resolve(str(tiny("gpt2").path)), device=CUDA).triton
    assert describe(llama, "float16", CUDA).dtype == "float16"
    shutil.copy(llama.path / "model.safetensors", tmp_path)
    config = json.loads((llama.path / "config.json").read_text()) | {"dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    half = resolve(str(tmp_path))
    assert (describe(half, device=CUDA).dtype, describe(half).dtype) == ("float16", "float32")


def test_a_demand_for_invariance_that_can_not_be_met_is_refused(llama):
    class Lossy(TorchLinears):
        invariant = False

    def choose(model: ModelToLoad) -> Any:
        return Lossy(torch.float32)

    assert load(llama, choose=choose).spec.lossless_reason == "matrix products of Lossy are not batch invariant"
    with pytest.raises(ModelError, match=r"llama can't be run with model\.batch_invariant = on: matrix products of Lossy"):
        load(llama, choose=choose, batch_invariant="on")
    assert load(llama, batch_invariant="on").spec.lossless


def test_products_of_the_cpp_kernels_do_not_go_into_a_triton_decoder(llama):
    from tokenbus.core.models.cpu_linears import CpuLinears

    with pytest.raises(ModelError, match="matrix products of CpuLinears are those of the C"):
        load(llama, kernels="triton", choose=lambda _: CpuLinears(torch.float32))


def test_a_fallback_without_invariance_keeps_transformers_own_linear_layers(tiny, paged, tokens):
    from tokenbus.core.models.fallback import load_fallback

    checkpoint = tiny("gpt2")
    model = load_fallback(resolve(str(checkpoint.path)), torch.float32, torch.device("cpu"), invariant=False)
    kept = load_fallback(resolve(str(checkpoint.path)), torch.float32, torch.device("cpu"))
    assert (model.spec.lossless_reason, model.kv_layout(4).invariant) == (GPU_IS_OFF, False)
    assert (model.spec.linear_params, model.spec.head_params) == (kept.spec.linear_params, kept.spec.head_params)
    prompt = tokens(30, seed=2)
    truth = checkpoint.truth(prompt)
    assert float((paged(model).prefill("a", prompt, 11) - truth).abs().max()) <= limit(truth)


def test_cublas_products_without_triton(llama):
    """What kernels = torch is on a GPU with batch_invariant off."""
    from tokenbus.core.models.loader import Checkpoint
    from tokenbus.core.models.sizing import weight_files

    made = describe(llama)
    assert made.config is not None
    cpu = torch.device("cpu")
    files = Checkpoint(weight_files(llama.path), "llama", torch.float32, cpu)
    model = Decoder(made.config, files, torch.float32, cpu, CublasLinears(torch.float32), invariant=False)
    assert model.spec.lossless_reason == GPU_IS_OFF
    assert model.spec.weights_bytes == load(llama, kernels="torch").spec.weights_bytes


def layout(where: torch.device, head_dim: int = 64, *, invariant: bool = True) -> KVLayout:
    return KVLayout(1, (2,), (head_dim,), 16, torch.bfloat16, where, invariant=invariant)


def test_cores_own_attention_by_device(monkeypatch):
    assert isinstance(default_attention(layout(torch.device("cpu"))), TorchAttention)
    for invariant in (True, False):
        found = default_attention(layout(CUDA, invariant=invariant))
        assert isinstance(found, TritonAttention)
        assert found.invariant is invariant
    asked: list[torch.device] = []
    monkeypatch.setattr("tokenbus.core.worker.torch_attention.attention_probe", lambda at: asked.append(at) or False)
    wide = default_attention(layout(CUDA, head_dim=320))
    assert isinstance(wide, TorchAttention)
    assert (wide.invariant, asked) == (False, [CUDA])


def test_plugins_that_do_not_work_with_the_device():
    host = make_host("front", Config(model=ModelConfig(device="cuda")))
    switches = host.start_switches()
    reason = "it works on cpu, and the model is on cuda"
    assert "attention.cpu" not in switches.on
    assert switches.reasons["attention.cpu"] == reason
    with pytest.raises(ConfigError, match=reason):
        host.start_switches(("attention.cpu",))
    with pytest.raises(ConflictError, match=reason):
        host.change_switches(switches, {"attention.cpu": True})
    assert "attention.cpu" in make_host("front", Config(model=ModelConfig(device="cpu"))).start_switches().on


def test_on_a_gpu_every_attention_plugin_is_a_kernel_set_of_its_own():
    """Core's kernels are torch's on the CPU, Triton's on a GPU: K/V of one is nothing to the other."""
    sets = {}
    for where in ("cpu", "cuda"):
        host = make_host("front", Config(model=ModelConfig(device=where)))
        on = host.start_switches((), ("attention.cpu",)).on
        with_torch = host.change_switches(host.start_switches((), ("attention.cpu",)), {"attention.torch": True}).on
        sets[where] = (
            host.kernels(on),
            host.kernels(with_torch),
            host.lossless("attention.torch"),
            host.lossless("prefix_cache"),
        )
    assert sets == {"cpu": ("", "", True, True), "cuda": ("", "attention.torch", False, True)}


def test_the_front_keeps_out_of_a_gpus_memory(llama):
    for where in ("cuda", "cpu"):
        config = from_mapping(
            {"model": {"model": str(llama.path), "device": where}, "cache": {"kv_memory_mb": 1 << 40}}, "test"
        )
        host = make_host("front", config)
        if where == "cuda":
            check_pool(config, host, host.start_switches())
            continue
        with pytest.raises(ConfigError, match=r"cache\.kv_memory_mb asks for"):
            check_pool(config, host, host.start_switches())


def test_a_recording_tells_triton_from_the_rest():
    assert layers(Config(model=ModelConfig(kernels="torch", device="cpu"))).startswith("torch ")
    found = layers(Config(model=ModelConfig(kernels="triton", device="cpu")))
    assert found.startswith("triton ")
    assert found.endswith(", batch invariant")
