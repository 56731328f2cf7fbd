"""Finds the keywords of a JSON Schema that ask for nothing where they stand, such as `uniqueItems: false`.

Programs that make schemas write them, and llguidance refuses them as it refuses all keywords that it does
not know. They are honoured by leaving them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

KINDS = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
"""The types of JSON, as schemas name them."""
_ABOUT: Mapping[str, str] = {
    "format": "string",
    "uniqueItems": "array",
    "contains": "array",
    "minContains": "array",
    "maxContains": "array",
    "unevaluatedItems": "array",
    "propertyNames": "object",
    "dependentRequired": "object",
    "dependentSchemas": "object",
    "dependencies": "object",
    "unevaluatedProperties": "object",
}
"""Keywords that llguidance may refuse, and the only type of which they ask for something."""
_REFUSED_REMARKS = frozenset({"$dynamicAnchor", "$recursiveAnchor", "contentSchema"})
"""Keywords that never restrict a value, but that llguidance refuses or whose schema need not be read."""
_REMARKS = _REFUSED_REMARKS | {
    "$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType",
    "default", "definitions", "deprecated", "description", "examples", "id", "readOnly", "title", "writeOnly",
}  # fmt: skip
"""All keywords that describe, name or define something, and never restrict a value."""
_EMPTY: Mapping[str, Any] = {
    "minLength": 0, "minItems": 0, "minProperties": 0, "pattern": "", "required": [], "properties": {},
    "patternProperties": {}, "prefixItems": [], "items": True, "additionalItems": True,
    "additionalProperties": True, "allOf": [],
}  # fmt: skip
"""Keywords that llguidance knows, each with a value by which it asks for nothing."""


def without_neutral(schema: Mapping[str, Any], *, counts_contained: bool = True) -> dict[str, Any]:
    """Return the schema without those of its own keywords that every value satisfies and llguidance may
    refuse.

    `counts_contained`: whether the schema's draft has "minContains", so that "contains" may ask for no item.
    """
    if not counts_contained:
        schema = {key: value for key, value in schema.items() if key not in ("minContains", "maxContains")}
    kinds = _kinds(schema)
    return {
        key: value
        for key, value in schema.items()
        if not (key in _REFUSED_REMARKS or _is_neutral(key, value, schema, kinds))
    }


def asks_nothing(schema: Any, kinds: frozenset[str] = KINDS) -> bool:
    """Say whether every value of these types satisfies the schema, as each of its keywords shows by
    itself.
    """
    if not isinstance(schema, dict):
        return schema is True
    return all(
        key in _REMARKS
        or (key == "type" and kinds <= _named(value))
        or (key in _EMPTY and _is(value, _EMPTY[key]))
        or _is_neutral(key, value, schema, kinds)
        for key, value in schema.items()
    )


def _is_neutral(key: str, value: Any, schema: Mapping[str, Any], kinds: frozenset[str]) -> bool:
    """Say whether every value of these types satisfies a keyword that llguidance may refuse."""
    if key in _ABOUT and _ABOUT[key] not in kinds:
        return True
    match key:
        case "uniqueItems":
            return value is False or (_is_number(schema.get("maxItems")) and schema["maxItems"] <= 1)
        case "unevaluatedItems":
            # What another keyword has judged is evaluated: "items" judges all that "prefixItems" leaves.
            return asks_nothing(value) or isinstance(schema.get("items"), dict | bool)
        case "unevaluatedProperties":
            return asks_nothing(value) or "additionalProperties" in schema
        case "propertyNames":
            return asks_nothing(value, frozenset({"string"}))
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(_depends_on_nothing(one, schema) for one in value.values())
        case "patternProperties":
            others = [schema.get(one, True) for one in ("additionalProperties", "unevaluatedProperties")]
            return isinstance(value, dict) and all(map(asks_nothing, [*value.values(), *others]))
        case "contains":
            return _is(schema.get("minContains"), 0) and "maxContains" not in schema
        case "minContains":
            return "contains" not in schema or (_is(value, 0) and "maxContains" not in schema)
        case "maxContains":
            return "contains" not in schema
        case "not":
            return _admits_nothing(value)
        case "if":
            return all(asks_nothing(schema.get(branch, True)) for branch in ("then", "else"))
        case "then" | "else":
            return "if" not in schema or _is_neutral("if", schema["if"], schema, kinds)
    return False


def _admits_nothing(schema: Any) -> bool:
    return schema is False or (isinstance(schema, dict) and asks_nothing(schema.get("not")))


def _depends_on_nothing(needed: Any, schema: Mapping[str, Any]) -> bool:
    """Say whether a member asks for no others: for a schema that asks nothing, or names that must come
    anyway.
    """
    if not isinstance(needed, list):
        return asks_nothing(needed)
    required = schema.get("required")
    return all(isinstance(required, list) and name in required for name in needed)


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that the schema's "type" admits; all where it has none that can be read."""
    return (_named(schema.get("type")) & KINDS) or KINDS


def _named(names: Any) -> frozenset[str]:
    listed = names if isinstance(names, list) else [names]
    named = frozenset(name for name in listed if isinstance(name, str))
    return named | {"integer"} if "number" in named else named


def _is(value: Any, other: Any) -> bool:
    """Say whether two values of JSON are equal; in Python, False is also 0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)
