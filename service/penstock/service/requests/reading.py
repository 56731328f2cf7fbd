"""Converts the contract's requests for embeddings, scores and relevance to validated frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self, TypedDict

from penstock.runtime.errors import UnsupportedFeature
from penstock.runtime.prompting.prompts import Prompt, TextPrompt, TokenPrompt, Truncation, most_cut_tokens
from penstock.runtime.prompting.relevance import (
    INSTRUCTION,
    RelevanceMethod,
    answer_tokens,
    default_method,
    judges_pairs,
)
from penstock.runtime.prompting.results import VectorForm
from penstock.runtime.requests.request import CacheParams, Pooling, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.service.requests.generate import (
    TRUNCATIONS,
    WHY_NO_ADAPTERS,
    Ids,
    Limits,
    ServedJob,
    Violations,
    check_generates,
    check_model,
    request_id_of,
    token_ids,
)
from penstock.service.requests.support import Refused, check_supported
from penstock.v1 import inference_pb2, types_pb2

_OF_TEXTS, _OF_PAIRS = "text and token_ids", "text, token_ids and pair"
_NEED_TEXT: Refused = {"prompt": (), "inputs.text": (), "continuations.text": ()}
_POOLINGS = {
    types_pb2.POOLING_LAST_TOKEN: Pooling.LAST_TOKEN,
    types_pb2.POOLING_MEAN: Pooling.MEAN,
    types_pb2.POOLING_FIRST_TOKEN: Pooling.FIRST_TOKEN,
    types_pb2.POOLING_MAX: Pooling.MAX,
}
_METHODS = {
    types_pb2.RERANK_METHOD_EMBEDDINGS: RelevanceMethod.EMBEDDINGS,
    types_pb2.RERANK_METHOD_YES_NO: RelevanceMethod.YES_NO,
    types_pb2.RERANK_METHOD_CLASSIFIER: RelevanceMethod.CLASSIFIER,
}
RERANK_METHODS = {method: value for value, method in _METHODS.items()}
POOLINGS = {pooling: value for value, pooling in _POOLINGS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingJob(ServedJob):
    """What one call that generates nothing asks for. Each of `parts` becomes an output of the engine."""

    parts: tuple[Prompt, ...]
    """The inputs of Embed, or the continuations of Score, which follow `prompt`."""
    pooling: Pooling | None
    """What embeddings are made of; None: the job is for scores."""
    truncation: Truncation = Truncation.REJECT
    """What is cut of inputs that are too long."""
    form: VectorForm = field(default_factory=VectorForm)
    """How vectors are made of embeddings."""

    @property
    def operation(self) -> str:
        """What is asked for, by OpenTelemetry's name."""
        return "embeddings" if self.pooling is not None else "text_completion"

    def without_load(self) -> Self:
        """Return the job without what is no longer needed once its requests are made."""
        return dataclasses.replace(self, prompt=TokenPrompt(()), parts=())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingJob(ReadingJob):
    """What one call of Rerank asks for. It has no `parts`: what is read is made of query and documents."""

    query: str
    documents: tuple[str, ...]
    method: RelevanceMethod
    instruction: str
    """What the model judges by."""
    answer_token_ids: tuple[int, int] | None
    """The tokens that mean yes and no, if the model is asked."""
    max_document_tokens: int | None
    """How many tokens are kept of each document; None: all."""
    top_n: int | None
    """How many documents are told; None: all."""

    def without_load(self) -> Self:
        """Return the job without what is no longer needed once its requests are made."""
        return dataclasses.replace(self, query="", documents=())


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a classifier reads together."""

    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyJob(ReadingJob):
    """What one call of Classify asks for. It has no `parts`, because an input may be a pair."""

    inputs: tuple[Prompt | TextPair, ...]

    def without_load(self) -> Self:
        """Return the job without what is no longer needed once its requests are made."""
        return dataclasses.replace(self, inputs=())


def to_embed_job(message: inference_pb2.EmbedRequest, limits: Limits) -> ReadingJob:
    """Check the whole message. Raises what `to_job` raises."""
    check_model(message.model, limits)
    if not limits.has_hidden_states:
        raise UnsupportedFeature(["Embed"], "its engine tells no hidden states")
    check_supported(message, _lacking(limits), WHY_NO_ADAPTERS)
    bad = Violations()
    few = bad.allows("inputs", len(message.inputs), limits.max_outputs_queued, "inputs")
    if not message.inputs:
        bad.add("inputs", "at least one is required")
    truncation = _truncation(message, limits, bad)
    parts = list(_parts("inputs", message.inputs if few else (), limits, truncation, bad))
    pooling: Pooling | None = limits.info.pooling
    if message.pooling != types_pb2.POOLING_UNSPECIFIED:
        pooling = _POOLINGS.get(message.pooling)
        if pooling is None:
            bad.add("pooling", f"unknown value {message.pooling}")
    form = VectorForm(
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
    )
    bad.build(lambda: form.check(limits.info.hidden_size))
    return _job(message, TokenPrompt(()), parts, bad, pooling=pooling, truncation=truncation, form=form)


def to_classify_job(message: inference_pb2.ClassifyRequest, limits: Limits) -> ClassifyJob:
    """Check the whole message. Raises what `to_job` raises."""
    check_model(message.model, limits)
    reader = limits.info.reader
    if reader is None or reader.classes is None:
        raise UnsupportedFeature(["Classify"], "the model has no classifier")
    without_text: Refused = {} if limits.has_text else {"inputs.text": (), "inputs.pair": ()}
    check_supported(message, {**limits.lacking_engine, **without_text}, WHY_NO_ADAPTERS)
    bad = Violations()
    few = bad.allows("inputs", len(message.inputs), limits.max_outputs_queued, "inputs")
    if not message.inputs:
        bad.add("inputs", "at least one is required")
    truncation = _truncation(message, limits, bad)
    inputs: list[Prompt | TextPair] = []
    for i, one in enumerate(message.inputs if few else ()):
        if one.HasField("pair"):
            for name in ("first", "second"):
                if not getattr(one.pair, name):
                    bad.add(f"inputs[{i}].pair.{name}", "must not be empty")
            inputs.append(TextPair(one.pair.first, one.pair.second))
        else:
            inputs.append(_part(f"inputs[{i}]", one, limits, truncation, bad))
    return ClassifyJob(
        **_common(message, bad),
        prompt=TokenPrompt(()),
        parts=(),
        n=len(inputs),
        pooling=reader.classes.pooling,
        truncation=truncation,
        inputs=tuple(inputs),
    )


def _truncation(
    message: inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest, limits: Limits, bad: Violations
) -> Truncation:
    if message.truncation == types_pb2.TRUNCATION_UNSPECIFIED:
        return limits.truncation
    known = TRUNCATIONS.get(message.truncation)
    if known is None:
        bad.add("truncation", f"unknown value {message.truncation}")
    return known or limits.truncation


def to_score_job(message: inference_pb2.ScoreRequest, limits: Limits) -> ReadingJob:
    """Check the whole message. Raises what `to_job` raises."""
    check_model(message.model, limits)
    check_generates(limits, "Score")
    check_supported(message, _lacking(limits), WHY_NO_ADAPTERS)
    bad = Violations()
    prompt: Prompt = TextPrompt(message.prompt)
    kind = message.WhichOneof("input")
    if kind is None:
        bad.add("input", "one of prompt and prompt_token_ids is required")
    elif kind == "prompt" and not message.prompt:
        bad.add("prompt", "must not be empty")
    elif kind == "prompt_token_ids":
        prompt = _ids("prompt_token_ids", message.prompt_token_ids.ids, limits, Truncation.REJECT, bad)
    few = bad.allows("continuations", len(message.continuations), limits.max_outputs_queued, "continuations")
    if not message.continuations:
        bad.add("continuations", "at least one is required")
    parts = list(
        _parts("continuations", message.continuations if few else (), limits, Truncation.REJECT, bad)
    )
    return _job(message, prompt, parts, bad, pooling=None)


def answers_for(method: RelevanceMethod, limits: Limits) -> tuple[int, int] | None:
    """Return the tokens that mean yes and no, where the method asks for these. UnsupportedFeature where the
    server lacks what the method needs.
    """
    if not limits.has_text:
        raise UnsupportedFeature(["Rerank"], "the model has no tokenizer")
    if method is RelevanceMethod.CLASSIFIER:
        if not judges_pairs(limits.info.reader):
            raise UnsupportedFeature(["method"], "the model is no classifier with one class")
        return None
    if method is RelevanceMethod.YES_NO:
        check_generates(limits, "method")
        return answer_tokens(limits.info.answer_token_ids, limits.codec)
    if not limits.has_hidden_states:
        raise UnsupportedFeature(["method"], "the engine tells no hidden states")
    return None


def can_rerank(method: RelevanceMethod, limits: Limits) -> bool:
    """Say whether the server has what the method needs."""
    try:
        answers_for(method, limits)
    except UnsupportedFeature:
        return False
    return True


def to_ranking_job(message: inference_pb2.RerankRequest, limits: Limits) -> RankingJob:
    """Check the whole message. Raises what `to_job` raises."""
    check_model(message.model, limits)
    if not limits.has_text:
        raise UnsupportedFeature(["Rerank"], "the model has no tokenizer")
    check_supported(message, _lacking(limits), WHY_NO_ADAPTERS)
    bad = Violations()
    method: RelevanceMethod | None = default_method(
        limits.info.answer_token_ids, limits.codec, limits.info.reader
    )
    if message.method != types_pb2.RERANK_METHOD_UNSPECIFIED:
        method = _METHODS.get(message.method)
        if method is None:
            bad.add("method", f"unknown value {message.method}")
    answers = None if method is None else answers_for(method, limits)
    asks = answers is not None
    if message.instruction and not asks:
        bad.add("instruction", "goes with RERANK_METHOD_YES_NO: no other method shows it to the model")
    if not message.query:
        bad.add("query", "must not be empty")
    if not message.documents:
        bad.add("documents", "at least one is required")
    classifies = method is RelevanceMethod.CLASSIFIER
    most = limits.max_outputs_queued // 2 if asks else limits.max_outputs_queued - (not classifies)
    if bad.allows("documents", len(message.documents), most, "documents"):
        for i, document in enumerate(message.documents):
            if not document:
                bad.add(f"documents[{i}]", "must not be empty")
    for name in ("top_n", "max_document_tokens"):
        if message.HasField(name) and not getattr(message, name):
            bad.add(name, "must be at least 1")
    num_documents = len(message.documents)
    common = _common(message, bad)
    assert method is not None, "what is wrong was raised"
    return RankingJob(
        **common,
        prompt=TokenPrompt(()),
        parts=(),
        n=2 * num_documents if asks else num_documents + (not classifies),
        pooling=None if asks else limits.info.pooling,
        query=message.query,
        documents=tuple(message.documents),
        method=method,
        instruction=message.instruction or INSTRUCTION,
        answer_token_ids=answers,
        max_document_tokens=message.max_document_tokens if message.HasField("max_document_tokens") else None,
        top_n=message.top_n if message.HasField("top_n") else None,
    )


def _lacking(limits: Limits) -> Refused:
    return {
        **limits.lacking_engine,
        **({} if limits.has_text else _NEED_TEXT),
    }


def _job(
    message: inference_pb2.EmbedRequest | inference_pb2.ScoreRequest,
    prompt: Prompt,
    parts: Sequence[Prompt],
    bad: Violations,
    *,
    pooling: Pooling | None,
    truncation: Truncation = Truncation.REJECT,
    form: VectorForm | None = None,
) -> ReadingJob:
    return ReadingJob(
        **_common(message, bad),
        prompt=prompt,
        parts=tuple(parts),
        n=len(parts),
        pooling=pooling,
        truncation=truncation,
        form=form or VectorForm(),
    )


class _Common(TypedDict):
    """The arguments of a job that all of these requests have."""

    request_id: str
    sampling: ResolvedSampling
    stopping: StoppingParams
    cache: CacheParams
    priority: int
    adapter: str | None
    min_generation: int
    return_text: bool


def _common(
    message: inference_pb2.EmbedRequest
    | inference_pb2.ScoreRequest
    | inference_pb2.RerankRequest
    | inference_pb2.ClassifyRequest,
    bad: Violations,
) -> _Common:
    """Read what all of these requests have. Raises InvalidRequest if anything of the message was found
    wrong.
    """
    request_id = request_id_of(message.request_id, bad)
    cache = bad.build(lambda: CacheParams(message.cache.cache_salt, message.cache.bypass_prefix_cache))
    bad.raise_if_any()
    assert cache is not None
    return _Common(
        request_id=request_id,
        sampling=ResolvedSampling(),
        stopping=StoppingParams(),
        cache=cache,
        priority=message.priority,
        adapter=message.adapter or None,
        min_generation=message.min_weights.generation,
        return_text=False,
    )


def _parts(
    name: str,
    messages: Sequence[inference_pb2.EmbedInput | inference_pb2.Continuation],
    limits: Limits,
    truncation: Truncation,
    bad: Violations,
) -> Iterator[Prompt]:
    for i, message in enumerate(messages):
        yield _part(f"{name}[{i}]", message, limits, truncation, bad)


def _part(
    field: str,
    message: inference_pb2.EmbedInput | inference_pb2.Continuation | inference_pb2.ClassifyInput,
    limits: Limits,
    truncation: Truncation,
    bad: Violations,
) -> Prompt:
    if message.HasField("token_ids"):
        return _ids(f"{field}.token_ids", message.token_ids.ids, limits, truncation, bad)
    if not message.HasField("text"):
        takes_pairs = isinstance(message, inference_pb2.ClassifyInput)
        bad.add(field, f"one of {_OF_PAIRS if takes_pairs else _OF_TEXTS} is required")
    elif not message.text:
        bad.add(f"{field}.text", "must not be empty")
    return TextPrompt(message.text)


def _ids(name: str, ids: Ids, limits: Limits, truncation: Truncation, bad: Violations) -> TokenPrompt:
    """Read token ids, counted before anything walks over all of them."""
    room = limits.info.room
    most = room - 1 if truncation is Truncation.REJECT else most_cut_tokens(room)
    field = f"{name}.ids"
    if not bad.allows(field, len(ids), most, "ids"):
        return TokenPrompt(())
    if not ids:
        bad.add(field, "must not be empty")
    return TokenPrompt(token_ids(field, ids, limits.info.vocab_size, bad))
