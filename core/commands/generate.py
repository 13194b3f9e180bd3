"""`tokenbus generate`: texts in, continuations out, through the offline engine."""

from __future__ import annotations

import argparse
import sys

import msgspec

from ..config import Config
from ..front.values import check_text
from ..offline import LLM, RequestOutput
from ..params import SamplingParams


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed)


def quiet(config: Config) -> Config:
    """Errors only, unless a level was asked for: the output belongs to the texts."""
    if config.server.log_level != "info":
        return config
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, log_level="warning"))


def run(arguments: argparse.Namespace, config: Config) -> int:
    params = sampling_params(arguments)
    prompts = list(arguments.prompts)
    if prompts in ([], ["-"]):
        prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    for prompt in prompts:
        check_text("prompt", prompt)
    with LLM(config.model.model, config=quiet(config)) as llm:
        for output in llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()):
            print(_shown(output, as_json=arguments.json))
    return 0


def _shown(output: RequestOutput, *, as_json: bool) -> str:
    answer = output.outputs[0]
    if not as_json:
        return f"{output.prompt}{answer.text}"
    return msgspec.json.encode(
        {
            "prompt": output.prompt,
            "text": answer.text,
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "seed": output.seed,
        }
    ).decode()
