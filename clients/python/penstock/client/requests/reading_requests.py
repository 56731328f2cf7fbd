"""Builds the requests for embeddings and scores from keyword arguments, for both clients."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

from penstock.client.requests.checks import Violations, named
from penstock.client.requests.generation_requests import assign, given_of
from penstock.client.requests.options import Truncation
from penstock.client.values.results import WeightsVersion
from penstock.v1 import inference_pb2, types_pb2

TextOrIds: TypeAlias = str | Sequence[int]
"""A text, which the server tokenizes, or token ids, which are used as they are."""


class Pooling(enum.Enum):
    """What a vector is made of: the hidden states of the last layer, after the final norm."""

    LAST_TOKEN = "last_token"
    """That of the last token."""
    MEAN = "mean"
    """The mean of those of all tokens."""


class ReadingOptions(TypedDict, total=False):
    """Keyword arguments of `score`, and of `embed` beside its own. What is left out, or None, takes the
    server's default.
    """

    request_id: str | None
    """An id for `abort` and logs; by default the server makes one."""
    model: str | None
    priority: int | None
    """Requests with a higher priority run first. Only for servers whose features have "priority"."""
    min_weights: int | WeightsVersion | None
    """The smallest generation of weights that the request may start on."""
    cache_salt: str | None
    """Cached prefixes are shared only between requests with equal salts."""
    bypass_prefix_cache: bool | None
    """Neither use cached prefixes nor add to them."""


class EmbedOptions(ReadingOptions, total=False):
    """Keyword arguments of `embed`."""

    pooling: Pooling | str | None
    """A Pooling, or its value; by default what the model is made for (`ModelInfo.default_pooling`)."""
    normalize: bool | None
    """Whether each vector is divided by its length (default true)."""
    dimensions: int | None
    """How many numbers are kept from the start of each vector, before it is divided by its length."""
    truncation: Truncation | str | None
    """How to shorten an input that is too long: a Truncation, or its value, such as "left"."""


_FIELDS = {
    **{name: name for name in ("request_id", "model", "priority")},
    "min_weights": "min_weights.generation",
    "cache_salt": "cache.cache_salt",
    "bypass_prefix_cache": "cache.bypass_prefix_cache",
}
_EMBED_FIELDS = {
    **_FIELDS,
    **{name: name for name in ("pooling", "normalize", "dimensions", "truncation")},
}


def embed_request(inputs: Sequence[TextOrIds], options: EmbedOptions) -> inference_pb2.EmbedRequest:
    """Build an EmbedRequest. Raises TypeError and InvalidRequest as `fill_request`."""
    request = inference_pb2.EmbedRequest()
    given = given_of(options, _EMBED_FIELDS)
    violations = Violations()
    if isinstance(inputs, str):
        raise TypeError("inputs: give a sequence of texts or of sequences of token ids, not one text")
    for i, each in enumerate(inputs):
        with violations.of(f"inputs[{i}]"), named(f"inputs[{i}]"):
            _set_part(request.inputs.add(), each)
    pooling = given.pop("pooling", None)
    if pooling is not None:
        with violations.of("pooling"):
            request.pooling = _pooling(pooling)
    _set_all(request, given, violations)
    return request


def score_request(
    prompt: TextOrIds, continuations: Sequence[TextOrIds], options: ReadingOptions
) -> inference_pb2.ScoreRequest:
    """Build a ScoreRequest. Raises TypeError and InvalidRequest as `fill_request`."""
    request = inference_pb2.ScoreRequest()
    given = given_of(options, _FIELDS)
    violations = Violations()
    if isinstance(continuations, str):
        raise TypeError("continuations: give a sequence of texts or of sequences of token ids, not one text")
    with violations.of("input"), named("prompt"):
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.prompt_token_ids.ids.extend(prompt)
            request.prompt_token_ids.SetInParent()
    for i, each in enumerate(continuations):
        with violations.of(f"continuations[{i}]"), named(f"continuations[{i}]"):
            _set_part(request.continuations.add(), each)
    _set_all(request, given, violations)
    return request


def _set_part(part: inference_pb2.EmbedInput | inference_pb2.Continuation, value: TextOrIds) -> None:
    if isinstance(value, str):
        part.text = value
    else:
        part.token_ids.ids.extend(value)
        part.token_ids.SetInParent()


def _set_all(
    request: inference_pb2.EmbedRequest | inference_pb2.ScoreRequest,
    given: dict[str, Any],
    violations: Violations,
) -> None:
    for name, value in given.items():
        with violations.of(_EMBED_FIELDS[name]), named(name):
            assign(request, _EMBED_FIELDS[name], value)
    violations.tell()


def _pooling(value: Pooling | str) -> types_pb2.Pooling.ValueType:
    names = [member.value for member in Pooling]
    name = value.value if isinstance(value, Pooling) else value
    if name not in names:
        raise ValueError(f"must be one of {', '.join(names)}, not {name!r}")
    return types_pb2.Pooling.Value(f"POOLING_{name.upper()}")
