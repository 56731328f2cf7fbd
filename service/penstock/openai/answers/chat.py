"""Makes the answer to a chat that does not stream."""

from __future__ import annotations

from typing import Any

from penstock.client import Generation, Output, ToolCall
from penstock.openai.answers.finishing import finish_reason, stop_reason
from penstock.openai.answers.frames import Wanted
from penstock.openai.answers.large import chat_logprobs_json, prompt_logprobs_json, spliced
from penstock.openai.answers.usage import usage_dict
from penstock.openai.jsonbytes import json_bytes


async def chat_answer(answer: Generation, created: int, wanted: Wanted) -> bytes:
    """The JSON of `chat_completion`, with log-probabilities. Raises ApiError if an output was aborted."""
    made = chat_completion(answer, created, wanted)
    if wanted.vocabulary is None:
        return json_bytes(made)
    choices = [{"logprobs": await chat_logprobs_json(output, wanted.vocabulary)} for output in answer.outputs]
    more = {}
    if answer.prompt.logprobs is not None:
        more["prompt_logprobs"] = await prompt_logprobs_json(answer.prompt, wanted.vocabulary)
    return spliced(made, more, choices)


def chat_completion(answer: Generation, created: int, wanted: Wanted) -> dict[str, Any]:
    """The object "chat.completion", without log-probabilities. Raises ApiError if an output was aborted."""
    made: dict[str, Any] = {
        "id": answer.request_id,
        "object": "chat.completion",
        "created": created,
        "model": answer.model,
        "choices": [_choice(output, wanted) for output in answer.outputs],
        "usage": usage_dict(answer.usage),
    }
    if wanted.token_ids:
        made["prompt_token_ids"] = answer.prompt.token_ids
    return made


def tool_call_dict(call: ToolCall) -> dict[str, Any]:
    """A call as it stands in a message."""
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _choice(output: Output, wanted: Wanted) -> dict[str, Any]:
    calls = [tool_call_dict(call) for call in output.tool_calls]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": output.text if output.text or not calls else None,
        "refusal": None,
        "annotations": [],
    }
    if calls:
        message["tool_calls"] = calls
    if output.reasoning and wanted.reasoning:
        message["reasoning"] = output.reasoning
    choice: dict[str, Any] = {
        "index": output.index,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_reason(output.finish, has_calls=bool(calls)),
        **stop_reason(output.finish),
    }
    if wanted.token_ids:
        choice["token_ids"] = output.token_ids
    return choice
