"""POST /v1/responses: each request brings the whole conversation, or goes on from a response that is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import ChatOptions, JsonObject, RequestOptions, Tool
from penstock.client.generation.options import Constraint
from penstock.openai.backend import ModelFacts
from penstock.openai.calls import call_of
from penstock.openai.endpoints import ignored_in, name_params
from penstock.openai.failures import invalid_value, missing, unsupported_value
from penstock.openai.front import front_of
from penstock.openai.generation.options import (
    PARAMS,
    constraint_field,
    constraint_of,
    constraint_params,
    form_beside_tools,
    generation_options,
    requires_call,
    schema_constraint,
)
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, json_response, late_error, sse
from penstock.openai.routes.responses.stored import check_sizes, kept_of, previous_of, without_references
from penstock.openai.routes.responses.tools import ignored_tools, offered_of
from penstock.openai.routes.responses.turns import has_images, turn_params, turns_of
from penstock.openai.routes.responses.writing import Asked, read_response, response_events, whole_response
from penstock.openai.routes.tokens import check_model
from penstock.openai.routes.turns import template_options, variables_of_effort
from penstock.openai.schemas.responses import (
    AllowedTools,
    CustomTool,
    InputTokensBody,
    Item,
    ResponsesBody,
    TextFormat,
)

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_INCLUDABLE = (LOGPROBS, ENCRYPTED_REASONING)


def _chat_of(
    body: ResponsesBody | InputTokensBody,
    facts: ModelFacts,
    previous: Sequence[Item],
    tools: Sequence[Tool],
    choice: str | None,
) -> ChatOptions:
    """Make the conversation that the model is given. Raises ApiError, with the field."""
    return ChatOptions(
        messages=turns_of(() if body.input is None else body.input, body.instructions, previous),
        tools=tools or None,
        tool_choice=choice,
        template_options=template_options(
            body.reasoning.effort if body.reasoning is not None else None,
            facts.template_variables,
            body.chat_template_kwargs,
            "reasoning.effort",
        ),
    )


def response_options(body: ResponsesBody, facts: ModelFacts, previous: Sequence[Item] = ()) -> RequestOptions:
    """Make the keyword arguments of `generate` or `stream`, for a conversation that begins with the
    `previous` items. Raises ApiError, with the field, for what the front can tell to be wrong; the rest is
    the server's to tell.
    """
    _check_values(body)
    functions, choice = offered_of(body.tools, body.tool_choice)
    tools = [function.offered() for function in functions]
    options: RequestOptions = {
        **generation_options(body, facts),
        **_chat_of(body, facts, previous, tools, choice),
    }
    field = constraint_field(body, _format_field(body))
    options["constraint"] = form_beside_tools(_constraint(body), field, tools, choice)
    options["parallel_tool_calls"] = body.parallel_tool_calls if tools else None
    options["max_tokens"] = body.max_output_tokens
    options["truncation"] = "left" if body.truncation == "auto" else "reject"
    options["logprobs"] = _num_logprobs(body)
    options["return_token_ids"] = options["logprobs"] is not None
    return options


def response_ignored(body: ResponsesBody, facts: ModelFacts, *, keeps: bool = False) -> set[str]:
    """Return the fields that have no effect, besides those that the body itself ignores. `keeps`: whether the
    front keeps responses.
    """
    ignored = _chat_ignored(body, facts)
    if body.store and not keeps:
        ignored.add("store")
    form, choice = body.text.format if body.text is not None else None, body.tool_choice
    mode = choice.mode if isinstance(choice, AllowedTools) else choice
    if form is not None and form.type != "text" and requires_call(mode):
        ignored.add("text.format")
    return ignored


def _chat_ignored(body: ResponsesBody | InputTokensBody, facts: ModelFacts) -> set[str]:
    """Name those that are about the conversation."""
    ignored = ignored_tools(body.tools)
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort and not variables_of_effort(effort, facts.template_variables):
        ignored.add("reasoning.effort")
    return ignored


def response_params(body: ResponsesBody, previous: Sequence[Item] = ()) -> dict[str, str]:
    """Map the contract's path of a field to the name of the field of this request that it was made of."""
    return {
        **PARAMS,
        **constraint_params(constraint_field(body, _format_field(body))),
        **_chat_params(body, previous),
        "chat.parallel_tool_calls": "parallel_tool_calls",
        "stopping.max_tokens": "max_output_tokens",
        "output.logprobs": "top_logprobs",
        "context": "truncation",
    }


def _chat_params(body: ResponsesBody | InputTokensBody, previous: Sequence[Item]) -> dict[str, str]:
    """Return the part of that which is about the conversation."""
    params = {
        **turn_params(() if body.input is None else body.input, body.instructions, previous),
        "input": "input",
        "chat": "input",
        "chat.tools": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.template_options_json": "chat_template_kwargs",
    }
    functions, _ = offered_of(body.tools, body.tool_choice)
    for i, function in enumerate(functions):
        schema = "format" if isinstance(function.tool, CustomTool) else "parameters"
        params[f"chat.tools[{i}]"] = function.path
        params[f"chat.tools[{i}].parameters_json"] = f"{function.path}.{schema}"
    return params


def is_included(body: ResponsesBody, name: str) -> bool:
    """Say whether the request includes further data of this name in the answer."""
    return name in (body.include or ())


def _check_values(body: ResponsesBody) -> None:
    """Raise ApiError for values of which the front takes only some."""
    if body.background:
        raise unsupported_value("background", "a response is made while its caller waits; leave it out.")
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "it goes with stream: true.")
    for i, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            raise unsupported_value(f"include[{i}]", f"answers can include {' and '.join(_INCLUDABLE)}.")


def _constraint(body: ResponsesBody) -> Constraint | None:
    of_format = (
        _of_format(body.text.format) if body.text is not None and body.text.format is not None else None
    )
    return constraint_of(body, of_format, "text.format")


def _of_format(form: TextFormat) -> Constraint | None:
    if form.type == "json_schema":
        for name, value in (("name", form.name), ("schema", form.schema_)):
            if value is None:
                raise missing(f"text.format.{name}")
        return schema_constraint(form.schema_ or {}, strict=bool(form.strict))
    for name in form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True):
        raise invalid_value(f"text.format.{name}", 'it goes with the type "json_schema".')
    return JsonObject() if form.type == "json_object" else None


def _format_field(body: ResponsesBody) -> str | None:
    """Return its name if it asks for a constraint."""
    form = None if body.text is None else body.text.format
    return None if form is None or form.type == "text" else "text.format"


def _num_logprobs(body: ResponsesBody) -> int | None:
    """Tell how many of the likeliest tokens are told beside each token; None for no log-probabilities."""
    if is_included(body, LOGPROBS):
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid_value("top_logprobs", f'it goes with include: ["{LOGPROBS}"].')
    return None


async def create_response(request: Request) -> Response:
    """Serve POST /v1/responses."""
    call, front = call_of(request), front_of(request)
    backend = front.backend
    body = await read_body(request, ResponsesBody)
    facts = await backend.facts(call)
    previous = await previous_of(front, call.key, body.previous_response_id)
    items = await without_references(front, call.key, body.input)
    check_sizes(previous, items)
    body = body.model_copy(update={"input": items})
    ignored_in(request.scope).update(response_ignored(body, facts, keeps=front.store is not None))
    if has_images(body.input) or has_images(previous.items):
        # Base64 of megabytes is read in a thread, so that other requests do not wait for it.
        options = await asyncio.to_thread(response_options, body, facts, previous.items)
    else:
        options = response_options(body, facts, previous.items)
    params = partial(response_params, body, previous.items)
    name_params(request.scope, params)
    wants_logprobs = options["logprobs"] is not None
    asked = Asked(
        body=body,
        number=body.request_id or call.number,
        created=call.created,
        defaults=facts.default_sampling,
        carries_reasoning=is_included(body, ENCRYPTED_REASONING),
        is_kept=front.store is not None and body.store is not False,
        vocabulary=await backend.vocabulary(call) if wants_logprobs else None,
    )
    options["request_id"] = asked.response_id

    async def keep(response: str) -> None:
        if front.store is not None and asked.is_kept:
            kept = await asyncio.to_thread(kept_of, response, previous, body.input, call.number)
            await front.store.keep(call.key, asked.response_id, kept)

    if body.stream:
        stream = backend.client.stream(
            tool_call_deltas=True, timeout=call.timeout, metadata=call.metadata, **options
        )
        events = response_events(stream, asked, lambda error: late_error(request, error), keep)
        return await sse(request, events)
    if wants_logprobs:
        stream = backend.client.stream(timeout=call.timeout, metadata=call.metadata, **options)
        made = await answered(request, read_response(stream, asked))
    else:
        answer = await answered(
            request, backend.client.generate(timeout=call.timeout, metadata=call.metadata, **options)
        )
        made = whole_response(answer, asked)
    await keep(made)
    return Response(made, media_type="application/json")


async def count_input_tokens(request: Request) -> Response:
    """Serve POST /v1/responses/input_tokens."""
    call, front = call_of(request), front_of(request)
    body = await read_body(request, InputTokensBody)
    await check_model(body.model, front, call)
    facts = await front.backend.facts(call)
    previous = await previous_of(front, call.key, body.previous_response_id)
    items = await without_references(front, call.key, () if body.input is None else body.input)
    check_sizes(previous, items)
    body = body.model_copy(update={"input": items})
    ignored_in(request.scope).update(_chat_ignored(body, facts))
    functions, choice = offered_of(body.tools, body.tool_choice)
    tools = [function.offered() for function in functions]
    # Base64 of images may have megabytes, and is read in a thread.
    chat = await asyncio.to_thread(_chat_of, body, facts, previous.items, tools, choice)
    name_params(request.scope, partial(_chat_params, body, previous.items))
    asked = front.backend.client.tokenize(timeout=call.timeout, metadata=call.metadata, **chat)
    told = await answered(request, asked)
    return json_response({"object": "response.input_tokens", "input_tokens": len(told.token_ids)})
