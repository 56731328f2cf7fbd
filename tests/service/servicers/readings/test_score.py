"""Score, on the fake engine, which gives a prompt's token t the log-probability -t/16."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import processors

from penstock.runtime.requests.request import PromptReading
from penstock.service.servicers import inference
from penstock.v1 import inference_pb2, types_pb2
from tests.service.rig import failure_of, fake, ids, serving, until
from tests.support.models.byte_text import END, EOS, ByteText

pytestmark = pytest.mark.asyncio(loop_scope="module")
WAIT_S = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server_of_file():
    """Serve those tests that change nothing."""
    async with serving(fake(max_queued_requests=8)) as rig:
        yield rig


def score(prompt: str | None, *continuations: str, **fields: Any) -> inference_pb2.ScoreRequest:
    asked = [inference_pb2.Continuation(text=text) for text in continuations]
    if prompt is not None:
        fields["prompt"] = prompt
    return inference_pb2.ScoreRequest(continuations=asked, **fields)


async def test_each_continuation_has_the_log_probabilities_of_its_tokens(rig):
    reply = await rig.inference.Score(score("ab", "c", "de"))
    first, second = reply.scores
    assert (list(first.token_ids), list(second.token_ids)) == (ids("c"), ids("de"))
    assert list(first.logprobs) == [-99 / 16]
    assert list(second.logprobs) == [-100 / 16, -101 / 16]
    assert second.total_logprob == -201 / 16
    assert (first.weights.generation, reply.prompt.token_count) == (1, 2)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 0)
    assert reply.timing.HasField("total")
    by_ids = inference_pb2.ScoreRequest(
        prompt_token_ids=types_pb2.TokenIds(ids=ids("ab")),
        continuations=[inference_pb2.Continuation(token_ids=types_pb2.TokenIds(ids=ids("de")))],
    )
    assert list((await rig.inference.Score(by_ids)).scores) == [second]
    assert {request.reading for request in rig.engine.seen} == {PromptReading(scores_from=2)}
    assert [request.prompt_token_ids for request in rig.engine.seen][1] == tuple(ids("abde"))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (score(None, "a"), "input"),
        (score("", "a"), "prompt"),
        (inference_pb2.ScoreRequest(prompt_token_ids=types_pb2.TokenIds()), "prompt_token_ids.ids"),
        (score("a"), "continuations"),
        (score("a", "b", ""), "continuations[1].text"),
        (
            inference_pb2.ScoreRequest(prompt="a", continuations=[inference_pb2.Continuation()]),
            "continuations[0]",
        ),
        (score("a", *["b"] * 9), "continuations"),
    ],
)
async def test_what_is_wrong_is_named(rig, request_, field):
    failure = await failure_of(rig.inference.Score(request_))
    assert failure.reason == "INVALID_FIELD"
    assert field in failure.violations
    assert rig.engine.seen == []


async def test_the_prompt_alone_has_special_tokens():
    codec = ByteText()
    codec.backend.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, EOS)]
    )
    async with serving(fake(codec=codec)) as rig:
        await rig.inference.Score(score("ab", "c"))
        assert rig.engine.seen[0].prompt_token_ids == (EOS, *ids("abc"))


async def test_prompt_and_continuation_must_fit_together():
    async with serving(fake(max_model_len=6)) as rig:
        assert len((await rig.inference.Score(score("abc", "de"))).scores) == 1
        failure = await failure_of(rig.inference.Score(score("abc", "d", "def")))
        assert (failure.reason, failure.info.metadata["prompt_tokens"]) == ("PROMPT_TOO_LONG", "6")


async def test_the_prompt_counts_before_each_continuation(monkeypatch: pytest.MonkeyPatch):
    """A short message could otherwise ask for gigabytes of prompts."""
    monkeypatch.setattr(inference, "MAX_JOINED_TOKENS", 11)
    async with serving() as rig:
        failure = await failure_of(rig.inference.Score(score("abc", "d", "e", "f")))
        assert failure.violations == {"continuations": "12 tokens, with the prompt before each; at most 11"}
        assert rig.engine.seen == []
        assert len((await rig.inference.Score(score("abc", "d", "e"))).scores) == 2


async def test_an_abort_ends_all():
    async with serving(fake(hold=True)) as rig:
        call = asyncio.ensure_future(failure_of(rig.inference.Score(score("a", "b", "c", request_id="r"))))
        await until(lambda: len(rig.engine.seen) == 2)
        await rig.inference.Abort(inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=["r"])))
        assert (await asyncio.wait_for(call, WAIT_S)).reason == "REQUEST_ABORTED"
