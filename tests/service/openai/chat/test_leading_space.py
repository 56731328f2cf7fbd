"""Outputs of tokenizers that strip a space from the beginning of a text, as Llama 2's does. What goes on from
a prompt is no beginning: prompt and output together are what the tokenizer makes of all their tokens.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.service.codecs import LLAMA2_VOCAB, SPACE, THE, A, llama2_codec
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import fake
from tests.support.models.byte_text import EOS

LLAMA2 = llama2_codec()
B = 262
SCRIPTS: Any = {"a b": [THE, A, EOS], "u:a|": [THE, A, EOS]}


def front() -> Any:
    return front_rig(fake(codec=LLAMA2, vocab_size=LLAMA2_VOCAB, scripts=SCRIPTS))


async def texts(rig: FrontRig, **fields: Any) -> tuple[str, str]:
    """Return the text that is told at once, and that which is streamed."""
    body = {"model": "fake", **fields}
    whole = (await rig.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    reply = await rig.http.post("/v1/completions", json=body | {"stream": True})
    return whole, "".join(event["choices"][0]["text"] for event in events_of(reply.text))


def events_of(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


def test_what_the_tokenizer_makes_of_all_tokens() -> None:
    assert LLAMA2.backend is not None
    assert LLAMA2.encode("a b") == [A, B]
    assert LLAMA2.backend.decode([A, B, THE, A]) == "a b the a"
    assert LLAMA2.backend.decode([THE, A]) == "the a"
    assert LLAMA2.backend.decode([SPACE, A]) == " a"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, " the a"),
        ({"echo": True}, "a b the a"),
        ({"echo": True, "prompt": [A, B]}, "a b the a"),
        ({"stop": ["the"]}, " "),
        ({"stop": [" the"]}, ""),
        ({"stop": [" a"]}, " the"),
        ({"max_tokens": 1}, " the"),
        ({"structured_outputs": {"choice": [" the"]}}, " the"),
        ({"structured_outputs": {"choice": ["the"]}}, "the"),
        ({"structured_outputs": {"regex": " [a-b]"}}, " a"),
        ({"structured_outputs": {"grammar": f"start: <[{THE}]> <[{A}]>"}, "echo": True}, "a b the a"),
    ],
    ids=repr,
)
async def test_a_completion_goes_on_from_its_prompt(fields: dict[str, Any], text: str) -> None:
    async with front() as rig:
        assert await texts(rig, **({"prompt": "a b"} | fields)) == (text, text)


async def test_an_answer_to_a_conversation_is_a_text_of_its_own() -> None:
    async with front() as rig:
        body = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
        reply = await rig.http.post("/v1/chat/completions", json=body)
    assert reply.json()["choices"][0]["message"]["content"] == "the a"


async def test_the_same_over_grpc() -> None:
    async with front() as rig:
        client = rig.front.backend.client
        assert (await client.generate("a b")).text == " the a"
        assert (await client.generate(token_ids=[A, B])).text == " the a"
        assert (await client.generate(messages=[{"role": "user", "content": "a"}])).text == "the a"


@pytest.mark.parametrize(("fields", "offsets"), [({}, [0, 4]), ({"echo": True}, [0, 1, 3, 7])])
@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_count_the_first_space(fields: Any, offsets: list[int], stream: bool) -> None:
    """Of "a b the a": the tokens are "a", " b", " the" and " a"."""
    body = {"model": "fake", "prompt": "a b", "logprobs": 0, "max_tokens": 2, "stream": stream} | fields
    async with front() as rig:
        reply = await rig.http.post("/v1/completions", json=body)
    told = [reply.json()] if not stream else events_of(reply.text)
    found = [choice["logprobs"] for one in told for choice in one["choices"] if choice["logprobs"]]
    assert [offset for logprobs in found for offset in logprobs["text_offset"]] == offsets
