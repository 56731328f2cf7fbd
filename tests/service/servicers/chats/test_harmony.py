"""Answers of a model that writes Harmony, as gpt-oss does, over gRPC: reasoning, text, calls, grammars.

The fake engine writes scripts; its tokenizer has the markers as special tokens.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.service.usage.ledger import Counts, read_usage
from penstock.v1 import types_pb2
from tests.service.codecs import HARMONY_ENDS, harmony_codec
from tests.service.rig import fake, generate, read_all, serving, stream
from tests.service.servicers.chats.test_tool_calls import TOOLS, both, chat, said

CODEC = harmony_codec()
ASKED = "<|start|>user<|message|>hi<|end|>"
PROMPT = f"get|put|{ASKED}<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>hm, é\n<|end|>"
NEXT = "<|start|>assistant"
PREAMBLE = f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"on": true}<|call|>'
ROLE_CALL = " to=functions.put<|channel|>commentary json<|message|>{}<|call|>"


def engine(script: str, prompt: str = PROMPT, **options: Any) -> Any:
    """Make an engine that writes the script to the prompt."""
    return fake(
        codec=CODEC,
        vocab_size=264,
        max_model_len=2000,
        eos_token_ids=HARMONY_ENDS,
        scripts={prompt: CODEC.encode(script, add_special_tokens=False)},
        **options,
    )


@pytest.mark.parametrize("tokens_per_step", [1, pytest.param(3, marks=pytest.mark.ci), 1000])
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"{THOUGHT}{NEXT}{FINAL} 4.\n<|return|>", (" 4.\n", "hm, é\n", [])),
        (f"{THOUGHT}{NEXT}{CALL}", ("", "hm, é\n", [("get", '{"on": true}')])),
        (f"{THOUGHT}{NEXT}{ROLE_CALL}", ("", "hm, é\n", [("put", "{}")])),
        (
            f"{THOUGHT}{NEXT}{PREAMBLE}{THOUGHT}{NEXT}{CALL}",
            ("I look.", "hm, é\n\n\nhm, é\n", [("get", '{"on": true}')]),
        ),
        ("no message", ("no message", "", [])),
    ],
)
async def test_messages_are_told_apart(script, expected, tokens_per_step):
    """All tokens are there, and the end token ends the output: also the one after a call."""
    async with serving(engine(script, tokens_per_step=tokens_per_step)) as rig:
        (output,) = await both(rig)
    assert said(output) == expected
    written = CODEC.encode(script, add_special_tokens=False)
    assert list(output.token_ids[: len(written)]) == written
    assert output.token_ids[-1] in HARMONY_ENDS
    assert output.finish.reason == types_pb2.FINISH_REASON_EOS


async def test_reasoning_and_text_come_as_they_are_made():
    script = f"{THOUGHT}{NEXT}{FINAL}four"
    deltas = []
    async with serving(engine(script, hold=True)) as rig:
        call = rig.inference.Stream(stream(chat=chat()))
        await call.read()
        for _ in CODEC.encode(script, add_special_tokens=False):
            rig.engine.step()
            deltas.append((await asyncio.wait_for(call.read(), 20)).delta)
        rig.engine.release()
        last = [message async for message in read_all(call)][-1]
    kinds = ["r" if delta.reasoning else "t" if delta.text else "" for delta in deltas]
    assert "".join(kinds) == "r" * 6 + "t" * 4  # the letter with an accent has two tokens
    # <|channel|> analysis <|message|>, seven bytes and <|end|>
    assert last.summary.usage.reasoning_tokens == 1 + 8 + 1 + 7 + 1


@pytest.mark.parametrize("tokens_per_step", [1, 7])
async def test_the_ledger_keeps_the_tokens_of_all_reasoning(tmp_path: Path, tokens_per_step: int):
    """Also of what the model thinks after it has said something; that message's header is longer."""
    usage = tmp_path / "usage.db"
    script = f"{THOUGHT}{NEXT}{PREAMBLE}{THOUGHT}{NEXT}{CALL}"
    async with serving(engine(script, tokens_per_step=tokens_per_step), usage_file=usage) as rig:
        reply = await rig.inference.Generate(generate(chat=chat()))
    assert reply.usage.reasoning_tokens == 18 + 10 + 18
    assert sum(read_usage(usage).values(), Counts()).reasoning_tokens == 46


async def test_a_call_that_must_be_made():
    """Where the script's token is not allowed, the next higher one is taken that is."""
    call = ' to=functions.get<|channel|>commentary json<|message|>{"on": 7}<|call|>'
    async with serving(engine(f"{THOUGHT}{NEXT}{call}")) as rig:
        for choice, expected in (
            ("get", ("get", '{"on": false}')),
            ("required", ("get", '{"on": false}')),
            ("put", ("put", "{}")),
        ):
            (output,) = await both(rig, chat=chat(tool_choice=choice))
            assert said(output) == ("", "hm, é\n", [expected])
    async with serving(engine(f"{THOUGHT}{NEXT}{CALL}")) as rig:
        (output,) = await both(rig, chat=chat(tool_choice="required"))
        assert said(output) == ("", "hm, é\n", [("get", '{"on": true}')])


async def test_a_strict_tool_is_called_as_its_schema_says():
    strict = [
        types_pb2.ToolDefinition(name=t.name, parameters_json=t.parameters_json, strict=True) for t in TOOLS
    ]
    script = f"{THOUGHT}{NEXT}{PREAMBLE}{CALL.replace('true', '7')}"
    async with serving(engine(script)) as rig:
        (output,) = await both(rig, chat=chat(tools=strict), stopping={"max_tokens": 300})
        assert said(output) == ("I look.", "hm, é\n", [("get", '{"on": false}')])


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_a_constraint_is_for_the_final_message(tokens_per_step):
    schema = json.dumps({"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]})
    constraint = {"json_schema": schema}
    prompt = PROMPT.removeprefix("get|put|")
    script = f'{THOUGHT}{NEXT}{FINAL}{{"on":true}}'
    async with serving(engine(script, prompt, tokens_per_step=tokens_per_step)) as rig:
        (output,) = await both(rig, chat=chat(tools=[]), constraint=constraint)
    assert (json.loads(output.text), output.reasoning) == ({"on": True}, "hm, é\n")


async def test_the_answer_goes_back_to_the_template():
    """With both its reasoning and what it told the user before its call, of which the template takes one."""
    turns = [
        types_pb2.ChatMessage(role="user", content="hi"),
        types_pb2.ChatMessage(
            role="assistant",
            content="I look.",
            reasoning="Hm.",
            tool_calls=[types_pb2.ToolCall(id="abcdefghi", name="get", arguments_json='{"on":true}')],
        ),
        types_pb2.ChatMessage(role="tool", content="4", tool_call_id="abcdefghi"),
    ]
    prompt = (
        f'get|put|low|{ASKED}<|start|>assistant<|message|>Hm.\n\nI look.get{{"on": true}}<|end|>'
        "<|start|>tool<|message|>4<|end|><|start|>assistant"
    )
    options = json.dumps({"reasoning_effort": "low"})
    async with serving(engine(f"{FINAL}Four.", prompt, prefix_cache_pages=0)) as rig:
        asked = types_pb2.ChatPrompt(messages=turns, tools=TOOLS, template_options_json=options)
        (output,) = await both(rig, chat=asked)
    assert said(output) == ("Four.", "", [])
