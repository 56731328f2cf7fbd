"""Log-probabilities in OpenAI's and vLLM's shapes, of values that were written down by hand."""

from __future__ import annotations

import math

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.completion_choice import Logprobs as CompletionLogprobs

from penstock.client import Logprobs
from penstock.openai.answers.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from penstock.openai.vocabulary import Vocabulary
from tests.service.openai.chat import shapes

EURO = "€".encode()
WORDS = Vocabulary((b"a", b" b", EURO[:2], EURO[2:], b"<|end|>"), frozenset({4}))


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
