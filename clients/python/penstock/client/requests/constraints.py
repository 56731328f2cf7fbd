"""Constraints on an output: one class for each kind of grammar in the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.client.requests.checks import checked
from penstock.client.values.jsontext import json_text
from penstock.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The output is JSON that the schema allows. With pydantic: `JsonSchema(Model.model_json_schema())`."""

    schema: Mapping[str, Any] | str
    """The schema as a mapping, or as JSON text."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The output is any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole output matches the pattern."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Ebnf:
    """The output is a sentence of the grammar, in the server's dialect (that of Lark)."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The output is exactly one of these strings."""

    choices: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.choices, str):
            raise TypeError("choices: give a sequence of strings, not one string")
        object.__setattr__(self, "choices", tuple(self.choices))


Constraint = JsonSchema | JsonObject | Regex | Ebnf | Choice


def set_constraint(message: types_pb2.Constraint, constraint: Constraint) -> None:
    """Write the constraint into an empty message. Raises InvalidRequest, with the field, for values that JSON
    or the wire cannot carry.

    An empty list of choices is sent, too: the server refuses it, while an unset field would mean no
    constraint.
    """
    match constraint:
        case JsonSchema(schema):
            with checked("constraint.json_schema"):
                message.json_schema = json_text(schema)
        case JsonObject():
            message.json_object.SetInParent()
        case Regex(pattern):
            with checked("constraint.regex"):
                message.regex = pattern
        case Ebnf(grammar):
            with checked("constraint.ebnf"):
                message.ebnf = grammar
        case Choice(choices):
            with checked("constraint.choice.choices"):
                message.choice.SetInParent()
                message.choice.choices.extend(choices)
        case _:
            raise TypeError(
                "give JsonSchema(...), JsonObject(), Regex(...), Ebnf(...) or Choice(...), "
                f"not {type(constraint).__name__}"
            )
