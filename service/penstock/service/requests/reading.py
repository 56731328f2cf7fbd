"""Converts the contract's requests for embeddings and scores to validated frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from penstock.runtime.errors import UnsupportedFeature
from penstock.runtime.prompting.prompts import Prompt, TextPrompt, TokenPrompt, Truncation, most_cut_tokens
from penstock.runtime.prompting.results import VectorForm
from penstock.runtime.requests.request import CacheParams, Pooling, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.service.requests.generate import (
    TRUNCATIONS,
    Ids,
    Limits,
    ServedJob,
    Violations,
    check_model,
    request_id_of,
    token_ids,
)
from penstock.service.requests.support import Refused, check_supported
from penstock.v1 import inference_pb2, types_pb2

_NEED_TEXT: Refused = {"prompt": (), "inputs.text": (), "continuations.text": ()}
_POOLINGS = {
    types_pb2.POOLING_LAST_TOKEN: Pooling.LAST_TOKEN,
    types_pb2.POOLING_MEAN: Pooling.MEAN,
}
POOLINGS = {pooling: value for value, pooling in _POOLINGS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingJob(ServedJob):
    """What one call of Embed or Score asks for. Each of `parts` becomes an output of the engine."""

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
        """The job without what is no longer needed once its requests are made."""
        return dataclasses.replace(self, prompt=TokenPrompt(()), parts=())


def to_embed_job(message: inference_pb2.EmbedRequest, limits: Limits) -> ReadingJob:
    """Check the whole message. Raises what `to_job` raises."""
    check_model(message.model, limits)
    if not limits.has_hidden_states:
        raise UnsupportedFeature(["Embed"], "its engine tells no hidden states")
    check_supported(message, _lacking(limits))
    bad = Violations()
    few = bad.allows("inputs", len(message.inputs), limits.max_outputs_queued, "inputs")
    if not message.inputs:
        bad.add("inputs", "at least one is required")
    truncation = limits.truncation
    if message.truncation != types_pb2.TRUNCATION_UNSPECIFIED:
        known = TRUNCATIONS.get(message.truncation)
        if known is None:
            bad.add("truncation", f"unknown value {message.truncation}")
        truncation = known or truncation
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


def to_score_job(message: inference_pb2.ScoreRequest, limits: Limits) -> ReadingJob:
    """Check the whole message. Raises what `to_job` raises."""
    check_model(message.model, limits)
    check_supported(message, _lacking(limits))
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


def _lacking(limits: Limits) -> Refused:
    return {
        **({} if limits.has_priority else {"priority": ()}),
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
    request_id = request_id_of(message.request_id, bad)
    cache = bad.build(lambda: CacheParams(message.cache.cache_salt, message.cache.bypass_prefix_cache))
    bad.raise_if_any()
    assert cache is not None
    return ReadingJob(
        request_id=request_id,
        prompt=prompt,
        parts=tuple(parts),
        sampling=ResolvedSampling(),
        stopping=StoppingParams(),
        n=len(parts),
        pooling=pooling,
        truncation=truncation,
        form=form or VectorForm(),
        cache=cache,
        priority=message.priority,
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
        field = f"{name}[{i}]"
        if message.HasField("token_ids"):
            yield _ids(f"{field}.token_ids", message.token_ids.ids, limits, truncation, bad)
        elif message.HasField("text"):
            if not message.text:
                bad.add(f"{field}.text", "must not be empty")
            yield TextPrompt(message.text)
        else:
            bad.add(field, "one of text and token_ids is required")


def _ids(name: str, ids: Ids, limits: Limits, truncation: Truncation, bad: Violations) -> TokenPrompt:
    """Token ids, counted before anything walks over all of them."""
    room = limits.info.max_model_len
    most = room - 1 if truncation is Truncation.REJECT else most_cut_tokens(room)
    field = f"{name}.ids"
    if not bad.allows(field, len(ids), most, "ids"):
        return TokenPrompt(())
    if not ids:
        bad.add(field, "must not be empty")
    return TokenPrompt(token_ids(field, ids, limits.info.vocab_size, bad))
