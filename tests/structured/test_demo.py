"""Structured output on the demo model, through the API and offline: rows of the case book, and what it composes with."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from tokenbus import LLM, SamplingParams
from tokenbus.core.errors import FieldError, RequestError
from tokenbus.core.front.events import RequestRecord
from tokenbus.core.messages import StepReport

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", max_model_len=512, num_blocks=128) as made:
        yield made


def run(llm, prompts="Give me a person as JSON:", **params):
    params = {"temperature": 1.3, "max_tokens": 120, **params}
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def test_every_seed_gives_a_valid_answer(llm):
    """C45 among them: white space is bounded, so each ends, or is cut at the limit with content."""
    prompts = ["Give me a person as JSON:"] * 12
    params = [SamplingParams(temperature=1.3, max_tokens=120, seed=seed, response_format=FORMAT) for seed in range(12)]
    for output in llm.generate(prompts, params, use_tqdm=False):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), PERSON)
        assert sum(char.isspace() for char in answer.text) < len(answer.text) * 0.7
        assert "structured" in output.features
    without = run(llm, seed=0)[0].outputs[0].text
    with pytest.raises(json.JSONDecodeError):
        json.loads(without)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_c45_room_is_not_spent_on_white_space(llm):
    texts = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("title", "text")},
        "required": ["title", "text"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": texts}}
    params = [SamplingParams(temperature=1.0, max_tokens=200, seed=seed, response_format=form) for seed in range(20)]
    answers = [output.outputs[0] for output in llm.generate(["Something as JSON:"] * 20, params, use_tqdm=False)]
    for answer in answers:
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), texts)
        else:
            assert answer.finish_reason == "length"
        between = re.split(r'"(?:[^"\\]|\\.)*"?', answer.text)
        assert max(sum(char.isspace() for char in piece) for piece in between) <= 3 * 9, answer.text
    assert sum(answer.finish_reason == "stop" for answer in answers) > 5
    assert run(llm, temperature=0, prompts="1, 2, 3, 4,", max_tokens=3)[0].outputs[0].text == " 5,"


def test_alone_in_a_batch_and_after_preemption_the_tokens_are_the_same(llm):
    one = [run(llm, seed=seed, response_format=FORMAT, logprobs=2, max_tokens=70)[0].outputs[0] for seed in (1, 2)]
    params = [
        SamplingParams(temperature=1.3, max_tokens=70, seed=1, response_format=FORMAT, logprobs=2),
        SamplingParams(temperature=1.3, max_tokens=70, seed=2, response_format=FORMAT, logprobs=2),
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(temperature=1.3, max_tokens=60, seed=3, structured_outputs={"regex": "[a-c]{40}"}),
    ]
    both = llm.generate(["Give me a person as JSON:"] * 4, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in both[:2]] == [o.token_ids for o in one]
    assert [o.outputs[0].logprobs for o in both[:2]] == [o.logprobs for o in one]
    assert all(len(o.logprobs) == len(o.token_ids) for o in one)
    assert re.fullmatch("[a-c]{40}", both[3].outputs[0].text)
    with LLM("demo", max_model_len=128, num_blocks=10, block_size=8, disable=("prefix_cache",)) as small:
        records: list[RequestRecord] = []
        small._portal.call(lambda: small._service.bus.listen(records.append, RequestRecord))
        squeezed = small.generate(["Give me a person as JSON:"] * 4, params[:2] * 2, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in squeezed] == [o.token_ids for o in one] * 2
    assert sum(record.preemptions for record in records) > 0


def test_composition(llm):
    three = run(llm, n=3, seed=4, structured_outputs={"choice": ["yes", "no", "maybe"]})[0].outputs
    assert {answer.text for answer in three} <= {"yes", "no", "maybe"}
    biased = run(llm, temperature=0, structured_outputs={"regex": "[0-9]{3}"}, logit_bias=dict.fromkeys(range(100, 400), 100.0))
    assert re.fullmatch("[0-9]{3}", biased[0].outputs[0].text)
    fined = run(llm, seed=1, structured_outputs={"regex": "(ab|cd){4}"}, frequency_penalty=2.0, repetition_penalty=5.0)
    assert re.fullmatch("(ab|cd){4}", fined[0].outputs[0].text)
    longer = run(llm, seed=2, structured_outputs={"regex": "[a-z ]+"}, min_tokens=10, max_tokens=14)[0].outputs[0]
    assert len(longer.token_ids) >= 10
    stopped = run(llm, seed=2, structured_outputs={"grammar": 'root ::= "abc" "stop" "def"'}, stop="stop")[0].outputs[0]
    assert (stopped.text, stopped.finish_reason) == ("abc", "stop")
    cut = run(llm, temperature=0, response_format=FORMAT, max_tokens=4)[0].outputs[0]
    assert cut.finish_reason == "length"
    assert cut.text.lstrip().startswith("{")
    forever = run(llm, structured_outputs={"choice": ["yes"]}, ignore_eos=True, max_tokens=9)[0].outputs[0]
    assert (forever.text, forever.finish_reason, len(forever.token_ids)) == ("yes", "length", 9)


def test_a_request_that_cant_go_on_ends_alone(llm):
    with pytest.raises(RequestError, match="by min_tokens, if the text is complete here"):
        run(llm, structured_outputs={"choice": ["yes"]}, min_tokens=20)
    assert run(llm, temperature=0, max_tokens=3)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "("}}}},
         "response_format.json_schema.schema"),
        ({"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"type": "strange"}}}},
         "response_format.json_schema.schema.type"),
        ({"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": [], "strict": True}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"type": "string", "format": "uuid", "maxLength": 5}}}, "structured_outputs.json"),
    ],
)  # fmt: skip
def test_c46_what_does_not_compile_generates_nothing(llm, fields, param):
    with pytest.raises(FieldError) as refused:
        run(llm, **fields)
    assert refused.value.param == param


def test_a_grammar_that_takes_too_long_is_stopped_while_others_go_on():
    def one(name):
        return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}

    bomb = {"allOf": [{"anyOf": [one(f"a{i}"), one(f"b{i}")]} for i in range(10)]}
    settings = {"structured": {"compile_seconds": 0.1}}
    with LLM("demo", max_model_len=256, num_blocks=64, plugins=settings) as limited, ThreadPoolExecutor(2) as threads:
        other = threads.submit(run, limited, temperature=0, max_tokens=60)
        for _ in range(3):
            with pytest.raises(FieldError, match=r"takes more than 0\.1 s of CPU time"):
                run(limited, structured_outputs={"json": bomb})
        assert len(other.result(60)[0].outputs[0].token_ids) == 60
        answer = run(limited, structured_outputs={"regex": "[0-9]{4}"})[0].outputs[0].text
    assert re.fullmatch("[0-9]{4}", answer)


# ---- through the API ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(api_server):
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def api_server():
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    spec = spec_from_file_location("tokenbus_demo_process", Path(__file__).parents[1] / "api" / "demo_process.py")
    process = module_from_spec(spec)
    spec.loader.exec_module(process)
    with process.serve_demo() as server:
        yield server


MESSAGES = [{"role": "user", "content": "Who are you? Answer as JSON."}]


def test_openai_client(client):
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=FORMAT, seed=1, max_completion_tokens=150
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)
    assert answer.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=FORMAT, seed=1, max_completion_tokens=150, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content


def test_openai_client_parses_models(client):
    import pydantic

    class Point(pydantic.BaseModel):
        x: int = pydantic.Field(ge=0, le=9)
        y: bool

    parsed = client.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Point, seed=2, max_completion_tokens=60
    )
    assert isinstance(parsed.choices[0].message.parsed, Point)
    done = client.completions.create(model="demo", prompt="x", extra_body={"structured_outputs": {"regex": "[xyz]{5}"}})
    assert re.fullmatch("[xyz]{5}", done.choices[0].text)


def test_refusals_name_the_field(client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
            },
        )
    assert bad.value.param == "response_format.json_schema.schema.uniqueItems"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="demo", prompt="x", extra_body={"guided_json": {}})
    assert bad.value.param == "guided_json"


def test_text_that_is_forced_takes_fewer_steps(llm):
    """Jump-forward: the same tokens and logprobs, drafts that are right, fewer steps."""
    schema = {
        "type": "object",
        "properties": {"identification_number": {"enum": [7, 8]}, "department_of_origin": {"enum": ["north", "south"]}},
        "required": ["identification_number", "department_of_origin"],
        "additionalProperties": False,
    }
    params = {"structured_outputs": {"json": schema}, "logprobs": 1, "temperature": 0.8, "seed": 3}

    def counted(model):
        reports: list[StepReport] = []
        model._portal.call(lambda: model._service.bus.listen(reports.append, StepReport))
        answer = run(model, **params)[0].outputs[0]
        steps = [report for report in reports if report.num_requests]
        return answer, len(steps), sum(report.counters.get("structured.jump_forward.accepted_tokens", 0) for report in steps)

    answer, quick, accepted = counted(llm)
    llm.switch(**{"structured.jump_forward": False})
    truth, slow, none = counted(llm)
    llm.switch(**{"structured.jump_forward": True})
    assert (answer.token_ids, answer.logprobs) == (truth.token_ids, truth.logprobs)
    assert none == 0
    assert accepted >= 4
    assert quick <= slow - accepted + 1  # the last token accepted is the end, behind which nothing is saved
