"""Templates write what they write in transformers: those of published models, and each thing that a template
may use of its environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.runtime.chat.rendering import render_messages

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "<\u00e9>"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": " What is <b>2 & 2</b>? "},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "f", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "\u00e9"},
)
SNIPPETS = [
    "{{ messages | tojson }}{{ messages[2] | tojson(indent=2, sort_keys=true) }}",
    "{{ {'a': 1} | tojson(separators=(',', ':'), ensure_ascii=true) }}{{ '\u00e9' | tojson }}",
    "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for m in messages %}{% generation %}{{ m.role }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0, self=2) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ ns.self }}",
    "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{{ dict(a=1) | tojson }}{{ dict.fromkeys(['a'], 2) | tojson }}",
    "{% for m in messages %}\n  {% if 1 %}\n{{ m.thinking }}{{ m.reasoning }}\n  {% endif %}\n{% endfor %}",
    "{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ more }}{{ bos_token }}",
    "{{ strftime_now('%Y') }}",
]


def theirs(template: str, messages: tuple[dict[str, Any], ...], **variables: Any) -> str:
    text: str = render_jinja_template(
        conversations=[list(messages)], chat_template=template, add_generation_prompt=True, **variables
    )[0][0]
    return text


def both(template: str, messages: tuple[dict[str, Any], ...], **variables: Any) -> tuple[str, str]:
    """Return what a template writes here and in transformers; or what it says if it refuses."""
    found = []
    for render in (
        lambda: render_messages(
            chat_template=template, messages=list(messages), add_generation_prompt=True, **variables
        ),
        lambda: theirs(template, messages, **variables),
    ):
        try:
            found.append(render())
        except Exception as error:  # noqa: BLE001  # a template is a program
            found.append(f"refused: {error!r}")
    return found[0], found[1]


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["", "tools"])
def test_templates_of_models(file: Path, count: int, tools: list[Any] | None) -> None:
    ours, witness = both(file.read_text(), MESSAGES[:count], tools=tools, bos_token="<s>", eos_token="</s>")
    assert ours == witness


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_what_a_template_may_use(snippet: str) -> None:
    ours, witness = both(snippet, MESSAGES, more={"a": [1]}, bos_token="<s>")
    assert ours == witness
    assert not ours.startswith("refused")


@pytest.mark.parametrize(
    "snippet",
    [
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ messages.clear() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ none.x.y }}",
    ],
)
def test_what_a_template_may_not(snippet: str) -> None:
    ours, witness = both(snippet, MESSAGES)
    assert ours == witness
    assert ours.startswith("refused")


@pytest.mark.parametrize(
    "snippet",
    ["{{ namespace(__x=1) }}", "{% set ns = namespace() %}{% set ns._x = 1 %}"],
)
def test_a_namespace_takes_no_names_of_pythons(snippet: str) -> None:
    with pytest.raises(SecurityError, match="underscore"):
        theirs(snippet, MESSAGES)
    with pytest.raises(SecurityError, match="underscore"):
        render_messages(chat_template=snippet, messages=MESSAGES)
