"""Plugins that note each of their hooks' calls, with the process it came from, in a file."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from tokenbus import Plugin, PluginInfo, hookimpl
from tokenbus.core.contexts import Route
from tokenbus.core.host import HOOK_NAMES
from tokenbus.core.policy import FcfsPolicy
from tokenbus.core.worker.side import SideModel


class RecorderSettings(msgspec.Struct, frozen=True):
    path: str = ""


class _Noting(Plugin):
    Settings = RecorderSettings

    def note(self, hook: str) -> None:
        with Path(self.settings.path).open("a", encoding="utf-8") as file:
            file.write(f"{self.role} {hook}\n")


class Recorder(_Noting):
    info = PluginInfo(name="note_taker", summary="notes its calls", scope="request", lossless=True, claims={"note"})

    @hookimpl
    def front_started(self, front):
        self.note("front_started")

    @hookimpl
    def front_stopped(self):
        self.note("front_stopped")

    @hookimpl
    def http_routes(self):
        self.note("http_routes")
        return [Route("GET", "/noted", self._noted)]

    async def _noted(self, request):
        from aiohttp import web

        return web.json_response({"noted": True})

    @hookimpl
    def implied_fields(self, fields, endpoint):
        self.note("implied_fields")
        assert endpoint == "generate"

    @hookimpl
    def check_fields(self, fields, request):
        self.note("check_fields")
        assert request.prompt_len > 0
        return fields

    @hookimpl
    def prepare_fields(self, fields, request):
        self.note("prepare_fields")
        assert threading.current_thread() is not threading.main_thread()
        assert len(request.vocabulary().tokens) == request.vocab_size
        return fields

    @hookimpl
    def text_filter(self, request):
        self.note("text_filter")

    @hookimpl
    def engine_started(self, engine):
        self.note("engine_started")

    @hookimpl
    def engine_stopped(self):
        self.note("engine_stopped")

    @hookimpl
    def request_added(self, request):
        self.note("request_added")

    @hookimpl
    def stop_rule(self, request, eos_token_ids):
        self.note("stop_rule")

    @hookimpl
    def wants_prompt_logits(self, request):
        self.note("wants_prompt_logits")
        return request.fields["note"] == "prompt"

    @hookimpl
    def propose_drafts(self, request, most):
        self.note("propose_drafts")
        return [5][:most]

    @hookimpl
    def drafts_verified(self, request, proposed, accepted):
        self.note("drafts_verified")

    @hookimpl(tryfirst=True)
    def match_prefix(self, request, pool):
        self.note("match_prefix")

    @hookimpl
    def limit_chunk(self, request, wanted, step):
        self.note("limit_chunk")

    @hookimpl
    def blocks_filled(self, request, first, last, pool):
        self.note("blocks_filled")

    @hookimpl
    def block_evicted(self, block_id):
        self.note("block_evicted")

    @hookimpl
    def request_removed(self, request):
        self.note("request_removed")

    @hookimpl
    def step_finished(self, plan, result, seconds):
        self.note("step_finished")

    @hookimpl
    def kv_layout(self, layout):
        self.note("kv_layout")
        assert layout.num_layers == len(layout.head_dim)

    @hookimpl
    def worker_request_added(self, request, worker):
        self.note("worker_request_added")
        assert worker.vocabulary() is worker.vocabulary()

    @hookimpl
    def adjust_logits(self, logits, rows):
        self.note("adjust_logits")
        assert logits.shape[0] == len(rows)

    @hookimpl
    def filter_logits(self, logits, rows):
        self.note("filter_logits")

    @hookimpl
    def token_logprobs(self, raw, processed, rows, token_ids):
        self.note("token_logprobs")
        assert raw.shape[0] == len(rows) == len(token_ids)


class RecorderPolicy(_Noting):
    info = PluginInfo(name="note_taker.policy", summary="notes its calls", scope="step", lossless=True, slot="scheduling")

    @hookimpl
    def scheduling_policy(self):
        self.note("scheduling_policy")
        return FcfsPolicy()


class RecorderAttention(_Noting):
    info = PluginInfo(name="note_taker.attention", summary="notes its calls", scope="step", lossless=True, slot="attention")

    @hookimpl
    def attention_backend(self, layout):
        from tokenbus.core.worker.torch_attention import TorchAttention

        self.note("attention_backend")
        return TorchAttention()


class RecorderProducts(_Noting):
    """Core's own matrix products, under another name."""

    info = PluginInfo(name="note_taker.products", summary="notes its calls", scope="engine", lossless=True, slot="quantization")

    @hookimpl
    def quantized_checkpoint(self, model):
        self.note("quantized_checkpoint")
        assert not model.method
        assert any(name.endswith("weight") for name in (model.tensors or model.stored))

    @hookimpl
    def quantization(self, model):
        import torch

        from tokenbus.core.models.cpu_linears import CpuLinears
        from tokenbus.core.models.decoder import TorchLinears

        self.note("quantization")
        made = TorchLinears if model.no_cpu_kernels else CpuLinears
        return made(getattr(torch, model.dtype))


class NoModel(SideModel):
    weights_bytes = kv_bytes_per_token = 0

    def load(self, beside):
        assert beside.spec.vocab_size

    def allocate(self, num_blocks):
        assert num_blocks == 8

    def handed_out(self, blocks):
        assert all(0 <= block < 8 for block in blocks)


class RecorderSide(_Noting):
    info = PluginInfo(name="note_taker.side", summary="notes its calls", scope="request", lossless=True, resident=True)

    @hookimpl
    def side_model(self, model, block_size, size_of):
        self.note("side_model")
        assert size_of("demo").kv_bytes_per_token > 0
        return NoModel()

    @hookimpl
    def drafts_after_step(self, step):
        self.note("drafts_after_step")
        return {run.request.request_id: [5] for run in step.runs if run.sampled and len(run.request.tokens) % 2}


ACTOR = {
    "front": {
        "front_started",
        "front_stopped",
        "http_routes",
        "implied_fields",
        "check_fields",
        "prepare_fields",
        "prepare_media",
        "text_filter",
        "reasoning_parser",
        "tool_parser",
    },
    "worker": {
        "quantized_checkpoint",
        "quantization",
        "kv_layout",
        "media_encoder",
        "side_model",
        "attention_backend",
        "worker_request_added",
        "adjust_logits",
        "filter_logits",
        "fused_filters",
        "token_logprobs",
        "drafts_after_step",
    },
}
ACTOR["engine"] = set(HOOK_NAMES) - ACTOR["front"] - ACTOR["worker"]
