"""From a PIL image to tokens: front, decoding processes, engine and tower, against transformers on a tiny random LLaVA."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenbus import LLM, SamplingParams
from tokenbus.core.errors import FeatureOffError, FieldError
from tokenbus.core.messages import StepOutput, StepReport

sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("api", "models")]  # the kits

import media_kit as kit
from checkpoint_formats import packed, quantise

FIRST, SECOND = kit.noise(61, 45, seed=1), kit.noise(40, 90, seed=2)


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kit.llava_folder(tmp_path_factory.mktemp("models") / "tiny-llava")


@pytest.fixture(scope="module")
def reference(folder):
    """transformers' model, saved in the folder with all that a server needs."""
    return kit.llava_checkpoint(folder)


@pytest.fixture(scope="module")
def llm(folder, reference):
    with LLM(str(folder), dtype="float32", max_model_len=512, num_blocks=128, enable=("multimodal",)) as made:
        yield made


@pytest.fixture(scope="module", params=["thread", "process"])
def llm_ahead(request, folder, reference):
    plans = {"ahead": "on", "token_budget": 96, "encoder_slice_ms": 0.01, "worker": request.param}
    with LLM(str(folder), dtype="float32", max_model_len=512, num_blocks=128, enable=("multimodal",), **plans) as made:
        yield made


def talk(*images):
    parts = []
    for index, image in enumerate(images):
        parts += [{"type": "text", "text": f"{index}: "}, {"type": "image", "image": image}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


def expected(model, folder, token_ids, images, count):
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    pixels = [processor(image, return_tensors="np")["pixel_values"] for image in images]
    given = {"pixel_values": torch.from_numpy(np.concatenate(pixels))} if images else {}
    ids = torch.tensor([token_ids])
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0, -1]
        ids = torch.cat([ids, logits.argmax().view(1, 1)], 1)
    return ids[0, len(token_ids) :].tolist()


@pytest.mark.parametrize("images", [(), (FIRST,), (FIRST, SECOND), (SECOND, FIRST), (FIRST, FIRST, SECOND)])
def test_answers_are_transformers(llm, reference, folder, images):
    answer = llm.chat(talk(*images), greedy(12))
    assert answer.outputs[0].token_ids == expected(reference, folder, answer.prompt_token_ids, images, 12)


@pytest.mark.long
def test_a_quantised_checkpoint_answers_as_the_weights_that_it_stands_for(folder, reference, tmp_path):
    from transformers import LlavaForConditionalGeneration

    text = r"(model\.)?language_model\."
    quantised, dense = quantise(folder, tmp_path, packed(4, 16), only=text)
    shutil.copy(folder / "chat_template.jinja", quantised)
    with LLM(str(quantised), dtype="float32", max_model_len=512, num_blocks=128, enable=("multimodal",)) as llm:
        answer = llm.chat(talk(FIRST, SECOND), greedy(12))
    model = LlavaForConditionalGeneration.from_pretrained(dense, dtype=torch.float32).eval()
    found = answer.outputs[0].token_ids
    assert found == expected(model, folder, answer.prompt_token_ids, (FIRST, SECOND), 12)
    assert found != expected(reference, folder, answer.prompt_token_ids, (FIRST, SECOND), 12)


def test_steps_planned_ahead_and_encoding_in_pieces_change_no_answer(llm_ahead, reference, folder):
    seen, several = Counter(), [(FIRST,), (), (SECOND, FIRST, SECOND)]

    def count(report: StepReport) -> None:
        seen["ahead"] += report.ahead
        for name in ("encoded_items", "encoded_pieces"):
            seen[name] += report.counters.get(f"multimodal.{name}", 0)

    listening = llm_ahead._service.bus.listen(count, StepReport)
    try:
        asked = [{"prompt": "<image>, " * len(images) + "?", "images": list(images)} if images else "?" for images in several]
        answers = llm_ahead.generate(asked, greedy(40), use_tqdm=False)
    finally:
        listening.close()
    assert seen["ahead"] > 20, seen
    assert seen["encoded_items"] == 2
    assert seen["encoded_pieces"] > 10, seen
    for answer, images in zip(answers, several, strict=True):
        assert answer.outputs[0].token_ids == expected(reference, folder, answer.prompt_token_ids, images, 40)


def test_a_prompt_with_markers_and_a_chat_are_the_same(llm):
    text = "<|im_start|>user\n0: <image>?<|im_end|>\n<|im_start|>assistant\n"
    (plain,) = llm.generate({"prompt": text, "images": [FIRST]}, greedy(8), use_tqdm=False)
    chat = llm.chat(talk(FIRST), greedy(8))
    assert (plain.prompt_token_ids, plain.outputs[0].token_ids) == (chat.prompt_token_ids, chat.outputs[0].token_ids)


def test_the_same_text_with_another_image_is_another_answer(llm):
    first, other, again = (llm.chat(talk(image), greedy(12)) for image in (FIRST, SECOND, FIRST))
    assert first.prompt_token_ids == other.prompt_token_ids
    assert first.outputs[0].token_ids != other.outputs[0].token_ids
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


@contextmanager
def running(llm):
    """A long answer is being made; at the end it is in the dict."""
    begun, found = threading.Event(), {}
    take = llm._service.client._take_output

    def and_tell(output: StepOutput):
        take(output)
        if output.tokens:
            begun.set()

    llm._service.client._take_output = and_tell
    asking = threading.Thread(target=lambda: found.update(answer=llm.chat(talk(FIRST, SECOND), greedy(400))))
    asking.start()
    try:
        assert begun.wait(60)
        yield found
        asking.join(100)
    finally:
        llm._service.client._take_output = take
    assert "answer" in found


@pytest.fixture(scope="module")
def whole(llm):
    return llm.chat(talk(FIRST, SECOND), greedy(400)).outputs[0].token_ids


def test_an_answer_goes_on_after_the_engines_death(llm, whole):
    """Also while the plugin is switched off: the request had it."""
    with running(llm) as found:
        pid = llm.info.pid
        llm.switch(multimodal=False)
        assert "answer" not in found, "it was over before it could be switched"
        os.kill(pid, signal.SIGKILL)
    assert found["answer"].outputs[0].token_ids == whole
    assert llm.info.pid != pid
    with pytest.raises(FeatureOffError):
        llm.chat(talk(FIRST), greedy(1))
    llm.switch(multimodal=True)
    assert llm.chat(talk(FIRST, SECOND), greedy(400)).outputs[0].token_ids == whole


def test_an_open_request_goes_on_when_the_plugin_is_switched_off_and_new_ones_are_refused(llm, whole):
    with running(llm) as found:
        llm.switch(multimodal=False)
        assert "answer" not in found, "it was over before it could be switched"
        with pytest.raises(FeatureOffError, match="'multimodal', is off"):
            llm.chat(talk(FIRST), greedy(1))
        assert llm.generate("text", greedy(2), use_tqdm=False)[0].outputs[0].token_ids
    llm.switch(multimodal=True)
    assert found["answer"].outputs[0].token_ids == whole


def test_off_means_an_error_that_names_the_plugin(llm):
    llm.switch(multimodal=False)
    try:
        with pytest.raises(FeatureOffError, match="'multimodal', is off"):
            llm.chat(talk(FIRST), greedy(1))
    finally:
        llm.switch(multimodal=True)
    assert llm.chat(talk(FIRST), greedy(1)).outputs[0].token_ids


def test_a_bad_image_ends_nothing_else(llm):
    with pytest.raises(FieldError, match=r"messages\[0\].content\[1\].image': is not an image"):
        llm.chat(talk(b"no image"), greedy(1))
    assert llm.chat(talk(FIRST), greedy(1)).outputs[0].token_ids
