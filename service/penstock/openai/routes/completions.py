"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import AsyncClient, Generation, RequestOptions, Vocabulary
from penstock.openai.backend import Backend, ModelFacts
from penstock.openai.calls import Call, call_of
from penstock.openai.endpoints import name_params
from penstock.openai.failures import unsupported_value
from penstock.openai.front import front_of
from penstock.openai.generation.frames import Wanted, usage_wanted
from penstock.openai.generation.logprobs import Bound, TextTokens, read_whole
from penstock.openai.generation.options import sampling_options, sampling_params
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, sse
from penstock.openai.routes.completion_answers import Echo, Sent, completion_answer, completion_chunks
from penstock.openai.schemas.completions import CompletionBody, prompts_of

PromptOptions = tuple[str | None, RequestOptions]
"""A prompt if it is a text, and the keyword arguments, which hold a prompt of token ids."""

DEFAULT_MAX_TOKENS = 16
"""As in OpenAI's API."""


def completion_options(body: CompletionBody, facts: ModelFacts) -> RequestOptions:
    """Make the keyword arguments of `generate` or `stream`, but the prompt. Raises ApiError, with the field,
    for what the front can tell to be wrong; the rest is the server's to tell.
    """
    if body.best_of not in (None, body.n):
        raise unsupported_value("best_of", "the best choices are not selected; give n, or the same number.")
    options = sampling_options(body, facts)
    options["max_tokens"] = _max_tokens(body)
    options["logprobs"] = body.logprobs
    if body.logprobs is not None:
        options["return_token_ids"] = True
    if body.echo or body.logprobs is not None:  # where the output begins in its text depends on the prompt
        options["echo_prompt_token_ids"] = True
    if body.echo and body.prompt_logprobs is None:
        options["prompt_logprobs"] = body.logprobs
    return options


def is_prompt_only(body: CompletionBody) -> bool:
    """Say whether the answer is the prompt alone. The server makes one token all the same, which is its
    least.
    """
    return bool(body.echo) and body.max_tokens == 0


def one_by_one(body: CompletionBody, options: RequestOptions, answer_id: str) -> list[PromptOptions]:
    """Return what the client is given for each prompt. Of several prompts each has an id of its own at the
    server: the answer's with the number of the prompt.
    """
    prompts = prompts_of(body.prompt)
    made: list[PromptOptions] = []
    for i, prompt in enumerate(prompts):
        own: RequestOptions = {**options}
        own["request_id"] = answer_id if len(prompts) == 1 else f"{answer_id}-{i}"
        if isinstance(prompt, str):
            made.append((prompt, own))
        else:
            own["token_ids"] = prompt
            made.append((None, own))
    return made


def completion_params(body: CompletionBody) -> dict[str, str]:
    """Map the contract's path of a field to the name of the field of this request that it was made of."""
    return sampling_params(body) | {
        "input": "prompt",
        "prompt": "prompt",
        "prompt_token_ids": "prompt",
        "prompt_token_ids.ids": "prompt",
        "stopping.max_tokens": "max_tokens",
        "output.logprobs": "logprobs",
        "output.prompt_logprobs": "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
    }


def _max_tokens(body: CompletionBody) -> int:
    if is_prompt_only(body):
        return 1
    return DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens


PREFIX = "cmpl"


@dataclass(frozen=True, slots=True)
class _Reading:
    """How answers with log-probabilities are read."""

    bound: Bound
    prompt_copies: int
    """How often those of a prompt are in the answer."""
    text_tokens: Callable[[], TextTokens] | None
    """As in `Wanted`."""


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
    vocabulary = await backend.vocabulary(call) if has_logprobs else None
    wanted = Wanted(
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
        vocabulary=vocabulary,
        text_tokens=_text_tokens(body, vocabulary),
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
    reading = _Reading(Bound(), _prompt_copies(body), wanted.text_tokens) if has_logprobs else None
    answers = await answered(request, _generate(backend.client, prompts, call, reading))
    made = await completion_answer(answers, answer_id, call.created, wanted, echo)
    return Response(made, media_type="application/json")


async def _echo(body: CompletionBody, prompts: Sequence[PromptOptions], backend: Backend, call: Call) -> Echo:
    """Tell how the answer repeats the prompts. Raises ApiError if that were too much."""
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


def _text_tokens(body: CompletionBody, vocabulary: Vocabulary | None) -> Callable[[], TextTokens] | None:
    """Return what finds the tokens of a choice's text. All tokens are told to who asks for their ids, and to
    who has prompts scored: such programs count the tokens, and take `max_tokens` of them for those of the
    output.
    """
    if vocabulary is None or body.return_token_ids or body.echo:
        return None
    with_special = body.skip_special_tokens is False
    return partial(TextTokens, vocabulary, with_special=with_special, is_parsed=False)


def _prompt_copies(body: CompletionBody) -> int:
    in_each_choice = (body.prompt_logprobs is not None) + (bool(body.echo) and body.logprobs is not None)
    return in_each_choice * (body.n or 1)


async def _generate(
    client: AsyncClient, prompts: Sequence[PromptOptions], call: Call, reading: _Reading | None
) -> list[Generation]:
    """Return the answers to all prompts, in their order, which are read as streams where it is said how. The
    first error of one ends the others.
    """

    async def one(prompt: str | None, own: RequestOptions) -> Generation:
        if reading is None:
            return await client.generate(prompt, timeout=call.timeout, metadata=call.metadata, **own)
        stream = client.stream(prompt, timeout=call.timeout, metadata=call.metadata, **own)
        return await read_whole(stream, reading.bound, reading.prompt_copies, reading.text_tokens)

    running = [asyncio.create_task(one(prompt, own)) for prompt, own in prompts]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
