"""What templates demand of turns with calls: those of gpt-oss and DeepSeek get turns as they can show them.

The expected prompts are written by hand, after the models' descriptions of their forms.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime.chat.messages import Chat, ChatTurn, Tool, ToolCall
from penstock.runtime.chat.template_reading import Demands, demands_of
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import LLAMA3, MISTRAL, QWEN, R1, bytes_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
USER = ChatTurn("user", "Hi")
CALL = ToolCall("abcdefghi", "f", '{"city":"Zürich"}')
RESULT = ChatTurn("tool", "4 °C", tool_call_id="abcdefghi")
TOOLS = (Tool("f", "Look."),)


def codec_of(name: str) -> TextCodec:
    return TextCodec(bytes_tokenizer(chat_template=(TEMPLATES / f"{name}.jinja").read_text()))


def rendered(name: str, *turns: ChatTurn, **options: object) -> str:
    return codec_of(name).render_chat(Chat((USER, *turns), TOOLS, options=options))


@pytest.mark.parametrize(
    ("template", "demands"),
    [
        ("{{ '[' + tool['function']['arguments'] + ']' }}", Demands(text_arguments=True)),
        ("{{ 'x' ~ call.arguments }}", Demands(text_arguments=True)),
        ("{{ call.arguments }}", Demands(text_arguments=True)),
        ("{{ 'x' + call.arguments | tojson }}", Demands()),
        ("{% if a.arguments is string %}{{ a.arguments }}{% endif %}", Demands()),
        ("{% for k, v in call.arguments | items %}{{ k }}{% endfor %}", Demands()),
        ("{% if m['content'] is not none %}{{ m.content }}{% endif %}", Demands(no_content=True)),
        ("{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}", Demands(one_text=True)),
        ("{% broken", Demands()),
        *((template, Demands()) for template in (QWEN, LLAMA3, MISTRAL, R1)),
    ],
)  # fmt: skip
def test_what_templates_demand(template: str, demands: Demands) -> None:
    assert demands_of(template) == demands


@pytest.mark.parametrize(("content", "shown"), [("", ""), ("I look.", "I look.")])
def test_deepseek_v3_1(content: str, shown: str) -> None:
    assert rendered("deepseek_v3_1", ChatTurn("assistant", content, (CALL, CALL)), RESULT) == (
        f"<｜User｜>Hi<｜Assistant｜></think>{shown}<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city":"Zürich"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city":"Zürich"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>4 °C<｜tool▁output▁end｜>"
    )
    assert rendered("deepseek_v3_1") == "<｜User｜>Hi<｜Assistant｜></think>"
    assert rendered("deepseek_v3_1", thinking=True) == "<｜User｜>Hi<｜Assistant｜><think>"


def test_deepseek_r1_shows_calls_where_content_is_none() -> None:
    assert rendered("deepseek_r1", ChatTurn("assistant", "", (CALL,)), RESULT) == (
        "<｜User｜>Hi<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        '```json\n{"city":"Zürich"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4 °C<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )


CALLED = (
    '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"city": "Zürich"}<|call|>'
    '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"4 °C"<|end|><|start|>assistant'
)
SAID = "<|start|>user<|message|>Hi<|end|>"


@pytest.mark.parametrize(
    ("content", "reasoning", "before"),
    [
        ("", "", ""),
        ("", "Hm.", "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"),
        ("I look.", "", "<|start|>assistant<|channel|>analysis<|message|>I look.<|end|>"),
        # The template refuses both, and takes what it is given for reasoning.
        ("I look.", "Hm.", "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"),
    ],
)
def test_gpt_oss(content: str, reasoning: str, before: str) -> None:
    turn = ChatTurn("assistant", content, (CALL,), reasoning=reasoning)
    prompt = rendered("gpt_oss", turn, RESULT, reasoning_effort="high")
    assert "\nReasoning: high\n" in prompt
    assert prompt.endswith(f"}} // namespace functions<|end|>{SAID}{before}{CALLED}")


def test_gpt_oss_drops_what_it_thought_before_an_answer() -> None:
    prompt = rendered("gpt_oss", ChatTurn("assistant", "4", reasoning="2 + 2"), USER)
    assert prompt.endswith(
        f"{SAID}<|start|>assistant<|channel|>final<|message|>4<|end|>{SAID}<|start|>assistant"
    )


def test_gpt_oss_tells_its_variables() -> None:
    assert codec_of("gpt_oss").template_variables == ("builtin_tools", "model_identity", "reasoning_effort")
    assert codec_of("deepseek_v3_1").template_variables == ("thinking",)
