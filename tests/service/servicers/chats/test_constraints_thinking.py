"""Constraints on models that think, over gRPC: the grammar applies to the answer, however the reasoning block
was opened. The fake engine writes scripts, and under a constraint the lowest allowed token that is not below
the script's, or else the lowest allowed one. Each expected text follows from that rule by hand.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.v1 import types_pb2
from tests.service.codecs import END_THINK, QWEN_VOCAB, THINK, qwen_codec
from tests.service.rig import collect, fake, generate, ids, joined, serving, stream
from tests.service.servicers.chats.test_constraints import KINDS
from tests.support.models.byte_text import EOS

CODEC = qwen_codec()
OPENED, SILENT = "u:hi|a:<think>", "u:hi|a:"


def engine(script: str, prompt: str, **options: Any) -> Any:
    """Make an engine that writes the script, which may hold markers, to the prompt."""
    scripts = {prompt: CODEC.encode(script, add_special_tokens=False)}
    fields = {"codec": CODEC, "vocab_size": QWEN_VOCAB, "max_model_len": 2000, "scripts": scripts}
    return fake(**{**fields, **options})


def asked(prompt: str) -> types_pb2.ChatPrompt:
    """Make a chat that is rendered as `prompt`."""
    options = json.dumps({"thinking": prompt == OPENED})
    user = types_pb2.ChatMessage(role="user", content="hi")
    return types_pb2.ChatPrompt(messages=[user], template_options_json=options)


async def both(rig: Any, prompt: str, **fields: Any) -> Any:
    """Return Generate's outputs, which must equal Stream's."""
    fields = {"chat": asked(prompt), "request_id": "one", **fields}
    whole = await asyncio.wait_for(rig.inference.Generate(generate(**fields)), 20)
    parts = joined(await collect(rig.inference.Stream(stream(**fields))))
    assert parts.outputs == whole.outputs
    return whole.outputs


def said(output: Any) -> tuple[str, str]:
    return output.text, output.reasoning


ANSWERS = {
    "regex": "mno",
    "choice": "maybe",
    "ebnf": "<c>",
    "gbnf": "c0.",
    "json_schema": '{"on":false,"of":"coffee"}',
}


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_begins_after_the_thinking(kind, tokens_per_step):
    """The reasoning is the model's own text, which no grammar here allows. The answer is text,
    not reasoning.
    """
    constraint, answer = KINDS[kind][0], ANSWERS[kind]
    thought = "Hm { \u00e9\n"
    for prompt, opening in ((OPENED, ""), (SILENT, "<think>\n")):
        script = f"{opening}{thought}</think>\n\n{answer}"
        async with serving(engine(script, prompt, tokens_per_step=tokens_per_step)) as rig:
            (output,) = await both(rig, prompt, constraint=constraint)
        assert said(output) == (answer, "Hm { \u00e9")
        assert output.finish.reason == types_pb2.FINISH_REASON_EOS


@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_is_forced_whatever_the_model_would_say(kind):
    """It thinks, and then wants what no grammar allows, so it gets the lowest allowed token each time."""
    constraint = KINDS[kind][0]
    lowest = ANSWERS | {"regex": "mmm"}
    script = "so</think>" + "\u007f" * 60
    async with serving(engine(script, OPENED)) as rig:
        (output,) = await both(rig, OPENED, constraint=constraint)
    assert said(output) == (lowest[kind], "so")
    assert output.token_ids[2] == END_THINK


async def test_json_object():
    answer = '{"answer": 42}'
    async with serving(engine(f"so</think>{answer}", OPENED)) as rig:
        (output,) = await both(rig, OPENED, constraint={"json_object": {}})
    assert said(output) == (answer, "so")


async def test_a_model_that_may_think_need_not():
    async with serving(engine("mno", SILENT)) as rig:
        (output,) = await both(rig, SILENT, constraint={"regex": "[m-p]{3}"})
    assert said(output) == ("mno", "")


async def test_no_thinking_where_nobody_takes_it_out():
    """With the parser off the grammar applies to the whole output, as it does for prompts that
    are no chat.
    """
    constraint = {"regex": "[m-p]{3}"}
    async with serving(engine("so</think>mno", OPENED, reasoning_parser="none")) as rig:
        (output,) = await both(rig, OPENED, constraint=constraint)
        assert said(output) == ("mom", "")  # nothing above "s" is allowed; "o" is
    async with serving(engine("so</think>mno", "a")) as rig:
        reply = await rig.inference.Generate(generate("a", constraint=constraint))
        assert len(reply.outputs[0].text) == 3


async def test_limits_within_the_thinking():
    """Then there is only reasoning, and the finish says why. An end token comes only after the answer."""
    constraint = {"regex": "[m-p]{3}"}
    async with serving(engine("one two three</think>mno", OPENED)) as rig:
        (output,) = await both(rig, OPENED, constraint=constraint, stopping={"max_tokens": 7})
        assert said(output) == ("", "one two")
        assert output.finish.reason == types_pb2.FINISH_REASON_MAX_TOKENS
        (output,) = await both(rig, OPENED, constraint=constraint, stopping={"stop": ["two"]})
        assert said(output) == ("", "one")
        assert output.finish.match.stop == "two"
        (output,) = await both(rig, OPENED, constraint=constraint, stopping={"min_tokens": 30})
        assert said(output) == ("mno", "one two three"), "a complete grammar ends it before min_tokens"
    async with serving(engine("one", OPENED)) as rig:
        (output,) = await both(rig, OPENED, constraint=constraint, stopping={"max_tokens": 20})
        assert said(output) == ("mmm", "one"), "the token that is allowed next above the end token is the tag"
        assert EOS not in output.token_ids


async def test_each_output_has_its_own():
    """Each of n outputs, which think for different lengths."""
    scripts = {
        (OPENED, i): CODEC.encode("o" * i + "</think>" + answer, add_special_tokens=False)
        for i, answer in enumerate(("mno", "nop", "omm"))
    }
    async with serving(engine("", OPENED, scripts=scripts)) as rig:
        outputs = await both(rig, OPENED, constraint={"regex": "[m-p]{3}"}, sampling={"n": 3})
    assert [said(output) for output in outputs] == [("mno", ""), ("nop", "o"), ("omm", "oo")]


async def test_tokens_only():
    """Nothing is parsed, and the grammar applies where it did before."""
    async with serving(engine("so</think>mno", OPENED)) as rig:
        (output,) = await both(rig, OPENED, constraint={"regex": "[m-p]{3}"}, output={"text": False})
    assert said(output) == ("", "")
    assert list(output.token_ids) == [*ids("so"), END_THINK, *ids("mno")]
    assert THINK not in output.token_ids
