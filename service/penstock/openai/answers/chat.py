"""Makes the answer to a chat that does not stream."""

from __future__ import annotations

from typing import Any

from penstock.client import Generation, Output, ToolCall
from penstock.openai.answers.finishing import finish_reason, stop_reason
from penstock.openai.answers.frames import Wanted
from penstock.openai.answers.logprobs import chat_logprobs, prompt_logprobs
from penstock.openai.answers.usage import usage_dict


def chat_completion(answer: Generation, created: int, wanted: Wanted) -> dict[str, Any]:
    """The object "chat.completion". Raises ApiError if an output was aborted."""
    made: dict[str, Any] = {
        "id": answer.request_id,
        "object": "chat.completion",
        "created": created,
        "model": answer.model,
        "choices": [_choice(output, wanted) for output in answer.outputs],
        "usage": usage_dict(answer.usage),
    }
    if answer.prompt.logprobs is not None and wanted.vocabulary is not None:
        made["prompt_logprobs"] = prompt_logprobs(
            answer.prompt.logprobs, answer.prompt.token_ids, wanted.vocabulary
        )
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
    if output.logprobs is not None and wanted.vocabulary is not None:
        content = chat_logprobs(output.logprobs, output.token_ids, wanted.vocabulary)
        choice["logprobs"] = {"content": content, "refusal": None}
    if wanted.token_ids:
        choice["token_ids"] = output.token_ids
    return choice
