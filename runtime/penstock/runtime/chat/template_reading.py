"""Reads a chat template without rendering it: which variables it reads, so that callers know which of their
options it takes, and what it demands of turns, and of tools, where templates disagree.

Hugging Face's documentation says that the arguments of a call are an object and that content is a text. The
templates of DeepSeek V3, R1 and V3.1 put the arguments into a text as they are, which only a text can be, and
show the calls of a turn only where its content is none. SmolLM3's reads the tools from a variable of its own,
Phi-4-mini's from the system's turn, and Ministral 3's shows reasoning that is part of the content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from functools import lru_cache
from typing import NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.meta import find_undeclared_variables

from penstock.runtime.chat.messages import RESERVED_OPTIONS
from penstock.runtime.chat.rendering import JINJA


def check_template(template: str) -> None:
    """Raise what Jinja raises if it cannot compile the template: TemplateSyntaxError, or anything else,
    because a template may be no text, and Jinja computes constants as it compiles.
    """
    JINJA.compile(template)


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
    """Find what the template demands. One that is no Jinja demands nothing. It takes milliseconds, and is
    kept.
    """
    try:
        parsed = JINJA.parse(template)
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
    """Say whether the value of this name is written as it is, without a filter such as `tojson`."""
    written: list[Collection[nodes.Node]] = [node.nodes for node in parsed.find_all(nodes.Output)]
    written += [node.nodes for node in parsed.find_all(nodes.Concat)]
    written += [(node.left, node.right) for node in parsed.find_all(nodes.Add)]
    return any(_names(part, name) for parts in written for part in parts)


def _gets(node: nodes.Node, name: str) -> bool:
    """Say whether the node is `something.get("name")`, perhaps with a default."""
    match node:
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=key), *_]):
            return bool(key == name)
    return False


def _names(node: nodes.Node, name: str) -> bool:
    """Say whether the node is `something.name` or `something["name"]`."""
    match node:
        case nodes.Getattr():
            return node.attr == name
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return bool(key == name)
    return False


def variables_of(templates: Iterable[str], special_tokens: Iterable[str]) -> tuple[str, ...]:
    """List the names that a request may set and one of the templates reads, sorted, without those of
    `special_tokens`. A template that is no Jinja reads nothing.
    """
    names: set[str] = set()
    for template in templates:
        try:
            parsed = JINJA.parse(template)
        except TemplateError:
            continue
        # Jinja also names what a template sets itself, if it does so in a branch.
        found: set[str] = set()
        _read(parsed.body, frozenset(), found)
        names |= found & find_undeclared_variables(parsed)
    return tuple(sorted(names - RESERVED_OPTIONS - set(special_tokens)))


def _read(parts: Iterable[nodes.Node], known: Set[str], found: set[str]) -> frozenset[str]:
    """Add the names to `found` that these parts of a template read before they set them; `known` are those
    that were set before. Returns the names that are set after the parts.
    """
    now = frozenset(known)
    for part in parts:
        match part:
            case nodes.Name(ctx="load"):
                if part.name not in now:
                    found.add(part.name)
            case nodes.Assign():
                _read([part.node], now, found)
                now |= _targets(part.target)
            case nodes.AssignBlock():
                _read(part.body, now, found)
                now |= _targets(part.target)
            case nodes.If():
                now = _read([part.test], now, found)
                # Jinja nests no `elif` in another, and each has no `else` of its own.
                ways = [part.body, part.else_, *(one.body for one in part.elif_)]
                _read([one.test for one in part.elif_], now, found)
                now = frozenset.intersection(*(_read(way, now, found) for way in ways))
            case nodes.For():
                _read([part.iter], now, found)
                inner = now | _targets(part.target)
                _read([*([part.test] if part.test else []), *part.body], inner, found)
                _read(part.else_, now, found)
            case nodes.Macro():
                _read(part.defaults, now, found)
                _read(part.body, now | {argument.name for argument in part.args}, found)
                now |= {part.name}
            case _:  # what is set in a block is not set after it
                inside = now
                for child in part.iter_child_nodes():
                    inside = _read([child], inside, found)
    return now


def _targets(target: nodes.Node) -> frozenset[str]:
    names = frozenset(name.name for name in target.find_all(nodes.Name))
    return names | {target.name} if isinstance(target, nodes.Name) else names
