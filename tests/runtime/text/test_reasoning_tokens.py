"""How many tokens of an output belong to its reasoning, counted by hand; each character is a token."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.messages import Chat, ChatTurn
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.reasoning import REASONING_FORMS
from penstock.runtime.requests.request import Finish, FinishReason, StepOutput, StoppingParams
from penstock.runtime.text.assembler import Assembler
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import bytes_tokenizer

CODEC = TextCodec(bytes_tokenizer())
FORMS = ChatForms(reasoning=REASONING_FORMS["think"])
CHAT = Chat((ChatTurn("user", "hi"),))
CASES = [
    ("<think>Hm.</think>Hi", "", 18),
    ("<think>Hm.</think>", "", 18),
    ("\n <think></think>\n\nHi", "", 17),
    ("Hm.</think>\nHi", "<think>", 11),
    ("<think>Hm.</think>Hi", "<think>", 18),
    ("<think>Hm. </th", "", 15),
    ("Hm", "<think>", 2),
    ("<thin", "", 0),
    ("Hi", "", 0),
    ("Hi <think>Hm.</think>", "", 0),
    ("", "", 0),
    ("<think>€</think>€", "", 18),
]
"""What the model wrote, how the prompt ended, and how many tokens the reasoning has: the euro sign has
three.
"""


def deltas(text: str, prompt: str, cuts: list[int], stop: tuple[str, ...] = ()) -> list[int]:
    """Return the tokens of the reasoning that each delta tells."""
    assembler = Assembler(StoppingParams(stop=stop), CODEC, parser=FORMS.parser(CHAT, prompt))
    ids = CODEC.encode(text)
    marks = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    told = []
    for i, (start, end) in enumerate(itertools.pairwise(marks)):
        finish = Finish(FinishReason.MAX_TOKENS) if i == len(marks) - 2 else None
        told.append(assembler.add(StepOutput("r", tuple(ids[start:end]), finish=finish)).reasoning_tokens)
    return told


@pytest.mark.parametrize(("text", "prompt", "expected"), CASES)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 25), max_size=25))
def test_they_are_counted_however_steps_cut_the_text(
    text: str, prompt: str, expected: int, cuts: list[int]
) -> None:
    told = deltas(text, prompt, cuts)
    assert sum(told) == expected
    assert min(told) >= 0


def test_they_are_told_as_soon_as_it_is_certain() -> None:
    """The opening tag is complete with the seventh token, and the closing one with the seventeenth."""
    told = deltas("<think>Hm</think>Hi", "", list(range(1, 19)))
    assert told == [0] * 6 + [7] + [1] * 10 + [0, 0]


def test_what_a_stop_string_cuts_off_does_not_count() -> None:
    assert sum(deltas("<think>Hm. END and more", "", [], stop=("END",))) == len("<think>Hm. END")


def test_without_a_form_there_is_none() -> None:
    assembler = Assembler(StoppingParams(), CODEC, parser=ChatForms().parser(CHAT, ""))
    assert assembler.add(StepOutput("r", tuple(CODEC.encode("<think>Hm.</think>")))).reasoning_tokens == 0
