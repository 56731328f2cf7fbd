"""POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import ChatOptions
from penstock.openai.calls import Call, call_of
from penstock.openai.endpoints import ignored_in
from penstock.openai.failures import ApiError, invalid_value, missing
from penstock.openai.front import Front, front_of
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, json_response
from penstock.openai.routes.turns import ignored_of, tools_of, turns_of
from penstock.openai.schemas.tokens import DetokenizeBody, TokenizeBody

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
    """Return the conversation that shall be tokenized; empty where it is a text. Raises ApiError, with the
    field, unless the body has one of both.
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


async def tokenize(request: Request) -> Response:
    """Tell the tokens that the model would be given."""
    call, body, front = call_of(request), await read_body(request, TokenizeBody), front_of(request)
    chat = chat_of(body)
    await check_model(body.model, front, call)
    if body.messages is not None:
        facts = await front.backend.facts(call)
        ignored_in(request.scope).update(ignored_of(body.messages, facts, body.chat_template))
    asked = front.backend.client.tokenize(
        body.prompt,
        add_special_tokens=body.add_special_tokens,
        timeout=call.timeout,
        metadata=call.metadata,
        **chat,
    )
    told = await answered(request, asked)
    texts = None
    if body.return_token_strs:
        vocabulary = await front.backend.vocabulary(call, "return_token_strs")
        texts = [vocabulary.bytes_of(i).decode("utf-8", "replace") for i in told.token_ids]
    return json_response(
        {
            "count": len(told.token_ids),
            "max_model_len": told.max_context_tokens,
            "tokens": told.token_ids,
            "token_strs": texts,
        }
    )


async def detokenize(request: Request) -> Response:
    """Tell the text of tokens, special ones included."""
    call, body, front = call_of(request), await read_body(request, DetokenizeBody), front_of(request)
    await check_model(body.model, front, call)
    asked = front.backend.client.detokenize(
        body.tokens, skip_special_tokens=False, timeout=call.timeout, metadata=call.metadata
    )
    return json_response({"prompt": await answered(request, asked)})


async def tokenizer_info(request: Request) -> Response:
    """Tell the special tokens and the chat template, as they stand in tokenizer_config.json."""
    call, client = call_of(request), front_of(request).backend.client
    asked = client.model_info(include_tokenizer=True, timeout=call.timeout, metadata=call.metadata)
    told = (await answered(request, asked)).tokenizer
    if told is None:
        raise ApiError(501, "the served model has no tokenizer", code="unsupported_endpoint")
    return json_response(
        {
            **told.special_tokens,
            "tokenizer_class": told.tokenizer_class,
            "chat_template": told.chat_template or None,
        }
    )


async def check_model(model: str | None, front: Front, call: Call) -> None:
    """Raise ApiError for a model that is not served: the RPCs do not ask which one is wanted. An adapter has
    the tokenizer of its model. One below the server's --adapter-dir is known when it is in memory, because
    no RPC tells of others without loading them.
    """
    if model is None or model == (await front.backend.facts(call)).model:
        return
    if model not in [one.name for one in await front.backend.adapters(call)]:
        message = f"the model {model[:200]!r} is not served here"
        raise ApiError(404, message, param="model", code="model_not_found")
