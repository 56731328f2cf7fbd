"""The object "response", which an answer is and which some events of a stream hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.client import SamplingDefaults, Usage
from penstock.openai.answers.responses.events import json_text
from penstock.openai.failures import ApiError
from penstock.openai.schemas.response_items import Other
from penstock.openai.schemas.responses import NamedFunction, ResponsesBody, TextFormat, Tool

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt", 413: "invalid_prompt"}
"""From a status of HTTP to the code of a response's error, of which OpenAI's API has few."""


def empty_response(
    body: ResponsesBody, response_id: str, model: str, created: int, defaults: SamplingDefaults
) -> dict[str, Any]:
    """The response before the model has written anything, but for its list of items: what was asked for, and
    what is used where nothing was. `created` is in seconds of Unix time.
    """
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning is not None else None,
            "summary": None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": _first(body.temperature, defaults.temperature, 1.0),
        "text": {"format": _format(body.text.format if body.text is not None else None)},
        "tool_choice": _choice(body),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _first(body.top_p, defaults.top_p, 1.0),
        "presence_penalty": _first(body.presence_penalty, defaults.presence_penalty, 0.0),
        "frequency_penalty": _first(body.frequency_penalty, defaults.frequency_penalty, 0.0),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def ended_response(response: Mapping[str, Any], usage: Usage, *, is_whole: bool, now: int) -> dict[str, Any]:
    """The response after its last token, but for its items. One that a limit ended is not `is_whole`."""
    return {
        **response,
        "status": "completed" if is_whole else "incomplete",
        "completed_at": now if is_whole else None,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "usage": _usage(usage),
    }


def failed_response(response: Mapping[str, Any], error: ApiError) -> dict[str, Any]:
    """The response after it failed, but for its items."""
    told = {
        "code": _ERROR_CODES.get(error.status, "server_error"),
        "message": error.message,
        "param": error.param,
        "type": error.type,
    }
    return {**response, "status": "failed", "error": told}


def with_items(response: Mapping[str, Any], items: Sequence[str]) -> str:
    """The JSON of the response with these items, which are JSON already."""
    return f'{json_text(response)[:-1]},"output":[{",".join(items)}]}}'


def _first(*values: float | None) -> float:
    """The first value that there is."""
    return next(value for value in values if value is not None)


def _usage(usage: Usage) -> dict[str, Any]:
    """The figures that the server counted, which are those of its ledger."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _format(form: TextFormat | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return {
        "type": form.type,
        "name": form.name,
        "description": form.description,
        "schema": form.schema_,
        "strict": True,
    }


def _choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        return {"type": choice.type, "name": choice.name}
    return choice or "auto"


def _tool(tool: Tool) -> dict[str, Any]:
    assert not isinstance(tool, Other), "tools of other types were refused"
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
