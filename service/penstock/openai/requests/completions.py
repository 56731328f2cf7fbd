"""Converts the body of a completion to keyword arguments of the client, and to its prompts."""

from __future__ import annotations

from penstock.client import RequestOptions
from penstock.openai.backend import ModelFacts
from penstock.openai.requests.refusing import unsupported_value
from penstock.openai.requests.sampling import sampling_options, sampling_params
from penstock.openai.schemas.completions import CompletionBody, prompts_of

PromptOptions = tuple[str | None, RequestOptions]
"""A prompt if it is a text, and the keyword arguments, which hold a prompt of token ids."""

DEFAULT_MAX_TOKENS = 16
"""As in OpenAI's API."""


def completion_options(body: CompletionBody, facts: ModelFacts) -> RequestOptions:
    """The keyword arguments of `generate` or `stream`, but the prompt. Raises ApiError, with the field, for
    what the front can tell to be wrong; the rest is the server's to tell.
    """
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise unsupported_value("best_of", "the best choices are not selected; give n, or the same number.")
    options = sampling_options(body, facts)
    options["max_tokens"] = _max_tokens(body)
    options["logprobs"] = body.logprobs
    if body.logprobs is not None:
        options["return_token_ids"] = True
    if body.echo:
        options["echo_prompt_token_ids"] = True
        if body.prompt_logprobs is None:
            options["prompt_logprobs"] = body.logprobs
    return options


def is_prompt_only(body: CompletionBody) -> bool:
    """Whether the answer is the prompt alone. The server makes one token all the same, which is its least."""
    return bool(body.echo) and body.max_tokens == 0


def one_by_one(body: CompletionBody, options: RequestOptions, answer_id: str) -> list[PromptOptions]:
    """What the client is given for each prompt. Of several prompts each has an id of its own at the server:
    the answer's with the number of the prompt.
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
    """From the contract's path of a field to the name of the field of this request that it was made of."""
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
