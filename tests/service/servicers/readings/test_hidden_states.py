"""Hidden states of generated tokens, on the fake engine, whose hidden state after some tokens is (their
number, their sum, the last one, 1).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.service.replies.reply_budget import ReplyLimits
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import collect, failure_of, fake, generate, serving, stream

A = 97
ABC = [[1, A, A, 1], [2, 2 * A + 1, A + 1, 1], [3, 3 * A + 3, A + 2, 1]]
"""From which "b", "c" and "d" are chosen after "a"."""
FIELDS = {"output": {"hidden_states": True}, "stopping": {"max_tokens": 3}}


def states(message: types_pb2.HiddenStates) -> list[list[float]]:
    assert message.size == 4
    return np.frombuffer(message.values, "<f4").reshape(-1, 4).tolist()


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_one_for_each_token(tokens_per_step):
    async with serving(fake(tokens_per_step=tokens_per_step)) as rig:
        reply = await rig.inference.Generate(generate("a", **FIELDS))
        assert states(reply.outputs[0].hidden_states) == ABC
        messages = await collect(rig.inference.Stream(stream("a", **FIELDS)))
        deltas = [m.delta for m in messages if m.WhichOneof("event") == "delta"]
        assert [row for delta in deltas for row in states(delta.hidden_states)] == ABC
        for delta in deltas:
            assert len(states(delta.hidden_states)) == len(delta.token_ids)


async def test_of_each_output_and_cut_at_a_stop():
    async with serving(fake(tokens_per_step=3)) as rig:
        fields = {**FIELDS, "sampling": {"n": 2}}
        reply = await rig.inference.Generate(generate("a", **fields))
        assert [len(states(one.hidden_states)) for one in reply.outputs] == [3, 3]
        stopped = {**FIELDS, "stopping": {"max_tokens": 3, "stop": ["c"]}}
        output = (await rig.inference.Generate(generate("a", **stopped))).outputs[0]
        assert (len(output.token_ids), states(output.hidden_states)) == (2, ABC[:2])


async def test_unasked_there_are_none_and_without_ids_they_are_refused():
    async with serving() as rig:
        reply = await rig.inference.Generate(generate("a", stopping={"max_tokens": 2}))
        assert not reply.outputs[0].HasField("hidden_states")
        bad = generate("a", output={"hidden_states": True, "token_ids": False})
        failure = await failure_of(rig.inference.Generate(bad))
        assert set(failure.violations) == {"output.hidden_states"}


async def test_a_reply_that_would_be_too_large_is_refused():
    async with serving(replies=ReplyLimits(max_response_bytes=100)) as rig:
        fields = {"output": {"hidden_states": True}, "stopping": {"max_tokens": 5}}
        failure = await failure_of(rig.inference.Generate(generate("a", **fields)))
        assert failure.reason == "RESPONSE_TOO_LARGE"
        assert "output.hidden_states" in failure.violations
        assert rig.engine.seen == []


async def test_an_engine_that_tells_no_hidden_states_has_neither_these_nor_embeddings():
    engine = fake()
    engine.info = dataclasses.replace(engine.info, hidden_size=0)
    async with serving(engine) as rig:
        failure = await failure_of(rig.inference.Generate(generate("a", **FIELDS)))
        assert (failure.reason, failure.info.metadata["field"]) == (
            "UNSUPPORTED_FEATURE",
            "output.hidden_states",
        )
        inputs = [inference_pb2.EmbedInput(text="a")]
        failure = await failure_of(rig.inference.Embed(inference_pb2.EmbedRequest(inputs=inputs)))
        assert (failure.reason, failure.info.metadata["field"]) == ("UNSUPPORTED_FEATURE", "Embed")
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert not {control_pb2.FEATURE_EMBED, control_pb2.FEATURE_HIDDEN_STATES} & set(info.features)
