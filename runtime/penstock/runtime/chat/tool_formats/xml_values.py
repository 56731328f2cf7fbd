"""What the text of an argument means where it has no quotes: the tool's JSON Schema decides.

An argument that can only be a string is its text as it stands. An argument that cannot be a string is read as
JSON, or as a Python literal, which models write too, because some templates show `True` and `None`. Where the
schema admits both, or neither way of reading succeeds, the text is a string unless it is a value of an
admitted type. An argument of which the schema says no type, or that it does not list, is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from penstock.runtime.chat.tool_formats.json_scan import json_value
from penstock.runtime.chat.tool_formats.python_scan import python_value
from penstock.runtime.chat.tool_formats.reader import Reader, T, Wait
from penstock.runtime.schemas.neutral import KINDS

_MAX_REFERENCES = 16
"""A type is not looked for behind more references and unions than this, which may be circles."""
_INTEGER = re.compile(r"-?[0-9]+")
_ANYTHING: Mapping[str, Any] = {}


def property_schema(parameters: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the schema of one argument, empty where nothing is said of it."""
    properties = parameters.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    if found is None:
        found = parameters.get("additionalProperties")
    return found if isinstance(found, Mapping) else _ANYTHING


def kinds_of(schema: Any, parameters: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Return the types that the schema of an argument admits, as JSON Schema names them; None if it does not
    say.

    A number's type includes "integer". `parameters` is the schema of all arguments, for references into it.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return None
    said: list[frozenset[str] | None] = []
    if "$ref" in schema:
        said.append(kinds_of(referred(schema["$ref"], parameters), parameters, depth + 1))
    if "type" in schema:
        said.append(_named(schema["type"]))
    if (members := members_of(schema)) is not None:
        said.append(frozenset(kind_of(json.dumps(member)) for member in members))
    said += [
        _either([kinds_of(one, parameters, depth + 1) for one in schema[key]])
        for key in ("anyOf", "oneOf")
        if isinstance(schema.get(key), list)
    ]
    if isinstance(schema.get("allOf"), list):
        said += [kinds_of(one, parameters, depth + 1) for one in schema["allOf"]]
    known = [kinds for kinds in said if kinds is not None]
    return frozenset.intersection(*known) if known else None


def members_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """List the only values that the schema admits, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def value_json(text: str, schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Write the value that the text of an argument means, as JSON text."""
    kinds = kinds_of(schema, parameters)
    if kinds is not None and text not in (members_of(schema) or ()):
        literal = text.strip()
        found = literal if _whole(json_value, literal) else _whole(python_value, literal)
        kind = kind_of(found) if found else "string"
        if found and ("string" not in kinds or (kind != "string" and kind in kinds)):
            return found
    return json.dumps(text, ensure_ascii=False)


def _whole(scanner: Callable[[Reader], Wait[T]], text: str) -> T | None:
    """Return what the scanner finds in the text, if that is all of the text."""
    r = Reader()
    r.add(text)
    r.ended = True
    run = scanner(r)
    try:
        next(run)
    except StopIteration as found:
        result: T = found.value
        return result if r.pos == len(text) else None
    raise AssertionError("nothing is waited for after the end")


def _named(names: Any) -> frozenset[str] | None:
    listed = names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) and name in KINDS for name in listed):
        return None
    return frozenset(listed) | ({"integer"} if "number" in listed else set())


def _either(kinds: list[frozenset[str] | None]) -> frozenset[str] | None:
    known = [one for one in kinds if one is not None]
    return frozenset[str]().union(*known) if len(known) == len(kinds) else None


def referred(reference: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the schema that a reference into `parameters` names; None for any other."""
    if not isinstance(reference, str) or not re.match("#(/|$)", reference):
        return None
    found: Any = parameters
    for step in unquote(reference[1:]).split("/")[1:]:
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def kind_of(value: str) -> str:
    """Name the type of a JSON text."""
    first = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
    return first.get(value[0]) or ("integer" if _INTEGER.fullmatch(value) else "number")
