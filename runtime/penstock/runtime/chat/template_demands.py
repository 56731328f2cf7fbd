"""Finds out what a chat template demands of turns, and of tools, where templates disagree.

Hugging Face's documentation says that the arguments of a call are an object and that content is a text. The
templates of DeepSeek V3, R1 and V3.1 put the arguments into a text as they are, which only a text can be, and
show the calls of a turn only where its content is none. SmolLM3's reads the tools from a variable of its own,
Phi-4-mini's from the system's turn, and Ministral 3's shows reasoning that is part of the content.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from jinja2 import TemplateError, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template


class Demands(NamedTuple):
    """What a template demands."""

    text_arguments: bool = False
    """Whether the arguments of calls must be a text of JSON rather than an object."""
    no_content: bool = False
    """Whether a turn that only calls must have none as its content rather than an empty text."""
    one_text: bool = False
    """Whether a turn that calls must not have both reasoning and content."""
    thinking_parts: bool = False
    """Whether reasoning must be a part of the content, which then is a list."""
    xml_tools: bool = False
    """Whether the functions are read from the variable `xml_tools`."""
    system_tools: bool = False
    """Whether the functions are read from the system's turn, as a text of JSON."""


@lru_cache(maxsize=32)
def demands_of(template: str) -> Demands:
    """What the template demands. One that is no Jinja demands nothing. It takes milliseconds, and is kept."""
    try:
        parsed = _compile_jinja_template(template).environment.parse(template)
    except TemplateError:
        return Demands()
    tests = list(parsed.find_all(nodes.Test))
    distinguishes = any(
        test.name in ("string", "mapping") and _names(test.node, "arguments") for test in tests
    )
    read = {node.name for node in parsed.find_all(nodes.Name) if node.ctx == "load"}
    looked_up = {
        name
        for name in ("tools", "reasoning_content")
        if any(_names(node, name) or _gets(node, name) for node in parsed.find_all(nodes.Expr))
    }
    return Demands(
        text_arguments=not distinguishes and _is_written(parsed, "arguments"),
        no_content=any(test.name == "none" and _names(test.node, "content") for test in tests),
        one_text=any(
            _names(both.left, "content") and _names(both.right, "thinking")
            for both in parsed.find_all(nodes.And)
        ),
        thinking_parts="reasoning_content" not in looked_up
        and any(
            _names(compare.expr, "type") and compare.ops[0].expr == nodes.Const("thinking")
            for compare in parsed.find_all(nodes.Compare)
        ),
        xml_tools="xml_tools" in read,
        system_tools="tools" in looked_up and "tools" not in read,
    )


def _is_written(parsed: nodes.Template, name: str) -> bool:
    """Whether the value of this name is written as it is, without a filter such as `tojson`."""
    written: list[Collection[nodes.Node]] = [node.nodes for node in parsed.find_all(nodes.Output)]
    written += [node.nodes for node in parsed.find_all(nodes.Concat)]
    written += [(node.left, node.right) for node in parsed.find_all(nodes.Add)]
    return any(_names(part, name) for parts in written for part in parts)


def _gets(node: nodes.Node, name: str) -> bool:
    """Whether the node is `something.get("name")`, perhaps with a default."""
    match node:
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=key), *_]):
            return bool(key == name)
    return False


def _names(node: nodes.Node, name: str) -> bool:
    """Whether the node is `something.name` or `something["name"]`."""
    match node:
        case nodes.Getattr():
            return node.attr == name
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return bool(key == name)
    return False
