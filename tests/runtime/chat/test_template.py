"""Conversations are rendered to prompts by templates in the style of Qwen, Llama 3, Mistral and DeepSeek-R1.

The expected prompts are written by hand.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.chat.messages import Chat, ChatTurn, RawTool, Tool, ToolCall
from penstock.runtime.chat.template import ChatTemplates, render
from penstock.runtime.chat.template_sandbox import TemplateSandbox
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.images.image import Image
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import LLAMA3, MISTRAL, QWEN, R1, bytes_tokenizer

USER = ChatTurn("user", "Weather in Z\u00fcrich?")
WEATHER = RawTool("get_weather", "Look.", '{"type": "object", "properties": {"city": {"type": "string"}}}')
CALLED = (
    USER,
    ChatTurn("assistant", "", (ToolCall("abcdefghi", "get_weather", '{"city":"Z\u00fcrich"}'),)),
    ChatTurn("tool", "4 \u00b0C", tool_call_id="abcdefghi"),
)
NO_TEMPLATE = ChatTemplates(None, {"eos_token": "<|end|>"})
SHOWN = (
    '{"type": "function", "function": {"name": "get_weather", "description": "Look.", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}}}}'
)


def rendered(template: str | dict[str, str] | None, chat: Chat) -> str:
    return TextCodec(bytes_tokenizer(chat_template=template)).render_chat(chat)


def refusal(template: str | None, chat: Chat) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        rendered(template, chat)
    (violation,) = caught.value.violations
    return violation.field, violation.description


def test_qwen() -> None:
    chat = Chat.parse(CALLED, [WEATHER])
    assert rendered(QWEN, chat) == (
        f"<|im_start|>system\n# Tools\n<tools>\n{SHOWN}\n</tools>\n"
        'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n'
        "<|im_start|>user\nWeather in Z\u00fcrich?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
        '"Z\u00fcrich"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4 \u00b0C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_llama3() -> None:
    chat = Chat.parse(CALLED, [WEATHER])
    assert rendered(LLAMA3, chat) == (
        "<|start_header_id|>user<|end_header_id|>\n\nRespond in the format "
        '{"name": function name, "parameters": dictionary of argument name and its value}.\nget_weather\n'
        "Weather in Z\u00fcrich?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "get_weather", "parameters": {"city": "Z\u00fcrich"}}<|eot_id|>'
        "<|start_header_id|>ipython<|end_header_id|>\n\n4 \u00b0C<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_mistral() -> None:
    chat = Chat.parse(CALLED, [WEATHER])
    assert rendered(MISTRAL, chat) == (
        f"<s>[AVAILABLE_TOOLS] [{SHOWN}][/AVAILABLE_TOOLS][INST] Weather in Z\u00fcrich?[/INST]"
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Z\u00fcrich"}, "id": "abcdefghi"}]</s>'
        '[TOOL_RESULTS] {"content": "4 \u00b0C", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    )


@pytest.mark.parametrize("template", [QWEN, LLAMA3, MISTRAL, R1])
def test_it_is_what_transformers_renders(template: str) -> None:
    tokenizer = bytes_tokenizer(chat_template=template)
    shown = {"name": "get_weather", "description": "Look.", "parameters": json.loads(WEATHER.parameters_json)}
    function = {"name": "get_weather", "arguments": {"city": "Z\u00fcrich"}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    turns: list[Any] = [
        {"role": "user", "content": USER.content},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4 \u00b0C", "tool_call_id": "abcdefghi", "name": "get_weather"},
    ]
    expected = tokenizer.apply_chat_template(
        turns,
        tools=[{"type": "function", "function": shown}],
        add_generation_prompt=True,
        tokenize=False,
        bos_token="<b>",
    )
    chat = Chat.parse(CALLED, [WEATHER], template_options_json='{"bos_token": "<b>"}')
    assert rendered(template, chat) == expected


THINKING = """
{%- for message in messages %}
{{- "<|" + message.role + "|>" }}
{%- if message.reasoning_content is string %}
{{- "<think>" + message.reasoning_content + "</think>" }}
{%- endif %}
{{- message.content }}
{%- endfor %}"""
"""As Qwen3 shows what it thought. gpt-oss' template calls it `thinking`."""


@pytest.mark.parametrize("template", [THINKING, THINKING.replace("reasoning_content", "thinking")])
def test_reasoning_is_shown_as_transformers_shows_it(template: str) -> None:
    turns = [
        {"role": "user", "content": "2*3?"},
        {"role": "assistant", "content": "6", "reasoning_content": "2+2+2"},
        {"role": "assistant", "content": "Yes."},
    ]
    expected = bytes_tokenizer(chat_template=template).apply_chat_template(turns, tokenize=False)
    assert expected == "<|user|>2*3?<|assistant|><think>2+2+2</think>6<|assistant|>Yes."
    said = (ChatTurn("user", "2*3?"), ChatTurn("assistant", "6", reasoning="2+2+2"))
    assert rendered(template, Chat((*said, ChatTurn("assistant", "Yes.")))) == expected


OWN = """{% set a = 1 %}{% macro f(b) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{% for d in messages %}
{{ loop.index }}{{ d.e }}{% generation %}{{ f(1) }}{% endgeneration %}{% break %}{% endfor %}
{{ raise_exception(tools) }}{{ strftime_now(add_generation_prompt) }}{{ namespace(x=1) }}"""


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (None, ()),
        ("no variables", ()),
        (QWEN, ("enable_thinking",)),
        (LLAMA3, ()),  # reads bos_token, a special token
        # What the template sets itself, is given, or calls is none of the request's variables.
        (OWN, ("c",)),
        # What is set in each branch, in one of them, and in a loop, which it does not outlive.
        (
            "{% if x %}{% set a = 1 %}{% elif y %}{% set a = 2 %}{% else %}{% set a = 3 %}{% endif %}{{ a }}",
            ("x", "y"),
        ),
        ("{% if tools %}{% set a = 1 %}{% elif messages %}{% set a = 2 %}{% endif %}{{ a }}", ("a",)),
        ("{% for m in messages %}{% set a = 1 %}{{ a }}{% endfor %}", ()),
        ("{% for m in messages %}{% set a = 1 %}{% endfor %}{{ a }}", ("a",)),
        ("{% set a %}{{ b }}{% endset %}{{ a }}{% macro f(x=c) %}{{ f(x) }}{% endmacro %}", ("b", "c")),
        # What it sets only where it is not given.
        ('{% if day is not defined %}{% set day = "1 May" %}{% endif %}{{ day }}', ("day",)),
        (
            {"default": "{{ one }}{{ documents }}", "tool_use": "{{ two }}{{ one }}"},
            ("documents", "one", "two"),
        ),
        ({"default": "{{ one }}", "broken": "{% if %}"}, ("one",)),
    ],
)
def test_the_variables_that_a_template_reads(template: Any, names: tuple[str, ...]) -> None:
    assert TextCodec(bytes_tokenizer(chat_template=template)).template_variables == names


def test_no_tools_are_shown_under_tool_choice_none() -> None:
    for choice, shown in (("none", False), ("auto", True), ("required", True), ("get_weather", True)):
        prompt = rendered(QWEN, Chat.parse([USER], [WEATHER], choice))
        assert ("# Tools" in prompt) is shown
    assert rendered(QWEN, Chat.parse([USER])) == (
        "<|im_start|>user\nWeather in Z\u00fcrich?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_options_are_variables_of_the_template() -> None:
    thinking = Chat.parse([USER], template_options_json='{"enable_thinking": false}')
    assert rendered(QWEN, thinking).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    template = "{{ a }} {{ b }} {{ eos_token }} {{ documents[0].title }}"
    options = {"a": [1], "b": None, "documents": [{"title": "T", "text": "x"}]}
    chat = Chat.parse([USER], template_options_json=json.dumps(options))
    assert rendered(template, chat) == "[1] None <|end|> T"


def test_the_generation_prompt_may_open_the_reasoning() -> None:
    assert rendered(R1, Chat((USER,))).endswith("<|assistant|><think>\n")


def test_a_tool_turn_names_its_function() -> None:
    template = "{% for m in messages %}{{ m.keys() | list }}{{ m.name }};{% endfor %}"
    assert rendered(template, Chat(CALLED)) == (
        "['role', 'content'];['role', 'content', 'tool_calls'];"
        "['role', 'content', 'tool_call_id', 'name']get_weather;"
    )


def test_answers_of_tools_stand_where_their_calls_do() -> None:
    """Most templates show no ids, so the model reads the first answer as that of the first call."""
    calls = tuple(ToolCall(f"call-{name}", name, "{}") for name in "abc")
    later = ToolCall("call-d", "d", "{}")

    def answer(name: str, *more: Image) -> ChatTurn:
        return ChatTurn("tool", (f"of {name}", *more), tool_call_id=f"call-{name}")

    def order(*turns: ChatTurn) -> str:
        chat = Chat((USER, ChatTurn("assistant", "", calls), *turns))
        template = "{% for m in messages if m.role == 'tool' %}{{ m.name }}{% endfor %}"
        return rendered(template, chat)

    assert order(answer("c"), answer("a"), answer("b")) == "abc"
    assert order(answer("b")) == "b"
    again = ChatTurn("assistant", "", (later,))
    assert order(answer("b"), answer("a"), again, answer("d"), answer("c")) == "abcd"
    assert order(answer("b"), USER, answer("a")) == "ba"
    image = Image(b"", "image/png")
    assert order(answer("b", image), answer("a")) == "ba"


def test_named_templates() -> None:
    """As in transformers, a model may have a template of its own for chats with tools."""
    templates = {"default": "plain", "tool_use": "tools {{ tools | length }}"}
    assert rendered(templates, Chat((USER,))) == "plain"
    assert rendered(templates, Chat((USER,), (Tool("f"),))) == "tools 1"
    assert rendered(templates, Chat((USER,), template="tool_use", tools=(Tool("f"),))) == "tools 1"
    assert "no default" in refusal({"other": "x"}, Chat((USER,)))[1]  # type: ignore[arg-type]


def test_a_model_without_a_template() -> None:
    assert refusal(None, Chat((USER,))) == ("chat", "the model has no chat template")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "says: roles must alternate"),
        ("{{ messages.nothing.more }}", "says: 'list object' has no attribute 'nothing'"),
        ("{% if %}", "says: Expected an expression"),
        ("{{ 1 + 'a' }}", "fails: TypeError: unsupported operand"),
        ("{{ 1 // 0 }}", "fails: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
        ("{{ range(100001) | list }}", "fails: OverflowError: Range too big"),
        ("{{ ''.__class__.__mro__ }}", "says: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "says: access to attribute 'append'"),
        ("{{ half }}", "the rendered chat is no Unicode text"),
    ],
)
def test_a_template_that_fails(template: str, reason: str, sandbox: TemplateSandbox) -> None:
    """If the model's own template fails, the error names the messages. If the caller's fails, which runs in
    another process, the error names the template.
    """
    options = {"half": "\ud800"}
    field, own = refusal(template, Chat((USER,), options=options))
    assert field == "chat.messages"
    assert reason in own
    with pytest.raises(InvalidRequest) as caught:
        render(NO_TEMPLATE, Chat((USER,), template=template, options=options), sandbox)
    (violation,) = caught.value.violations
    assert violation.field == "chat.chat_template"
    assert reason in violation.description


@pytest.fixture(scope="module")
def sandbox():
    sandbox = TemplateSandbox(cpu_limit_s=60, max_chars=10_000)
    yield sandbox
    sandbox.close()


def test_a_callers_template(sandbox: TemplateSandbox) -> None:
    """It works for a model without a template, and renders what the same template of a model would."""
    for template in (QWEN, LLAMA3, MISTRAL, R1):
        chat = Chat.parse(
            CALLED, [WEATHER], chat_template=template, template_options_json='{"bos_token": "<s>"}'
        )
        own = Chat.parse(CALLED, [WEATHER], template_options_json='{"bos_token": "<s>"}')
        assert render(NO_TEMPLATE, chat, sandbox) == rendered(template, own)


def test_output_is_bounded(sandbox: TemplateSandbox) -> None:
    with pytest.raises(InvalidRequest, match="writes 10001 characters; at most 10000 are taken"):
        render(NO_TEMPLATE, Chat((USER,), template="{{ 'x' * 10001 }}"), sandbox)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",  # computed by one instruction, while the template compiles
        "{% set ns = namespace(x='x') %}{% for i in range(50) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
    ids=["loop", "power", "memory"],
)
@pytest.mark.ci
def test_a_template_that_would_never_end(template: str) -> None:
    """It is stopped, and the same process renders the next template, so that nobody waits for a process to
    start.
    """
    sandbox = TemplateSandbox(cpu_limit_s=1)
    try:
        with pytest.raises(
            InvalidRequest, match=r"^chat\.chat_template: the chat template (took|fails: Memory)"
        ):
            render(NO_TEMPLATE, Chat((USER,), template=template), sandbox)
        worker = sandbox.worker_pid
        assert worker is not None
        assert (
            render(NO_TEMPLATE, Chat((USER,), template="{{ messages[0].content }}"), sandbox) == USER.content
        )
        assert sandbox.worker_pid == worker
    finally:
        sandbox.close()


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_templates_cannot_see_what_earlier_ones_did(sandbox: TemplateSandbox) -> None:
    """Each template is rendered in a process of its own, which has ended when the result arrives."""
    sandbox.render({"messages": [], "chat_template": "x"})
    pid = sandbox.worker_pid
    assert pid is not None
    assert not Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_the_sandbox_ends_with_its_owner() -> None:
    sandbox = TemplateSandbox(cpu_limit_s=60)
    assert sandbox.render({"messages": [], "chat_template": "x"}) == "x"
    pid = sandbox.worker_pid
    assert pid is not None
    assert runs(pid)
    del sandbox
    assert not runs(pid)


def test_a_process_that_died_meanwhile_is_replaced() -> None:
    sandbox = TemplateSandbox(cpu_limit_s=60)
    for _ in range(2):
        assert sandbox.render({"messages": [], "chat_template": "x"}) == "x"
        assert sandbox.worker_pid is not None
        os.kill(sandbox.worker_pid, signal.SIGKILL)
        while sandbox.worker_pid is not None:
            time.sleep(0.01)
    sandbox.close()


def test_the_sandbox_does_not_see_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a template broke out of jinja's sandbox, it would find no secrets there."""
    monkeypatch.setenv("PENSTOCK_SECRET", "x")
    sandbox = TemplateSandbox(cpu_limit_s=60)
    sandbox.render({"messages": [], "chat_template": "x"})
    environment = Path(f"/proc/{sandbox.worker_pid}/environ").read_text()
    sandbox.close()
    assert "PENSTOCK_SECRET" not in environment


def test_messages_as_mappings() -> None:
    codec = TextCodec(bytes_tokenizer(chat_template=QWEN))
    chat = [{"role": "user", "content": "hi"}]
    assert codec.render_chat(chat) == codec.render_chat(Chat((ChatTurn("user", "hi"),)))
