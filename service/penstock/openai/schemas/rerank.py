"""The bodies of requests to /v1/rerank, in Jina's and Cohere's shapes, and to /v1/score, in vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from penstock.openai.schemas.base import NEUTRAL, Body, RequestBody

MAX_DOCUMENTS: Final = 2048
"""The most documents, or pairs, of one request. The server may take fewer at once."""
MAX_QUERIES: Final = 256
"""The most different queries of one request. Each is a call of its own to the server."""

_LACKING: Final = {
    "truncate_prompt_tokens": "use max_tokens_per_doc",
    "truncate": "use max_tokens_per_doc",
    "truncation": "use max_tokens_per_doc",
    "use_activation": "the method says what a score is",
    "softmax": "the method says what a score is",
    "activation": "the method says what a score is",
    "mm_processor_kwargs": "documents are texts",
}
_NEUTRAL: Final[Mapping[str, Sequence[Any]]] = {
    **NEUTRAL,
    "truncate": (False,),
    "truncation": (False,),
    "use_activation": (True,),
    "softmax": (True,),
    "activation": (True,),
    "mm_processor_kwargs": ({},),
}


class Document(Body):
    """A document as an object."""

    text: str


class RelevanceBody(RequestBody):
    """What requests for relevance have in common. Fields that are not Jina's, Cohere's or vLLM's are those of
    the contract's RerankRequest.
    """

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = _NEUTRAL
    unsupported: ClassVar[Mapping[str, str]] = _LACKING

    model: str | None = None
    """Without it the served one."""
    max_tokens_per_doc: int | None = Field(default=None, ge=1)
    """How many tokens are kept from the start of each document."""
    instruction: str | None = None
    """What a model judges by that is asked for yes or no."""
    method: Literal["embeddings", "yes_no", "classifier"] | None = None
    priority: int | None = None
    """As in vLLM, a lower number is served first."""


class RerankBody(RelevanceBody):
    """A query, and documents that may answer it."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {**_NEUTRAL, "top_n": (0,), "rank_fields": ([],)}
    unsupported: ClassVar[Mapping[str, str]] = {
        **_LACKING,
        "max_chunks_per_doc": "documents are not cut into chunks; use max_tokens_per_doc",
        "rank_fields": "documents have a text alone",
    }

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool | None = None
    """Whether each result has its document, as it has in vLLM; false leaves it out."""


Texts = str | list[str]


class ScoreBody(RelevanceBody):
    """Pairs of texts: one text with each of others, or as many of both. Each side has one of two names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    """vLLM's newer name of `text_1`."""
    documents: Texts | None = None
    """vLLM's newer name of `text_2`."""
