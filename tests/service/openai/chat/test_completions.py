"""/v1/completions through OpenAI's own client, in front of an engine whose tokens are known."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.service.openai.chat import shapes
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import fake, until
from tests.support.models.byte_text import EOS

SCRIPTS: dict[Any, Any] = {"hi": [*b"hello", EOS], "ho": [*b"w\xc3\xb6rld", EOS]}


def engine(**options: Any) -> Any:
    return fake(scripts=SCRIPTS, **options)


async def post(rig: FrontRig, **fields: Any) -> Any:
    return await rig.http.post("/v1/completions", json={"model": "fake", "prompt": "hi", **fields})


async def streamed(rig: FrontRig, **fields: Any) -> list[Any]:
    made: Any = await rig.openai.completions.create(
        **{"model": "fake", "prompt": "hi", "stream": True, **fields}
    )
    return [chunk async for chunk in made]


async def test_a_completion() -> None:
    async with front_rig(engine()) as rig:
        raw = await rig.openai.completions.with_raw_response.create(model="fake", prompt="hi")
        answer = shapes.completion(json.loads(raw.text))
    assert (answer.id[:5], answer.object, answer.model) == ("cmpl-", "text_completion", "fake")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "hello", "stop", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)


async def test_a_stream() -> None:
    async with front_rig(engine()) as rig:
        chunks = await streamed(rig, stream_options={"include_usage": True})
        reply = await post(rig, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["stop"]
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 8)
    assert reply.content.endswith(b"\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hi", ["hello"]),
        (["ho", "hi"], ["wörld", "hello"]),
        ([104, 105], ["hello"]),
        ([[104, 111], [104, 105], [104, 111]], ["wörld", "hello", "wörld"]),
    ],
)
async def test_prompts(prompt: Any, texts: list[str]) -> None:
    async with front_rig(engine()) as rig:
        answer = await rig.openai.completions.create(model="fake", prompt=prompt)
        chunks = await streamed(rig, prompt=prompt, stream_options={"include_usage": True})
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    made = [""] * len(texts)
    for chunk in chunks[:-1]:
        made[chunk.choices[0].index] += chunk.choices[0].text
    assert made == texts
    assert answer.usage == chunks[-1].usage
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 * len(texts)


async def test_choices_of_prompts_are_numbered_as_openai_does() -> None:
    scripts: Any = {
        ("hi", 0): [*b"a", EOS],
        ("hi", 1): [*b"b", EOS],
        ("ho", 0): [*b"c", EOS],
        ("ho", 1): [*b"d", EOS],
    }
    async with front_rig(fake(scripts=scripts)) as rig:
        answer = await rig.openai.completions.create(model="fake", prompt=["hi", "ho"], n=2, best_of=2)
        ids = [request.request_id for request in rig.engine.seen]
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    ]
    assert len(set(ids)) == 4


async def test_sixteen_tokens_unless_more_are_asked_for() -> None:
    async with front_rig(fake(scripts={"hi": [*b"x"] * 50})) as rig:
        few = await rig.openai.completions.create(model="fake", prompt="hi")
        more = await rig.openai.completions.create(model="fake", prompt="hi", max_tokens=20)
    assert (few.choices[0].text, few.choices[0].finish_reason) == ("x" * 16, "length")
    assert more.choices[0].text == "x" * 20


async def test_an_error_of_one_prompt_is_the_answer_and_frees_the_others() -> None:
    async with front_rig(engine(hold=True)) as rig:
        for stream in False, True:
            rig.engine.cancelled.clear()
            reply = await post(rig, prompt=["hi", "x" * 100], stream=stream)
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "context_length_exceeded"
            await until(lambda: rig.engine.load().num_running == 0)


async def test_token_ids() -> None:
    async with front_rig(engine()) as rig:
        choice = (await post(rig, return_token_ids=True)).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([104, 105], [*b"hello", EOS])


@pytest.mark.parametrize(("asked", "kept"), [(40, 40), (3, 3), (-1, 34), (64, 34)])
async def test_a_prompt_is_cut_to_its_last_tokens(asked: int, kept: int) -> None:
    """The context has 64 tokens. Where no number says how many are kept, there is room for max_tokens."""
    text = "".join(chr(ord("A") + i % 26) for i in range(100))
    async with front_rig(engine()) as rig:
        fields: Any = {"truncate_prompt_tokens": asked, "max_tokens": 30, "return_token_ids": True}
        choice = (await post(rig, prompt=text, **fields)).json()["choices"][0]
    assert bytes(choice["prompt_token_ids"]).decode() == text[-kept:]


REFUSED: Any = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": ["a"] * 257}),
    ("prompt", {"prompt": [9999]}),
    ("prompt", {"prompt": [-1]}),
    ("best_of", {"best_of": 2}),
    ("echo", {"echo": 1}),
    ("suffix", {"suffix": "x"}),
    ("max_tokens", {"max_tokens": 0}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("logprobs", {"logprobs": 999}),
]


async def test_refused() -> None:
    async with front_rig(engine()) as rig:
        for param, fields in REFUSED:
            reply = await post(rig, **fields)
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), fields
            assert error["param"].startswith(param), (fields, error)
            assert param in error["message"], (fields, error)


async def test_an_error_of_a_stream_before_its_first_event_has_its_status() -> None:
    async with front_rig(engine()) as rig:
        with pytest.raises(openai.BadRequestError) as caught:
            await streamed(rig, prompt="x" * 100)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("prompt", [[-1], [2**40], [1 << 31], [[1], [-1]]], ids=str)
async def test_ids_that_are_none_are_a_matter_of_the_prompt(prompt: list[Any]) -> None:
    async with front_rig() as rig:
        reply = await post(rig, prompt=prompt)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].partition("[")[0] == "prompt"
