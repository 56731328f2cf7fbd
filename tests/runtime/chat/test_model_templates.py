"""The forms that are chosen for the models people run, by excerpts of their own chat templates.

`templates/` has parts of the templates as the checkpoints have them: instructions, turns, and how an answer
begins. What such a template writes for a turn with calls is what its model was trained to write, so the
parser that is chosen must find the calls in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.chat.messages import Chat, ChatTurn, Tool, ToolCall
from penstock.runtime.chat.parser import detect
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import bytes_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
USER = ChatTurn("user", "Weather?")
WEATHER = Tool(
    "get_weather",
    "Look.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"type": "boolean"},
            "hours": {"type": "array"},
        },
    },
)
ARGUMENTS: dict[str, Any] = {"city": "Rome,\nItalia è", "days": 3, "wind": True, "hours": [1, 2]}
CHOSEN = {
    "qwen3_coder": ("qwen3_coder", None),
    "seed_oss": ("seed_oss", "seed"),
    "minimax_m2": ("minimax_m2", "think"),
    "glm_4_6": ("glm", "think"),
    "glm_4_7": ("glm", "think"),
    "deepseek_v3_1": ("deepseek", "think"),
    "deepseek_r1": ("deepseek", "think"),
    "gpt_oss": ("harmony", "harmony"),
    "gemma3": (None, None),
    "gemma4": ("gemma4", "gemma4"),
    "olmo3": ("olmo3", None),
    "granite_3": ("granite", None),
    "granite_4": ("hermes", None),
    "phi_4_mini": ("granite", None),
    "smollm3": ("hermes", "think"),
    "ministral_3": ("mistral", None),
    "ministral_3_reasoning": ("mistral", "magistral"),
}
WRITING = sorted(
    CHOSEN.keys()
    - {"glm_4_7", "gemma3", "granite_3", "phi_4_mini", "smollm3"}
    - {"deepseek_v3_1", "deepseek_r1", "gpt_oss"}
)
"""Templates of which the excerpt has turns with calls, and shows all of such a turn."""
OPTIONS = {"gemma4": {"enable_thinking": True}}


def codec_of(name: str) -> TextCodec:
    return TextCodec(bytes_tokenizer(chat_template=(TEMPLATES / f"{name}.jinja").read_text()))


def test_each_template_is_tested() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == CHOSEN.keys()


@pytest.mark.parametrize("name", CHOSEN)
def test_the_forms_that_are_chosen(name: str) -> None:
    forms = detect(codec_of(name).chat_template)
    tools = forms.tools.name if forms.tools is not None else None
    reasoning = forms.reasoning.name if forms.reasoning is not None else None
    assert (("harmony", "harmony") if forms.is_harmony else (tools, reasoning)) == CHOSEN[name]


def test_tools_are_shown_where_a_template_looks_for_them() -> None:
    """SmolLM3's template has a variable of its own for them, Phi-4-mini's looks into the system's turn."""
    function = json.dumps(
        {"name": "get_weather", "description": "Look.", "parameters": dict(WEATHER.parameters)}
    )
    system = ChatTurn("system", "Be brief.")
    smollm3, phi = codec_of("smollm3"), codec_of("phi_4_mini")
    shown = smollm3.render_chat(Chat((USER,), (WEATHER,)))
    assert f"<tools>\n{json.loads(function)}\n</tools>" in shown
    assert "</tools>" not in smollm3.render_chat(Chat((USER,)))
    assert "</tools>" not in smollm3.render_chat(Chat((USER,), (WEATHER,), "none"))
    assert "<tools>\nmine\n" in smollm3.render_chat(
        Chat((USER,), (WEATHER,), options={"xml_tools": ["mine"]})
    )
    head = f"<|tool|>[{function}]<|/tool|><|end|>"
    user = "<|user|>Weather?<|end|><|assistant|>"
    assert phi.render_chat(Chat((USER,), (WEATHER,))) == f"<|system|>{head}{user}"
    assert phi.render_chat(Chat((system, USER), (WEATHER,))) == f"<|system|>Be brief.{head}{user}"
    assert phi.render_chat(Chat((system, USER))) == f"<|system|>Be brief.<|end|>{user}"


def test_reasoning_is_a_part_of_the_content_where_a_template_wants_it_so() -> None:
    """As in the first templates of Ministral 3's reasoning models. Later ones read `reasoning_content`."""
    codec = codec_of("ministral_3_reasoning")
    said = ChatTurn("assistant", "It rains.", reasoning="Look outside.")
    shown = codec.render_chat(Chat((USER, said, USER)))
    assert shown.endswith("[/INST][THINK]Look outside.[/THINK]It rains.</s>[INST]Weather?[/INST]")
    call = ToolCall("abcdefghi", "f", "{}")
    shown = codec.render_chat(Chat((USER, ChatTurn("assistant", "", (call,), reasoning="Hm."))))
    assert shown.endswith("[/INST][THINK]Hm.[/THINK][TOOL_CALLS]f[ARGS]{}</s>")
    assert codec.render_chat(Chat((USER, ChatTurn("assistant", "Hi.")))).endswith("[/INST]Hi.</s>")


@pytest.mark.parametrize("name", WRITING)
def test_the_parser_reads_what_the_template_writes(name: str) -> None:
    """The assistant's turn as the template writes it is what comes between two prompts: the one that asks for
    the turn, and the one after it.
    """
    codec = codec_of(name)
    forms = detect(codec.chat_template)
    calls = tuple(
        ToolCall(f"abcdefgh{i}", "get_weather", json.dumps(arguments))
        for i, arguments in enumerate((ARGUMENTS, {"city": "Oslo"}))
    )
    turn = ChatTurn("assistant", "I look.", calls, reasoning="Hm." if forms.reasoning is not None else "")
    options = OPTIONS.get(name, {})
    chat = Chat((USER,), (WEATHER,), options=options)
    prompt = codec.render_chat(chat)
    after = codec.render_chat(Chat((USER, turn, USER), (WEATHER,), options=options))
    assert after.startswith(prompt.removesuffix("<think>\n"))
    written = (
        after[len(prompt) :] if after.startswith(prompt) else after[len(prompt.removesuffix("<think>\n")) :]
    )
    parser = forms.parser(chat, prompt)
    parts = [*map(parser.push, written), parser.flush()]
    found: list[list[str]] = []
    for piece in (piece for part in parts for piece in part.calls):
        if piece.name:
            found.append([piece.name, ""])
        found[-1][1] += piece.arguments
    assert [(name, json.loads(arguments)) for name, arguments in found] == [
        ("get_weather", ARGUMENTS),
        ("get_weather", {"city": "Oslo"}),
    ]
    assert "".join(part.reasoning for part in parts) == turn.reasoning
    assert "".join(part.text for part in parts).startswith("I look.")
