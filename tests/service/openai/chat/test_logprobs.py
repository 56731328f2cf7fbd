"""Log-probabilities in OpenAI's and vLLM's shapes, of values that were written down by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs
from openai.types.completion_choice import Logprobs as CompletionLogprobs

from penstock.client import Logprobs, Vocabulary
from penstock.openai.generation import logprobs
from penstock.openai.generation.logprobs import Bound, chat_logprobs, completion_logprobs, prompt_logprobs
from tests.service.openai.chat import shapes
from tests.service.openai.rig import front_rig
from tests.service.rig import fake
from tests.support.models.byte_text import EOS

EURO = "€".encode()
WORDS = Vocabulary((b"a", b" b", EURO[:2], EURO[2:], b"<|end|>"), frozenset({4}), True, 0)


def test_a_chats() -> None:
    made = chat_logprobs(
        Logprobs((-0.5, -math.inf), (((0, -0.5), (2, -1.0)), ((3, -0.25), (4, -math.inf)))), (0, 1), WORDS
    )
    for entry in made:
        shapes.typed(ChatCompletionTokenLogprob, entry)
    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    half = {"token": "\\xe2\\x82", "logprob": -1.0, "bytes": [0xE2, 0x82]}
    last = {"token": "\\xac", "logprob": -0.25, "bytes": [0xAC]}
    end = {"token": "<|end|>", "logprob": -9999.0, "bytes": list(b"<|end|>")}
    b = {"token": " b", "logprob": -9999.0, "bytes": [32, 98]}
    assert made == [{**a, "top_logprobs": [a, half]}, {**b, "top_logprobs": [last, end]}]


def test_without_the_likeliest() -> None:
    (entry,) = chat_logprobs(Logprobs((-1.0,)), (0,), WORDS)
    assert entry["top_logprobs"] == []


def test_what_json_does_not_have() -> None:
    """The engine tells NaN where a log-probability is undefined."""
    told = Logprobs((math.nan, -math.inf), (((0, math.nan),), ((1, -math.inf),)))
    for entry in chat_logprobs(told, (0, 1), WORDS):
        assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    made, _ = completion_logprobs(told, (0, 1), WORDS, 0)
    assert made["token_logprobs"] == [-9999.0, -9999.0]
    assert made["top_logprobs"] == [{"a": -9999.0}, {" b": -9999.0}]


def test_offsets_begin_after_the_spaces_that_a_text_drops() -> None:
    """The tokens " b" and "a" are the text "ba"."""
    dropping = Vocabulary(WORDS.tokens, WORDS.special_token_ids, is_exact=True, dropped_leading_spaces=1)
    made, after = completion_logprobs(Logprobs((-1.0,) * 3), (1, 0, 1), dropping, 0)
    assert (made["text_offset"], after) == ([0, 1, 2], 4)


def test_a_completions() -> None:
    """The text is "a€ b": offsets count its characters, and the character is there with its first token."""
    ids = (0, 2, 3, 4, 1)
    made, after = completion_logprobs(
        Logprobs((-1.0,) * 5, (((1, -0.5),), ((2, -1.0),), ((0, -2.0),), ((4, -1.0),), ((0, -3.0),))),
        ids,
        WORDS,
        10,
    )
    shapes.typed(CompletionLogprobs, made)
    names = ["a", "bytes:\\xe2\\x82", "bytes:\\xac", "<|end|>", " b"]
    assert made == {
        "tokens": names,
        "token_logprobs": [-1.0] * 5,
        "top_logprobs": [
            {" b": -0.5, "a": -1.0},
            {names[1]: -1.0},
            {"a": -2.0, names[2]: -1.0},
            {"<|end|>": -1.0},
            {"a": -3.0, " b": -1.0},
        ],
        "text_offset": [10, 11, 12, 12, 12],
    }
    assert after == 14


def test_a_prompts() -> None:
    made = prompt_logprobs(
        Logprobs((math.nan, -3.0, -0.1), ((), ((0, -0.5),), ((2, -0.1),))), (0, 1, 2), WORDS
    )
    assert made == [
        None,
        {
            "1": {"logprob": -3.0, "rank": None, "decoded_token": " b"},
            "0": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
        {"2": {"logprob": -0.1, "rank": 1, "decoded_token": "\ufffd"}},
    ]


NONE = ChoiceLogprobs()
SPELLED = [*(bytes([b]) for b in range(256)), b"<|end|>", b"", b"", b""]
"""The vocabulary of the fake engine, whose last ids the tokenizer does not have."""
HELLO = [*b"hey", EOS]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def front() -> Any:
    return front_rig(fake(scripts={"u:hi|": HELLO, "hi": HELLO}))


async def test_of_a_chat_over_http() -> None:
    """They are those of the same call in gRPC, and a stream's are the same as a whole answer's."""
    fields: Any = {"model": "fake", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    async with front() as rig:
        whole = shapes.chat_completion(
            (await rig.openai.chat.completions.create(**fields)).to_dict(mode="json")
        )
        chunks = [chunk async for chunk in await rig.openai.chat.completions.create(**fields, stream=True)]
        async with rig.openai.chat.completions.stream(**fields) as stream:
            streamed = await stream.get_final_completion()
        client = rig.front.backend.client
        grpc = await client.generate(messages=MESSAGES, logprobs=2)
    assert whole.choices[0].logprobs is not None
    content: Any = whole.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["h", "e", "y"]
    assert grpc.logprobs is not None
    assert [entry.logprob for entry in content] == list(grpc.logprobs.sampled[:-1]), "but for the end token"
    for entry, top in zip(content, grpc.logprobs.top[:-1], strict=True):
        assert [(bytes(one.bytes), one.logprob) for one in entry.top_logprobs] == [
            (SPELLED[token], logprob) for token, logprob in top
        ]
    entries = [e for chunk in chunks for e in (chunk.choices[0].logprobs or NONE).content or ()]
    assert entries == content
    assert streamed.choices[0].logprobs is not None
    assert streamed.choices[0].logprobs.content == content


async def test_of_a_completion_over_http() -> None:
    fields: Any = {"model": "fake", "prompt": "hi", "logprobs": 1}
    async with front() as rig:
        whole = (await rig.openai.completions.create(**fields)).choices[0].logprobs
        chunks = [chunk async for chunk in await rig.openai.completions.create(**fields, stream=True)]
    assert (whole.tokens, whole.text_offset) == (["h", "e", "y"], [0, 1, 2])
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for one in streamed for item in getattr(one, name)] == getattr(whole, name)


async def test_of_prompts_over_http() -> None:
    async with front() as rig:
        body = {"model": "fake", "prompt": "hi", "prompt_logprobs": 1}
        made = (await rig.http.post("/v1/completions", json=body)).json()["choices"][0]["prompt_logprobs"]
        body = {"model": "fake", "messages": MESSAGES, "prompt_logprobs": 0}
        of_chat = (await rig.http.post("/v1/chat/completions", json=body)).json()["prompt_logprobs"]
    assert made[0] is None
    assert made[1][str(ord("i"))]["decoded_token"] == "i"
    assert [None if one is None else list(one) for one in of_chat] == [None, *([str(b)] for b in b":hi|")]


async def test_of_whole_answers_there_are_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens of each of two choices, with two candidates each, are 24; a stream may have any number."""
    body: Any = {"model": "fake", "messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2}
    prompts = {"model": "fake", "prompt": ["hi"] * 2, "logprobs": 2}
    async with front() as rig:
        for most, status in (24, 200), (23, 400):
            monkeypatch.setattr(Bound.__init__, "__defaults__", (most,))
            for path, fields in ("chat/completions", body), ("completions", prompts):
                reply = await rig.http.post(f"/v1/{path}", json=fields)
                assert reply.status_code == status
                assert status == 200 or reply.json()["error"]["code"] == "response_too_large"
                reply = await rig.http.post(f"/v1/{path}", json=fields | {"stream": True})
                assert reply.status_code == 200
                assert b'"error"' not in reply.content


async def test_slices_join(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front() as rig:
        for path, prompt in ("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "hi"}):
            body: Any = {"model": "fake", "logprobs": 1, "prompt_logprobs": 1, "seed": 1, **prompt}
            if path == "chat/completions":
                body |= {"logprobs": True, "top_logprobs": 1}
            made = []
            for size in 256, 3, 1:
                monkeypatch.setattr(logprobs, "_SLICE", size)
                answer = (await rig.http.post(f"/v1/{path}", json=body)).json()
                made.append((answer["choices"], answer.get("prompt_logprobs")))
            assert made[0] == made[1] == made[2]
