"""The offline engine and the commands that stand on it, with the demo model in float32."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tokenbus import LLM, SamplingParams, TokenbusError
from tokenbus.core.errors import ConfigError, ContextLengthError, FieldError, ModelError
from tokenbus.core.offline import _as_prompts, _config
from tokenbus.kernels.cpu import lib

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", dtype="float32", max_model_len=512, num_blocks=128) as made:
        yield made


def test_prompts_come_back_in_order_each_as_if_alone(llm):
    prompts = ["The capital of France is", "Once upon a time", "2 + 2 =", "The capital of France is"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert outputs[0].outputs[0].text == " Paris.\n\nThe answer is:"
    assert outputs[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [a.outputs[0].token_ids for a in alone] == [o.outputs[0].token_ids for o in outputs]
    assert all(len(o.outputs[0].token_ids) == 8 and o.outputs[0].finish_reason == "length" for o in outputs)


def test_ids_and_text_give_the_same_and_params_may_differ(llm):
    ids = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].prompt_token_ids
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=3)]
    by_text, by_ids = llm.generate(["Once upon a time", ids], params, use_tqdm=False)
    assert by_ids.prompt is None
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids[:3]
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == by_text.outputs[0].token_ids
    with pytest.raises(FieldError, match="2 SamplingParams for 1"):
        llm.generate("x", params, use_tqdm=False)


def test_n_seed_logprobs(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1)
    first, again = (llm.generate("The weather today", params, use_tqdm=False)[0] for _ in range(2))
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3
    assert first.seed == 5
    assert all(len(c.logprobs) == len(c.token_ids) for c in first.outputs)
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids) - 1
    assert first.prompt_logprobs == again.prompt_logprobs


def test_a_prefix_is_found_again_and_a_request_can_do_without(llm):
    prompt = "word " * 60
    first = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    second = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    without = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=8, features={"prefix_cache": False}), use_tqdm=False
    )[0]
    assert (first.cached_tokens, second.cached_tokens, without.cached_tokens) == (0, 48, 0)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == without.outputs[0].token_ids
    assert "prefix_cache" in second.features
    assert "prefix_cache" not in without.features


def test_a_request_may_have_what_is_off(llm):
    prompt = "one two three four five six one two three four five six one two three"
    params = SamplingParams(temperature=0, max_tokens=24, features={"speculative.ngram": True})
    plain, helped = (
        llm.generate(prompt, one, use_tqdm=False)[0] for one in (SamplingParams(temperature=0, max_tokens=24), params)
    )
    assert ("speculative.ngram" in plain.features, "speculative.ngram" in helped.features) == (False, True)
    assert helped.outputs[0].token_ids == plain.outputs[0].token_ids
    assert "speculative.ngram" not in llm._service.host.loaded
    with pytest.raises(FieldError, match="scope step"):
        llm.generate(prompt, SamplingParams(features={"sampling.stops": False}), use_tqdm=False)


def test_chat_and_stream(llm):
    messages = [{"role": "user", "content": "Say hello."}]
    whole = llm.chat(messages, GREEDY).outputs[0].text
    assert "".join(llm.stream(llm.chat_ids(messages), GREEDY)) == whole
    assert len(whole) > 0


def test_leaving_a_stream_cancels_it(llm):
    stream = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    stats = llm._portal.call(llm._service.client.query, "stats")
    deadline = 200
    while stats["open"] and deadline:
        stats = llm._portal.call(llm._service.client.query, "stats")
        deadline -= 1
    assert stats["open"] == 0
    assert stats["free_blocks"] == stats["num_blocks"] == 128


def test_a_bad_prompt_raises_and_the_next_call_works(llm):
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", [5] * 600], GREEDY, use_tqdm=False)
    with pytest.raises(TokenbusError, match="top_p"):
        llm.generate("x", SamplingParams(top_p=7.0), use_tqdm=False)
    with pytest.raises(TokenbusError, match="unknown field"):
        llm.generate("x", SamplingParams(extra={"foo": 1}), use_tqdm=False)
    assert llm.generate("The capital of France is", GREEDY, use_tqdm=False)[0].outputs[0].text.startswith(" Paris")


def test_more_prompts_than_the_queue_takes():
    with LLM("demo", max_model_len=64, num_blocks=64, max_running=3, max_waiting=2) as small:
        outputs = small.generate(
            [f"Number {i}" for i in range(12)], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False
        )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2] * 12


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"bogus": 1}, ConfigError), ({"enable": ("nobody",)}, ConfigError), ({"dtype": "int3"}, ConfigError)],
)
def test_wrong_settings(settings, error):
    with pytest.raises(error):
        LLM("demo", **settings)


def test_a_model_that_is_not_there():
    with pytest.raises(ModelError, match="no file or folder"):
        LLM("./nowhere")


def test_settings_find_their_section():
    config = _config("demo", None, {"dtype": "float32", "token_budget": 7, "enable": ("a",), "plugins": {"p": {"x": 1}}})
    assert config.model.dtype == "float32"
    assert config.scheduler.token_budget == 7
    assert config.features.enable == ("a",)
    assert config.plugins == {"p": {"x": 1}}


def test_what_counts_as_one_prompt():
    assert _as_prompts("a") == ["a"]
    assert _as_prompts([1, 2]) == [[1, 2]]
    assert _as_prompts([[1], "b"]) == [[1], "b"]
    assert _as_prompts([]) == []


def command(*words, stdin=""):
    return subprocess.run(
        [sys.executable, "-m", "tokenbus", *words], input=stdin, capture_output=True, text=True, timeout=100, check=False
    )


def test_generate_command():
    done = command(
        "generate", "--dtype", "float32", "--max-model-len", "128", "--temperature", "0", "--max-tokens", "4", "--json",
        stdin="The capital of France is\n\nOnce upon a time\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["The capital of France is", "Once upon a time"]
    assert rows[0]["text"].startswith(" Paris")
    assert rows[0]["completion_tokens"] == 4


def test_chat_command():
    done = command(
        "chat", "--max-model-len", "256", "--temperature", "0", "--max-tokens", "8", stdin="Hello\n/reset\n\nHello\n"
    )
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line]
    assert len(answers) >= 2
    assert done.stdout[: len(done.stdout) // 2] == done.stdout[len(done.stdout) // 2 :], "after /reset the same answer"


def test_plan_memory_command_loads_no_weights():
    done = command("plan-memory", "--json", "--dtype", "float32", "--kv-memory-mb", "90")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    # 30 layers, 3 KV heads of 64, K and V, 4 bytes
    assert plan["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    assert plan["num_blocks"] == 90 * 2**20 // (16 * plan["kv_bytes_per_token"])
    assert plan["longest_request"] == min(8192, plan["num_blocks"] * 16)
    assert plan["weights_bytes"] == pytest.approx(134_515_008 * 4, rel=1e-3)
    text = command("plan-memory")
    assert all(word in text.stdout for word in ("weights", "KV per token", "longest request", "concurrency"))


@pytest.mark.skipif(lib.load() is None, reason="no compiler")
def test_plan_memory_counts_what_plugins_change():
    done = command("plan-memory", "--json", "--enable", "quantization.gguf", "--enable", "quantization.kv_int8")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["kv_bytes_per_token"] == 30 * 2 * 3 * (64 + 4)
    assert plan["weights_bytes"] == pytest.approx(106_203_456 * 20 / 32 + 28_311_552 * 34 / 32, rel=1e-2)
    refused = command("plan-memory", "--enable", "quantization.int8", "--kernels", "torch")
    assert refused.returncode == 1
    assert "can't be run with quantization.int8: it needs the C++ kernels, and model.kernels is torch" in refused.stderr


def test_wrong_command_lines():
    assert command("serve", "--no-such-flag").returncode == 2
    wrong = command("generate", "--model", "./nowhere", "x")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("tokenbus: ")
    assert "Traceback" not in wrong.stderr


def test_a_worker_in_a_process_of_its_own_gives_the_same():
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=10, logprobs=2, top_p=0.9)
    prompts = ["The capital of France is", "Once upon a time, " * 20, "2 + 2 ="]
    answers = []
    for worker in ("thread", "process"):
        with LLM("demo", dtype="float32", max_model_len=256, num_blocks=64, worker=worker) as made:
            answers.append(made.generate(prompts, params, use_tqdm=False))
    for here, there in zip(*answers, strict=True):
        assert here.outputs[0].token_ids == there.outputs[0].token_ids
        assert here.outputs[0].logprobs == there.outputs[0].logprobs


def test_a_model_that_reads_text_only_is_named_when_it_is_given_an_image(llm):
    image = {"type": "image", "image": np.zeros((4, 4, 3), np.uint8)}
    with pytest.raises(FieldError, match=r"'messages\[0\].content\[1\].image': the model .* reads text only"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "see"}, image]}], GREEDY)
    with pytest.raises(FieldError, match=r"'prompt.images\[0\]': the model .* reads text only"):
        llm.generate({"prompt": "<image>", "images": ["a.png"]}, GREEDY, use_tqdm=False)


def test_a_program_that_fails_without_closing_it_ends():
    script = "from tokenbus import LLM\nllm = LLM('demo')\nraise ValueError('on purpose')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: on purpose")
