"""Embed, on the fake engine, whose hidden state after some tokens is (their number, their sum, the last one,
1).
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from penstock.runtime.errors import NonFiniteLogits
from penstock.runtime.prompting.prompts import most_cut_chars
from penstock.runtime.requests.request import Pooling, PromptReading
from penstock.service.replies.reply_budget import ReplyLimits
from penstock.service.requests.generate import encode_prompt
from penstock.service.servicers import inference
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import failure_of, fake, generate, ids, serving, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
WAIT_S = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server_of_file():
    """Serve those tests that change nothing."""
    async with serving(fake(max_queued_requests=8)) as rig:
        yield rig


def embed(*texts: str, **fields: Any) -> inference_pb2.EmbedRequest:
    inputs = [inference_pb2.EmbedInput(text=text) for text in texts]
    return inference_pb2.EmbedRequest(inputs=inputs, **fields)


def vectors(reply: inference_pb2.EmbedResponse) -> list[list[float]]:
    return [np.frombuffer(one.values, "<f4").tolist() for one in reply.embeddings]


def unit(*values: float) -> Any:
    length = math.hypot(*values)
    return pytest.approx([value / length for value in values], rel=1e-6)


async def test_one_vector_for_each_input_in_their_order(rig):
    reply = await rig.inference.Embed(embed("ab", "abc", normalize=False))
    assert vectors(reply) == [[2, 97 + 98, 98, 1], [3, 97 + 98 + 99, 99, 1]]
    assert [one.token_count for one in reply.embeddings] == [2, 3]
    assert [one.weights.generation for one in reply.embeddings] == [1, 1]
    assert (reply.model, len(reply.request_id)) == ("fake", 32)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 0)
    assert reply.timing.HasField("total")
    by_ids = inference_pb2.EmbedRequest(
        inputs=[inference_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=ids("ab")))], normalize=False
    )
    assert vectors(await rig.inference.Embed(by_ids)) == vectors(reply)[:1]


async def test_pooling_dimensions_and_length(rig):
    mean = await rig.inference.Embed(embed("ab", pooling=types_pb2.POOLING_MEAN, normalize=False))
    assert vectors(mean) == [[1.5, (97 + 195) / 2, 97.5, 1]]
    assert vectors(await rig.inference.Embed(embed("ab"))) == [unit(2, 195, 98, 1)]
    # What is cut off does not count in the length, as models of this kind were trained.
    assert vectors(await rig.inference.Embed(embed("ab", dimensions=2))) == [unit(2, 195)]
    whole = await rig.inference.Embed(embed("ab", dimensions=4, normalize=False))
    assert vectors(whole) == [[2, 195, 98, 1]]
    asked = [request.reading for request in rig.engine.seen]
    assert asked[:2] == [PromptReading(pooling=Pooling.MEAN), PromptReading(pooling=Pooling.LAST_TOKEN)]
    others = {types_pb2.POOLING_FIRST_TOKEN: [1, 98, 98, 1], types_pb2.POOLING_MAX: [2, 195, 98, 1]}
    for pooling, expected in others.items():
        reply = await rig.inference.Embed(embed("ba", pooling=pooling, normalize=False))
        assert vectors(reply) == [expected]


async def test_what_the_model_is_made_for_is_the_default():
    engine = fake()
    engine.info = dataclasses.replace(engine.info, pooling=Pooling.MEAN)
    async with serving(engine) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert (info.hidden_size, info.default_pooling) == (4, types_pb2.POOLING_MEAN)
        await rig.inference.Embed(embed("ab"))
        assert rig.engine.seen[0].reading == PromptReading(pooling=Pooling.MEAN)
        wanted = {
            control_pb2.FEATURE_EMBED,
            control_pb2.FEATURE_SCORE,
            control_pb2.FEATURE_HIDDEN_STATES,
        }
        assert wanted <= set(info.features)


async def test_inputs_that_are_too_long():
    async with serving(fake(max_model_len=6)) as rig:
        failure = await failure_of(rig.inference.Embed(embed("abcde", "abcdef", "abcdefg")))
        assert failure.reason == "INVALID_FIELD"
        assert failure.violations == {
            "inputs[1]": "at most 5 tokens, not 6",
            "inputs[2]": "at most 5 tokens, not 7",
        }
        cut = await rig.inference.Embed(
            embed("abcdefg", truncation=types_pb2.TRUNCATION_LEFT, normalize=False)
        )
        assert vectors(cut) == [[5, sum(b"cdefg"), ord("g"), 1]]
        assert (cut.embeddings[0].token_count, cut.embeddings[0].truncated_tokens) == (5, 2)
        assert not rig.engine.load().num_running


async def test_an_input_that_is_too_long_to_be_cut_is_named():
    """Its text is not tokenized at all, so it is refused before the others."""
    async with serving(fake(max_model_len=6)) as rig:
        most = most_cut_chars(6)
        request = embed("a", "b" * (most + 1), "c" * (most + 2), truncation=types_pb2.TRUNCATION_LEFT)
        failure = await failure_of(rig.inference.Embed(request))
        described = f"at most {most} characters, also of a prompt to be cut, not"
        assert failure.violations == {
            "inputs[1]": f"{described} {most + 1}",
            "inputs[2]": f"{described} {most + 2}",
        }


async def test_other_tasks_have_turns_while_many_inputs_are_tokenized(monkeypatch: pytest.MonkeyPatch):
    turns, seen = 0, []

    async def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(turns)
        return await encode_prompt(*args, **kwargs)

    monkeypatch.setattr(inference, "encode_prompt", watched)
    async with serving() as rig:
        call = asyncio.ensure_future(rig.inference.Embed(embed(*["a"] * 100)))
        while not call.done():
            turns += 1
            await asyncio.sleep(0)
        assert len((await call).embeddings) == len(seen) == 100
        assert seen[-1] > seen[0]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (embed(), "inputs"),
        (embed("a", ""), "inputs[1].text"),
        (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()]), "inputs[0]"),
        (
            inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(token_ids=types_pb2.TokenIds())]),
            "inputs[0].token_ids.ids",
        ),
        (
            inference_pb2.EmbedRequest(
                inputs=[inference_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=[1, 10**6]))]
            ),
            "inputs[0].token_ids.ids[1]",
        ),
        (embed("a", pooling=9), "pooling"),
        (embed("a", truncation=9), "truncation"),
        (embed("a", dimensions=0), "dimensions"),
        (embed("a", dimensions=5), "dimensions"),
        (embed("a", request_id="x" * 129), "request_id"),
        (embed(*["a"] * 9), "inputs"),
    ],
)
async def test_what_is_wrong_is_named(rig, request_, field):
    failure = await failure_of(rig.inference.Embed(request_))
    assert (failure.reason, set(failure.violations)) == ("INVALID_FIELD", {field})
    assert rig.engine.seen == []


async def test_what_this_server_does_not_have_is_refused(rig):
    failure = await failure_of(rig.inference.Embed(embed("a", priority=1)))
    assert failure.reason == "UNSUPPORTED_FEATURE"
    failure = await failure_of(rig.inference.Embed(embed("a", model="other")))
    assert failure.reason == "UNKNOWN_MODEL"
    old = types_pb2.WeightsVersion(generation=7)
    failure = await failure_of(rig.inference.Embed(embed("a", min_weights=old)))
    assert failure.reason == "WEIGHTS_TOO_OLD"


async def test_a_reply_that_is_too_large_is_refused_before_it_is_computed():
    async with serving(replies=ReplyLimits(max_response_bytes=100)) as rig:
        failure = await failure_of(rig.inference.Embed(embed(*["a"] * 7)))
        assert (failure.reason, set(failure.violations)) == ("RESPONSE_TOO_LARGE", {"inputs"})
        assert rig.engine.seen == []
        assert len((await rig.inference.Embed(embed(*["a"] * 6))).embeddings) == 6


async def test_one_that_fails_ends_all():
    async with serving(fake(hold=True)) as rig:
        call = asyncio.ensure_future(failure_of(rig.inference.Embed(embed("a", "b", "c", request_id="r"))))
        await until(lambda: len(rig.engine.seen) == 3)
        rig.engine.fail(rig.engine.seen[1].request_id, NonFiniteLogits())
        failure = await asyncio.wait_for(call, WAIT_S)
        assert failure.reason == "NON_FINITE_LOGITS"
        await until(lambda: not rig.engine.load().num_waiting)
        assert len(rig.engine.cancelled) == 2


async def test_an_abort_ends_all_and_tells_so():
    async with serving(fake(hold=True)) as rig:
        call = asyncio.ensure_future(failure_of(rig.inference.Embed(embed("a", "b", request_id="mine"))))
        await until(lambda: len(rig.engine.seen) == 2)
        target = inference_pb2.AbortRequest(
            request_ids=inference_pb2.RequestIds(ids=["mine"]), reason="enough"
        )
        reply = await rig.inference.Abort(target)
        assert [one.outcome for one in reply.results] == [inference_pb2.ABORT_OUTCOME_ABORTED]
        failure = await asyncio.wait_for(call, WAIT_S)
        assert (failure.reason, "enough" in failure.message) == ("REQUEST_ABORTED", True)
        assert not rig.engine.load().num_waiting


async def test_inputs_take_places_in_the_queue_like_outputs():
    async with serving(fake(hold=True, max_num_seqs=1, max_queued_requests=2)) as rig:
        first = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: rig.engine.load().num_running == 1)
        second = asyncio.ensure_future(rig.inference.Embed(embed("a", "b")))
        await until(lambda: rig.engine.load().num_waiting == 2)
        failure = await failure_of(rig.inference.Embed(embed("a")))
        assert failure.reason == "QUEUE_FULL"
        rig.engine.release()
        assert len((await asyncio.wait_for(second, WAIT_S)).embeddings) == 2
        await asyncio.wait_for(first, WAIT_S)


async def test_each_vector_tells_its_weights():
    async with serving() as rig:
        rig.engine.go_live("new")
        reply = await rig.inference.Embed(embed("a"))
        weights = reply.embeddings[0].weights
        assert (weights.generation, weights.label) == (2, "new")
