"""Usage in the shape of chats and completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.client import Usage


def usage_dict(usage: Usage) -> dict[str, Any]:
    """The figures that the server counted, which are those of its ledger."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """What vLLM sends with every chunk when it is asked for continuous_usage_stats."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def total_usage(parts: Iterable[Usage]) -> Usage:
    """The usage of several calls to the server together."""
    parts = tuple(parts)
    return Usage(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        cached_prompt_tokens=sum(part.cached_prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        reasoning_tokens=sum(part.reasoning_tokens for part in parts),
    )
