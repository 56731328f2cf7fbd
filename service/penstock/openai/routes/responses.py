"""/v1/responses, which keeps nothing: each request brings the whole conversation."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.answers.responses.writing import Asked, read_response, response_events, whole_response
from penstock.openai.calls import call_of
from penstock.openai.endpoints import name_params
from penstock.openai.front import front_of
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, sse
from penstock.openai.requests.response_turns import has_pictures
from penstock.openai.requests.responses import (
    ENCRYPTED_REASONING,
    is_included,
    response_options,
    response_params,
)
from penstock.openai.schemas.responses import ResponsesBody


async def create_response(request: Request) -> Response:
    """POST /v1/responses."""
    call, backend = call_of(request), front_of(request).backend
    body = await read_body(request, ResponsesBody)
    name_params(request.scope, lambda: response_params(body))
    facts = await backend.facts(call)
    if has_pictures(body.input):
        # Base64 of megabytes is read in a thread, so that other requests do not wait for it.
        options = await asyncio.to_thread(response_options, body, facts)
    else:
        options = response_options(body, facts)
    wants_logprobs = options["logprobs"] is not None
    asked = Asked(
        body=body,
        number=body.request_id or call.number,
        created=call.created,
        defaults=facts.default_sampling,
        carries_reasoning=is_included(body, ENCRYPTED_REASONING),
        vocabulary=await backend.vocabulary(call) if wants_logprobs else None,
    )
    options["request_id"] = asked.response_id
    if body.stream:
        stream = backend.client.stream(timeout=call.timeout, metadata=call.metadata, **options)
        return await sse(request, response_events(stream, asked, lambda: response_params(body)))
    if wants_logprobs:
        stream = backend.client.stream(timeout=call.timeout, metadata=call.metadata, **options)
        made = await answered(request, read_response(stream, asked))
    else:
        answer = await answered(
            request, backend.client.generate(timeout=call.timeout, metadata=call.metadata, **options)
        )
        made = whole_response(answer, asked)
    return Response(made, media_type="application/json")
