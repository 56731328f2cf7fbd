"""Converts the body of /tokenize to keyword arguments of the client."""

from __future__ import annotations

from typing import Final

from penstock.client import ChatOptions
from penstock.openai.requests.refusing import invalid_value, missing
from penstock.openai.requests.turns import tools_of, turns_of
from penstock.openai.schemas.tokens import TokenizeBody

PARAMS: Final = {
    "text": "prompt",
    "input": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.chat_template": "chat_template",
    "chat.template_options_json": "chat_template_kwargs",
    "token_ids": "tokens",
}
"""From the contract's paths to the fields of /tokenize and /detokenize."""
_OF_CHATS: Final = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")


def chat_of(body: TokenizeBody) -> ChatOptions:
    """The conversation that shall be tokenized; empty where it is a text. Raises ApiError, with the field,
    unless the body has one of both.
    """
    if body.messages is None:
        if body.prompt is None:
            raise missing("prompt")
        for name in (*_OF_CHATS, "continue_final_message"):
            if getattr(body, name) is not None:
                raise invalid_value(name, "it goes with messages.")
        return ChatOptions()
    if body.prompt is not None:
        raise invalid_value("prompt", "give either prompt or messages.")
    return ChatOptions(
        messages=turns_of(body.messages),
        tools=tools_of(body.tools) if body.tools else None,
        chat_template=body.chat_template,
        template_options=body.chat_template_kwargs,
    )
