"""Conversations on their way to the prompt: templates, options, tools, turns of tools, and what is refused.

The model's template is that of tests/service/codecs.py: tools as "T:name:name|", a turn as its role's letter,
its content and calls, then "a:" for the assistant.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.service.requests.generate import Features
from penstock.v1 import control_pb2, types_pb2
from tests.service.codecs import CALL, END_CALL, QWEN_VOCAB, THINK, byte_codec, qwen_codec
from tests.service.rig import collect, failure_of, fake, generate, ids, serving, stream

CODEC = qwen_codec()
USER = {"role": "user", "content": "hi"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OWN_TEMPLATES = Features(request_templates=True)
TOOLS = [{"name": "get", "parameters_json": json.dumps(WEATHER)}, {"name": "put", "description": "it"}]


def chat(*messages, **fields):
    return types_pb2.ChatPrompt(messages=[types_pb2.ChatMessage(**m) for m in messages or [USER]], **fields)


def qwen(**options):
    return fake(**{"codec": CODEC, "vocab_size": QWEN_VOCAB, "max_model_len": 2000, **options})


async def prompt_of(rig, asked):
    """Ids of the prompt. Generate, Stream and Tokenize agree on them, and the engine got them."""
    fields = {"chat": asked, "stopping": {"max_tokens": 1}, "output": {"echo_prompt_token_ids": True}}
    reply = await asyncio.wait_for(rig.inference.Generate(generate(**fields)), 60)
    messages = await collect(rig.inference.Stream(stream(**fields)))
    tokenized = await rig.control.Tokenize(control_pb2.TokenizeRequest(chat=asked))
    found = list(reply.prompt.token_ids)
    assert found == list(messages[0].started.prompt.token_ids) == list(tokenized.token_ids)
    assert found == list(rig.engine.seen[-1].prompt_token_ids)
    return found


async def test_tools_stand_in_the_prompt():
    async with serving(qwen()) as rig:
        assert await prompt_of(rig, chat()) == ids("u:hi|a:")
        assert await prompt_of(rig, chat(tools=TOOLS)) == ids("T:get:put|u:hi|a:")
        assert await prompt_of(rig, chat(tools=TOOLS, tool_choice="auto")) == ids("T:get:put|u:hi|a:")


async def test_tool_choice_none_offers_none():
    async with serving(qwen()) as rig:
        assert await prompt_of(rig, chat(tools=TOOLS, tool_choice="none")) == ids("u:hi|a:")


async def test_a_tools_definition_reaches_the_template():
    template = "{% for t in tools %}{{ t.type }}{{ t.function | tojson }}{% endfor %}"
    async with serving(qwen(), features=OWN_TEMPLATES) as rig:
        text = bytes(await prompt_of(rig, chat(tools=TOOLS, chat_template=template))).decode()
    _, first, second = text.split("function{")
    assert json.loads("{" + first) == {"name": "get", "description": "", "parameters": WEATHER}
    nothing = {"type": "object", "properties": {}}
    assert json.loads("{" + second) == {"name": "put", "description": "it", "parameters": nothing}


async def test_calls_and_what_tools_answered_stand_in_the_prompt():
    """The template gets arguments as an object, and the result under the name of the function."""
    turns = [
        USER,
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [
                {"id": "c1", "name": "get", "arguments_json": '{"city":\n"Rome"}'},
                {"id": "c2", "name": "put", "arguments_json": "{}"},
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "done", "tool_call_id": "c2"},
    ]
    async with serving(qwen()) as rig:
        found = await prompt_of(rig, chat(*turns))
    assert found == [
        *ids("u:hi|a:let me see"), CALL, *ids('get{"city": "Rome"}#c1'), END_CALL, CALL, *ids("put{}#c2"),
        END_CALL, *ids("|t:rain=get#c1|t:done=put#c2|a:"),
    ]  # fmt: skip


async def test_the_template_decides_what_the_model_sees_of_its_reasoning():
    """It finds it as `reasoning_content`, and nothing where a turn has none. The model's own template, which
    does not look for it, shows the turns as if they had none.
    """
    turns = [
        USER,
        {"role": "assistant", "content": "6", "reasoning": "2 times 3"},
        USER,
        {"role": "assistant", "content": "7"},
    ]
    template = (
        "{% for m in messages %}{{ m.content }}"
        "{% if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %};{% endfor %}"
    )
    async with serving(qwen(), features=OWN_TEMPLATES) as rig:
        assert await prompt_of(rig, chat(*turns, chat_template=template)) == ids("hi;6(2 times 3);hi;7;")
        assert await prompt_of(rig, chat(*turns)) == ids("u:hi|a:6|u:hi|a:7|a:")


async def test_the_template_decides_whether_the_model_sees_who_speaks():
    """It finds a name where a turn has one. The model's own template does not look for it and shows the turns
    as if they had none, and the server says so.
    """
    turns = [
        {"role": "system", "name": "Bo", "content": "be"},
        {**USER, "name": "Al"},
        {"role": "assistant", "content": "6", "name": "Cy"},
        USER,
    ]
    template = "{% for m in messages %}{{ m.name }}:{{ m.content }};{% endfor %}"
    named = byte_codec(chat_template=template)
    for codec, text, shows in (
        (CODEC, "s:be|u:hi|a:6|u:hi|a:", False),
        (named, "Bo:be;Al:hi;Cy:6;:hi;", True),
    ):
        async with serving(qwen(codec=codec)) as rig:
            assert await prompt_of(rig, chat(*turns)) == ids(text)
            info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
            assert (control_pb2.FEATURE_NAMES in info.features) is shows


async def test_a_template_of_the_requests_own():
    """It replaces the model's template, if the model has one."""
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ 'go' if add_generation_prompt }}"
    for codec in (CODEC, byte_codec(chat_template=None)):
        async with serving(qwen(codec=codec), features=OWN_TEMPLATES) as rig:
            assert await prompt_of(rig, chat(chat_template=template)) == ids("<hi>go")


async def test_options_are_variables_of_the_template():
    options = json.dumps({"thinking": True})
    other = {"chat_template": "{{ a.b[1] }}", "template_options_json": '{"a": {"b": [1, "two"]}}'}
    async with serving(qwen(), features=OWN_TEMPLATES) as rig:
        assert await prompt_of(rig, chat(template_options_json=options)) == [*ids("u:hi|a:"), THINK]
        assert await prompt_of(rig, chat(**other)) == ids("two")
        assert await prompt_of(rig, chat(template_options_json='{"add_generation_prompts": 0}')) == ids(
            "u:hi|a:"
        )


# -- refusals --

CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "arguments_json": "{}"}]}
FIRST_CALL = "chat.messages[0].tool_calls[0]"
BAD = [
    (chat(tools=TOOLS, tool_choice="got"), "chat.tool_choice"),
    (chat(tool_choice="required"), "chat.tool_choice"),
    (chat(tools=[{"name": ""}]), "chat.tools[0].name"),
    (chat(tools=[TOOLS[0], TOOLS[0]]), "chat.tools[1].name"),
    (chat(tools=[{"name": "f", "parameters_json": "{"}]), "chat.tools[0].parameters_json"),
    (chat(tools=[{"name": "f", "parameters_json": "3"}]), "chat.tools[0].parameters_json"),
    (chat(tools=[{"name": "f", "parameters_json": '{"type": "array"}'}]), "chat.tools[0].parameters_json"),
    (chat(USER, {"role": "tool"}), "chat.messages[1].tool_call_id"),
    (chat(USER, {"role": "tool", "tool_call_id": "c"}, CALLED), "chat.messages[1].tool_call_id"),
    (chat(CALLED, {"role": "user", "tool_call_id": "c"}), "chat.messages[1].tool_call_id"),
    (chat({**CALLED, "role": "user"}), "chat.messages[0].tool_calls"),
    (chat({**USER, "reasoning": "hm"}), "chat.messages[0].reasoning"),
    (chat({**CALLED, "tool_calls": [{"id": "c", "arguments_json": "{}"}]}), f"{FIRST_CALL}.name"),
    (chat({**CALLED, "tool_calls": [{"name": "f", "arguments_json": "{}"}]}), f"{FIRST_CALL}.id"),
    (chat(template_options_json="[]"), "chat.template_options_json"),
    (chat(template_options_json='{"tools": []}'), "chat.template_options_json"),
    (chat(chat_template="{% if %}"), "chat.chat_template"),
    (chat(chat_template="{{ raise_exception('no, thanks') }}"), "chat.chat_template"),
    (chat(chat_template="x" * 300_000), "chat.chat_template"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "field"), BAD, ids=range(len(BAD)))
async def test_a_bad_chat_is_refused(asked, field):
    """By all RPCs that take a chat."""
    async with serving(qwen(), features=OWN_TEMPLATES) as rig:
        for call in (
            rig.inference.Generate(generate(chat=asked)),
            rig.inference.Stream(stream(chat=asked)).read(),
            rig.control.Tokenize(control_pb2.TokenizeRequest(chat=asked)),
        ):
            failure = await failure_of(call)
            assert (failure.code.name, list(failure.violations)) == ("INVALID_ARGUMENT", [field])
        assert not rig.engine.seen


async def test_the_templates_own_words_are_told():
    async with serving(qwen(), features=OWN_TEMPLATES) as rig:
        asked = chat(chat_template="{{ raise_exception('no, thanks') }}")
        failure = await failure_of(rig.inference.Generate(generate(chat=asked)))
        assert "no, thanks" in failure.violations["chat.chat_template"]


async def test_all_that_is_wrong_with_a_chat_and_with_the_rest():
    asked = chat({"role": "x"}, tools=[{"name": "f", "parameters_json": "{"}], template_options_json="1")
    fields = {"chat": asked, "sampling": {"top_p": 2}, "output": {"logprobs": 99}}
    async with serving(qwen()) as rig:
        failure = await failure_of(rig.inference.Generate(generate(**fields)))
    assert set(failure.violations) == {
        "chat.messages[0].role", "chat.tools[0].parameters_json", "chat.template_options_json",
        "sampling.top_p", "output.logprobs",
    }  # fmt: skip


async def test_a_required_call_and_a_constraint_contradict_each_other():
    async with serving(qwen()) as rig:
        for choice in ("required", "get"):
            fields = {"chat": chat(tools=TOOLS, tool_choice=choice), "constraint": {"regex": "a"}}
            failure = await failure_of(rig.inference.Generate(generate(**fields)))
            assert list(failure.violations) == ["constraint"]
        for choice in ("auto", "none"):
            fields = {"chat": chat(tools=TOOLS, tool_choice=choice), "constraint": {"regex": "a"}}
            assert (await rig.inference.Generate(generate(**fields))).outputs[0].text == "a"


async def test_a_model_whose_calls_nobody_knows_cannot_be_made_to_call():
    async with serving(fake()) as rig:
        asked = chat(tools=TOOLS, tool_choice="get")
        failure = await failure_of(rig.inference.Generate(generate(chat=asked)))
        assert list(failure.violations) == ["chat.tool_choice"]
        assert "--tool-call-parser" in failure.violations["chat.tool_choice"]
