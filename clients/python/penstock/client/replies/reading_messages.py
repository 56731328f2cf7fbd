"""Converts the answers of Embed and Score to frozen values."""

from __future__ import annotations

from penstock.client.errors import ProtocolError
from penstock.client.replies.messages import prompt_info, timing, usage, weights_version
from penstock.client.values.reading_values import ContinuationScore, Embedding, Embeddings, Scores
from penstock.v1 import inference_pb2


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


def _check_number(number: int, wanted: int) -> None:
    if number != wanted:
        raise ProtocolError.local(f"the server answered with {number} results instead of {wanted}")
