"""Reads answers with the types of OpenAI's own client, and finds fields that OpenAI does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from openai import BaseModel
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

ModelT = TypeVar("ModelT", bound=BaseModel)

EXTENSIONS = frozenset({"reasoning", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"})
"""Fields that the front has beside OpenAI's, all of them vLLM's."""


def typed(kind: type[ModelT], data: Any) -> ModelT:
    """Return the answer as OpenAI's type. Fails if a field is missing, of a wrong type, or one that nobody
    has.
    """
    made = kind.model_validate(data, strict=True)
    assert set(_extra(made)) <= EXTENSIONS
    return made


def chat_completion(data: Any) -> ChatCompletion:
    made = typed(ChatCompletion, data)
    assert made.usage is not None
    for choice in made.choices:
        assert {"logprobs", "finish_reason"} <= choice.model_fields_set
        assert {"role", "content", "refusal"} <= choice.message.model_fields_set
    return made


def chat_chunk(data: Any) -> ChatCompletionChunk:
    made = typed(ChatCompletionChunk, data)
    for choice in made.choices:
        assert {"delta", "logprobs", "finish_reason"} <= choice.model_fields_set
    return made


def completion(data: Any) -> Completion:
    return typed(Completion, data)


def _extra(value: Any) -> Iterable[str]:
    """Return the names of all fields, at any depth, that the types do not declare."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in value.model_fields_set:
            yield from _extra(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _extra(item)
