"""Outputs in Harmony, written by hand after the examples in openai/harmony's docs/format.md and after what
gpt-oss is known to write: what becomes text, reasoning and calls, and how many tokens the reasoning has.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.messages import Chat, ChatTurn, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.tool_formats.events import CallPiece as Call
from penstock.runtime.chat.tool_formats.events import Parsed, joined
from penstock.runtime.chat.tool_formats.harmony import MARKERS
from penstock.runtime.requests.request import Finish, FinishReason, StepOutput, StoppingParams
from penstock.runtime.text.assembler import Assembler
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import bytes_tokenizer, pieces_of

FORMS = ChatForms(is_harmony=True)
USER = (ChatTurn("user", "hi"),)
WITH_TOOLS = Chat(USER, (Tool("get_weather"), Tool("f")))
WITHOUT = Chat(USER)
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
NEXT = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Simple.<|end|>"
CALLED = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"SF"}<|call|>'
WEATHER = Call("get_weather", '{"city":"SF"}')
F = Call("f", "{}")


def parse(pieces: list[str], chat: Chat = WITH_TOOLS, prompt: str = PROMPT) -> Parsed:
    parser = FORMS.parser(chat, prompt)
    parts = [*map(parser.push, pieces), parser.flush()]
    return Parsed(
        "".join(p.text for p in parts),
        "".join(p.reasoning for p in parts),
        tuple(joined([call for p in parts for call in p.calls])),
    )


EXAMPLES = [
    (f"{THOUGHT}{NEXT}<|channel|>final<|message|>2 + 2 = 4.<|return|>", Parsed("2 + 2 = 4.", "Simple.")),
    (f"{THOUGHT}{NEXT}{CALLED}", Parsed("", "Simple.", (WEATHER,))),
    # A preamble is for the user, and so are both messages where there are two.
    (
        f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.\n<|end|>{NEXT}{CALLED}",
        Parsed("I look.\n", "Simple.", (WEATHER,)),
    ),
    (
        f"<|channel|>commentary<|message|>One.<|end|>{NEXT}<|channel|>final<|message|> Two.<|return|>",
        Parsed("One.\n\n Two."),
    ),
    (f"{THOUGHT}{NEXT}{THOUGHT}", Parsed("", "Simple.\n\nSimple.")),
    (f"<|channel|>analysis<|message|><|end|>{NEXT}{THOUGHT}", Parsed("", "Simple.")),
    # The recipient stands after the role, as gpt-oss' template writes it.
    (
        f"{THOUGHT}{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
        Parsed("", "Simple.", (F,)),
    ),
    (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", Parsed(calls=(F,))),
    (" to=functions.f<|channel|>analysis code<|message|>{}<|call|>", Parsed(calls=(F,))),
    ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>", Parsed(calls=(F,))),
    ("<|channel|>commentary to=functions.f<|message|> {}\n<|call|>", Parsed(calls=(F,))),
    ("<|channel|>commentary <|constrain|>json to=functions.f<|message|>{}<|call|>", Parsed(calls=(F,))),
    ("<|channel|>commentary<|channel|>commentary to=functions.f<|message|>{}<|call|>", Parsed(calls=(F,))),
    # A known name without its namespace is a call, and so is an unknown name in the namespace.
    ("<|channel|>commentary to=f<|message|>{}<|call|>", Parsed(calls=(F,))),
    ("<|channel|>commentary to=functions.n.o<|message|>{}<|call|>", Parsed(calls=(Call("n.o", "{}"),))),
    # The last end token has no text, so the end of the output stands for it; and several calls are found.
    (CALLED.removesuffix("<|call|>"), Parsed(calls=(WEATHER,))),
    (f"{CALLED.replace('<|call|>', '<|end|>')}{NEXT}{CALLED}", Parsed(calls=(WEATHER, WEATHER))),
    (f"{CALLED.removesuffix('<|call|>')}{NEXT}{THOUGHT}", Parsed("", "Simple.", (WEATHER,))),
    (f"{CALLED}{NEXT}<|channel|>final<|message|>Done", Parsed("Done", "", (WEATHER,))),
    # A marker in a string of the arguments is part of the string.
    (
        '<|channel|>commentary to=functions.f<|message|>{"a": "<|call|><|end|>\\""}<|call|>',
        Parsed(calls=(Call("f", '{"a": "<|call|><|end|>\\""}'),)),
    ),
    # Built-in tools are no functions: their messages belong to their channels.
    (
        f"<|channel|>analysis to=python code<|message|>print(1)<|call|>{NEXT}<|channel|>final<|message|>1",
        Parsed("1", "print(1)"),
    ),
    ('<|channel|>analysis to=browser.search<|message|>{"query":"x"}<|call|>', Parsed("", '{"query":"x"}')),
    # A message to a function is a call, whatever its arguments are.
    (
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "Par',
        Parsed(calls=(Call("f", '{"a": "Par'),)),
    ),
    (
        f"{THOUGHT}{NEXT} to=functions.f<|channel|>commentary<|message|>f(1)<|call|>",
        Parsed("", "Simple.", (Call("f", "f(1)"),)),
    ),
    (
        "<|channel|>commentary to=functions.f<|message|>{} or\n<|end|>",
        Parsed(calls=(Call("f", "{} or"),)),
    ),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", Parsed(calls=(F,))),
    ("<|channel|>commentary to=functions.f<|message|>\n", Parsed(calls=(Call("f", ""),))),
    # Outputs without headers, or with broken ones.
    ("Hello.", Parsed("Hello.")),
    (" to be", Parsed(" to be")),
    ("", Parsed()),
    ("a <| b |> c <|chan", Parsed("a <| b |> c <|chan")),
    (f"Hello.<|end|>{NEXT}<|channel|>final<|message|>You.", Parsed("Hello.\n\nYou.")),
    ("<|message|>Hello.<|return|>", Parsed("Hello.")),
    (f"{THOUGHT}<|channel|>final<|message|>Hi.", Parsed("Hi.", "Simple.")),
    ("<|channel|>analysis<|message|>So.<|channel|>final<|message|>Hi.", Parsed("Hi.", "So.")),
    (f"<|channel|>analysis<|message|>So.{NEXT}<|channel|>final<|message|>Hi.", Parsed("Hi.", "So.")),
    (
        "<|channel|>analysis<|message|>The <|channel|> of it.<|end|>",
        Parsed("", "The <|channel|> of it."),
    ),
    (f"{THOUGHT}\n{NEXT}<|channel|>final<|message|>Hi.", Parsed("Hi.", "Simple.")),
    # A header that the end of the output cuts off is no text.
    (f"{THOUGHT}{NEXT}<|channel|>fin", Parsed("", "Simple.")),
    (f"{THOUGHT}<|start|>", Parsed("", "Simple.")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), EXAMPLES)
def test_examples(text: str, expected: Parsed) -> None:
    """Each output is parsed as a whole and character by character."""
    assert parse([text]) == expected
    assert parse(list(text)) == expected


def test_no_message_is_a_call_if_no_tools_were_offered() -> None:
    for chat in (WITHOUT, Chat(USER, (Tool("f"),), "none")):
        assert parse([f"{THOUGHT}{NEXT}{CALLED}"], chat) == Parsed('{"city":"SF"}', "Simple.")
        assert FORMS.markers(chat) == set(MARKERS)


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        ("<|channel|>final<|message|>", "Hi.<|return|>", Parsed("Hi.")),
        ("<|channel|>analysis<|message|>So", ".<|end|><|channel|>final<|message|>Hi.", Parsed("Hi.", ".")),
        (" to=functions.f<|channel|>commentary", " json<|message|>{}", Parsed(calls=(F,))),
    ],
)
def test_the_prompt_may_have_begun_the_message(begun: str, text: str, expected: Parsed) -> None:
    """As templates do that choose the channel themselves. What they wrote is in no field."""
    assert parse([text], prompt=PROMPT + begun) == expected
    assert parse(list(text), prompt=PROMPT + begun) == expected


SCRAPS = st.sampled_from([
    *MARKERS, *(mark[:-1] for mark in MARKERS), "assistant", "analysis", "final", "commentary",
    " json", "to=",
    " to=functions.f", "to=f", "functions.", "{}", '{"a": "<|end|>"}', "{", '"', " ", "\n", "words ", "é",
    THOUGHT, CALLED, NEXT,
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(SCRAPS, max_size=10), cuts=st.lists(st.integers(0, 200), max_size=10))
def test_pieces_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = parse([text])
    assert parse(pieces_of(text, cuts)) == whole
    assert parse(list(text)) == whole


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.text(alphabet="ab\n {}=to<|", max_size=8), max_size=6))
def test_text_comes_at_once(words: list[str]) -> None:
    """After every piece all of the message has come, but what may become a marker."""
    parser = FORMS.parser(WITH_TOOLS, PROMPT)
    assert parser.push("<|channel|>final<|message|>") == Parsed()
    came = ""
    for i, word in enumerate(words):
        came += parser.push(word).text
        text = "".join(words[: i + 1])
        assert text.startswith(came)
        assert text[len(came) :] in ("", "<", "<|")
    assert came + parser.flush().text == "".join(words)


def test_a_call_is_told_from_its_header_on() -> None:
    parser = FORMS.parser(WITH_TOOLS, PROMPT)
    header, _, rest = CALLED.partition("{")
    assert parser.push(header) == Parsed(calls=(Call("get_weather", "", is_last=False),))
    assert parser.push("{" + rest[:5]) == Parsed(calls=(Call("", '{"city', is_last=False),))
    assert parser.push(rest[5:]) == Parsed(calls=(Call("", '":"SF"}'),))


# -- Tokens: each marker is one, as is each byte --

MARKED = TextCodec(bytes_tokenizer(special=[m for m in MARKERS if m != "<|return|>"], end="<|return|>"))


def deltas(text: str, cuts: list[int], *, prompt: str = PROMPT) -> tuple[str, str, list[int]]:
    """Return the text, the reasoning, and the tokens of the reasoning that each delta tells."""
    assembler = Assembler(
        StoppingParams(),
        MARKED,
        parser=FORMS.parser(WITH_TOOLS, prompt),
        visible=FORMS.markers(WITH_TOOLS),
    )
    ids = MARKED.encode(text)
    marks = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = []
    for i, (start, end) in enumerate(itertools.pairwise(marks)):
        finish = Finish(FinishReason.MAX_TOKENS) if i == len(marks) - 2 else None
        parts.append(assembler.add(StepOutput("r", tuple(ids[start:end]), finish=finish)))
    return (
        "".join(part.delta for part in parts),
        "".join(part.reasoning for part in parts),
        [part.reasoning_tokens for part in parts],
    )


COUNTED = [
    # <|channel|> analysis <|message|> Simple. <|end|>: 1 + 8 + 1 + 7 + 1
    (f"{THOUGHT}{NEXT}<|channel|>final<|message|>4", 18, "4", "Simple."),
    # A second thought has <|start|> assistant more: 1 + 9 + 18.
    (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{CALLED}", 46, "", "Simple.\n\nSimple."),
    (f"<|channel|>commentary<|message|>Hm<|end|>{NEXT}{THOUGHT}{NEXT}{CALLED}", 28, "Hm", "Simple."),
    ("<|channel|>analysis<|message|>€", 13, "", "€"),
    ("<|channel|>ana", 0, "", ""),
    (f"{THOUGHT}{NEXT}<|channel|>", 18, "", "Simple."),
    ("Hi", 0, "Hi", ""),
]


@pytest.mark.parametrize(("text", "tokens", "words", "reasoning"), COUNTED)
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 80), max_size=12))
def test_the_tokens_of_the_reasoning_are_counted_however_steps_cut_the_text(
    text: str, tokens: int, words: str, reasoning: str, cuts: list[int]
) -> None:
    """Counted by hand: those of each message of the channel, with its header and its end."""
    found = deltas(text, cuts)
    assert (found[0], found[1], sum(found[2])) == (words, reasoning, tokens)
    assert min(found[2]) >= 0


def test_the_tokens_are_told_as_soon_as_they_are_certain() -> None:
    text = f"{THOUGHT}{NEXT}<|channel|>final<|message|>4"
    assert deltas(text, list(range(1, 40)))[2][:20] == [0] * 9 + [10] + [1] * 8 + [0, 0]
