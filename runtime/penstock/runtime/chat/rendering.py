"""Renders chat templates by Jinja: the environment that models' templates are written for.

It has what transformers' environment has, so that a template writes here what it writes there (a test
compares them). transformers itself is not used, because importing it takes a second and some 40 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names that templates have for what a turn thought before it answered."""


class _Generation(Extension):
    """The block {% generation %}, in which the answer stands: its content. What is set in it ends with it."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """Jinja's namespace, but it takes no names that begin with an underscore: they reach into Python."""

    def __init__(*args: Any, **values: Any) -> None:
        # Not `self`, because a template may give a value of that name.
        own, *given = args
        values = dict(*given, **values)
        for name in values:
            _check_name(name)
        Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict`, without the attributes of Python's type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, as {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as models see it: Jinja's own filter would write characters that matter in HTML as
    escapes.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


JINJA = ImmutableSandboxedEnvironment(
    extensions=["jinja2.ext.loopcontrols", _Generation], trim_blocks=True, lstrip_blocks=True
)
"""Reads and renders models' templates."""
JINJA.filters["tojson"] = _to_json
JINJA.globals |= {
    "raise_exception": _raise,
    "strftime_now": _now,
    "dict": _Dict(),
    "namespace": _Namespace,
}


def render_messages(
    *,
    chat_template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """Return what the template writes. Raises TemplateError if it refuses, and anything else if it fails,
    because a template is a program. All values must be those of JSON.
    """
    return _compiled(chat_template).render(
        messages=list(map(_with_all_names, messages)),
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    return JINJA.from_string(template)


def _with_all_names(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put reasoning also under the names that most templates read and that gpt-oss's reads."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
