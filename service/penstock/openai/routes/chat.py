"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.answers.chat import chat_answer
from penstock.openai.answers.chat_chunks import chat_chunks
from penstock.openai.answers.frames import Wanted, usage_wanted
from penstock.openai.answers.large import Bound, read_whole
from penstock.openai.calls import call_of
from penstock.openai.endpoints import name_params
from penstock.openai.front import front_of
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, sse
from penstock.openai.requests.chat import chat_options, chat_params
from penstock.openai.requests.turns import has_pictures
from penstock.openai.schemas.chat import ChatBody

PREFIX = "chatcmpl"


async def chat(request: Request) -> Response:
    """Continue a conversation."""
    call, body, backend = call_of(request), await read_body(request, ChatBody), front_of(request).backend
    name_params(request.scope, lambda: chat_params(body))
    facts = await backend.facts(call)
    if has_pictures(body.messages):
        # Base64 of megabytes is read in a thread, so that other requests do not wait for it.
        options = await asyncio.to_thread(chat_options, body, facts)
    else:
        options = chat_options(body, facts)
    options["request_id"] = f"{PREFIX}-{body.request_id or call.number}"
    needs_texts = body.logprobs or body.prompt_logprobs is not None
    wanted = Wanted(
        reasoning=body.include_reasoning is not False,
        token_ids=bool(body.return_token_ids),
        vocabulary=await backend.vocabulary(call) if needs_texts else None,
    )
    if body.stream:
        stream = backend.client.stream(timeout=call.timeout, metadata=call.metadata, **options)
        chunks = chat_chunks(stream, call.created, body.n or 1, wanted, usage_wanted(body.stream_options))
        return await sse(request, chunks)
    if needs_texts:
        stream = backend.client.stream(timeout=call.timeout, metadata=call.metadata, **options)
        answer = await answered(request, read_whole(stream, Bound()))
    else:
        answer = await answered(
            request, backend.client.generate(timeout=call.timeout, metadata=call.metadata, **options)
        )
    return Response(await chat_answer(answer, call.created, wanted), media_type="application/json")
