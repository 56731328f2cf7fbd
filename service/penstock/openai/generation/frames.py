"""What of an answer is sent, why an output ended, usage, and what all chunks of a stream have around their
choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.client import Finish, FinishReason, Usage, Vocabulary
from penstock.openai.failures import ApiError
from penstock.openai.generation.logprobs import TextTokens
from penstock.openai.jsonbytes import json_bytes, json_string
from penstock.openai.schemas.sampling import StreamOptions


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Write the figures that the server counted, which are those of its ledger."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.proposed_tokens - usage.accepted_tokens,
        },
    }


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Write what vLLM sends with every chunk when it is asked for continuous_usage_stats."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def total_usage(parts: Iterable[Usage]) -> Usage:
    """Add up the usage of several calls to the server together."""
    parts = tuple(parts)
    return Usage(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        cached_prompt_tokens=sum(part.cached_prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        reasoning_tokens=sum(part.reasoning_tokens for part in parts),
        proposed_tokens=sum(part.proposed_tokens for part in parts),
        accepted_tokens=sum(part.accepted_tokens for part in parts),
    )


_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_FULL: "length",
    FinishReason.TIME_LIMIT: "length",
}


def finish_reason(finish: Finish, *, has_calls: bool = False) -> str:
    """Return OpenAI's word for it. A limit of any kind, also of time, is "length".

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
    """Return vLLM's field that names what the output stopped at; empty unless it is one of the caller's
    stops.
    """
    if finish.reason is not FinishReason.STOP:
        return {}
    return {"stop_reason": finish.stop if finish.stop is not None else finish.token_id}


DONE = b"data: [DONE]\n\n"
"""The end of a stream."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of an answer is sent besides its text."""

    reasoning: bool = True
    token_ids: bool = False
    custom_tools: frozenset[str] = frozenset()
    """The names of a chat's tools of the type "custom"."""
    prompt_logprobs: bool = False
    """Whether the answer to a completion has vLLM's `prompt_logprobs`. A chat's has what the server sent."""
    vocabulary: Vocabulary | None = None
    """What tokens look like; None unless log-probabilities were asked for."""
    text_tokens: Callable[[], TextTokens] | None = None
    """Finds the tokens of a choice's text. None: log-probabilities are told of all tokens."""


@dataclass(frozen=True, slots=True)
class UsageWanted:
    """What of the usage a stream tells: at its end, and also in every chunk."""

    at_end: bool = False
    always: bool = False


def usage_wanted(options: StreamOptions | None) -> UsageWanted:
    """Say what `stream_options` asks for."""
    if options is None:
        return UsageWanted()
    return UsageWanted(bool(options.include_usage), bool(options.continuous_usage_stats))


class Frame:
    """Makes the bytes of chunks. What is the same in all of them is made once."""

    def __init__(self, kind: str, answer_id: str, created: int, model: str, usage: UsageWanted) -> None:
        """`kind` is the chunks' "object", and `created` is in seconds of Unix time."""
        self._head = (
            f'data: {{"id":{json_string(answer_id)},"object":"{kind}","created":{created},'
            f'"model":{json_string(model)}'
        )
        self._before = f'{self._head},"choices":['
        self._after = '],"usage":null}\n\n' if usage.at_end else "]}\n\n"
        self._counts = usage.always
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def count(self, *, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        """Count tokens for the chunks that tell the usage so far."""
        if self._counts:
            self._prompt_tokens += prompt_tokens
            self._completion_tokens += completion_tokens
            so_far = json_bytes(usage_so_far(self._prompt_tokens, self._completion_tokens)).decode()
            self._after = f'],"usage":{so_far}}}\n\n'

    def chunk(self, choice: str) -> bytes:
        """Make a chunk with one choice, which is JSON."""
        return f"{self._before}{choice}{self._after}".encode()

    def first(self, choice: str, prompt_token_ids: str) -> bytes:
        """Make a chunk that has the ids of the prompt's tokens as well, which are JSON."""
        return f'{self._head},"prompt_token_ids":{prompt_token_ids},"choices":[{choice}{self._after}'.encode()

    def end(self, usage: Usage) -> bytes:
        """Make the chunk with the usage of the whole request, and no choice."""
        return f'{self._before}],"usage":{json_bytes(usage_dict(usage)).decode()}}}\n\n'.encode()
