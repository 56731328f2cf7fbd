"""What an output may be held to, one class for each kind of grammar. No jax."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.requests.grammar import Grammar


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The output is JSON that the schema allows; of a pydantic class: `JsonSchema(C.model_json_schema())`."""

    schema: Mapping[str, Any] | str
    """The document as a mapping, or its JSON text."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The output is any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """The pattern matches the whole output."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Ebnf:
    """The output is a sentence of the grammar, which is written in Lark's dialect or in GBNF."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The output is exactly one of these strings."""

    choices: Sequence[str]


Constraint: TypeAlias = JsonSchema | JsonObject | Regex | Ebnf | Choice


def grammar_of(constraint: Constraint) -> Grammar:
    """Return the grammar that holds an output to the constraint. InvalidRequest, with the field, where its
    source is empty, too large or no JSON; TypeError for any other class.
    """
    match constraint:
        case JsonSchema(schema):
            return Grammar.json_schema(schema if isinstance(schema, str) else _json(schema))
        case JsonObject():
            return Grammar.json_object()
        case Regex(pattern):
            return Grammar.regex(pattern)
        case Ebnf(grammar):
            return Grammar.ebnf(grammar)
        case Choice(str()):
            raise TypeError("constraint: Choice takes a sequence of strings, not one string")
        case Choice(choices):
            return Grammar.choice(choices)
        case _:
            raise TypeError(
                "constraint: give JsonSchema(...), JsonObject(), Regex(...), Ebnf(...) or Choice(...), "
                f"not {type(constraint).__name__}"
            )


def _json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(schema), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest([Violation("constraint.json_schema", f"is no JSON: {error}")]) from error
