"""How answers look: several outputs, reasoning, calls, terminals and pipes."""

from __future__ import annotations

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.__main__ import main
from penstock.cli.calling.show import AnswerView, describe
from penstock.client import Delta, Finish, Finished, FinishReason, Output, ToolCall
from tests.clients import rich

WHOLE = """--- output 0 ---
Let me see.
tool call: get_weather {"city": "Oslo"}
--- output 1 ---
No idea
"""
EOS = Finish(FinishReason.EOS)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def rich_server(server):
    server.answer = lambda request: rich.ANSWER
    server.replies = rich.STREAM
    return server


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_outputs_come_one_after_the_other_under_their_number(rich_server, capsys, more):
    assert main(["generate", "p", "--n", "2", "--addr", rich_server.addr, *more]) == 0
    shown = capsys.readouterr()
    assert shown.out == WHOLE
    assert shown.err == (
        "penstock generate: 7 tokens of the prompt were dropped to fit the context, 3 were kept; "
        "use --truncation reject to refuse such prompts\n"
    )


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_on_a_terminal_reasoning_is_dimmed_and_above_the_answer(rich_server, monkeypatch, capsys, more):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["generate", "p", "--n", "2", "--addr", rich_server.addr, *more]) == 0
    plain = screen.getvalue().replace("\x1b[22m\x1b[2m", "")
    assert plain == WHOLE.replace("Let me", "\x1b[2mHm, a city.\x1b[22m\nLet me")
    assert (
        "[eos, max_tokens: 5 tokens in 1.00 s, 5.0 tokens/s; 4 of 6 proposed tokens accepted]"
        in capsys.readouterr().err
    )


def test_json_has_all_of_it(rich_server, capsys):
    assert main(["generate", "p", "--n", "2", "--json", "--addr", rich_server.addr]) == 0
    shown = capsys.readouterr()
    reply = json.loads(shown.out)
    first, second = reply["outputs"]
    assert first["reasoning"] == "Hm, a city."
    assert first["tool_calls"] == [
        {"id": "call-1", "name": "get_weather", "arguments_json": '{"city": "Oslo"}'}
    ]
    assert first["logprobs"]["sampled"] == [-0.5, -2.0, -0.125]
    assert (second["text"], second["finish"]["reason"]) == ("No idea", "max_tokens")
    assert reply["prompt"]["logprobs"]["sampled"] == [None, -0.5, -1.25]
    assert reply["prompt"]["logprobs"]["top"] == [[], [[5, -0.5]], [[9, -0.25]]]
    assert (reply["prompt"]["truncated_tokens"], reply["prompt"]["token_ids"]) == (7, [4, 5, 6])
    assert shown.err == ""


def shown_of(screen, events):
    """Return what a view writes for a stream."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        view = AnswerView(numbered=True)
        for event in events:
            view.feed(event)
    return screen.getvalue()


def test_the_first_output_runs_along_while_others_wait():
    deltas = [Delta(1, "one"), Delta(0, "ze"), Finished(1, EOS, "one")]
    assert shown_of(io.StringIO(), deltas) == "--- output 0 ---\nze"
    deltas += [Delta(0, "ro"), Finished(0, EOS, "zero")]
    assert shown_of(io.StringIO(), deltas) == "--- output 0 ---\nzero\n--- output 1 ---\none\n"
    deltas += [Delta(2, "tw")]
    assert shown_of(io.StringIO(), deltas).endswith("one\n--- output 2 ---\ntw")


def test_an_output_without_anything_has_its_number():
    events = [Finished(1, EOS, ""), Finished(0, EOS, "")]
    assert shown_of(io.StringIO(), events) == "--- output 0 ---\n\n--- output 1 ---\n\n"


TEXT = st.text("ab \n", max_size=4)
CALLS = st.lists(st.builds(ToolCall, st.just("c"), st.text("fg", min_size=1), st.text("{}1 \n", max_size=6)))
OUTPUT = st.tuples(st.lists(TEXT, max_size=3), st.lists(TEXT, max_size=3), CALLS)


@given(outputs=st.lists(OUTPUT, min_size=1, max_size=4), draw=st.data(), terminal=st.booleans())
def test_whatever_the_order_of_deltas_the_screen_is_that_of_the_whole_reply(outputs, draw, terminal):
    """Deltas of several outputs are mixed in any way; each output's own keep their order: reasoning, text,
    calls.
    """
    queues = []
    for i, (thoughts, texts, calls) in enumerate(outputs):
        deltas = [Delta(i, "", reasoning=thought) for thought in thoughts]
        deltas += [Delta(i, text) for text in texts]
        deltas += [Delta(i, "", tool_calls=(call,)) for call in calls]
        queues.append([*deltas, Finished(i, EOS, "")])
    events = []
    while left := [queue for queue in queues if queue]:
        events.append(draw.draw(st.sampled_from(left)).pop(0))
    kind = Terminal if terminal else io.StringIO
    whole = [
        Delta(i, "".join(texts), reasoning="".join(thoughts), tool_calls=tuple(calls))
        for i, (thoughts, texts, calls) in enumerate(outputs)
    ]
    in_order = [e for delta in whole for e in (delta, Finished(delta.index, EOS, ""))]
    assert undimmed(shown_of(kind(), events)) == undimmed(shown_of(kind(), in_order))


def undimmed(text):
    return text.replace("\x1b[2m", "").replace("\x1b[22m", "")


def test_an_answer_that_is_all_reasoning_is_not_silently_empty(server, capsys):
    reply = rich.ANSWER.__class__()
    reply.CopyFrom(rich.ANSWER)
    del reply.outputs[1:]
    reply.outputs[0].text = ""
    del reply.outputs[0].tool_calls[:]
    reply.prompt.truncated_tokens = 0
    server.answer = lambda request: reply
    assert main(["generate", "p", "--no-stream", "--addr", server.addr]) == 0
    shown = capsys.readouterr()
    assert shown.out == "\n"
    assert "output 0 ended while the model was still thinking (eos)" in shown.err
    assert "--max-tokens" in shown.err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ('{"a": 1}', 'tool call: f {"a": 1}'),
        ('{\n  "a": "x y",\r\n  "b": 2\n}\n', 'tool call: f { "a": "x y", "b": 2 }'),
        ('{"a": "\u2028  b"}', 'tool call: f {"a": "\u2028  b"}'),
        ("", "tool call: f"),
    ],
)
def test_a_call_is_one_line(arguments, line):
    assert describe(ToolCall("c", "f", arguments)) == line


def test_reasoning_and_calls_cannot_rewrite_the_terminal():
    events = [
        Delta(0, "", reasoning="a\x1b[1mb"),
        Delta(0, "", tool_calls=(ToolCall("c", "\x1b]", ""),)),
    ]
    assert "\x1b" not in undimmed(shown_of(Terminal(), events))


def test_a_whole_reply_of_several_outputs_without_asking_for_them(monkeypatch):
    """A server's default of n may be above 1."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    view = AnswerView()
    for output in (Output(0, "a", (), EOS), Output(1, "b", (), EOS)):
        view.feed(Delta(output.index, output.text))
        view.feed(Finished(output.index, EOS, output.text))
    assert screen.getvalue() == "a\n--- output 1 ---\nb\n"
