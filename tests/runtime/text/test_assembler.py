"""An output that ends with its first call, in every form: the text is written token by token by hand, and the
engine's steps hold any number of the tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.messages import Chat, ChatTurn, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS
from penstock.runtime.requests.request import Finish, FinishReason, StepOutput, StoppingParams, TokenLogprobs
from penstock.runtime.text.assembler import Assembler, Delta
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import bytes_tokenizer

CODEC = TextCodec(bytes_tokenizer())
CHAT = Chat((ChatTurn("user", "hi"),), (Tool("f"), Tool("g")), parallel_tool_calls=False)
WRITTEN = {
    "hermes": ('I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "\n<tool_call>{"),
    "llama3_json": ('I look.\n{"name": "f", "parameters": {"a": 1}}', '; {"name": "g", "parameters": {}}'),
    "mistral": ('I look.\n[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}', ', {"name": "g"}] bye'),
    "pythonic": ("I look.\n[f(a=1), g()]", " and [g()]"),
}
"""For each form: the text up to where the first call is known, and what the model would go on with."""


def steps(ids: list[int], cuts: list[int]) -> Iterator[StepOutput]:
    """Yield the tokens in steps, with log-probabilities that tell their place."""
    marks = sorted({0, *(min(cut, len(ids)) for cut in cuts), len(ids)})
    for start, end in itertools.pairwise(marks):
        told = tuple(TokenLogprobs(-float(i), ()) for i in range(start, end))
        finish = Finish(FinishReason.MAX_TOKENS) if end == len(ids) else None
        yield StepOutput("r", tuple(ids[start:end]), told, finish)


def assembled(form: str, text: str, cuts: list[int], chat: Chat = CHAT) -> tuple[Delta, Finish | None]:
    """All deltas as one, and what the engine was told to end the output with."""
    forms = ChatForms(TOOL_FORMS[form])
    assembler = Assembler(
        StoppingParams(), CODEC, parser=forms.parser(chat, ""), ends_at_call=chat.ends_at_call
    )
    deltas = [assembler.add(step) for step in steps(CODEC.encode(text), cuts)]
    assert [one.finish for one in deltas[:-1]] == [None] * (len(deltas) - 1)
    whole = Delta(
        delta="".join(one.delta for one in deltas),
        token_ids=tuple(i for one in deltas for i in one.token_ids),
        logprobs=tuple(p for one in deltas for p in one.logprobs),
        tool_calls=tuple(call for one in deltas for call in one.tool_calls),
        finish=deltas[-1].finish,
    )
    return whole, assembler.stop


@pytest.mark.parametrize("form", WRITTEN)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 120), max_size=12))
def test_an_output_ends_with_its_first_call(form: str, cuts: list[int]) -> None:
    """The tokens up to the one that completes the call are there, with their log-probabilities."""
    written, more = WRITTEN[form]
    ended = Finish(FinishReason.EOS)
    for text in (written + more, written):
        whole, stop = assembled(form, text, cuts)
        assert (whole.delta, [(call.name, call.arguments_json) for call in whole.tool_calls]) == (
            "I look.",
            [("f", '{"a": 1}')],
        )
        assert (whole.finish, stop) == (ended, ended)
        assert CODEC.decode(whole.token_ids) == written
        assert [entry.sampled for entry in whole.logprobs] == [-float(i) for i in range(len(whole.token_ids))]


@pytest.mark.parametrize("form", WRITTEN)
def test_an_output_without_a_call_is_as_ever(form: str) -> None:
    """So is one whose calls may be parallel."""
    assert assembled(form, "I do not look.", [3])[0].finish == Finish(FinishReason.MAX_TOKENS)
    written, more = WRITTEN[form]
    whole, stop = assembled(form, written + more, [], Chat(CHAT.messages, CHAT.tools))
    assert (len(whole.token_ids), stop) == (len(written + more), None)
    assert whole.tool_calls


def test_a_call_that_only_the_end_completes_is_one() -> None:
    """The closing tag may be missing at the end, as always."""
    whole, stop = assembled("hermes", '<tool_call>{"name": "f", "arguments": {}}', [])
    assert [call.name for call in whole.tool_calls] == ["f"]
    assert (whole.finish, stop) == (Finish(FinishReason.MAX_TOKENS), None)
