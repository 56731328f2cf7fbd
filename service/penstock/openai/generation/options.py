"""Converts the fields that requests which generate have to keyword arguments of the client, and what they say
about the output's form to a constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from penstock.client import Choice, Ebnf, JsonObject, JsonSchema, Regex, RequestOptions, Tool
from penstock.client.generation.options import Constraint
from penstock.openai.backend import ModelFacts
from penstock.openai.failures import invalid_value, missing, unsupported_value
from penstock.openai.schemas.sampling import GenerationBody, ResponseFormat, SamplingBody, StructuredOutputs
from penstock.v1 import types_pb2


def constraint_of(
    body: GenerationBody, of_form: Constraint | None, form_field: str = "response_format"
) -> Constraint | None:
    """Return the constraint that a request asks for; None if no field asks for one. `of_form` is what the
    field `form_field` asks for.

    Raises ApiError if `structured_outputs` is not complete, and if two fields ask for different things.
    Programs that speak to several releases of vLLM ask for one thing by two names.
    """
    asked = [] if of_form is None else [(form_field, of_form)]
    if body.structured_outputs is not None:
        asked.append(("structured_outputs", _of_structured_outputs(body.structured_outputs)))
    for name, made in _OTHER_NAMES.items():
        if (value := getattr(body, name)) is not None:
            asked.append((name, made(value)))
    for name, constraint in asked[1:]:
        if constraint != asked[0][1]:
            raise invalid_value(name, f"it cannot go together with {asked[0][0]}.")
    return asked[0][1] if asked else None


def constraint_field(body: GenerationBody, form_field: str | None) -> str | None:
    """Name the first field that asks for a constraint, if one does: `form_field` if that is given."""
    names = ("structured_outputs", *_OTHER_NAMES)
    return form_field or next((name for name in names if getattr(body, name) is not None), None)


def response_format_field(body: SamplingBody) -> str | None:
    """Return its name if it asks for a constraint."""
    return None if body.response_format is None or body.response_format.type == "text" else "response_format"


def schema_constraint(schema: Mapping[str, Any] | str, *, strict: bool) -> JsonSchema:
    """Make the constraint of a schema. If that is not strict, a format that the server does not know is a
    remark; a schema that comes as text says so itself.
    """
    asked = {} if isinstance(schema, str) else schema.get("x-guidance", {})
    if strict or isinstance(schema, str) or not isinstance(asked, Mapping):
        return JsonSchema(schema)
    return JsonSchema({**schema, "x-guidance": {"ignore_unknown_formats": True, **asked}})


def requires_call(choice: object) -> bool:
    """Say whether a choice of tools, a word or an object that names one, leaves the model nothing but a
    call.
    """
    return choice not in (None, "none", "auto")


def form_beside_tools(
    form: Constraint | None, field: str | None, tools: Sequence[Tool], choice: str | None
) -> Constraint | None:
    """Return the constraint on the output for a form of the answer, which `field` (`constraint_field`) asks
    for. There is none where a call is required, because the form is that of answers in words. Where the model
    is free to call strict tools, the output is either calls or the answer.

    Raises ApiError for a form that would keep the model from calling tools, and, where a call is required,
    for vLLM's and SGLang's fields, whose forms are those of all that is written.
    """
    if form is None or field is None or not tools or choice == "none":
        return form
    if requires_call(choice):
        if field in ("structured_outputs", *_OTHER_NAMES):
            raise unsupported_value(field, "it contradicts a tool_choice that requires a call.")
        return None
    if not any(tool.strict for tool in tools):
        raise unsupported_value(
            field,
            "it keeps the model from calling tools of which none is strict; make one strict, leave them out, "
            "or give tool_choice none.",
        )
    return form


def constraint_params(field: str | None) -> dict[str, str]:
    """Map contract paths of the constraint to the fields of the request that it was made of. `field` is what
    `constraint_field` tells.
    """
    if field == "response_format":
        return {"constraint": field, "constraint.json_schema": "response_format.json_schema.schema"}
    if field == "text.format":
        return {"constraint": field, "constraint.json_schema": "text.format.schema"}
    inner = field in (None, "structured_outputs")
    return {"constraint": field or "structured_outputs"} | {
        f"constraint.{path}": f"structured_outputs.{name}" if inner else str(field)
        for path, name in _KINDS.items()
    }


_KINDS: Final = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "ebnf": "grammar",
    "choice": "choice",
    "choice.choices": "choice",
}
"""From the contract's kinds of constraints to the fields of `structured_outputs`."""
_OTHER_NAMES: Final[Mapping[str, Callable[[Any], Constraint]]] = {
    "guided_json": lambda schema: schema_constraint(schema, strict=False),
    "guided_regex": Regex,
    "guided_choice": Choice,
    "guided_grammar": Ebnf,
    "regex": Regex,
    "ebnf": Ebnf,
}
"""The fields that ask for a constraint as a field of `structured_outputs` does."""


def _of_response_format(form: ResponseFormat) -> Constraint | None:
    if form.type == "json_schema" and form.json_schema is None:
        raise missing("response_format.json_schema")
    if form.type != "json_schema" and form.json_schema is not None:
        raise invalid_value("response_format.json_schema", 'it goes with the type "json_schema".')
    if form.json_schema is not None:
        return schema_constraint(form.json_schema.schema_, strict=bool(form.json_schema.strict))
    return JsonObject() if form.type == "json_object" else None


def _of_structured_outputs(structured: StructuredOutputs) -> Constraint:
    asked: list[Constraint] = []
    if structured.json_ is not None:
        asked.append(schema_constraint(structured.json_, strict=False))
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


_SEEDS = 2**64
_SAMPLING = tuple(
    field.name
    for field in types_pb2.SamplingParams.DESCRIPTOR.fields
    if field.name in GenerationBody.model_fields
)
_STOPPING = ("min_tokens", "stop", "stop_token_ids", "ignore_eos", "time_limit")

PARAMS: Mapping[str, str] = {
    **{f"sampling.{name}": name for name in _SAMPLING},
    **{f"stopping.{name}": name for name in _STOPPING},
    "stopping.include_stop": "include_stop_str_in_output",
    "output.skip_special_tokens": "skip_special_tokens",
    "cache.cache_salt": "cache_salt",
    "model": "model",
    "adapter": "model",
    "priority": "priority",
    "request_id": "request_id",
}
"""From the contract's path of a field to the name of the field in HTTP that it was made of."""


def generation_options(body: GenerationBody, facts: ModelFacts) -> RequestOptions:
    """Make the keyword arguments for how tokens are drawn and when outputs end.

    `structured_outputs` and `request_id` are left to others: the first may contradict another field, and the
    second is a part of the answer's id. Raises ApiError for a key of `logit_bias` that is no token id, and
    for more keys than the model has tokens.
    """
    sampling = {name: getattr(body, name) for name in _SAMPLING}
    sampling["top_k"] = None if body.top_k is None else max(body.top_k, 0)
    sampling["seed"] = None if body.seed is None else body.seed % _SEEDS
    sampling["logit_bias"] = _biases(body.logit_bias, facts.vocab_size)
    return RequestOptions(
        **cast(RequestOptions, sampling),
        **facts.asked_for(body.model),
        min_tokens=body.min_tokens,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        include_stop=body.include_stop_str_in_output,
        time_limit=body.time_limit,
        skip_special_tokens=body.skip_special_tokens,
        cache_salt=body.cache_salt,
        priority=None if body.priority is None else -body.priority,
    )


def _biases(biases: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if biases is None:
        return None
    if len(biases) > vocab_size:  # so many would take long to convert, only to be refused by the server
        why = f"it has {len(biases)} token ids, and the model has {vocab_size} tokens."
        raise invalid_value("logit_bias", why)
    for key in biases:
        # "01" would be a second key for the token 1.
        if not (key.isascii() and key.isdigit() and len(key) < 11 and str(int(key)) == key):
            raise invalid_value("logit_bias", f"its keys are token ids, and {key[:40]!r} is none.")
    return {int(key): bias for key, bias in biases.items()}


def sampling_params(body: SamplingBody) -> dict[str, str]:
    """Map the contract's path of a field to the name of the field of this request that it was made of."""
    return {
        **PARAMS,
        **constraint_params(constraint_field(body, response_format_field(body))),
        "sampling.n": "n",
        "output.prompt_logprobs": "prompt_logprobs",
        "output.token_ids": "return_token_ids",
        "output.echo_prompt_token_ids": "return_token_ids",
        "context": "truncate_prompt_tokens",
    }


def sampling_options(body: SamplingBody, facts: ModelFacts) -> RequestOptions:
    """Make the keyword arguments for everything but the input, `max_tokens` and log-probabilities of the
    output.

    Raises ApiError for fields that contradict each other.
    """
    asked = body.stream_options
    if asked is not None and not body.stream:
        raise invalid_value("stream_options", "it goes with stream: true.")
    if asked is not None and asked.continuous_usage_stats and not asked.include_usage:
        raise invalid_value("stream_options.continuous_usage_stats", "it goes with include_usage: true.")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid_value("prompt_logprobs", "a stream has none; leave stream out.")
    wants_ids = bool(body.return_token_ids)
    options = generation_options(body, facts)
    options["n"] = body.n
    options["return_token_ids"] = wants_ids or counts_tokens(body)
    options["prompt_logprobs"] = body.prompt_logprobs
    options["echo_prompt_token_ids"] = wants_ids or body.prompt_logprobs is not None
    of_form = None if body.response_format is None else _of_response_format(body.response_format)
    options["constraint"] = constraint_of(body, of_form)
    if body.truncate_prompt_tokens is not None:
        options["truncation"] = "left"
        options["reserve_tokens"] = _reserved(body.truncate_prompt_tokens, facts.max_context_tokens)
    return options


def counts_tokens(body: SamplingBody) -> bool:
    """Say whether every chunk of the stream tells the usage so far, for which the tokens of each are
    counted.
    """
    asked = body.stream_options
    return asked is not None and bool(asked.continuous_usage_stats)


def _reserved(kept: int, max_context_tokens: int) -> int | None:
    """Return the room that leaves `kept` tokens to the prompt; None to take the server's default."""
    if kept == 0:
        raise invalid_value("truncate_prompt_tokens", "at least one token must be kept.")
    return max_context_tokens - kept if 0 < kept < max_context_tokens else None
