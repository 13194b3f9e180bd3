"""The real engine process with a tiny random Llama: worker as a thread and as a process of its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import anyio
import pytest
import torch
from engine_harness import request
from safetensors.torch import save_file
from test_client import alive, read, until

from tokenbus.core.bus import Bus
from tokenbus.core.config import from_mapping
from tokenbus.core.errors import EngineDiedError
from tokenbus.core.front.client import EngineClient
from tokenbus.core.host import make_host

pytestmark = pytest.mark.anyio

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 128, 32, 64, 4, 2, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": DIM, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    weights = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            prefix + "self_attn.q_proj.weight": random(HEADS * DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": random(KV_HEADS * DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": random(KV_HEADS * DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, HEADS * DIM),
            prefix + "mlp.gate_proj.weight": random(INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": random(INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]


ANSWERS: dict[str, list[list[int]]] = {}


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_a_real_engine_answers_dies_and_answers_the_same(tiny_llama: Path, worker: str):
    config = from_mapping(
        {
            "model": {"model": str(tiny_llama), "worker": worker, "threads": 1},
            "cache": {"num_blocks": 64},
            "supervision": {"restart_backoff": 0.05},
        },
        "test",
    )
    host = make_host("front", config)
    switches = host.start_switches()
    client = EngineClient(config, Bus(), host, switches)

    def ask(name: str):
        return client.submit(
            [
                request(f"{name}{i}", [1, 3 + i, 5], 40, features=switches.names(), temperature=float(i % 2), seed=7)
                for i in range(4)
            ]
        )

    async with anyio.create_task_group() as tasks:
        await tasks.start(lambda *, task_status: client.run(task_status=task_status))
        try:
            info = await client.wait_ready()
            assert (info.architecture, info.dtype, info.num_blocks, info.max_model_len) == (
                "LlamaForCausalLM",
                "float32",
                64,
                512,
            )
            first = [await read(stream) for stream in ask("a")]
            victim = info.pid
            if worker == "process":
                (victim,) = children_of(info.pid)
            (doomed,) = client.submit([request("doomed", [1, 9], 500, features=switches.names())])
            await anext(doomed)
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(EngineDiedError, match="SIGKILL" if worker == "thread" else "signal 9"):
                await read(doomed)
            assert not alive(info.pid)
            assert not alive(victim)
            await until(lambda: client.ready()[0])
            assert [await read(stream) for stream in ask("b")] == first
            assert (await client.query("stats"))["open"] == 0
            assert await client.query("integrity") == {"ok": True, "problem": ""}
        finally:
            with anyio.CancelScope(shield=True):
                await client.close()
    ANSWERS[worker] = first
    assert all(answers == first for answers in ANSWERS.values())
