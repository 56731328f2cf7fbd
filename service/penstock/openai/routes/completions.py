"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import AsyncClient, Generation, RequestOptions
from penstock.openai.answers.completion_chunks import completion_chunks
from penstock.openai.answers.completions import completion_answer
from penstock.openai.answers.echo import Echo, Sent
from penstock.openai.answers.frames import Wanted, usage_wanted
from penstock.openai.answers.large import Bound, read_whole
from penstock.openai.backend import Backend
from penstock.openai.calls import Call, call_of
from penstock.openai.endpoints import name_params
from penstock.openai.front import front_of
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, sse
from penstock.openai.requests.completions import (
    PromptOptions,
    completion_options,
    completion_params,
    is_prompt_only,
    one_by_one,
)
from penstock.openai.schemas.completions import CompletionBody

PREFIX = "cmpl"


@dataclass(frozen=True, slots=True)
class _Reading:
    """How answers with log-probabilities are read."""

    bound: Bound
    prompt_copies: int
    """How often those of a prompt are in the answer."""


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
    has_logprobs = body.logprobs is not None or body.prompt_logprobs is not None
    wanted = Wanted(
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
        vocabulary=await backend.vocabulary(call) if has_logprobs else None,
    )
    echo = await _echo(body, prompts, backend, call) if body.echo else None
    if body.stream:
        streams = [
            backend.client.stream(prompt, timeout=call.timeout, metadata=call.metadata, **own)
            for prompt, own in prompts
        ]
        usage = usage_wanted(body.stream_options)
        return await sse(
            request, completion_chunks(streams, answer_id, call.created, body.n or 1, wanted, usage, echo)
        )
    reading = _Reading(Bound(), _prompt_copies(body)) if has_logprobs else None
    answers = await answered(request, _generate(backend.client, prompts, call, reading))
    made = await completion_answer(answers, answer_id, call.created, wanted, echo)
    return Response(made, media_type="application/json")


async def _echo(body: CompletionBody, prompts: Sequence[PromptOptions], backend: Backend, call: Call) -> Echo:
    """How the answer repeats the prompts. Raises ApiError if that were too much."""
    sent: list[Sent] = [own["token_ids"] or () if prompt is None else prompt for prompt, own in prompts]
    are_as_sent = body.truncate_prompt_tokens is None and all(isinstance(prompt, str) for prompt in sent)
    needs_texts = body.logprobs is not None or not are_as_sent
    echo = Echo(
        sent,
        await backend.vocabulary(call, "echo") if needs_texts else None,
        has_logprobs=body.logprobs is not None,
        with_special=body.skip_special_tokens is False,
        is_all=is_prompt_only(body),
    )
    await echo.check(body.n or 1)
    return echo


def _prompt_copies(body: CompletionBody) -> int:
    in_each_choice = (body.prompt_logprobs is not None) + (bool(body.echo) and body.logprobs is not None)
    return in_each_choice * (body.n or 1)


async def _generate(
    client: AsyncClient, prompts: Sequence[PromptOptions], call: Call, reading: _Reading | None
) -> list[Generation]:
    """The answers to all prompts, in their order, which are read as streams where it is said how. The first
    error of one ends the others.
    """

    async def one(prompt: str | None, own: RequestOptions) -> Generation:
        if reading is None:
            return await client.generate(prompt, timeout=call.timeout, metadata=call.metadata, **own)
        stream = client.stream(prompt, timeout=call.timeout, metadata=call.metadata, **own)
        return await read_whole(stream, reading.bound, reading.prompt_copies)

    running = [asyncio.create_task(one(prompt, own)) for prompt, own in prompts]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
