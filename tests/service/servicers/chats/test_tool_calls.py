"""Answers to chats: text, reasoning and tool calls, parsed while they are generated.

The fake engine writes scripts in the form of Hermes and Qwen. Its tokenizer (tests/service/codecs.py)
has the four markers as special tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from penstock.v1 import types_pb2
from tests.service.codecs import CALL, END_CALL, END_THINK, QWEN_VOCAB, THINK, byte_codec, qwen_codec
from tests.service.rig import collect, failure_of, fake, generate, ids, joined, read_all, serving, stream
from tests.support.models.byte_text import EOS

CODEC = qwen_codec()
PROMPT = "T:get:put|u:hi|a:"
ON = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
TOOLS = [
    types_pb2.ToolDefinition(name="get", parameters_json=json.dumps(ON)),
    types_pb2.ToolDefinition(name="put"),
]
ROME = '{"city": "R\\u00f3ma"}'
CALLS = (
    f'<tool_call>\n{{"name": "get", "arguments": {ROME}}}\n</tool_call>\n'
    '<tool_call>{"name": "put", "arguments": {}}</tool_call>'
)
THOUGHT = "<think>\nhm, \u00e9\n</think>\n\n"


def chat(**fields: Any) -> types_pb2.ChatPrompt:
    user = types_pb2.ChatMessage(role="user", content="hi")
    return types_pb2.ChatPrompt(messages=[user], **{"tools": TOOLS, **fields})


def qwen(script: str, prompt: str = PROMPT, **options: Any) -> Any:
    """Make an engine that writes the script, which may hold markers, to the prompt."""
    scripts = {prompt: CODEC.encode(script, add_special_tokens=False)}
    fields = {"codec": CODEC, "vocab_size": QWEN_VOCAB, "max_model_len": 2000, "scripts": scripts}
    return fake(**{**fields, **options})


def without_ids(reply):
    """Return outputs without the ids of calls, which are new each time: nine letters and digits, no two
    alike.
    """
    calls = [call for output in reply.outputs for call in output.tool_calls]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call.id) for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        call.id = ""
    return reply


async def both(rig, **fields):
    """Return Generate's outputs. Stream's deltas add up to them, however they are cut."""
    fields = {"chat": chat(), "request_id": "one", **fields}
    whole = without_ids(await asyncio.wait_for(rig.inference.Generate(generate(**fields)), 20))
    whole.timing.Clear()
    for per_message in (1, 7, 10_000):
        request = stream(**fields, min_tokens_per_message=per_message)
        parts = without_ids(joined(await collect(rig.inference.Stream(request))))
        parts.timing.Clear()
        assert parts == whole
    pieces = await collect(rig.inference.Stream(stream(**fields, tool_call_deltas=True)))
    told = without_ids(from_pieces(pieces))
    told.timing.Clear()
    assert told == whole
    return whole.outputs


def from_pieces(messages):
    """Return the reply that a stream with calls in pieces adds up to."""
    assert not any(message.delta.tool_calls for message in messages)
    whole = joined(messages)
    for message in messages:
        calls = whole.outputs[message.delta.index].tool_calls
        for piece in message.delta.tool_call_deltas:
            if piece.name:
                assert (piece.index, len(piece.id)) == (len(calls), 9)
                calls.add(id=piece.id, name=piece.name)
            assert piece.index == len(calls) - 1
            calls[-1].arguments_json += piece.arguments_json
    return whole


def said(output):
    """Return the text, the reasoning and the calls."""
    calls = [(call.name, call.arguments_json) for call in output.tool_calls]
    return output.text, output.reasoning, calls


@pytest.mark.parametrize("tokens_per_step", [1, pytest.param(3, marks=pytest.mark.ci), 1000])
async def test_words_reasoning_and_calls_are_told_apart(tokens_per_step):
    """Every token id is there, in order, also those of the markers."""
    async with serving(qwen(f"{THOUGHT}I look.\n{CALLS}", tokens_per_step=tokens_per_step)) as rig:
        (output,) = await both(rig)
    assert said(output) == ("I look.", "hm, \u00e9", [("get", ROME), ("put", "{}")])
    assert list(output.token_ids[:3]) == [THINK, *ids("\nh")]
    assert list(output.token_ids[-2:]) == [END_CALL, EOS]
    assert output.finish.reason == types_pb2.FINISH_REASON_EOS


async def test_calls_come_whole_and_in_their_place():
    """Each call comes in one delta, as soon as it is complete, and before what the model writes next."""
    script = f"{THOUGHT}one {CALLS} two"
    deltas = []
    async with serving(qwen(script, hold=True)) as rig:
        call = rig.inference.Stream(stream(chat=chat()))
        await call.read()
        for _ in CODEC.encode(script, add_special_tokens=False):
            rig.engine.step()
            deltas.append((await asyncio.wait_for(call.read(), 20)).delta)
        rig.engine.release()
        assert [m async for m in read_all(call)][-1].HasField("summary")
    with_calls = [d for d in deltas if d.tool_calls]
    calls = [[json.loads(c.arguments_json) for c in d.tool_calls] for d in with_calls]
    assert calls == [[{"city": "R\u00f3ma"}], [{}]]
    assert all(d.token_ids[-1] == END_CALL for d in with_calls), "with the token that completed it"
    order = ["r" if d.reasoning else "c" if d.tool_calls else "t" if d.text else "" for d in deltas]
    assert re.fullmatch("r+t+cct+", "".join(order))
    assert sum(bool(d.reasoning) for d in deltas) > 1, "reasoning comes as it is made"


async def test_calls_come_in_pieces_if_these_are_asked_for():
    """The name with the first token of the arguments, and then each with its delta."""
    script = '<tool_call>{"name": "put", "arguments": {"a": "bc"}}</tool_call>'
    pieces = []
    async with serving(qwen(script, hold=True)) as rig:
        call = rig.inference.Stream(stream(chat=chat(), tool_call_deltas=True))
        await call.read()
        for _ in CODEC.encode(script, add_special_tokens=False):
            rig.engine.step()
            pieces += (await asyncio.wait_for(call.read(), 20)).delta.tool_call_deltas
        rig.engine.release()
        assert [m async for m in read_all(call)][-1].HasField("summary")
    assert [(p.name, p.arguments_json) for p in pieces] == [
        ("put", "{"), *(("", char) for char in '"a": "bc"}')
    ]  # fmt: skip


async def test_a_call_that_is_cut_off_is_a_call_with_a_part_of_its_arguments():
    """Wherever the output ends, it has no marker in its text, and the beginning of what the whole has."""
    script = CODEC.encode(f"so\n{CALLS}", add_special_tokens=False)
    async with serving(qwen(f"so\n{CALLS}", tokens_per_step=5)) as rig:
        (whole,) = await both(rig)
        for num_tokens in range(1, len(script), 7):
            (output,) = await both(rig, stopping={"max_tokens": num_tokens})
            assert output.finish.reason == types_pb2.FINISH_REASON_MAX_TOKENS
            assert output.text in ("s", "so")
            for call, meant in zip(output.tool_calls, whole.tool_calls, strict=False):
                assert call.name == meant.name
                assert meant.arguments_json.startswith(call.arguments_json)
    assert len(whole.tool_calls) == 2


async def test_tool_choice_none_looks_for_no_calls():
    """The model was offered no tools. Special tokens are not shown as text, as always."""
    script = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    async with serving(qwen(script, "u:hi|a:")) as rig:
        (output,) = await both(rig, chat=chat(tool_choice="none"))
        assert said(output) == ('{"name": "get", "arguments": {}}', "", [])
        (output,) = await both(rig, chat=chat(tools=[]))
        assert said(output) == ('{"name": "get", "arguments": {}}', "", [])


async def test_tool_choice_auto_leaves_the_model_its_choice():
    async with serving(qwen("no need")) as rig:
        for choice in ("", "auto"):
            (output,) = await both(rig, chat=chat(tool_choice=choice))
            assert said(output) == ("no need", "", [])
            assert rig.engine.seen[-1].constraint is None


@pytest.mark.parametrize(("choice", "name"), [("required", "get"), ("get", "get"), ("put", "put")])
async def test_tool_choice_that_requires_a_call_enforces_it(choice, name):
    """The script says "hello". The lowest allowed token from "h" on begins a reasoning block, in which "ello"
    is allowed. Then the script is over, and the lowest allowed token is taken each time ("f" before "t").
    """
    async with serving(qwen("hello")) as rig:
        (output,) = await both(rig, chat=chat(tool_choice=choice))
    arguments = {"get": '{"on": false}', "put": "{}"}[name]
    assert said(output) == ("", "ello", [(name, arguments)])
    assert output.token_ids[0] == THINK
    assert {END_THINK, CALL, END_CALL} <= set(output.token_ids)
    assert output.finish.reason == types_pb2.FINISH_REASON_EOS


async def test_a_required_call_lets_a_good_one_be():
    """One call of a named tool, several with "required"."""
    two = '<tool_call>\n{"name": "get", "arguments": {"on": true}}\n</tool_call>\n' * 2
    async with serving(qwen(two.strip())) as rig:
        (output,) = await both(rig, chat=chat(tool_choice="required"))
        assert said(output)[2] == [("get", '{"on": true}')] * 2
        (output,) = await both(rig, chat=chat(tool_choice="get"))
        assert said(output)[2] == [("get", '{"on": true}')]
        (output,) = await both(rig, chat=chat(tool_choice="required"), output={"text": False})
        assert said(output) == ("", "", [])
        assert list(output.token_ids).count(CALL) == 2, "enforced all the same"


@pytest.mark.parametrize("tokens_per_step", [1, pytest.param(3, marks=pytest.mark.ci), 1000])
async def test_an_output_may_be_kept_to_one_call(tokens_per_step):
    """It ends with its first call, and the engine is told so. An output that calls nothing is as ever."""
    asked = chat(parallel_tool_calls=False)
    async with serving(qwen(f"{THOUGHT}I look.\n{CALLS}", tokens_per_step=tokens_per_step)) as rig:
        (output,) = await both(rig, chat=asked, output={"logprobs": 0})
        assert said(output) == ("I look.", "hm, \u00e9", [("get", ROME)])
        assert (list(output.token_ids).count(CALL), output.token_ids[-1]) == (1, END_CALL)
        assert len(output.logprobs.sampled) == len(output.token_ids)
        assert (output.finish.reason, output.finish.HasField("match")) == (types_pb2.FINISH_REASON_EOS, False)
        (output,) = await both(rig, chat=chat(parallel_tool_calls=True))
        assert len(output.tool_calls) == 2
    async with serving(qwen("no need", tokens_per_step=tokens_per_step)) as rig:
        (output,) = await both(rig, chat=asked)
        assert said(output) == ("no need", "", [])
        assert output.finish.match.token_id == EOS


async def test_one_call_that_must_be_made():
    two = '<tool_call>\n{"name": "get", "arguments": {"on": true}}\n</tool_call>\n' * 2
    async with serving(qwen(two.strip())) as rig:
        (output,) = await both(rig, chat=chat(tool_choice="required", parallel_tool_calls=False))
        assert said(output) == ("", "", [("get", '{"on": true}')])
        assert output.token_ids[-1] == END_CALL


async def test_calls_that_nobody_looks_for_cannot_be_kept_to_one():
    """Without text there are no calls, so an output could not end with one. A grammar needs no text."""
    for choice, refused in (("auto", True), ("required", False), ("get", False), ("none", False)):
        async with serving(qwen(CALLS)) as rig:
            asked = generate(chat=chat(tool_choice=choice, parallel_tool_calls=False), output={"text": False})
            if not refused:
                await rig.inference.Generate(asked)
                continue
            failure = await failure_of(rig.inference.Generate(asked))
            assert failure.violations == {
                "chat.parallel_tool_calls": "false needs output.text: calls are found in the text"
            }


async def test_a_thought_that_the_prompt_began():
    """By an option of the template the output begins inside the reasoning block."""
    options = json.dumps({"thinking": True})
    async with serving(qwen("so\n</think>\nyes", "u:hi|a:<think>")) as rig:
        (output,) = await both(rig, chat=chat(tools=[], template_options_json=options))
        assert said(output) == ("yes", "so", [])
        assert list(output.token_ids[:2]) == ids("so")


async def test_reasoning_is_told_without_tools_too():
    async with serving(qwen(f"{THOUGHT}yes", "u:hi|a:")) as rig:
        (output,) = await both(rig, chat=chat(tools=[]))
        assert said(output) == ("yes", "hm, \u00e9", [])


async def test_text_prompts_are_not_taken_apart():
    """Nobody asked the model to answer in the form of a chat."""
    async with serving(qwen(f"{THOUGHT}{CALLS}", "a")) as rig:
        reply = await rig.inference.Generate(generate("a", output={"skip_special_tokens": False}))
        assert said(reply.outputs[0]) == (f"{THOUGHT}{CALLS}<|end|>", "", [])


# -- with other options --


@pytest.mark.parametrize("tokens_per_step", [1, pytest.param(5, marks=pytest.mark.ci), 1000])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_are_found_in_all_that_is_written(include, tokens_per_step):
    """In text, in reasoning, and in a call: a stop at its end leaves the call whole, one within it cuts it
    off.
    """
    script = f"{THOUGHT}I look.\n{CALLS}"
    for stop, expected in (
        ("look", (f"I {'look' * include}", "hm, \u00e9", [])),
        ("hm,", ("", "hm," * include, [])),
        ("</tool_call>", ("I look.", "hm, \u00e9", [("get", ROME)])),
        ("city", ("I look.", "hm, \u00e9", [("get", '{"' + "city" * include)])),
    ):
        async with serving(qwen(script, tokens_per_step=tokens_per_step)) as rig:
            (output,) = await both(rig, stopping={"stop": [stop], "include_stop": include})
            assert said(output) == expected
            assert output.finish.match.stop == stop


async def test_text_off_takes_nothing_apart():
    async with serving(qwen(f"{THOUGHT}I look.\n{CALLS}")) as rig:
        (output,) = await both(rig, output={"text": False})
        assert said(output) == ("", "", [])
        assert [t for t in output.token_ids if t > EOS] == [THINK, END_THINK, CALL, END_CALL, CALL, END_CALL]
        (output,) = await both(rig, output={"token_ids": False})
        assert (said(output)[0], list(output.token_ids)) == ("I look.", [])


async def test_special_tokens_are_shown_when_asked():
    """Except for markers, which belong to the parsers."""
    async with serving(qwen(f"{THOUGHT}I look.\n{CALLS} bye")) as rig:
        (output,) = await both(rig, output={"skip_special_tokens": False})
        assert said(output)[0] == "I look. bye<|end|>"
        assert len(output.tool_calls) == 2


async def test_each_output_is_taken_apart_alone():
    scripts = {
        (PROMPT, i): CODEC.encode(text, add_special_tokens=False)
        for i, text in enumerate([f"{THOUGHT}one", CALLS, "three"])
    }
    async with serving(qwen("", scripts=scripts, tokens_per_step=4)) as rig:
        outputs = await both(rig, sampling={"n": 3}, output={"logprobs": 1})
    assert [said(o) for o in outputs] == [
        ("one", "hm, \u00e9", []),
        ("", "", [("get", ROME), ("put", "{}")]),
        ("three", "", []),
    ]


async def test_an_abort_hands_out_what_was_held():
    async with serving(qwen('see <tool_call>{"name": "put", "arguments": {"a', hold=True)) as rig:
        parts = asyncio.create_task(collect(rig.inference.Stream(stream(chat=chat(), request_id="r"))))
        while not rig.engine.seen:  # noqa: ASYNC110 -- the fake has no event
            await asyncio.sleep(0.005)
        rig.engine.step(38)
        while rig.engine.num_steps < 38:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        rig.engine.abort(["r"])
        (output,) = joined(await parts).outputs
    assert said(output) == ("see", "", [("put", '{"a')])


# -- by option --


async def test_parsers_by_option():
    """For a model whose template shows nothing, and for one whose template shows something else."""
    text = "<think>hm</think>[get(a=1)]"
    plain = byte_codec("{% for m in messages %}{{ m.content }}{% endfor %}")
    cases: tuple[tuple[dict[str, Any], Any], ...] = (
        ({}, (text, "", [])),
        ({"reasoning_parser": "think"}, ("[get(a=1)]", "hm", [])),
        ({"reasoning_parser": "think", "tool_call_parser": "pythonic"}, ("", "hm", [("get", '{"a": 1}')])),
    )
    for options, expected in cases:
        engine = fake(codec=plain, max_model_len=500, scripts={"hi": ids(text)}, **options)
        async with serving(engine) as rig:
            (output,) = await both(rig)
            assert said(output) == expected
    engine = qwen(f"{THOUGHT}{CALLS}", tool_call_parser="none", reasoning_parser="none")
    async with serving(engine) as rig:
        (output,) = await both(rig, output={"skip_special_tokens": False})
        assert said(output) == (f"{THOUGHT}{CALLS}<|end|>", "", [])
        failure = await failure_of(rig.inference.Generate(generate(chat=chat(tool_choice="required"))))
        assert list(failure.violations) == ["chat.tool_choice"]


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("qwen3_coder", "<function=get>\n<parameter=on>\nTrue\n</parameter>\n</function>\n"),
        ("glm", "get\n<arg_key>on</arg_key>\n<arg_value>true</arg_value>\n"),
    ],
)
async def test_values_in_xml_have_the_types_of_the_tools_schema(form: str, call: str) -> None:
    """The schema of the request reaches the parser, of whole outputs and of streams."""
    script = f"{THOUGHT}I look.\n<tool_call>{call}</tool_call>"
    async with serving(qwen(script, tool_call_parser=form)) as rig:
        (output,) = await both(rig)
    text, reasoning, ((name, arguments),) = said(output)
    assert (text, reasoning, name, json.loads(arguments)) == ("I look.", "hm, \u00e9", "get", {"on": True})
