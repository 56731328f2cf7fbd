"""Prompts that the answer repeats: their texts, and the log-probabilities that the fake engine makes of them,
which are written down by hand.
"""

from __future__ import annotations

import json
import math
from operator import itemgetter
from typing import Any

import pytest

from penstock.client import Delta, Logprobs, PromptInfo, Started, Vocabulary, WeightsVersion
from penstock.openai.generation import logprobs
from penstock.openai.generation.frames import Frame, UsageWanted, Wanted
from penstock.openai.generation.logprobs import Bound, completion_logprobs, dropped_after
from penstock.openai.routes import completion_answers
from penstock.openai.routes.completion_answers import CompletionChunks, Repeated
from tests.service.openai.chat import shapes
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import fake
from tests.support.models.byte_text import EOS

SCRIPTS: Any = {"hi": [*b"hello", EOS], "ho": [*b"w\xc3\xb6rld", EOS], ("n", 0): [*b"a"], ("n", 1): [*b"b"]}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
OF_HI: Any = {
    "tokens": ["h", "i"],
    "token_logprobs": [None, -105 / 16],
    "top_logprobs": [None, {"i": -105 / 16, "j": -106 / 16}],
    "text_offset": [0, 1],
}
"""With two candidates."""


def front(**settings: Any) -> Any:
    return front_rig(fake(scripts=SCRIPTS), settings=settings)


async def answered(rig: FrontRig, **fields: Any) -> Any:
    """Return the answer, after OpenAI's types have read it. They know nothing of the null that OpenAI's API
    has for the first token of a prompt.
    """
    reply = await rig.http.post("/v1/completions", json={"model": "fake", "echo": True, **fields})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    typed = reply.json()
    for choice in typed["choices"]:
        if choice["logprobs"] is not None:
            assert choice["logprobs"]["token_logprobs"].pop(0) is None
            assert choice["logprobs"]["top_logprobs"].pop(0) is None
    shapes.completion(typed)
    return answer


async def streamed(rig: FrontRig, **fields: Any) -> tuple[Any, Any]:
    """Return a stream put together as the answer that does not stream, and its chunks."""
    asked = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    reply = await rig.http.post("/v1/completions", json={"model": "fake", "echo": True, **asked})
    assert reply.status_code == 200, reply.text
    *events, done, _ = reply.text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    choices: dict[int, Any] = {}
    for chunk in chunks[:-1]:
        (part,) = chunk["choices"]
        made = choices.setdefault(part["index"], {**part, "text": "", "logprobs": None, "token_ids": []})
        made["text"] += part["text"]
        made["finish_reason"] = part["finish_reason"]
        made["token_ids"] += part.get("token_ids", ())
        if part["logprobs"] is not None:
            made["logprobs"] = made["logprobs"] or {name: [] for name in LISTS}
            for name in LISTS:
                made["logprobs"][name] += part["logprobs"][name]
    for made in choices.values():
        if not fields.get("return_token_ids"):
            del made["token_ids"]
    return {
        "choices": [choices[i] for i in sorted(choices)],
        "usage": chunks[-1]["usage"],
    }, chunks


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"prompt": "hi"}, ["hihello"]),
        ({"prompt": ["ho", "hi"]}, ["howörld", "hihello"]),
        ({"prompt": [104, 105]}, ["hihello"]),
        ({"prompt": [[104, 111], [104, 105]]}, ["howörld", "hihello"]),
        ({"prompt": ["n", "n"], "n": 2, "max_tokens": 1}, ["na", "nb", "na", "nb"]),
        ({"prompt": "hi", "max_tokens": 0}, ["hi"]),
        ({"prompt": ["ho", "hi"], "n": 2, "max_tokens": 0}, ["ho", "ho", "hi", "hi"]),
        ({"prompt": "ABCDhi", "truncate_prompt_tokens": 2, "max_tokens": 0}, ["hi"]),
        ({"prompt": [104, EOS, 105], "max_tokens": 0}, ["hi"]),
        ({"prompt": [104, EOS, 105], "max_tokens": 0, "skip_special_tokens": False}, ["h<|end|>i"]),
        ({"prompt": [0xC3, 0xB6, 0xC3], "max_tokens": 0}, ["ö\ufffd"]),
    ],
)
async def test_texts(fields: Any, texts: list[str]) -> None:
    """Also with log-probabilities, and with the ids of tokens. A stream is the same in pieces."""
    async with front() as rig:
        for more in {}, {"logprobs": 1}, {"return_token_ids": True}:
            answer = await answered(rig, **fields, **more)
            assert [choice["text"] for choice in answer["choices"]] == texts
            assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
            whole, chunks = await streamed(rig, **fields, **more)
            assert whole == {name: answer[name] for name in whole}
            firsts: dict[int, str] = {}
            for chunk in chunks[:-1]:
                firsts.setdefault(chunk["choices"][0]["index"], chunk["choices"][0]["text"])
            assert all(texts[index].startswith(first) and first for index, first in firsts.items())


async def test_log_probabilities() -> None:
    """They are the prompt's, and then those of all tokens of the output, the end token too: evaluation tools
    count the tokens from the end of the list.
    """
    fields: Any = {"prompt": ["hi", "ho"], "logprobs": 2}
    async with front() as rig:
        answer = await answered(rig, **fields)
        body = {"model": "fake", "return_token_ids": True, **fields}
        plain = (await rig.http.post("/v1/completions", json=body)).json()
        grpc = await rig.front.backend.client.generate(
            "hi", logprobs=2, prompt_logprobs=2, max_tokens=16, echo_prompt_token_ids=True
        )
    made, alone = answer["choices"][0]["logprobs"], plain["choices"][0]["logprobs"]
    for name in LISTS[:3]:
        assert made[name] == OF_HI[name] + alone[name]
    assert made["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert made["token_logprobs"][2:] == [*(-token / 8 for token in b"hello"), -EOS / 8]
    assert grpc.prompt.logprobs is not None
    assert grpc.logprobs is not None
    assert math.isnan(grpc.prompt.logprobs.sampled[0])
    assert made["token_logprobs"][1:] == [*grpc.prompt.logprobs.sampled[1:], *grpc.logprobs.sampled]
    assert answer["usage"] == plain["usage"]


async def test_the_prompt_alone() -> None:
    """The one token that the server makes for each choice is left out, but for the usage, which is that of
    its ledger.
    """
    fields: Any = {"prompt": ["hi", "ho"], "n": 2, "max_tokens": 0, "logprobs": 2, "return_token_ids": True}
    async with front() as rig:
        answer = await answered(rig, **fields, stop_token_ids=[ord("h")])
        whole, _ = await streamed(rig, **fields, stop_token_ids=[ord("h")])
        counted = await answered(rig, **fields)
        grpc = await rig.front.backend.client.generate("hi", n=2, max_tokens=1)
    assert whole == {name: answer[name] for name in whole}
    for choice in answer["choices"]:
        assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
        assert "stop_reason" not in choice
    assert answer["choices"][0]["logprobs"] == answer["choices"][1]["logprobs"] == OF_HI
    assert counted["choices"] == answer["choices"]
    assert counted["usage"]["completion_tokens"] == 2 * grpc.usage.completion_tokens == 4
    assert counted["usage"]["prompt_tokens"] == 2 * grpc.usage.prompt_tokens == 4


async def test_prompt_logprobs_say_how_many_are_told_of_the_prompt() -> None:
    async with front() as rig:
        answer = await answered(rig, prompt="hi", logprobs=0, prompt_logprobs=2, max_tokens=1)
        without = await answered(rig, prompt="hi", prompt_logprobs=0, max_tokens=1)
    (choice,) = answer["choices"]
    assert choice["logprobs"]["top_logprobs"] == [*OF_HI["top_logprobs"], {"h": -13.0}]
    assert set(choice["prompt_logprobs"][1]) == {"105", "106"}
    assert without["choices"][0]["logprobs"] is None
    assert set(without["choices"][0]["prompt_logprobs"][1]) == {"105"}


def test_offsets_follow_the_text_of_the_prompt() -> None:
    """A special token counts where its name is in the text, and not where the tokenizer has added it."""
    words = Vocabulary((b" a", b" b", b"<s>"), frozenset({2}), is_exact=True, dropped_leading_spaces=1)
    values = Logprobs((math.nan, -1.0, -2.0, -3.0))
    for prompt, offsets in ("a<s> b", [0, 0, 1, 4]), ("a b", [0, 0, 1, 1]), ("a", [0, 0, 1, 1]):
        made, _ = completion_logprobs(values, (2, 0, 2, 1), words, 0, prompt=prompt)
        assert made["text_offset"] == offsets
        assert made["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    made, after = completion_logprobs(Logprobs((-1.0, -1.0)), (0, 1), words, 5, start=5)
    assert (made["text_offset"], after) == ([5, 6], 8)


def test_offsets_of_a_stream_go_on_where_its_prompt_ends() -> None:
    """The prompt has lost its leading space here, so that the output keeps its own."""
    words = Vocabulary((b" a", b" b"), frozenset(), is_exact=True, dropped_leading_spaces=1)
    frame = Frame("text_completion", "cmpl-1", 0, "m", UsageWanted())
    chunks = CompletionChunks(frame, 1, Wanted(vocabulary=words), is_plain=True)
    chunks.started(0, Started("r", "m", PromptInfo(2, token_ids=(0, 1)), WeightsVersion("", 0)))
    assert b'"text":"a b"' in b"".join(chunks.repeated(0, Repeated("a b", None)))
    offsets = []
    for text, token in (" a", 0), (" b", 1), (" a", 0):
        made = chunks.delta(0, Delta(0, text, (token,), Logprobs((-1.0,))))
        assert made is not None
        offsets += json.loads(made.removeprefix(b"data: "))["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [3, 5, 7]


@pytest.mark.parametrize(
    ("prompt", "dropped"),
    [([], 2), ([3], 2), ([3, 0], 0), ([2], 1), ([2, 2], 0), ([2, 3, 0], 0), ([1], 0), ([4, 2], 1), ([5], 0)],
)
def test_an_output_loses_the_spaces_that_its_prompt_has_not_lost(prompt: list[int], dropped: int) -> None:
    """The text of all tokens loses two spaces at its start. A special token has none."""
    tokens = (b" a", b"b", b" ", b"<s>", b"", b"  ")
    words = Vocabulary(tokens, frozenset({3}), is_exact=True, dropped_leading_spaces=2)
    assert dropped_after(prompt, words) == dropped


async def test_what_is_repeated_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two choices of each of two prompts of two characters repeat eight."""
    async with front() as rig:
        for prompt in ["hi", "ho"], [[104, 105], [104, 111]]:
            for most, status in (8, 200), (7, 400):
                monkeypatch.setattr(completion_answers, "MOST_CHARACTERS", most)
                monkeypatch.setattr(completion_answers, "_SLICE", 1)
                for stream in False, True:
                    body = {"model": "fake", "prompt": prompt, "n": 2, "echo": True, "stream": stream}
                    reply = await rig.http.post("/v1/completions", json=body)
                    assert reply.status_code == status
                    if status == 400:
                        error = reply.json()["error"]
                        assert (error["param"], error["code"]) == ("echo", "response_too_large")


async def test_log_probabilities_of_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of the prompt and one more, with a candidate each, in each of two choices, are 12. In a
    stream those of the prompt are bounded, which are 8.
    """
    body: Any = {"model": "fake", "prompt": "hi", "n": 2, "max_tokens": 0, "logprobs": 1, "echo": True}
    async with front() as rig:
        for stream, most, status in (
            (False, 12, 200),
            (False, 11, 400),
            (True, 8, 200),
            (True, 7, 400),
        ):
            monkeypatch.setattr(Bound.__init__, "__defaults__", (most,))
            reply = await rig.http.post("/v1/completions", json=body | {"stream": stream})
            assert reply.status_code == status, (stream, most)
            assert status == 200 or reply.json()["error"]["code"] == "response_too_large"


async def test_slices_join(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front() as rig:
        made = []
        for size in 256, 3, 1:
            monkeypatch.setattr(logprobs, "_SLICE", size)
            answer = await answered(rig, prompt="some words", logprobs=1, max_tokens=4)
            made.append(answer["choices"])
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("max_tokens", {"max_tokens": 0, "echo": False}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1, "echo": True}),
        ("echo", {"echo": "yes"}),
        ("logprobs", {"echo": True, "logprobs": 999}),
        ("prompt_logprobs", {"echo": True, "logprobs": 1, "prompt_logprobs": 999}),
        ("prompt", {"echo": True, "prompt": [9999]}),
        ("prompt", {"echo": True, "prompt": [-(10**6)]}),
        ("prompt", {"echo": True, "prompt": "x" * 100}),
    ],
)
async def test_refused(param: str, fields: dict[str, Any]) -> None:
    async with front() as rig:
        for stream in False, True:
            body = {"model": "fake", "prompt": "hi", "stream": stream, **fields}
            reply = await rig.http.post("/v1/completions", json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"].startswith(param)


def scores(answer: Any, context_lengths: list[int]) -> list[tuple[float, bool]]:
    """Return what lm-evaluation-harness 0.4.13 reads of an answer (`LocalCompletionsAPI.parse_logprobs`): of
    each choice the sum of the log-probabilities of the continuation, without the token that was generated,
    and whether the model would have chosen the continuation.
    """
    made = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, length in zip(choices, context_lengths, strict=True):
        told = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(token == max(top.values()) for token, top in zip(told, tops, strict=True))
        made.append((sum(told), is_greedy))
    return made


async def test_lm_evaluation_harness_scores_continuations() -> None:
    """The body is that of `LocalCompletionsAPI._create_payload`, which has the token ids of several contexts
    with their continuations.
    """
    prompts = [list(b"abcd"), list(b"xyz")]
    body = {
        "model": "fake",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    async with front() as rig:
        answer = (await rig.http.post("/v1/completions", json=body)).json()
    cd, z = -(ord("c") + ord("d")) / 16, -ord("z") / 16
    assert scores(answer, [2, 2]) == [(cd, True), (z, True)]
