"""Pictures in an experiment whose arms have engines of their own: processed once, by the control's plugin, and right for every arm."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import media_kit as kit
import pytest
from tiny_tokenizer import tiny_tokenizer

from tokenbus.core.errors import ConfigError
from tokenbus.core.experiments.records import experiment_dir, read_rows
from tokenbus.core.front.events import EngineStarted
from tokenbus.core.worker.threads import available_cores

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(available_cores() < 2, reason="two engines need two cores"),
]

PICTURES = [kit.encoded(kit.noise(seed=seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = kit.llava_folder(tmp_path_factory.mktemp("models") / "tiny-llava")
    config = folder / "config.json"
    text = {
        "model_type": "llama", "vocab_size": 270, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    import json

    config.write_text(json.dumps({**json.loads(config.read_text()), "text_config": text}))
    return folder


def settings(folder: Path, llava: Path, arms: dict[str, Any]) -> dict[str, Any]:
    x = {"engines": "own", "arms": arms, "autostart": True, "washout_seconds": 0}
    return {"server": {"state_dir": str(folder)}, "model": {"model": str(llava)}, "experiments": {"x": x}}


def serving(serve, folder, llava, arms):
    tokenizer = tiny_tokenizer(special=("<image>",))
    return serve(settings(folder, llava, arms), tokenizer=tokenizer, template=kit.TEMPLATE, vocab_size=262)


async def ask(api, picture):
    return await api.chat([{"role": "user", "content": [kit.text_part("what? "), kit.image_part(picture)]}], max_tokens=1)


def multimodal(api, arm):
    return api.engines[arm].host.loaded["multimodal"]


async def test_every_arm_gets_what_was_processed_once(serve, tmp_path, llava):
    arms = {"on": {}, "off": {"features": {"prefix_cache": False}, "settings": {"cache.block_size": 32}}}
    async with serving(serve, tmp_path, llava, arms) as api:
        for engine in api.engines.values():
            engine.bus.publish(EngineStarted(engine.info, 0))
        seen = Counter()
        for i in range(24):
            answer = await ask(api, PICTURES[i % 3])
            assert answer.status == 200, answer.body
            seen[answer.headers["x-tokenbus-arm"].removeprefix("x/")] += 1
        got = {arm: [request.media[0] for request in engine.admitted] for arm, engine in api.engines.items()}
        assert {arm: len(items) for arm, items in got.items()} == dict(seen)
        assert min(seen.values()) > 2
        assert len({(item.digest, len(item.tensors["pixel_values"].data)) for items in got.values() for item in items}) == 3
        assert multimodal(api, "on")._model[1]._processes.jobs == 3
        assert multimodal(api, "off")._model is None


async def test_an_arm_without_the_plugin_leaves_pictures_to_the_control(serve, tmp_path, llava):
    arms = {"on": {}, "off": {"features": {"multimodal": False}}}
    async with serving(serve, tmp_path, llava, arms) as api:
        for _ in range(12):
            answer = await ask(api, PICTURES[0])
            assert (answer.status, answer.headers["x-tokenbus-arm"]) == (200, "x/excluded")
        assert [len(api.engines[arm].admitted) for arm in arms] == [12, 0]
        texts = Counter([(await api.complete("hello")).headers["x-tokenbus-arm"] for _ in range(24)])
        assert texts.keys() == {"x/on", "x/off"}
        await api.service.experiments.tick()
        rows = list(read_rows(experiment_dir(tmp_path, "x")))
    assert Counter(row.excluded for row in rows) == {"claims": 12, "": 24}


async def test_without_it_in_the_control_pictures_are_refused_by_name_and_texts_are_not(serve, tmp_path, llava):
    arms = {"off": {"features": {"multimodal": False}}, "on": {}}
    async with serving(serve, tmp_path, llava, arms) as api:
        for _ in range(6):
            answer = await ask(api, PICTURES[0])
            assert answer.status == 400
            assert "'multimodal', is off" in answer.error["message"]
            assert answer.error["param"] == "messages[0].content[1].image_url"
        for _ in range(12):
            assert (await api.complete("hello")).status == 200
        assert not any(request.media for engine in api.engines.values() for request in engine.admitted)


async def test_an_arm_cant_have_its_pictures_processed_otherwise(serve, tmp_path, llava):
    arms = {"on": {}, "other": {"settings": {"plugins.multimodal.max_images": 1}}}
    with pytest.raises(
        ConfigError, match=r"arms\.other\.settings: 'plugins\.multimodal\.max_images' can't differ .* before a request"
    ):
        async with serving(serve, tmp_path, llava, arms):
            pass
