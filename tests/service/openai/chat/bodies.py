"""Bodies of requests, and what is known of the model that they are for."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import RequestOptions, SamplingDefaults
from penstock.openai.backend import ModelFacts
from penstock.openai.failures import ApiError
from penstock.openai.routes.chat import chat_options
from penstock.openai.routes.completions import PromptOptions, completion_options, one_by_one
from penstock.openai.schemas.chat import ChatBody
from penstock.openai.schemas.completions import CompletionBody

HI = [{"role": "user", "content": "hi"}]


def facts(**changes: Any) -> ModelFacts:
    given = {
        "model": "m",
        "features": frozenset({"chat"}),
        "max_context_tokens": 64,
        "vocab_size": 260,
        "default_sampling": SamplingDefaults(),
        "created": 0,
        "template_variables": (),
    }
    return ModelFacts(**{**given, **changes})


def chat_body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": HI, **fields})


def completion_body(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": "m", "prompt": "hi", **fields})


def asked(**fields: Any) -> RequestOptions:
    """Return what the client is asked for a chat, without what is left to the server."""
    return _given(chat_options(chat_body(**fields), facts()))


def completed(**fields: Any) -> list[PromptOptions]:
    """Return what the client is asked for a completion, without what is left to the server."""
    body = completion_body(**fields)
    prompts = one_by_one(body, completion_options(body, facts()), "cmpl-1")
    return [(prompt, _given(options)) for prompt, options in prompts]


def refusal(**fields: Any) -> ApiError:
    """Return the error of a chat that is refused when it is converted."""
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


def _given(options: RequestOptions) -> RequestOptions:
    return {name: value for name, value in options.items() if value is not None}  # type: ignore[return-value]
