"""The log-probabilities of a message are those of the tokens that its text is made of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.openai.routes.responses.items import TextLogprobs


def entries(*texts: str) -> list[dict[str, Any]]:
    return [{"token": text, "bytes": list(text.encode())} for text in texts]


def tokens(found: list[dict[str, Any]]) -> list[str]:
    return [entry["token"] for entry in found]


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6)
"""For each delta how many tokens come with it, and how many characters the text stays behind."""


@given(st.lists(st.text("ab é", min_size=1, max_size=3), min_size=1, max_size=8), STEPS)
@settings(max_examples=150, deadline=None)
def test_every_token_is_told_once_however_late_its_text_comes(
    texts: list[str], steps: list[tuple[int, int]]
) -> None:
    """A delta may also end within a token."""
    logprobs = TextLogprobs()
    found = logprobs.of_delta(entries("<think>", "ab"), "ab", "", False)
    found += logprobs.of_delta(entries("</ab>", "\n"), "", "", False)
    sent = said = 0
    for more, lag in [*steps, (len(texts), 0)]:
        new, sent = texts[sent : sent + more], sent + more
        text = "".join(texts[:sent])
        until = max(said, len(text) - lag)
        found += logprobs.of_delta(entries(*new), "", text[said:until], False)
        said = until
    assert tokens(found) == texts


@pytest.mark.parametrize(
    ("sent", "reasoning", "text", "expected"),
    [
        (["<think>", "think", "</think>", "think", "<eos>"], "think", "think", ["think"]),
        (["</think>", "think"], "", "think", ["think"]),
        (["\n\n", " Hi", "!"], "", "Hi!", [" Hi", "!"]),
        (["Hi", "<tool_call>", "{", "}"], "", "Hi", ["Hi"]),
        (["Hi", "<odd>", "you"], "", "Hiyou", ["Hi", "<odd>", "you"]),
    ],
    ids=[
        "all at once",
        "a tag has the text",
        "white space was dropped",
        "a call follows",
        "not in the bytes",
    ],
)
def test_other_tokens_are_left_out(sent: list[str], reasoning: str, text: str, expected: list[str]) -> None:
    assert tokens(TextLogprobs().of_delta(entries(*sent), reasoning, text, False)) == expected


def test_tokens_of_a_call_are_not_those_of_later_text() -> None:
    logprobs = TextLogprobs()
    logprobs.of_delta(entries("<tool_call>", "x"), "", "", True)
    assert tokens(logprobs.of_delta(entries("x"), "", "x", False)) == ["x"]
