"""What guidance does with the OpenAI front, as OpenAI and as vLLM. `run_checks.py` runs the checks."""

from __future__ import annotations

import json

from guidance import assistant, gen, models, regex, select, user
from guidance import json as as_json

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}


def asked(model):
    with user():
        return model + "what is 3 + 4?"


def as_openai(endpoint):
    return asked(models.OpenAI(endpoint.model, base_url=endpoint.url, api_key=endpoint.key, echo=False))


def as_vllm(endpoint):
    model = models.experimental.VLLMModel(
        endpoint.model, base_url=endpoint.url, api_key=endpoint.key, echo=False
    )
    return asked(model)


def check_text_of_openai_has_no_end_token(endpoint):
    model = as_openai(endpoint)
    with assistant():
        model += gen("answer", max_tokens=30)
    assert model["answer"] == "3 + 4 = 7.", model["answer"]


def check_json_of_openai(endpoint):
    model = as_openai(endpoint)
    with assistant():
        model += as_json(name="answer", schema=SCHEMA)
    assert isinstance(json.loads(model["answer"])["sum"], int), model["answer"]


def check_gen_of_vllm(endpoint):
    model = as_vllm(endpoint)
    with assistant():
        model += gen("answer", max_tokens=30)
    assert model["answer"] == "3 + 4 = 7.", model["answer"]


def check_select_of_vllm(endpoint):
    model = as_vllm(endpoint)
    with assistant():
        model += "It is " + select(["seven", "eight"], name="answer") + "."
    assert model["answer"] in ("seven", "eight"), model["answer"]


def check_regex_of_vllm(endpoint):
    model = as_vllm(endpoint)
    with assistant():
        model += regex(r"[0-9] \+ [0-9] = [0-9]", name="answer")
    assert model["answer"][1:4] == " + ", model["answer"]


def check_json_of_vllm(endpoint):
    model = as_vllm(endpoint)
    with assistant():
        model += as_json(name="answer", schema=SCHEMA)
    assert isinstance(json.loads(model["answer"])["sum"], int), model["answer"]
