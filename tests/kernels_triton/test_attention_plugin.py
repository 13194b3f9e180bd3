"""`attention.triton` in the slot: a whole engine answers with it as with core's attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from structlog.testing import capture_logs

from tokenbus.core.plugin import NoSettings
from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.core.worker.attention import KVLayout
from tokenbus.core.worker.triton_attention import TritonAttention as TritonBackend
from tokenbus.plugins.attention.triton import TritonAttention
from tokenbus.testing import Request, TinyEngine

F32 = torch.float32


def layout(dtype: torch.dtype = F32, head_dim: int = 64, device: str = "cpu") -> KVLayout:
    return KVLayout(1, (3,), (head_dim,), 16, dtype, torch.device(device))


def backend_for(of: KVLayout) -> object:
    return TritonAttention(NoSettings(), "worker").attention_backend(of)


@pytest.mark.parametrize("others", [(), ("quantization.kv_fp8",)])
def test_an_engine_answers_as_with_cores_attention(others, tmp_path, monkeypatch):
    model = str(make_tiny(tmp_path))
    requests = [Request([20 + k, *range(30, 30 + 9 * k)], 3) for k in (1, 2)]
    expected = TinyEngine(enable=others, model=model).run(requests, chunk=7)
    attended = []
    attend = TritonBackend.attend
    monkeypatch.setattr(TritonBackend, "attend", lambda *args: attended.append(len(args[1])) or attend(*args))
    engine = TinyEngine(enable=("attention.triton", *others), model=model)
    together = engine.run(requests, chunk=7)
    assert [answer.tokens for answer in together] == [answer.tokens for answer in expected]
    assert max(attended) > 7, "no step with prompts and decodes in one batch"
    alone = engine.run([requests[1]])[0]
    assert alone.tokens == together[1].tokens


def test_layouts_it_serves():
    for served in (layout(), layout(torch.bfloat16), layout(torch.float16, 256), layout(device="cuda")):
        assert TritonBackend.serves(served)
        backend = backend_for(served)
        assert isinstance(backend, TritonBackend)
        assert backend.invariant
        assert backend.quantized_kv
        free = backend_for(dataclasses.replace(served, invariant=False))
        assert isinstance(free, TritonBackend)
        assert not free.invariant


@pytest.mark.parametrize(
    ("refused", "interpret", "reason"),
    [
        (layout(), "0", "tests, with TRITON_INTERPRET=1); K and V are on 'cpu'"),
        (layout(torch.float64), "1", "no kernels for torch.float64"),
        (layout(head_dim=260), "1", "at most 256; this model's is 260"),
        (dataclasses.replace(layout(device="cuda"), looks_ahead=True), "1", "media attend in both directions"),
    ],
)
def test_layouts_it_declines_are_told_why(refused, interpret, reason, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with capture_logs() as lines:
        assert backend_for(refused) is None
    assert not TritonBackend.serves(refused)
    assert reason in lines[0]["reason"]
