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


def test_a_continuation_that_the_model_chose_is_scored_as_its_choice(both: Both) -> None:
    """As lm-evaluation-harness asks: token ids of prompts with continuations, whole and as a stream. The
    log-probabilities are those with which the tokens were chosen, and each token is the likeliest one.
    """
    texts = ["Once upon a time", "The weather"]
    made: Any = both.http.completions.create(
        model="demo",
        prompt=texts,
        temperature=0,
        max_tokens=12,
        logprobs=1,
        extra_body={"return_token_ids": True},
    )
    prompts = [[*choice.prompt_token_ids, *choice.token_ids] for choice in made.choices]
    fields: Any = {"model": "demo", "prompt": prompts, "temperature": 0, "logprobs": 1, "echo": True}
    answer = both.http.completions.create(**fields, max_tokens=1, seed=1234)
    for text, choice, scored in zip(texts, made.choices, answer.choices, strict=True):
        told: Any = scored.logprobs
        before = len(choice.prompt_token_ids)
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[before:-1] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)
        for value, top in list(zip(told.token_logprobs, told.top_logprobs, strict=True))[before:-1]:
            assert value == max(top.values())
        assert scored.text.startswith(text + choice.text)
        for token, offset in zip(told.tokens, told.text_offset, strict=True):
            assert token.startswith("<|") or scored.text[offset:].startswith(token)
    chunks = list(both.http.completions.create(**fields, max_tokens=0, stream=True))
    parts: Any = [chunk.choices[0] for chunk in chunks if chunk.choices[0].logprobs]
    assert [part.index for part in parts] == [0, 1] or [part.index for part in parts] == [1, 0]
    for part in parts:
        whole: Any = answer.choices[part.index].logprobs
        assert part.logprobs.token_logprobs[1:] == pytest.approx(whole.token_logprobs[1:-1], abs=1e-3)
        assert part.logprobs.tokens == whole.tokens[:-1]


class City(BaseModel):
    name: str
    is_large: bool


def test_an_answer_is_parsed(both: Both) -> None:
    answer = both.http.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=City, temperature=0, max_tokens=200
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, type(choice.message.parsed)) == ("stop", City)
