"""Several outputs of one prompt. On the fake engine output i of "a" begins i letters later: "bcd...",
"cde...", "def...".
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from penstock.runtime.prompting.results import merged_timing
from penstock.runtime.requests.request import RequestTiming, output_seed
from penstock.v1 import inference_pb2, types_pb2
from tests.service.rig import (
    collect,
    failure_of,
    fake,
    generate,
    ids,
    joined,
    read_all,
    serving,
    stream,
    until,
)
from tests.support.models.byte_text import EOS

A_TO_Z = "abcdefghijklmnopqrstuvwxyz"
ABORTED = types_pb2.FINISH_REASON_ABORTED
SMALL_WINDOWS = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


async def answer(rig, request):
    return await asyncio.wait_for(rig.inference.Generate(request), 20)


def abort(*names, **fields):
    target: dict[str, Any] = {"request_ids": {"ids": names}} if names else {}
    return inference_pb2.AbortRequest(**target, **fields)


async def test_n_outputs_in_order():
    async with serving() as rig:
        reply = await answer(rig, generate("a", sampling={"n": 3}, request_id="r"))
    assert [(o.index, o.text) for o in reply.outputs] == [(0, A_TO_Z[1:]), (1, A_TO_Z[2:]), (2, A_TO_Z[3:])]
    assert {o.finish.reason for o in reply.outputs} == {types_pb2.FINISH_REASON_EOS}
    assert [w.version.generation for o in reply.outputs for w in o.weights] == [1, 1, 1]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (1, 26 + 25 + 24)
    assert reply.request_id == "r"
    assert reply.timing.total.ToNanoseconds() > 0


@pytest.mark.parametrize("per_message", [1, 4, 1000])
@pytest.mark.parametrize("tokens_per_step", [1, 5])
async def test_deltas_are_generates_outputs(tokens_per_step, per_message):
    """Also if one of them ends earlier, by a stop string that only it generates."""
    fields = {
        "request_id": "one",
        "sampling": {"n": 4, "seed": 5},
        "stopping": {"stop": ["uvwx"], "max_tokens": 21, "stop_token_ids": [ord("w")], "include_stop": True},
        "output": {"logprobs": 2, "prompt_logprobs": 1},
    }
    engine = fake(tokens_per_step=tokens_per_step, scripts={("ab", 2): ids("xyz"), ("ab", 3): [EOS]})
    async with serving(engine) as rig:
        whole = await answer(rig, generate("ab", **fields))
        parts = joined(
            await collect(rig.inference.Stream(stream("ab", **fields, min_tokens_per_message=per_message)))
        )
    for reply in (whole, parts):
        reply.timing.Clear()
        assert [o.text for o in reply.outputs] == ["cdefghijklmnopqrstuvw", "defghijklmnopqrstuvw", "xyz", ""]
        del reply.prompt.logprobs.sampled[0]  # NaN is equal to nothing
    assert parts == whole


async def test_seeds():
    """Output 0 has the request's own seed, so it equals what n = 1 gives; the others differ."""
    async with serving() as rig:
        await answer(rig, generate("y", sampling={"seed": 11}))
        await answer(rig, generate("y", sampling={"seed": 11, "n": 3}))
        await collect(rig.inference.Stream(stream("y", sampling={"seed": 11, "n": 2})))
        seeds = [request.sampling.seed for request in rig.engine.seen]
    assert seeds == [11, *(output_seed(11, i) for i in (0, 1, 2, 0, 1))]
    assert len(set(seeds)) == 3


async def test_deltas_are_interleaved():
    """One step generates a token of each output, and each output's next message comes before the second of
    any.
    """
    async with serving(fake(hold=True)) as rig:
        call = rig.inference.Stream(stream("a", sampling={"n": 3}))
        assert (await call.read()).WhichOneof("event") == "started"
        for step in range(3):
            rig.engine.step()
            deltas = [(await call.read()).delta for _ in range(3)]
            assert {(d.index, d.text) for d in deltas} == {(i, A_TO_Z[1 + i + step]) for i in range(3)}
        rig.engine.release()
        rest = [message async for message in read_all(call)]
    finished = [m.finished.index for m in rest if m.HasField("finished")]
    assert sorted(finished) == [0, 1, 2]
    assert rest[-1].summary.usage.completion_tokens == 26 + 25 + 24


async def test_a_slow_output_does_not_wait_for_the_others_end():
    """Output 1 ends at once, and its `finished` comes while output 0 runs."""
    async with serving(fake(hold=True, scripts={("a", 1): [EOS]})) as rig:
        call = rig.inference.Stream(stream("a", sampling={"n": 2}))
        await call.read()
        rig.engine.step()
        messages = [await call.read() for _ in range(3)]
        assert {m.finished.index for m in messages if m.HasField("finished")} == {1}
        assert {m.delta.index for m in messages if m.HasField("delta")} == {0, 1}
        rig.engine.release()
        assert [m async for m in read_all(call)][-2].finished.index == 0


# -- ends --


@pytest.mark.parametrize("how", ["ids", "prefix", "all"])
async def test_an_abort_ends_all_outputs(how):
    """Also once output 0 has ended. The request is one result."""
    request = {"ids": abort("r"), "prefix": abort(request_id_prefix="r"), "all": abort(all={})}[how]
    async with serving(fake(hold=True, max_num_seqs=3, scripts={("a", 0): [98, EOS]})) as rig:
        call = asyncio.ensure_future(answer(rig, generate("a", request_id="r", sampling={"n": 4})))
        await until(lambda: len(rig.engine.seen) == 4)
        rig.engine.step(2)
        await until(lambda: rig.engine.num_steps == 2)
        (result,) = (await rig.inference.Abort(request)).results
        assert (result.request_id, result.outcome) == ("r", inference_pb2.ABORT_OUTCOME_ABORTED)
        assert (rig.engine.load().pages_used, rig.engine.load().num_waiting) == (0, 0)
        reply = await call
        assert [o.text for o in reply.outputs] == ["b", "cd", "de", ""]
        assert [o.finish.reason == ABORTED for o in reply.outputs] == [False, True, True, True]
        (again,) = (await rig.inference.Abort(abort("r"))).results
        assert again.outcome == inference_pb2.ABORT_OUTCOME_ALREADY_FINISHED


async def test_one_output_cannot_be_aborted_by_the_engines_name_of_it():
    async with serving(fake(hold=True)) as rig:
        call = asyncio.ensure_future(answer(rig, generate("a", request_id="r", sampling={"n": 2})))
        await until(lambda: len(rig.engine.seen) == 2)
        (result,) = (await rig.inference.Abort(abort("r\x001"))).results
        assert result.outcome == inference_pb2.ABORT_OUTCOME_NOT_FOUND
        assert not (await rig.inference.Abort(abort(request_id_prefix="r\x00"))).results
        rig.engine.release()
        assert {o.finish.reason for o in (await call).outputs} == {types_pb2.FINISH_REASON_EOS}


@pytest.mark.parametrize("started", [True, False])
async def test_a_cancel_frees_all_outputs(started):
    async with serving(fake(hold=True, max_num_seqs=2)) as rig:
        call = rig.inference.Stream(stream("a", request_id="r", sampling={"n": 4}))
        await call.read()
        if started:
            rig.engine.step()
            await call.read()
        call.cancel()
        await until(lambda: rig.engine.load().pages_used + rig.engine.load().num_waiting == 0)
        assert sorted(rig.engine.cancelled) == ["r", "r\x001", "r\x002", "r\x003"]


async def test_a_stalled_reader_loses_all_outputs():
    engine = fake(max_model_len=200_000)
    request = stream("a", sampling={"n": 3}, stopping={"ignore_eos": True}, output={"logprobs": 20})
    async with serving(engine, stall_limit_s=0.3, channel_options=SMALL_WINDOWS) as rig:
        call = rig.inference.Stream(request)
        await call.read()
        await until(lambda: len(engine.cancelled) == 3)
        assert engine.load().pages_used == 0

        async def drained():
            async for _ in read_all(call):
                pass

        assert (await failure_of(drained())).reason == "STALLED_READER"


async def test_an_id_is_taken_while_any_output_is_active():
    """Output 0 has ended, 1 runs."""
    async with serving(fake(hold=True, scripts={("a", 0): [EOS]})) as rig:
        first = asyncio.ensure_future(answer(rig, generate("a", request_id="r", sampling={"n": 2})))
        await until(lambda: len(rig.engine.seen) == 2)
        rig.engine.step()
        await until(lambda: rig.engine.load().num_running == 1)
        for n in (1, 2):
            failure = await failure_of(
                rig.inference.Generate(generate("b", request_id="r", sampling={"n": n}))
            )
            assert (failure.reason, failure.info.metadata["request_id"]) == ("DUPLICATE_REQUEST_ID", "r")
        rig.engine.release()
        assert [o.text for o in (await first).outputs] == ["", A_TO_Z[2:]]
        assert rig.engine.cancelled == [], "who was refused took nothing from the first"


# -- refusals --


async def test_an_id_may_not_look_like_an_outputs():
    async with serving() as rig:
        failure = await failure_of(rig.inference.Generate(generate("a", request_id="r\x001")))
    assert failure.violations == {"request_id": "must not hold the character U+0000"}


@pytest.mark.parametrize(("n", "queue", "most"), [(0, 1024, 128), (129, 1024, 128), (6, 5, 5)])
async def test_too_few_and_too_many(n, queue, most):
    """If more outputs are asked for than may ever wait, they could never be taken."""
    async with serving(fake(max_queued_requests=queue)) as rig:
        failure = await failure_of(rig.inference.Generate(generate("a", sampling={"n": n})))
        assert failure.violations == {"sampling.n": f"must be from 1 to {most}, not {n}"}
        reply = await answer(rig, generate("a", sampling={"n": most}, stopping={"max_tokens": 1}))
    assert [o.index for o in reply.outputs] == list(range(most))


async def test_a_queue_with_too_little_room_for_all_takes_none():
    async with serving(fake(hold=True, max_num_seqs=1, max_queued_requests=4)) as rig:
        calls = [asyncio.ensure_future(answer(rig, generate("y"))) for _ in range(3)]
        await until(lambda: len(rig.engine.seen) == 3)
        failure = await failure_of(rig.inference.Generate(generate("y", sampling={"n": 3})))
        assert (failure.reason, failure.info.metadata["limit"]) == ("QUEUE_FULL", "4")
        assert len(rig.engine.seen) == 3
        calls.append(asyncio.ensure_future(answer(rig, generate("y", sampling={"n": 2}))))
        await until(lambda: len(rig.engine.seen) == 5)
        rig.engine.release()
        assert [len(reply.outputs) for reply in await asyncio.gather(*calls)] == [1, 1, 1, 2]


async def test_a_refusal_midway_frees_what_was_submitted():
    """The queue fills up between the check and the third output."""
    engine = fake(hold=True, max_num_seqs=1, max_queued_requests=4)
    engine.load = lambda: type(engine).load(fake())  # type: ignore[method-assign]  # says that nobody waits
    async with serving(engine) as rig:
        waiting = [asyncio.ensure_future(answer(rig, generate("y"))) for _ in range(3)]
        await until(lambda: len(engine.seen) == 3)
        call = rig.inference.Generate(generate("y", request_id="r", sampling={"n": 4}))
        assert (await failure_of(call)).reason == "QUEUE_FULL"
        assert engine.cancelled == ["r", "r\x001"]
        engine.release()
        await asyncio.gather(*waiting)


# -- what all of them say together --


async def test_weights_are_told_for_each_output():
    async with serving(fake(hold=True)) as rig:
        asked = {"sampling": {"n": 2}, "stopping": {"max_tokens": 3}}
        whole = asyncio.ensure_future(answer(rig, generate("a", **asked)))
        parts = asyncio.create_task(collect(rig.inference.Stream(stream("a", **asked))))
        await until(lambda: len(rig.engine.seen) == 4)
        rig.engine.step()
        await until(lambda: rig.engine.num_steps == 1)
        rig.engine.go_live("new")
        rig.engine.release()
        for reply in (await whole, joined(await parts)):
            for output in reply.outputs:
                spans = [(w.first_output_token, w.version.generation) for w in output.weights]
                assert spans == [(0, 1), (1, 2)]


async def test_new_weights_are_told_though_nothing_else_is():
    """No ids are asked for, and the text is held back because it may become the stop."""
    fields = {"stopping": {"stop": ["bcd!"], "max_tokens": 3}, "output": {"token_ids": False}}
    async with serving(fake(hold=True)) as rig:
        call = rig.inference.Stream(stream("a", **fields))
        await call.read()
        rig.engine.step()
        await until(lambda: rig.engine.num_steps == 1)
        rig.engine.go_live("new")
        rig.engine.release()
        deltas = [m.delta async for m in read_all(call) if m.HasField("delta")]
        assert await call.code() is grpc.StatusCode.OK
    assert [d.weights.generation for d in deltas if d.HasField("weights")] == [2]
    assert "".join(d.text for d in deltas) == "bcd"


def timing(
    arrived: int,
    scheduled: int,
    first: int,
    ended: int,
    preemptions: int,
    *,
    cached: int = 0,
    proposed: int = 0,
    accepted: int = 0,
) -> RequestTiming:
    return RequestTiming(
        arrived_ns=arrived,
        scheduled_ns=scheduled,
        first_token_ns=first,
        finished_ns=ended,
        preemptions=preemptions,
        cached_prompt_tokens=cached,
        proposed_tokens=proposed,
        accepted_tokens=accepted,
    )


def test_times_of_several_outputs():
    """From the first arrival to the last end; cached tokens are of the one that was scheduled first."""
    first = timing(10, 30, 60, 90, 1, cached=8, proposed=9, accepted=5)
    second = timing(11, 40, 50, 80, 2, cached=16, proposed=4, accepted=4)
    both = {"cached": 8, "proposed": 13, "accepted": 9}
    never = timing(9, 0, 0, 99, 0)
    assert merged_timing([second, first]) == timing(10, 30, 50, 90, 3, **both)
    assert merged_timing([never, first, second]) == timing(9, 30, 50, 99, 3, **both)
    assert merged_timing([never]) == never
    assert merged_timing([]) is None
