"""Prepares a JSON Schema document for llguidance: reads it strictly, and adds the server's options."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from penstock.runtime.schemas.narrowing import GrammarError, narrow

JSON_WHITESPACE = r" |\n[ ]{0,32}|\n\t{0,8}"
"""What may stand between the tokens of JSON: nothing, one space, or a line break with indentation. It is
bounded, because a model might otherwise write white space forever."""

_GUIDANCE_KEY = "x-guidance"
_IGNORES_FORMATS = "ignore_unknown_formats"
_GUIDANCE_OPTIONS = ("coerce_one_of", "whitespace_flexible", _IGNORES_FORMATS)

_DRAFTS = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
)
"""The drafts that llguidance distinguishes; it would read an older one as the first of these."""
_COUNTS_CONTAINED = _DRAFTS[:2]
"""The drafts that have "minContains"."""
_MAX_EXPONENT = 1000
"""Largest exponent of a number anywhere in a schema; far beyond what a double holds."""


def any_object() -> dict[str, Any]:
    """Make the schema of any JSON object."""
    return {"type": "object", _GUIDANCE_KEY: _guidance({})}


def read_schema(text: str) -> dict[str, Any]:
    """Read the schema in `text`, for llguidance. Raises GrammarError.

    llguidance refuses keywords that it does not honour (`lenient: false`); what it honours only approximately
    is refused or narrowed here (`narrowing`).
    """
    schema = _parse(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON Schema is an object or true")
    asked = schema.pop(_GUIDANCE_KEY, {})
    options = _guidance(asked)
    draft = schema.get("$schema", _DRAFTS[0])
    if not isinstance(draft, str) or draft.removesuffix("#") not in _DRAFTS:
        raise GrammarError(f"$schema must be one of {', '.join(_DRAFTS)}")
    try:
        narrowed = narrow(
            schema,
            counts_contained=draft.removesuffix("#") in _COUNTS_CONTAINED,
            ignores_formats=asked.get(_IGNORES_FORMATS, False),
        )
        return {**narrowed, _GUIDANCE_KEY: options}
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply") from error


def _guidance(asked: Any) -> dict[str, Any]:
    """Return llguidance's options for JSON: those that the schema asks for, and the server's own."""
    if not isinstance(asked, dict):
        raise GrammarError(f"{_GUIDANCE_KEY} must be an object")
    for name, value in asked.items():
        if name not in _GUIDANCE_OPTIONS:
            raise GrammarError(f"{_GUIDANCE_KEY}: {name!r} is not one of {', '.join(_GUIDANCE_OPTIONS)}")
        if not isinstance(value, bool):
            raise GrammarError(f"{_GUIDANCE_KEY}.{name} must be true or false")
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": asked.get("coerce_one_of", False)}
    if asked.get("whitespace_flexible", True):
        return {**options, "whitespace_pattern": JSON_WHITESPACE}
    return {**options, "whitespace_flexible": False}


def _parse(text: str) -> Any:
    """Parse JSON. A name that is given twice, which JSON readers drop silently, is an error."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_decimal)
    except GrammarError:
        raise
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply") from error
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise GrammarError(f"the schema has the name {twice!r} twice in one object")
    return members


def _no_constant(name: str) -> Any:
    raise GrammarError(f"not JSON: {name}")


def _decimal(text: str) -> Decimal:
    try:
        value = Decimal(text)
    except ArithmeticError as error:
        raise GrammarError(f"the exponent of {text[:40]} is too large") from error
    if abs(value.adjusted()) > _MAX_EXPONENT:
        raise GrammarError(f"the exponent of {text[:40]} is too large")
    return value
