"""Converts the body of a chat to keyword arguments of the client."""

from __future__ import annotations

from penstock.client import RequestOptions
from penstock.openai.backend import ModelFacts
from penstock.openai.requests.constraints import check_beside_tools
from penstock.openai.requests.refusing import invalid_value
from penstock.openai.requests.sampling import sampling_options, sampling_params
from penstock.openai.requests.templates import template_options
from penstock.openai.requests.turns import choice_of, picture_params, tools_of, turns_of
from penstock.openai.schemas.chat import ChatBody


def chat_options(body: ChatBody, facts: ModelFacts) -> RequestOptions:
    """The keyword arguments of `generate` or `stream`. Raises ApiError, with the field, for what the front
    can tell to be wrong; the rest is the server's to tell.
    """
    tools = tools_of(body.tools or ())
    choice = choice_of(body.tool_choice, [tool.name for tool in tools])
    options = sampling_options(body, facts)
    if options["constraint"] is not None:
        param = "response_format" if body.structured_outputs is None else "structured_outputs"
        check_beside_tools(param, tools, choice)
    options["messages"] = turns_of(body.messages)
    options["tools"] = tools or None
    options["tool_choice"] = choice
    options["parallel_tool_calls"] = body.parallel_tool_calls if tools else None
    options["chat_template"] = body.chat_template
    options["template_options"] = template_options(
        body.reasoning_effort, facts.template_variables, body.chat_template_kwargs
    )
    options["max_tokens"] = _max_tokens(body)
    options["logprobs"] = _num_logprobs(body)
    if options["logprobs"] is not None:
        options["return_token_ids"] = True
    return options


def chat_params(body: ChatBody) -> dict[str, str]:
    """From the contract's path of a field to the name of the field of this request that it was made of."""
    by_old_name = body.max_tokens is not None
    params = sampling_params(body) | {
        "input": "messages",
        "chat": "messages",
        "chat.messages": "messages",
        "chat.tools": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.parallel_tool_calls": "parallel_tool_calls",
        "chat.chat_template": "chat_template",
        "chat.template_options_json": "chat_template_kwargs",
        "stopping.max_tokens": "max_tokens" if by_old_name else "max_completion_tokens",
        "output.logprobs": "top_logprobs",
    }
    for i in range(len(body.tools or ())):
        for name, field in (
            ("name", "name"),
            ("description", "description"),
            ("parameters_json", "parameters"),
        ):
            params[f"chat.tools[{i}].{name}"] = f"tools[{i}].function.{field}"
        params[f"chat.tools[{i}].strict"] = f"tools[{i}].function.strict"
    for i, message in enumerate(body.messages):
        for j in range(len(message.tool_calls or ())):
            call, made_of = f"chat.messages[{i}].tool_calls[{j}]", f"messages[{i}].tool_calls[{j}]"
            params[f"{call}.name"] = f"{made_of}.function.name"
            params[f"{call}.arguments_json"] = f"{made_of}.function.arguments"
    return params | picture_params("messages", body.messages)


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid_value("max_tokens", "it is an older name of max_completion_tokens; give one of them.")
    return new if new is not None else old


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_value("top_logprobs", "it goes with logprobs: true.")
    return (body.top_logprobs or 0) if body.logprobs else None
