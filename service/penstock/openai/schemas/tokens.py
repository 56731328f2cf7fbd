"""The bodies of requests to /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.openai.schemas.base import NEUTRAL, RequestBody
from penstock.openai.schemas.chat import AnyTool, Message


class TokenizeBody(RequestBody):
    """A text or a conversation. Exactly one of `prompt` and `messages`."""

    model: str | None = None
    """Without it the served one."""
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    """By default true for a text, and false for a conversation, whose template writes them."""
    return_token_strs: bool | None = None
    tools: list[AnyTool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] | None = None
    """The prompt always ends where the model's turn begins."""
    continue_final_message: Literal[False] | None = None

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **NEUTRAL,
        "documents": ([],),
        "mm_processor_kwargs": ({},),
    }
    unsupported: ClassVar[Mapping[str, str]] = {
        "documents": "put them into chat_template_kwargs",
        "mm_processor_kwargs": "the model's own settings for images are used",
    }


class DetokenizeBody(RequestBody):
    """Tokens that shall become text."""

    model: str | None = None
    tokens: list[int]
