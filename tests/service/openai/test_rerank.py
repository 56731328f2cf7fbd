"""/v1/rerank as clients of Jina, Cohere and vLLM use it, and /v1/score as vLLM's. The fake engine's state
after some tokens is (their number, their sum, the last one, 1).
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import fake, ids

TEXTS = ["zzzzzzzz", "ba", "ab"]


def cosine(one: str, other: str) -> Any:
    a, b = ((len(text), sum(text.encode()), text.encode()[-1], 1) for text in (one, other))
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return pytest.approx(product / math.hypot(*a) / math.hypot(*b), rel=1e-9)


async def post(rig: FrontRig, path: str, **body: Any) -> tuple[int, Any]:
    reply = await rig.http.post(path, json=body)
    return reply.status_code, reply.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_the_most_relevant_documents_come_first(path: str) -> None:
    async with front_rig() as rig:
        status, told = await post(rig, path, model="fake", query="ab", documents=TEXTS)
        objects = [{"text": text} for text in TEXTS]
        _, of_objects = await post(rig, path, query="ab", documents=objects, top_n=1, return_documents=False)
        _, cut = await post(rig, path, query="ab", documents=["abzz"], max_tokens_per_doc=2)
    assert status == 200
    assert told == {
        "id": told["id"],
        "model": "fake",
        "usage": {"prompt_tokens": 2 + 8 + 2 + 2, "total_tokens": 14},
        "results": [
            {"index": 2, "document": {"text": "ab"}, "relevance_score": cosine("ab", "ab")},
            {"index": 1, "document": {"text": "ba"}, "relevance_score": cosine("ab", "ba")},
            {"index": 0, "document": {"text": "zzzzzzzz"}, "relevance_score": cosine("ab", "zzzzzzzz")},
        ],
    }
    assert told["id"].startswith("rerank-")
    assert of_objects["results"] == [{"index": 2, "relevance_score": cosine("ab", "ab")}]
    assert cut["results"][0]["relevance_score"] == cosine("ab", "ab")
    assert cut["results"][0]["document"] == {"text": "abzz"}


async def test_scores_are_those_of_pairs_in_their_order() -> None:
    async with front_rig() as rig:
        for names in ("text_1", "text_2"), ("queries", "documents"):
            for path in "/v1/score", "/score":
                _, one = await post(rig, path, **{names[0]: "ab", names[1]: TEXTS})
                assert [row["score"] for row in one["data"]] == [cosine("ab", text) for text in TEXTS]
        assert one["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
        assert [(row["index"], row["object"]) for row in one["data"]] == [(i, "score") for i in range(3)]
        assert (one["object"], one["model"], one["id"][:6]) == ("list", "fake", "score-")
        _, each = await post(rig, "/score", text_1=["ab", "q", "ab"], text_2=TEXTS)
        assert [row["score"] for row in each["data"]] == [
            cosine("ab", TEXTS[0]), cosine("q", TEXTS[1]), cosine("ab", TEXTS[2]),
        ]  # fmt: skip
        _, pair = await post(rig, "/score", text_1="a", text_2="b")
        assert [row["score"] for row in pair["data"]] == [cosine("a", "b")]


RERANK: dict[str, Any] = {"query": "q", "documents": ["d"]}
SCORE: dict[str, Any] = {"text_1": "q", "text_2": ["d"]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/rerank", {"documents": ["d"]}, 400, "query"),
        ("/rerank", {**RERANK, "query": ""}, 400, "query"),
        ("/rerank", {**RERANK, "documents": []}, 400, "documents"),
        ("/rerank", {**RERANK, "documents": "d"}, 400, "documents"),
        ("/rerank", {**RERANK, "documents": ["d", 7]}, 400, "documents[1]"),
        ("/rerank", {**RERANK, "documents": ["d", {"title": "t"}]}, 400, "documents[1].text"),
        ("/rerank", {**RERANK, "documents": ["d", ""]}, 400, "documents[1]"),
        ("/rerank", {**RERANK, "documents": ["d", "d" * 70]}, 400, "documents[1]"),
        ("/rerank", {**RERANK, "documents": ["d"] * 2049}, 400, "documents"),
        ("/rerank", {**RERANK, "top_n": -1}, 400, "top_n"),
        ("/rerank", {**RERANK, "max_tokens_per_doc": 0}, 400, "max_tokens_per_doc"),
        ("/rerank", {**RERANK, "truncate_prompt_tokens": 9}, 400, "truncate_prompt_tokens"),
        ("/rerank", {**RERANK, "truncate": True}, 400, "truncate"),
        ("/rerank", {**RERANK, "max_chunks_per_doc": 3}, 400, "max_chunks_per_doc"),
        ("/rerank", {**RERANK, "rank_fields": ["a"]}, 400, "rank_fields"),
        ("/rerank", {**RERANK, "instruction": "i"}, 400, "instruction"),
        ("/rerank", {**RERANK, "method": "yes_no"}, 400, "method"),
        ("/rerank", {**RERANK, "model": "other"}, 404, "model"),
        ("/score", {"text_2": ["d"]}, 400, "text_1"),
        ("/score", {"text_1": "q"}, 400, "text_2"),
        ("/score", {**SCORE, "documents": ["d"]}, 400, "documents"),
        ("/score", {**SCORE, "text_1": ["a", "b"]}, 400, "text_1"),
        ("/score", {**SCORE, "text_2": []}, 400, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", ""]}, 400, "text_2[1]"),
        ("/score", {"queries": ["a", "d" * 70], "documents": ["c", "e"]}, 400, "queries"),
        ("/score", {"text_1": [str(i) for i in range(257)], "text_2": ["d"] * 257}, 400, "text_1"),
        ("/score", {**SCORE, "use_activation": False}, 400, "use_activation"),
        ("/score", {**SCORE, "model": "other"}, 404, "model"),
    ],
)
async def test_what_is_refused(path: str, body: dict[str, Any], status: int, param: str) -> None:
    async with front_rig() as rig:
        code, told = await post(rig, path, **body)
    assert (code, told["error"]["param"]) == (status, param)


async def test_what_goes_on_to_the_server() -> None:
    engine = fake(scheduling_policy="priority")
    async with front_rig(engine) as rig:
        await post(rig, "/rerank", **RERANK, priority=3, top_n=0)
    assert {request.priority for request in engine.seen} == {-3}
    assert [request.prompt_token_ids for request in engine.seen] == [tuple(ids("q")), tuple(ids("d"))]
