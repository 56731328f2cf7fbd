"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import AsyncClient, Generation, RequestOptions
from penstock.openai.answers.completion_chunks import completion_chunks
from penstock.openai.answers.completions import completion_answer
from penstock.openai.answers.frames import Wanted, usage_wanted
from penstock.openai.answers.large import Bound, read_whole
from penstock.openai.calls import Call, call_of
from penstock.openai.endpoints import name_params
from penstock.openai.front import front_of
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, sse
from penstock.openai.requests.completions import (
    PromptOptions,
    completion_options,
    completion_params,
    one_by_one,
)
from penstock.openai.schemas.completions import CompletionBody

PREFIX = "cmpl"


async def completions(request: Request) -> Response:
    """Continue one prompt, or several at once."""
    call, body, backend = (
        call_of(request),
        await read_body(request, CompletionBody),
        front_of(request).backend,
    )
    name_params(request.scope, lambda: completion_params(body))
    options = completion_options(body, await backend.facts(call))
    answer_id = f"{PREFIX}-{body.request_id or call.number}"
    prompts = one_by_one(body, options, answer_id)
    needs_texts = body.logprobs is not None or body.prompt_logprobs is not None
    vocabulary = await backend.vocabulary(call) if needs_texts else None
    wanted = Wanted(token_ids=bool(body.return_token_ids), vocabulary=vocabulary)
    if body.stream:
        streams = [
            backend.client.stream(prompt, timeout=call.timeout, metadata=call.metadata, **own)
            for prompt, own in prompts
        ]
        usage = usage_wanted(body.stream_options)
        return await sse(
            request, completion_chunks(streams, answer_id, call.created, body.n or 1, wanted, usage)
        )
    answers = await answered(
        request, _generate(backend.client, prompts, call, Bound() if needs_texts else None)
    )
    made = await completion_answer(answers, answer_id, call.created, wanted)
    return Response(made, media_type="application/json")


async def _generate(
    client: AsyncClient, prompts: Sequence[PromptOptions], call: Call, bound: Bound | None
) -> list[Generation]:
    """The answers to all prompts, in their order. With a bound they are read as streams. The first error of
    one ends the others.
    """

    async def one(prompt: str | None, own: RequestOptions) -> Generation:
        if bound is None:
            return await client.generate(prompt, timeout=call.timeout, metadata=call.metadata, **own)
        stream = client.stream(prompt, timeout=call.timeout, metadata=call.metadata, **own)
        return await read_whole(stream, bound)

    running = [asyncio.create_task(one(prompt, own)) for prompt, own in prompts]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
