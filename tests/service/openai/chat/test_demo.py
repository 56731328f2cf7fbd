"""What the demo model answers over HTTP is what gRPC answers with the same seed, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from pydantic import BaseModel

from penstock.client import Client, Generation
from tests.service.cli.test_serve import free_port
from tests.service.openai.chat import shapes
from tests.support.demo_server import served_demo

pytestmark = pytest.mark.sweep

SAMPLED: Any = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 24}
MESSAGES: Any = [{"role": "user", "content": "Tell me a story."}]


class Both(NamedTuple):
    """Clients of one server."""

    http: openai.OpenAI
    grpc: Client


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    port = free_port()
    with (
        served_demo("--openai-port", str(port)) as address,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as http,
        Client(address) as grpc,
    ):
        yield Both(http, grpc)


def ends(answer: Generation) -> list[str]:
    return [{"eos": "stop", "max_tokens": "length"}[output.finish.reason.value] for output in answer.outputs]


def test_a_chat_with_the_same_seed(both: Both) -> None:
    expected = both.grpc.generate(messages=MESSAGES, n=2, logprobs=2, **SAMPLED)
    fields: Any = {
        "model": "demo",
        "messages": MESSAGES,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        **SAMPLED,
    }
    raw = both.http.chat.completions.with_raw_response.create(**fields, extra_body={"return_token_ids": True})
    answer: Any = shapes.chat_completion(json.loads(raw.text))
    texts = ["", ""]
    entries: Any = [[], []]
    for chunk in both.http.chat.completions.create(**fields, stream=True):
        (part,) = chunk.choices
        texts[part.index] += part.delta.content or ""
        entries[part.index] += part.logprobs.content if part.logprobs else []
    for output, choice, text, parts in zip(expected.outputs, answer.choices, texts, entries, strict=True):
        assert choice.message.content == text == output.text
        assert tuple(choice.token_ids) == output.token_ids
        assert choice.logprobs.content == parts
        assert output.logprobs is not None
        assert [entry.logprob for entry in choice.logprobs.content] == list(output.logprobs.sampled)
        pieces = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert output.text.encode() in pieces
    assert [choice.finish_reason for choice in answer.choices] == ends(expected)
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens


def test_completions_of_several_prompts_with_the_same_seed(both: Both) -> None:
    prompts = ["Once upon a time", "The weather"]
    expected = [both.grpc.generate(prompt, **SAMPLED) for prompt in prompts]
    made = both.http.completions.create(model="demo", prompt=prompts, logprobs=0, **SAMPLED)
    assert [choice.text for choice in made.choices] == [answer.text for answer in expected]
    for choice in made.choices:
        assert choice.logprobs is not None
        for token, offset in zip(
            choice.logprobs.tokens or (), choice.logprobs.text_offset or (), strict=True
        ):
            assert token.startswith("<|") or choice.text[offset:].startswith(token)
    texts = ["", ""]
    for chunk in both.http.completions.create(model="demo", prompt=prompts, stream=True, **SAMPLED):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [answer.text for answer in expected]


class City(BaseModel):
    name: str
    is_large: bool


def test_an_answer_is_parsed(both: Both) -> None:
    answer = both.http.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=City, temperature=0, max_tokens=200
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, type(choice.message.parsed)) == ("stop", City)
