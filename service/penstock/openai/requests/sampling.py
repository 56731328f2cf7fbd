"""Converts the fields that chats and completions share to keyword arguments of the client."""

from __future__ import annotations

from penstock.client import RequestOptions
from penstock.openai.backend import ModelFacts
from penstock.openai.requests.constraints import constraint_of, constraint_params
from penstock.openai.requests.generation import PARAMS, generation_options
from penstock.openai.requests.refusing import invalid_value
from penstock.openai.schemas.sampling import SamplingBody


def sampling_params(body: SamplingBody) -> dict[str, str]:
    """From the contract's path of a field to the name of the field of this request that it was made of."""
    return {
        **PARAMS,
        **constraint_params(body.response_format),
        "sampling.n": "n",
        "output.prompt_logprobs": "prompt_logprobs",
        "output.token_ids": "return_token_ids",
        "output.echo_prompt_token_ids": "return_token_ids",
        "context": "truncate_prompt_tokens",
    }


def sampling_options(body: SamplingBody, facts: ModelFacts) -> RequestOptions:
    """The keyword arguments for everything but the input, `max_tokens` and log-probabilities of the output.

    Raises ApiError for fields that contradict each other.
    """
    asked = body.stream_options
    if asked is not None and not body.stream:
        raise invalid_value("stream_options", "it goes with stream: true.")
    if asked is not None and asked.continuous_usage_stats and not asked.include_usage:
        raise invalid_value("stream_options.continuous_usage_stats", "it goes with include_usage: true.")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid_value("prompt_logprobs", "a stream has none; leave stream out.")
    wants_ids = bool(body.return_token_ids)
    options = generation_options(body, facts.vocab_size)
    options["n"] = body.n
    options["return_token_ids"] = wants_ids or counts_tokens(body)
    options["prompt_logprobs"] = body.prompt_logprobs
    options["echo_prompt_token_ids"] = wants_ids or body.prompt_logprobs is not None
    options["constraint"] = constraint_of(body.response_format, body.structured_outputs)
    if body.truncate_prompt_tokens is not None:
        options["truncation"] = "left"
        options["reserve_tokens"] = _reserved(body.truncate_prompt_tokens, facts.max_context_tokens)
    return options


def counts_tokens(body: SamplingBody) -> bool:
    """Whether every chunk of the stream tells the usage so far, for which the tokens of each are counted."""
    asked = body.stream_options
    return asked is not None and bool(asked.continuous_usage_stats)


def _reserved(kept: int, max_context_tokens: int) -> int | None:
    """The room that leaves `kept` tokens to the prompt; None to take the server's default."""
    if kept == 0:
        raise invalid_value("truncate_prompt_tokens", "at least one token must be kept.")
    return max_context_tokens - kept if 0 < kept < max_context_tokens else None
