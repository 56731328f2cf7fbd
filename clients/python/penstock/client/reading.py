"""Embeddings, scores and relevance: their values, requests and answers, and the methods of both clients."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict, Unpack, cast

from penstock.client.async_calls import AsyncCalls
from penstock.client.calls import Calls
from penstock.client.connection.channel import Metadata
from penstock.client.errors import ProtocolError
from penstock.client.generation.checks import Violations, named
from penstock.client.generation.messages import METHOD_NAMES, prompt_info, timing, usage, weights_version
from penstock.client.generation.options import Truncation
from penstock.client.generation.requests import assign, given_of
from penstock.client.status import spelled
from penstock.client.values.results import PromptInfo, Timing, Usage, WeightsVersion
from penstock.v1 import inference_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one input. With NumPy: `numpy.frombuffer(embedding.values, "<f4")`."""

    values: bytes = field(repr=False)
    """The numbers, each a float of 32 bits with its lowest byte first."""
    token_count: int
    """Tokens of the input, as the model saw it."""
    truncated_tokens: int
    """How many tokens were cut off."""
    weights: WeightsVersion
    """The weights that made it."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers of the vector."""
        return struct.unpack(f"<{len(self.values) // 4}f", self.values)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of some inputs, in their order."""

    request_id: str
    model: str
    embeddings: tuple[Embedding, ...]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How likely the model finds one continuation of a prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability of each token, after the prompt and the tokens before it."""
    total_logprob: float
    """Their sum: the log-probability of the whole continuation."""
    weights: WeightsVersion
    """The weights that computed the last of them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of some continuations of one prompt, in their order."""

    request_id: str
    model: str
    prompt: PromptInfo
    scores: tuple[ContinuationScore, ...]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """How relevant one document is."""

    index: int
    """Which of the documents it is, counted from 0."""
    relevance: float
    weights: WeightsVersion
    """The weights that computed it."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents by their relevance to a query, the most relevant first."""

    request_id: str
    model: str
    method: str
    """What the relevance was computed from: "embeddings", "yes_no" or "classifier"."""
    results: tuple[RankedDocument, ...]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Classification:
    """The classes of one input."""

    logits: tuple[float, ...]
    """The number that the model makes for each class, in the order of the labels."""
    probabilities: tuple[float, ...]
    """The probability of each class; empty for a model whose numbers are no classes."""
    label: str
    """The name of the likeliest class; empty where there are no probabilities."""
    token_count: int
    """Tokens of the input, as the model saw it."""
    truncated_tokens: int
    """How many tokens were cut off."""
    weights: WeightsVersion
    """The weights that computed it."""


@dataclass(frozen=True, slots=True)
class Classifications:
    """The classes of some inputs, in their order."""

    request_id: str
    model: str
    labels: tuple[str, ...]
    """The names of the model's classes."""
    results: tuple[Classification, ...]
    usage: Usage
    timing: Timing


TextOrIds: TypeAlias = str | Sequence[int]
"""A text, which the server tokenizes, or token ids, which are used as they are."""

ClassifyInput: TypeAlias = str | Sequence[int] | tuple[str, str]
"""A text, token ids, or a pair of texts that the model reads together."""


class Pooling(enum.Enum):
    """What a vector is made of: the hidden states of the last layer, after the final norm."""

    LAST_TOKEN = "last_token"
    """That of the last token."""
    MEAN = "mean"
    """The mean of those of all tokens."""
    FIRST_TOKEN = "first_token"
    """That of the first token, which encoders make for it."""
    MAX = "max"
    """The largest number of each channel of those of all tokens."""


class RerankMethod(enum.Enum):
    """What the relevance of a document is computed from."""

    EMBEDDINGS = "embeddings"
    """The cosine of the angle between the vectors of query and document, from -1 to 1."""
    YES_NO = "yes_no"
    """The probability that the model answers "yes" and not "no", shown query and document, from 0 to 1."""
    CLASSIFIER = "classifier"
    """The sigmoid of the one number that a classifier makes of query and document, from 0 to 1."""


class ReadingOptions(TypedDict, total=False):
    """Keyword arguments of `score`, and of `embed`, `rerank` and `classify` beside their own. What is left
    out, or None, takes the server's default.
    """

    request_id: str | None
    """An id for `abort` and logs; by default the server makes one."""
    model: str | None
    adapter: str | None
    """A LoRA adapter of the server, by name; by default the model as it is."""
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


class ClassifyOptions(ReadingOptions, total=False):
    """Keyword arguments of `classify`."""

    truncation: Truncation | str | None
    """How to shorten a text that is too long: a Truncation, or its value, such as "left". Pairs are not
    cut."""


class RerankOptions(ReadingOptions, total=False):
    """Keyword arguments of `rerank`."""

    method: RerankMethod | str | None
    """A RerankMethod, or its value; by default what the model is made for
    (`ModelInfo.default_rerank_method`)."""
    top_n: int | None
    """How many documents the answer has, by default all."""
    instruction: str | None
    """What the model judges by; only with RerankMethod.YES_NO."""
    max_document_tokens: int | None
    """How many tokens are kept from the start of each document, by default all."""


_FIELDS = {
    **{name: name for name in ("request_id", "model", "adapter", "priority")},
    "min_weights": "min_weights.generation",
    "cache_salt": "cache.cache_salt",
    "bypass_prefix_cache": "cache.bypass_prefix_cache",
}
_EMBED_FIELDS = {
    **_FIELDS,
    **{name: name for name in ("pooling", "normalize", "dimensions", "truncation")},
}
_CLASSIFY_FIELDS = {**_FIELDS, "truncation": "truncation"}


_RERANK_FIELDS = {
    **_FIELDS,
    **{name: name for name in ("method", "top_n", "instruction", "max_document_tokens")},
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
            request.pooling = types_pb2.Pooling.Value(_spelled(Pooling, pooling, "POOLING_"))
    _set_all(request, given, _EMBED_FIELDS, violations)
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
    _set_all(request, given, _FIELDS, violations)
    return request


def rerank_request(
    query: str, documents: Sequence[str], options: RerankOptions
) -> inference_pb2.RerankRequest:
    """Build a RerankRequest. Raises TypeError and InvalidRequest as `fill_request`."""
    given = given_of(options, _RERANK_FIELDS)
    violations = Violations()
    if isinstance(documents, str):
        raise TypeError("documents: give a sequence of texts, not one text")
    request = inference_pb2.RerankRequest()
    with violations.of("query"), named("query"):
        request.query = query
    for i, each in enumerate(documents):
        with violations.of(f"documents[{i}]"), named(f"documents[{i}]"):
            request.documents.append(each)
    method = given.pop("method", None)
    if method is not None:
        with violations.of("method"):
            request.method = types_pb2.RerankMethod.Value(_spelled(RerankMethod, method, "RERANK_METHOD_"))
    _set_all(request, given, _RERANK_FIELDS, violations)
    return request


def classify_request(
    inputs: Sequence[ClassifyInput], options: ClassifyOptions
) -> inference_pb2.ClassifyRequest:
    """Build a ClassifyRequest. Raises TypeError and InvalidRequest as `fill_request`."""
    given = given_of(options, _CLASSIFY_FIELDS)
    violations = Violations()
    if isinstance(inputs, str):
        raise TypeError("inputs: give a sequence of texts, pairs of texts or token ids, not one text")
    request = inference_pb2.ClassifyRequest()
    for i, each in enumerate(inputs):
        with violations.of(f"inputs[{i}]"), named(f"inputs[{i}]"):
            if isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str):
                request.inputs.add().pair.MergeFrom(inference_pb2.TextPair(first=each[0], second=each[1]))
            else:
                _set_part(request.inputs.add(), cast("TextOrIds", each))
    _set_all(request, given, _CLASSIFY_FIELDS, violations)
    return request


def _set_part(
    part: inference_pb2.EmbedInput | inference_pb2.Continuation | inference_pb2.ClassifyInput,
    value: TextOrIds,
) -> None:
    if isinstance(value, str):
        part.text = value
    else:
        part.token_ids.ids.extend(value)
        part.token_ids.SetInParent()


def _set_all(
    request: inference_pb2.EmbedRequest
    | inference_pb2.ScoreRequest
    | inference_pb2.RerankRequest
    | inference_pb2.ClassifyRequest,
    given: dict[str, Any],
    fields: Mapping[str, str],
    violations: Violations,
) -> None:
    for name, value in given.items():
        with violations.of(fields[name]), named(name):
            assign(request, fields[name], value)
    violations.tell()


def _spelled(kind: type[enum.Enum], value: enum.Enum | str, prefix: str) -> str:
    """Return the contract's name of a member, which is given itself or by its value."""
    names = [str(member.value) for member in kind]
    name = value.value if isinstance(value, enum.Enum) else value
    if name not in names:
        raise ValueError(f"must be one of {', '.join(names)}, not {name!r}")
    return f"{prefix}{str(name).upper()}"


def embeddings(message: inference_pb2.EmbedResponse, num_inputs: int) -> Embeddings:
    """Convert the answer of Embed. Raises ProtocolError unless it has a vector for each input."""
    _check_number(len(message.embeddings), num_inputs)
    return Embeddings(
        request_id=message.request_id,
        model=message.model,
        embeddings=tuple(
            Embedding(one.values, one.token_count, one.truncated_tokens, weights_version(one.weights))
            for one in message.embeddings
        ),
        usage=usage(message.usage),
        timing=timing(message.timing),
    )


def scores(message: inference_pb2.ScoreResponse, num_continuations: int) -> Scores:
    """Convert the answer of Score. Raises ProtocolError unless it has a score for each continuation."""
    _check_number(len(message.scores), num_continuations)
    return Scores(
        request_id=message.request_id,
        model=message.model,
        prompt=prompt_info(message.prompt),
        scores=tuple(
            ContinuationScore(
                tuple(one.token_ids), tuple(one.logprobs), one.total_logprob, weights_version(one.weights)
            )
            for one in message.scores
        ),
        usage=usage(message.usage),
        timing=timing(message.timing),
    )


def ranking(message: inference_pb2.RerankResponse, num_documents: int) -> Ranking:
    """Convert the answer of Rerank. Raises ProtocolError unless each of its documents was asked about."""
    if any(one.index >= num_documents for one in message.results):
        raise ProtocolError.local(f"the server ranked a document that is not among the {num_documents}")
    return Ranking(
        request_id=message.request_id,
        model=message.model,
        method=spelled(METHOD_NAMES, message.method, "RERANK_METHOD_"),
        results=tuple(
            RankedDocument(one.index, one.relevance, weights_version(one.weights)) for one in message.results
        ),
        usage=usage(message.usage),
        timing=timing(message.timing),
    )


def classifications(message: inference_pb2.ClassifyResponse, num_inputs: int) -> Classifications:
    """Convert the answer of Classify. Raises ProtocolError unless it has the classes of each input."""
    _check_number(len(message.results), num_inputs)
    return Classifications(
        request_id=message.request_id,
        model=message.model,
        labels=tuple(message.labels),
        results=tuple(
            Classification(
                tuple(one.logits),
                tuple(one.probabilities),
                one.label,
                one.token_count,
                one.truncated_tokens,
                weights_version(one.weights),
            )
            for one in message.results
        ),
        usage=usage(message.usage),
        timing=timing(message.timing),
    )


def _check_number(number: int, wanted: int) -> None:
    if number != wanted:
        raise ProtocolError.local(f"the server answered with {number} results instead of {wanted}")


class Readings(Calls):
    """Asks for what a model makes of prompts alone."""

    def embed(
        self,
        inputs: Sequence[TextOrIds],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Make a vector of each input: a text, or token ids. For options see `EmbedOptions`.

        The texts whose vectors point the same way mean much the same. How they are to be written, such as an
        instruction before a query, is told by the model's publisher.
        """
        request = embed_request(inputs, options)
        reply = self._unary(self.inference.Embed, request, timeout, metadata, None)
        return embeddings(reply, len(request.inputs))

    def score(
        self,
        prompt: TextOrIds,
        continuations: Sequence[TextOrIds],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[ReadingOptions],
    ) -> Scores:
        """Tell how likely the model finds each continuation of a prompt; nothing is generated. Prompt and
        continuations are texts or token ids. For options see `ReadingOptions`.
        """
        request = score_request(prompt, continuations, options)
        reply = self._unary(self.inference.Score, request, timeout, metadata, None)
        return scores(reply, len(request.continuations))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """Tell how relevant each document is to a query, the most relevant first. For options see
        `RerankOptions`.
        """
        request = rerank_request(query, documents, options)
        reply = self._unary(self.inference.Rerank, request, timeout, metadata, None)
        return ranking(reply, len(request.documents))

    def classify(
        self,
        inputs: Sequence[ClassifyInput],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classifications:
        """Tell to which classes each input belongs: a text, token ids, or a pair of texts that the model
        reads together. For options see `ClassifyOptions`.
        """
        request = classify_request(inputs, options)
        reply = self._unary(self.inference.Classify, request, timeout, metadata, None)
        return classifications(reply, len(request.inputs))


# ruff: noqa: ASYNC109 - `timeout` is the deadline of the RPC, which gRPC also sends to the server


class AsyncReadings(AsyncCalls):
    """Asks for what a model makes of prompts alone."""

    async def embed(
        self,
        inputs: Sequence[TextOrIds],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Make a vector of each input: a text, or token ids. For options see `EmbedOptions`.

        The texts whose vectors point the same way mean much the same. How they are to be written, such as an
        instruction before a query, is told by the model's publisher.
        """
        request = embed_request(inputs, options)
        reply = await self._unary(self.inference.Embed, request, timeout, metadata, None)
        return embeddings(reply, len(request.inputs))

    async def score(
        self,
        prompt: TextOrIds,
        continuations: Sequence[TextOrIds],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[ReadingOptions],
    ) -> Scores:
        """Tell how likely the model finds each continuation of a prompt; nothing is generated. Prompt and
        continuations are texts or token ids. For options see `ReadingOptions`.
        """
        request = score_request(prompt, continuations, options)
        reply = await self._unary(self.inference.Score, request, timeout, metadata, None)
        return scores(reply, len(request.continuations))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """Tell how relevant each document is to a query, the most relevant first. For options see
        `RerankOptions`.
        """
        request = rerank_request(query, documents, options)
        reply = await self._unary(self.inference.Rerank, request, timeout, metadata, None)
        return ranking(reply, len(request.documents))

    async def classify(
        self,
        inputs: Sequence[ClassifyInput],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classifications:
        """Tell to which classes each input belongs: a text, token ids, or a pair of texts that the model
        reads together. For options see `ClassifyOptions`.
        """
        request = classify_request(inputs, options)
        reply = await self._unary(self.inference.Classify, request, timeout, metadata, None)
        return classifications(reply, len(request.inputs))
