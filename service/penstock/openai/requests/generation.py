"""Converts the fields that all requests which generate have to keyword arguments of the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from penstock.client import RequestOptions
from penstock.openai.requests.refusing import invalid_value
from penstock.openai.schemas.sampling import GenerationBody
from penstock.v1 import types_pb2

_SEEDS = 2**64
_SAMPLING = tuple(
    field.name
    for field in types_pb2.SamplingParams.DESCRIPTOR.fields
    if field.name in GenerationBody.model_fields
)
_STOPPING = ("min_tokens", "stop", "stop_token_ids", "ignore_eos", "time_limit")

PARAMS: Mapping[str, str] = {
    **{f"sampling.{name}": name for name in _SAMPLING},
    **{f"stopping.{name}": name for name in _STOPPING},
    "stopping.include_stop": "include_stop_str_in_output",
    "output.skip_special_tokens": "skip_special_tokens",
    "cache.cache_salt": "cache_salt",
    "model": "model",
    "priority": "priority",
    "request_id": "request_id",
}
"""From the contract's path of a field to the name of the field in HTTP that it was made of."""


def generation_options(body: GenerationBody, vocab_size: int) -> RequestOptions:
    """The keyword arguments for how tokens are drawn and when outputs end.

    `structured_outputs` and `request_id` are left to others: the first may contradict another field, and the
    second is a part of the answer's id. Raises ApiError for a key of `logit_bias` that is no token id, and
    for more keys than the model has tokens.
    """
    sampling = {name: getattr(body, name) for name in _SAMPLING}
    sampling["top_k"] = None if body.top_k is None else max(body.top_k, 0)
    sampling["seed"] = None if body.seed is None else body.seed % _SEEDS
    sampling["logit_bias"] = _biases(body.logit_bias, vocab_size)
    return RequestOptions(
        **cast(RequestOptions, sampling),
        model=body.model,
        min_tokens=body.min_tokens,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        include_stop=body.include_stop_str_in_output,
        time_limit=body.time_limit,
        skip_special_tokens=body.skip_special_tokens,
        cache_salt=body.cache_salt,
        priority=None if body.priority is None else -body.priority,
    )


def _biases(biases: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if biases is None:
        return None
    if len(biases) > vocab_size:  # so many would take long to convert, only to be refused by the server
        why = f"it has {len(biases)} token ids, and the model has {vocab_size} tokens."
        raise invalid_value("logit_bias", why)
    for key in biases:
        # "01" would be a second key for the token 1.
        if not (key.isascii() and key.isdigit() and len(key) < 11 and str(int(key)) == key):
            raise invalid_value("logit_bias", f"its keys are token ids, and {key[:40]!r} is none.")
    return {int(key): bias for key, bias in biases.items()}
