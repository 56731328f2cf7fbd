"""POST /v1/rerank and /v1/score: how relevant documents are, sorted, or score by score."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import PenstockClientError, Ranking, RerankOptions
from penstock.openai.backend import ModelFacts
from penstock.openai.calls import Call, call_of
from penstock.openai.failures import invalid_value, missing, of_client_error
from penstock.openai.front import Front, front_of
from penstock.openai.generation.frames import total_usage
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, json_response
from penstock.openai.schemas.rerank import (
    MAX_DOCUMENTS,
    MAX_QUERIES,
    Document,
    RelevanceBody,
    RerankBody,
    ScoreBody,
)

PARAMS: Final = {"max_document_tokens": "max_tokens_per_doc", "adapter": "model"}
"""From the contract's paths to the fields of both, where the names differ."""


def _options(body: RelevanceBody, facts: ModelFacts, request_id: str) -> RerankOptions:
    asked = facts.asked_for(body.model)
    return RerankOptions(
        model=asked["model"],
        adapter=asked["adapter"],
        request_id=request_id,
        method=body.method,
        instruction=body.instruction,
        max_document_tokens=body.max_tokens_per_doc,
        priority=None if body.priority is None else -body.priority,
    )


def _usage(rankings: Sequence[Ranking]) -> Mapping[str, int]:
    tokens = total_usage(ranking.usage for ranking in rankings).prompt_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def rerank(request: Request) -> Response:
    """Sort documents by their relevance to a query."""
    call, body, front = call_of(request), await read_body(request, RerankBody), front_of(request)
    texts = [one.text if isinstance(one, Document) else one for one in body.documents]
    options = _options(body, await front.backend.facts(call), call.answer_id("rerank"))
    options["top_n"] = body.top_n
    asked = front.backend.client.rerank(
        body.query, texts, timeout=call.timeout, metadata=call.metadata, **options
    )
    made = await answered(request, asked)
    has_documents = body.return_documents is not False
    return json_response(
        {
            "id": made.request_id,
            "model": made.model,
            "usage": _usage([made]),
            "results": [
                {
                    "index": one.index,
                    **({"document": {"text": texts[one.index]}} if has_documents else {}),
                    "relevance_score": one.relevance,
                }
                for one in made.results
            ],
        }
    )


async def score(request: Request) -> Response:
    """Tell how relevant the second text of each pair is to the first."""
    call, body, front = call_of(request), await read_body(request, ScoreBody), front_of(request)
    pairs = pairs_of(body)
    rankings = await answered(request, _rank_all(pairs, body, call, front))
    scores = [0.0] * len(pairs.documents)
    for places, ranking in zip(pairs.places.values(), rankings, strict=True):
        for one in ranking.results:
            scores[places[one.index]] = one.relevance
    return json_response(
        {
            "id": call.answer_id("score"),
            "object": "list",
            "created": call.created,
            "model": rankings[0].model,
            "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)],
            "usage": _usage(rankings),
        }
    )


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of texts of a request, by their first texts."""

    documents: Sequence[str]
    """The second text of each pair."""
    places: Mapping[str, Sequence[int]]
    """From each different first text to the numbers of its pairs."""
    query_field: str
    """The field that has the first texts."""
    document_field: str


def pairs_of(body: ScoreBody) -> Pairs:
    """Make the pairs of a request. Raises ApiError unless there is one first text, or as many as second ones,
    and for too many.
    """
    first_field, first = _side(body, "text_1", "queries")
    second_field, second = _side(body, "text_2", "documents")
    if len(second) > MAX_DOCUMENTS:
        raise invalid_value(second_field, f"it has more than {MAX_DOCUMENTS} texts.")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        why = f"it has {len(first)} texts and {second_field} has {len(second)}; give one, or as many."
        raise invalid_value(first_field, why)
    places: dict[str, list[int]] = {}
    for i, query in enumerate(first):
        places.setdefault(query, []).append(i)
    if len(places) > MAX_QUERIES:
        raise invalid_value(first_field, f"it has more than {MAX_QUERIES} different texts.")
    return Pairs(second, places, first_field, second_field)


def _side(body: ScoreBody, name: str, other: str) -> tuple[str, list[str]]:
    """Return the texts of one side, and the field that has them."""
    given = [(field, value) for field in (name, other) if (value := getattr(body, field)) is not None]
    if not given:
        raise missing(name)
    if len(given) > 1:
        raise invalid_value(other, f"it is another name of {name}; give one of them.")
    ((field, value),) = given
    if not value:
        raise invalid_value(field, "it must not be empty.")
    return field, [value] if isinstance(value, str) else value


async def _rank_all(pairs: Pairs, body: ScoreBody, call: Call, front: Front) -> list[Ranking]:
    """Compute the relevance of its documents to each query. The first error of one ends the others, and names
    the document as the request does.
    """

    facts = await front.backend.facts(call)

    async def one(i: int, query: str, places: Sequence[int]) -> Ranking:
        request_id = call.answer_id("score")
        options = _options(body, facts, request_id if len(pairs.places) == 1 else f"{request_id}-{i}")
        texts = [pairs.documents[place] for place in places]
        try:
            return await front.backend.client.rerank(
                query, texts, timeout=call.timeout, metadata=call.metadata, **options
            )
        except PenstockClientError as error:
            field = pairs.document_field
            names = {f"documents[{at}]": f"{field}[{place}]" for at, place in enumerate(places)}
            names |= {"documents": field, "query": pairs.query_field}
            raise of_client_error(error, {**PARAMS, **names}) from error

    running = [
        asyncio.create_task(one(i, query, places)) for i, (query, places) in enumerate(pairs.places.items())
    ]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
