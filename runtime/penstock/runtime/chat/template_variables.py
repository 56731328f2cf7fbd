"""Finds out which variables a chat template reads, so that callers know which of their options it takes."""

from __future__ import annotations

from collections.abc import Iterable, Set

from jinja2 import TemplateError, nodes
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from penstock.runtime.chat.messages import RESERVED_OPTIONS


def variables_of(templates: Iterable[str], special_tokens: Iterable[str]) -> tuple[str, ...]:
    """The names that a request may set and one of the templates reads, sorted, without those of
    `special_tokens`. A template that is no Jinja reads nothing.
    """
    names: set[str] = set()
    for template in templates:
        try:
            parsed = _compile_jinja_template(template).environment.parse(template)
        except TemplateError:
            continue
        # Jinja also names what a template sets itself, if it does so in a branch.
        found: set[str] = set()
        _read(parsed.body, frozenset(), found)
        names |= found & find_undeclared_variables(parsed)
    return tuple(sorted(names - RESERVED_OPTIONS - set(special_tokens)))


def _read(parts: Iterable[nodes.Node], known: Set[str], found: set[str]) -> frozenset[str]:
    """Adds the names to `found` that these parts of a template read before they set them; `known` are those
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
