"""The log-probabilities of a text are those of the tokens that the text is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client import Delta, Logprobs, ToolCall, Vocabulary
from penstock.openai.generation.logprobs import TextTokens
from tests.service.openai.responses.sent_events import events_of
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import fake
from tests.support.models.byte_text import EOS

SPECIAL = ("<eos>", "<odd>")


class Output:
    """Feeds deltas of tokens that are given by their texts, and returns the texts of those that are told."""

    def __init__(self, texts: Sequence[str], **options: bool) -> None:
        self.words = (*dict.fromkeys((*texts, *SPECIAL)), "\xff")
        special = frozenset(self.words.index(text) for text in SPECIAL)
        vocabulary = Vocabulary(tuple(word.encode("latin-1") for word in self.words), special, True, 0)
        self.tokens = TextTokens(vocabulary, **options)

    def add(self, texts: Sequence[str], text: str, reasoning: str = "", *, calls: bool = False) -> list[str]:
        ids = tuple(self.words.index(text) for text in texts)
        made = ToolCall("call_0", "f", "{}")
        told = self.tokens.of_delta(
            Delta(
                0,
                text,
                ids,
                Logprobs(tuple(map(float, ids))),
                reasoning=reasoning,
                tool_calls=(made,) if calls else (),
            )
        )
        assert told.logprobs is not None
        assert list(told.logprobs.sampled) == list(told.token_ids), "each keeps its own"
        return [self.words[token_id] for token_id in told.token_ids]


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6)
"""For each delta how many tokens come with it, and how many characters the text stays behind."""


@given(st.lists(st.text("ab c", min_size=1, max_size=3), min_size=1, max_size=8), STEPS)
@settings(max_examples=150, deadline=None)
def test_every_token_is_told_once_however_late_its_text_comes(
    texts: list[str], steps: list[tuple[int, int]]
) -> None:
    """A delta may also end within a token."""
    output = Output([*texts, "<think>", "ab", "</ab>", "\n"])
    found = output.add(["<think>", "ab"], "", "ab")
    found += output.add(["</ab>", "\n"], "")
    sent = said = 0
    for more, lag in [*steps, (len(texts), 0)]:
        new, sent = texts[sent : sent + more], sent + more
        text = "".join(texts[:sent])
        until = max(said, len(text) - lag)
        found += output.add(new, text[said:until])
        said = until
    assert [*found, *output.add(["<eos>"], "")] == texts


@pytest.mark.parametrize(
    ("sent", "reasoning", "text", "expected"),
    [
        (["<think>", "think", "</think>", "think", "<eos>"], "think", "think", ["think"]),
        (["</think>", "think"], "", "think", ["think"]),
        (["\n\n", " Hi", "!"], "", "Hi!", [" Hi", "!"]),
        (["Hi", "<tool_call>", "{", "}"], "", "Hi", ["Hi"]),
        (["Hi", "<odd>", "you", "<eos>"], "", "Hiyou", ["Hi", "you"]),
        (["Hi", "\xff", "<eos>"], "", "Hi\ufffd", ["Hi", "\xff"]),
        (["Hi", ".", "\n"], "", "Hi", ["Hi"]),
    ],
    ids=[
        "all at once",
        "a tag has the text",
        "white space was dropped",
        "a call follows",
        "a special token",
        "not in the bytes",
        "a stop string",
    ],
)
def test_other_tokens_are_left_out(sent: list[str], reasoning: str, text: str, expected: list[str]) -> None:
    assert Output(sent).add(sent, text, reasoning) == expected


def test_special_tokens_that_the_text_has_are_told() -> None:
    output = Output(["Hi"], with_special=True)
    assert output.add(["Hi", "<odd>", "<eos>"], "Hi<odd>") == ["Hi", "<odd>"]


def test_spaces_that_a_text_loses_count_where_offsets_begin() -> None:
    assert Output([" ", " b"], is_parsed=False).add([" ", " b"], " b") == [" ", " b"]


def test_tokens_of_a_call_are_not_those_of_later_text() -> None:
    output = Output(["<tool_call>", "x"])
    output.add(["<tool_call>", "x"], "", calls=True)
    assert output.add(["x"], "x") == ["x"]


LOGPROBS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "completions": {"prompt": "hi", "logprobs": 0},
    "responses": {"input": "hi", "top_logprobs": 1, "include": ["message.output_text.logprobs"]},
}


async def told(rig: FrontRig, path: str, fields: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the text of an answer, and the tokens of its log-probabilities; those of a stream are the
    same.
    """
    body = {"model": "fake", **LOGPROBS[path], **fields}
    whole = (await rig.http.post(f"/v1/{path}", json=body)).json()
    stream = (await rig.http.post(f"/v1/{path}", json=body | {"stream": True})).text
    if path == "responses":
        part = whole["output"][0]["content"][0]
        deltas = [e for e in events_of(stream) if e["type"] == "response.output_text.delta"]
        streamed = [entry for e in deltas for entry in e["logprobs"]]
        assert streamed == part["logprobs"]
        return part["text"], [entry["token"] for entry in part["logprobs"]]
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    in_chunks = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    (choice,) = whole["choices"]
    if path == "completions":
        assert [token for one in in_chunks for token in one["tokens"]] == choice["logprobs"]["tokens"]
        return choice["text"], choice["logprobs"]["tokens"]
    assert [entry for one in in_chunks for entry in one["content"]] == choice["logprobs"]["content"]
    return choice["message"]["content"], [entry["token"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize("path", LOGPROBS)
async def test_joined_they_are_the_text_at_every_endpoint(path: str) -> None:
    """An output ends by its end token, or by a stop string, whose tokens are generated as well. Who asks for
    ids gets an entry for each of them.
    """
    script = [*b"hey, you", EOS]
    async with front_rig(fake(scripts={"u:hi|": script, "hi": script})) as rig:
        for fields, text in (
            ({}, "hey, you"),
            ({"stop": ", y"}, "hey"),
            ({"stop": ", y", "include_stop_str_in_output": True}, "hey, y"),
            ({"stop": "h"}, ""),
        ):
            said, tokens = await told(rig, path, fields)
            assert (said, "".join(tokens)) == (text, text)
        if path != "responses":
            _, tokens = await told(rig, path, {"return_token_ids": True})
            assert tokens[-1] == "<|end|>"
