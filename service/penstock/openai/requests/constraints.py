"""Makes the constraint on an output of what a request says about its form."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.client import Choice, Ebnf, JsonObject, JsonSchema, Regex, Tool
from penstock.client.generation.options import Constraint
from penstock.openai.requests.refusing import invalid_value, missing, unsupported_value
from penstock.openai.schemas.sampling import ResponseFormat, StructuredOutputs


def constraint_of(form: ResponseFormat | None, structured: StructuredOutputs | None) -> Constraint | None:
    """The constraint that `response_format` or `structured_outputs` asks for; None if neither asks for one.

    Raises ApiError if both do, or if one is not complete.
    """
    of_form = None if form is None else _of_response_format(form)
    of_structured = None if structured is None else _of_structured_outputs(structured)
    if of_form is not None and of_structured is not None:
        raise invalid_value("structured_outputs", "it cannot go together with response_format.")
    return of_form or of_structured


def check_beside_tools(param: str, tools: Sequence[Tool], choice: str | None) -> None:
    """Raises ApiError for a constraint, which the field `param` asks for, that would keep the model from
    calling tools. Where it is free to call strict ones, the output is either calls or the answer.
    """
    if not tools or choice == "none":
        return
    if choice not in (None, "auto"):
        raise unsupported_value(param, "it contradicts a tool_choice that requires a call.")
    if not any(tool.strict for tool in tools):
        raise unsupported_value(
            param,
            "it keeps the model from calling tools of which none is strict; make one strict, leave them out, "
            "or give tool_choice none.",
        )


def constraint_params(form: ResponseFormat | None) -> dict[str, str]:
    """From contract paths of the constraint to the fields of the request that it was made of."""
    if form is not None and form.type != "text":
        return {
            "constraint": "response_format",
            "constraint.json_schema": "response_format.json_schema.schema",
        }
    return {
        "constraint": "structured_outputs",
        "constraint.json_schema": "structured_outputs.json",
        "constraint.json_object": "structured_outputs.json_object",
        "constraint.regex": "structured_outputs.regex",
        "constraint.ebnf": "structured_outputs.grammar",
        "constraint.choice": "structured_outputs.choice",
        "constraint.choice.choices": "structured_outputs.choice",
    }


def _of_response_format(form: ResponseFormat) -> Constraint | None:
    if form.type == "json_schema" and form.json_schema is None:
        raise missing("response_format.json_schema")
    if form.type != "json_schema" and form.json_schema is not None:
        raise invalid_value("response_format.json_schema", 'it goes with the type "json_schema".')
    if form.json_schema is not None:
        return JsonSchema(form.json_schema.schema_)
    return JsonObject() if form.type == "json_object" else None


def _of_structured_outputs(structured: StructuredOutputs) -> Constraint:
    asked: list[Constraint] = []
    if structured.json_ is not None:
        asked.append(JsonSchema(structured.json_))
    if structured.regex is not None:
        asked.append(Regex(structured.regex))
    if structured.choice is not None:
        asked.append(Choice(structured.choice))
    if structured.grammar is not None:
        asked.append(Ebnf(structured.grammar))
    if structured.json_object is not None:
        asked.append(JsonObject())
    if len(asked) != 1:
        raise invalid_value("structured_outputs", "give one of json, regex, choice, grammar and json_object.")
    return asked[0]
