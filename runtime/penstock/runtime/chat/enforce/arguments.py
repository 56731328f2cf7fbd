"""The schema that the arguments of a call follow.

Arguments of a strict tool follow every keyword of its schema, or the request is refused. Those of another
tool follow it as far as llguidance can express it where a call must be made, and are any object elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.runtime.chat.enforce.lark import Lark
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.schemas.json_schema import read_schema
from penstock.runtime.schemas.narrowing import GrammarError

_SAYS_MORE = frozenset({
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "patternProperties",
    "additionalProperties", "unevaluatedProperties",
})  # fmt: skip
"""Keywords that decide, beside "properties", which other properties may come."""


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Make the schema of the arguments: an object and, if the tool lists properties and does not say more,
    only those properties.

    The contract allows a model to add others, but a grammar that did so would lead it astray.
    """
    schema = {**tool.parameters, "type": "object"}
    if "properties" in schema and not _SAYS_MORE & schema.keys():
        schema["additionalProperties"] = False
    return schema


def arguments(g: Lark, chat: Chat, tool: Tool) -> str:
    """Add a rule for the arguments as a JSON object; return its name. InvalidRequest for the schema of a
    strict tool that cannot be obeyed.
    """
    if not follows_schema(chat, tool):
        return g.json({"type": "object"})
    return value(g, chat, tool, arguments_schema(tool))


def value(g: Lark, chat: Chat, tool: Tool, schema: Mapping[str, Any]) -> str:
    """Do the same as `arguments`, for a part of them with a schema of its own."""
    if not tool.strict:
        return g.json(schema)
    return g.json(check(chat, tool, schema), exact=True)


def check(chat: Chat, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema, or a part of it, of a strict tool, ready for `Lark.json`. InvalidRequest if it
    cannot be obeyed.
    """
    try:
        return read_schema(json.dumps(schema))
    except GrammarError as error:
        at = f"chat.tools[{chat.tools.index(tool)}].parameters_json"
        raise InvalidRequest([Violation(at, str(error))]) from error


def follows_schema(chat: Chat, tool: Tool) -> bool:
    """Say whether calls of the tool follow its schema, and not only its form."""
    return tool.strict or bool(chat.required_tools)


def check_names(chat: Chat, spelling: re.Pattern[str], where: str) -> None:
    """Raise InvalidRequest, naming each, if tools whose calls follow their schemas have names that `spelling`
    does not match: the form cannot write them. `where` says in words what a name is written as.
    """
    bad = [
        Violation(
            f"chat.tools[{chat.tools.index(tool)}].name", f"{tool.name[:40]!r} cannot be written as {where}"
        )
        for tool in chat.callable_tools
        if follows_schema(chat, tool) and not spelling.fullmatch(tool.name)
    ]
    if bad:
        raise InvalidRequest(bad)
