"""Why an output ended, in OpenAI's words."""

from __future__ import annotations

from typing import Any

from penstock.client import Finish, FinishReason
from penstock.openai.failures import ApiError

_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_FULL: "length",
    FinishReason.TIME_LIMIT: "length",
}


def finish_reason(finish: Finish, *, has_calls: bool = False) -> str:
    """OpenAI's word for it. A limit of any kind, also of time, is "length".

    Raises ApiError where the output was aborted, for which OpenAI has no word: half an answer must not look
    like a whole one. Clients do not try again by themselves then, as somebody has ended the request on
    purpose.
    """
    reason = _REASONS.get(finish.reason)
    if reason is None:
        why = f": {finish.message}" if finish.message else ""
        raise ApiError(503, f"The request was aborted{why}", "server_error", code="aborted", may_retry=False)
    return "tool_calls" if has_calls and reason == "stop" else reason


def stop_reason(finish: Finish) -> dict[str, Any]:
    """vLLM's field that names what the output stopped at; empty unless it is one of the caller's stops."""
    if finish.reason is not FinishReason.STOP:
        return {}
    return {"stop_reason": finish.stop if finish.stop is not None else finish.token_id}
