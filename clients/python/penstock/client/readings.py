"""The methods of the sync client for embeddings and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from penstock.client.calls import Calls
from penstock.client.connection.channel import Metadata
from penstock.client.replies.reading_messages import embeddings, scores
from penstock.client.requests.reading_requests import (
    EmbedOptions,
    ReadingOptions,
    TextOrIds,
    embed_request,
    score_request,
)
from penstock.client.values.reading_values import Embeddings, Scores


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
