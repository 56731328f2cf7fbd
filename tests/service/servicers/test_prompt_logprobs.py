"""Log-probabilities of the prompt. By hand: the fake engine gives a prompt's token t the value -t/16, and t,
t + 1, ... as likeliest; the first token has none.
"""

from __future__ import annotations

import asyncio
import math

import pytest

from penstock.v1 import inference_pb2, types_pb2
from tests.service.rig import collect, failure_of, fake, generate, serving, stream, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
A, B, C = 97, 98, 99


async def prompts_of(rig, prompt, **fields):
    """Return the prompt's entries in Generate's reply, which must equal those of StreamStarted; NaN becomes
    None.
    """
    whole = await asyncio.wait_for(rig.inference.Generate(generate(prompt, **fields)), 20)
    messages = await collect(rig.inference.Stream(stream(prompt, **fields)))
    assert messages[0].started.prompt.SerializeToString() == whole.prompt.SerializeToString()
    values = whole.prompt.logprobs
    sampled = [None if math.isnan(value) else value for value in values.sampled]
    return sampled, [[(c.token_id, c.logprob) for c in top.candidates] for top in values.top]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_prompt_logprobs(tokens_per_step):
    """One for each token of the prompt, the first of them undefined, whichever parts of the
    output are sent.
    """
    async with serving(fake(tokens_per_step=tokens_per_step)) as rig:
        sampled, top = await prompts_of(rig, "abc", output={"prompt_logprobs": 2})
        assert sampled == [None, -B / 16, -C / 16]
        assert top == [[], [(B, -B / 16), (C, -C / 16)], [(C, -C / 16), (C + 1, -(C + 1) / 16)]]
        for output in ({"token_ids": False}, {"text": False}, {"logprobs": 3}):
            found, none = await prompts_of(rig, "abc", output={"prompt_logprobs": 0, **output})
            assert (found, none) == (sampled, [])
        assert {request.prompt_logprobs for request in rig.engine.seen} == {0, 2}


async def test_unasked_there_are_none(rig):
    reply = await rig.inference.Generate(generate("abc", output={"logprobs": 2}))
    assert not reply.prompt.HasField("logprobs")
    assert rig.engine.seen[0].prompt_logprobs is None


async def test_a_prompt_of_one_token_has_only_the_undefined(rig):
    assert await prompts_of(rig, "a", output={"prompt_logprobs": 2}) == ([None], [[]])


async def test_they_are_of_what_was_left_of_the_prompt():
    context = {"truncation": types_pb2.TRUNCATION_LEFT, "reserve_tokens": 2}
    async with serving(fake(max_model_len=5)) as rig:
        sampled, _ = await prompts_of(rig, "yyyabc", context=context, output={"prompt_logprobs": 0})
    assert sampled == [None, -B / 16, -C / 16]


async def test_several_outputs_have_one_prompt():
    """Only the first output computes them, and they are sent before any output."""
    async with serving(fake(scripts={("abc", 1): [256]})) as rig:
        asked = {"sampling": {"n": 3}, "output": {"prompt_logprobs": 0}}
        assert (await prompts_of(rig, "abc", **asked))[0] == [None, -B / 16, -C / 16]
        assert [r.prompt_logprobs for r in rig.engine.seen] == [0, None, None] * 2


async def test_a_stream_starts_with_the_first_token_then():
    """They are known no earlier. Without them the stream starts at once."""
    async with serving(fake(hold=True)) as rig:
        call = rig.inference.Stream(stream("abc", output={"prompt_logprobs": 0}))
        first = asyncio.ensure_future(call.read())
        other = rig.inference.Stream(stream("abc"))
        assert (await other.read()).WhichOneof("event") == "started"
        await until(lambda: len(rig.engine.seen) == 2)
        assert not first.done()
        rig.engine.step()
        assert len((await first).started.prompt.logprobs.sampled) == 3
        assert (await call.read()).delta.text == "d"
        rig.engine.release()


async def test_who_ends_before_has_none():
    """The request is aborted while it waits."""
    async with serving(fake(hold=True, max_num_seqs=1)) as rig:
        first = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 1)
        asked = {"request_id": "r", "output": {"prompt_logprobs": 0}}
        calls = [asyncio.create_task(collect(rig.inference.Stream(stream("abc", **asked))))]
        await until(lambda: len(rig.engine.seen) == 2)
        await rig.inference.Abort(inference_pb2.AbortRequest(request_id_prefix="r"))
        started = (await calls[0])[0].started
        assert (started.prompt.token_count, started.prompt.HasField("logprobs")) == (3, False)
        rig.engine.release()
        await first


async def test_no_more_than_the_server_gives():
    async with serving(fake(max_logprobs=3)) as rig:
        for output in ({"prompt_logprobs": 4}, {"prompt_logprobs": 2**32 - 1}):
            failure = await failure_of(rig.inference.Generate(generate("a", output=output)))
            assert set(failure.violations) == {"output.prompt_logprobs"}
        assert len((await prompts_of(rig, "ab", output={"prompt_logprobs": 3}))[1][1]) == 3
