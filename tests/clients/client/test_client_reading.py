"""Embed, Score and Rerank of both clients, on a server that answers what it is told to."""

from __future__ import annotations

import struct

import pytest

from penstock.client import (
    AsyncClient,
    Client,
    InvalidRequest,
    Pooling,
    ProtocolError,
    RerankMethod,
    Truncation,
)
from penstock.v1 import inference_pb2, types_pb2


def vectors(*numbers):
    return inference_pb2.EmbedResponse(
        request_id="r",
        model="m",
        embeddings=[
            inference_pb2.Embedding(
                values=struct.pack("<3f", *each),
                token_count=2,
                truncated_tokens=1,
                weights=types_pb2.WeightsVersion(label="w", generation=4),
            )
            for each in numbers
        ],
        usage=types_pb2.Usage(prompt_tokens=5, cached_prompt_tokens=3),
    )


async def call(server, is_async, name, *args, **options):
    if not is_async:
        with Client(server.addr) as client:
            return getattr(client, name)(*args, **options)
    async with AsyncClient(server.addr) as client:
        return await getattr(client, name)(*args, **options)


@pytest.mark.parametrize("is_async", [False, True])
async def test_embed(server, is_async):
    server.embeddings = vectors((1, 2, 3), (0.5, -1, 0))
    reply = await call(
        server,
        is_async,
        "embed",
        ["a", (7, 8)],
        pooling=Pooling.MEAN,
        normalize=False,
        dimensions=3,
        truncation=Truncation.LEFT,
        request_id="r",
        model="m",
        priority=2,
        min_weights=3,
        cache_salt="s",
        bypass_prefix_cache=True,
    )
    assert [one.numbers for one in reply.embeddings] == [(1, 2, 3), (0.5, -1, 0)]
    first = reply.embeddings[0]
    assert (first.token_count, first.truncated_tokens, first.weights.generation) == (2, 1, 4)
    assert (reply.request_id, reply.model, reply.usage.cached_prompt_tokens) == ("r", "m", 3)
    assert server.calls[-1] == inference_pb2.EmbedRequest(
        request_id="r",
        model="m",
        inputs=[
            inference_pb2.EmbedInput(text="a"),
            inference_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=[7, 8])),
        ],
        pooling=types_pb2.POOLING_MEAN,
        normalize=False,
        dimensions=3,
        truncation=types_pb2.TRUNCATION_LEFT,
        priority=2,
        min_weights=types_pb2.WeightsVersion(generation=3),
        cache=types_pb2.CacheOptions(cache_salt="s", bypass_prefix_cache=True),
    )
    await call(server, is_async, "embed", ["a", "b"])
    bare = [inference_pb2.EmbedInput(text=text) for text in "ab"]
    assert server.calls[-1] == inference_pb2.EmbedRequest(inputs=bare)


@pytest.mark.parametrize("is_async", [False, True])
async def test_score(server, is_async):
    server.scores = inference_pb2.ScoreResponse(
        request_id="r",
        model="m",
        prompt=types_pb2.PromptInfo(token_count=2),
        scores=[inference_pb2.ContinuationScore(token_ids=[5, 6], logprobs=[-1, -2], total_logprob=-3)],
    )
    reply = await call(server, is_async, "score", "p", ["x"], priority=1)
    (score,) = reply.scores
    assert (score.token_ids, score.logprobs, score.total_logprob) == ((5, 6), (-1, -2), -3)
    assert reply.prompt.token_count == 2
    wanted = [inference_pb2.Continuation(text="x")]
    assert server.calls[-1] == inference_pb2.ScoreRequest(prompt="p", continuations=wanted, priority=1)
    await call(server, is_async, "score", [1, 2], [[3]])
    assert server.calls[-1] == inference_pb2.ScoreRequest(
        prompt_token_ids=types_pb2.TokenIds(ids=[1, 2]),
        continuations=[inference_pb2.Continuation(token_ids=types_pb2.TokenIds(ids=[3]))],
    )


@pytest.mark.parametrize("is_async", [False, True])
async def test_rerank(server, is_async):
    server.ranking = inference_pb2.RerankResponse(
        request_id="r",
        model="m",
        method=types_pb2.RERANK_METHOD_YES_NO,
        results=[
            inference_pb2.RankedDocument(
                index=1, relevance=0.75, weights=types_pb2.WeightsVersion(label="w", generation=4)
            )
        ],
        usage=types_pb2.Usage(prompt_tokens=5),
    )
    reply = await call(
        server,
        is_async,
        "rerank",
        "q",
        ["a", "b"],
        method=RerankMethod.YES_NO,
        top_n=1,
        instruction="i",
        max_document_tokens=9,
        min_weights=3,
    )
    (one,) = reply.results
    assert (one.index, one.relevance, one.weights.generation) == (1, 0.75, 4)
    assert (reply.request_id, reply.model, reply.method, reply.usage.prompt_tokens) == ("r", "m", "yes_no", 5)
    assert server.calls[-1] == inference_pb2.RerankRequest(
        query="q",
        documents=["a", "b"],
        method=types_pb2.RERANK_METHOD_YES_NO,
        top_n=1,
        instruction="i",
        max_document_tokens=9,
        min_weights=types_pb2.WeightsVersion(generation=3),
    )
    with pytest.raises(ProtocolError):
        await call(server, is_async, "rerank", "q", ["a"])


async def test_an_answer_that_lacks_a_vector_is_no_answer(server):
    server.embeddings = vectors((1, 2, 3))
    with pytest.raises(ProtocolError):
        await call(server, False, "embed", ["a", "b"])


async def test_what_cannot_be_sent_is_refused_here(server):
    with pytest.raises(TypeError, match="inputs"):
        await call(server, False, "embed", "a")
    with pytest.raises(TypeError, match="continuations"):
        await call(server, False, "score", "a", "b")
    with pytest.raises(TypeError, match="documents"):
        await call(server, False, "rerank", "a", "b")
    with pytest.raises(TypeError, match="did you mean 'pooling'"):
        await call(server, False, "embed", ["a"], poolin="mean")
    with pytest.raises(InvalidRequest) as refusal:
        await call(server, False, "embed", ["a", [-1]], pooling="median", dimensions=-1)
    assert {one.field for one in refusal.value.violations} == {"inputs[1]", "pooling", "dimensions"}
    with pytest.raises(InvalidRequest) as refusal:
        await call(server, False, "rerank", "q", ["a", "\ud800"], method="guess", top_n=-1)
    assert {one.field for one in refusal.value.violations} == {"documents[1]", "method", "top_n"}


@pytest.mark.parametrize("is_async", [False, True])
async def test_classify(server, is_async):
    one = inference_pb2.Classification(
        logits=[0.5, -0.5],
        probabilities=[0.75, 0.25],
        label="good",
        token_count=3,
        weights=types_pb2.WeightsVersion(label="w", generation=4),
    )
    server.classes = inference_pb2.ClassifyResponse(
        request_id="r", model="m", labels=["good", "bad"], results=[one] * 3
    )
    inputs = ["a", ("b", "c"), [1, 2]]
    reply = await call(server, is_async, "classify", inputs, truncation="right", min_weights=3)
    assert (reply.request_id, reply.model, reply.labels) == ("r", "m", ("good", "bad"))
    assert [each.label for each in reply.results] == ["good"] * 3
    found = reply.results[0]
    assert (found.logits, found.probabilities, found.token_count) == ((0.5, -0.5), (0.75, 0.25), 3)
    assert server.calls[-1] == inference_pb2.ClassifyRequest(
        inputs=[
            inference_pb2.ClassifyInput(text="a"),
            inference_pb2.ClassifyInput(pair=inference_pb2.TextPair(first="b", second="c")),
            inference_pb2.ClassifyInput(token_ids=types_pb2.TokenIds(ids=[1, 2])),
        ],
        truncation=types_pb2.TRUNCATION_RIGHT,
        min_weights=types_pb2.WeightsVersion(generation=3),
    )
    with pytest.raises(ProtocolError):
        await call(server, is_async, "classify", ["a"])
