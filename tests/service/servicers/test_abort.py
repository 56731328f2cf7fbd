"""Abort: exact targets, the reply after pages are free, and what the aborted requests answer."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock.v1 import inference_pb2, types_pb2
from tests.service.codecs import slow_codec
from tests.service.rig import collect, failure_of, fake, generate, joined, serving, stream, until

ABORTED = inference_pb2.ABORT_OUTCOME_ABORTED
FINISHED = inference_pb2.ABORT_OUTCOME_ALREADY_FINISHED
NOT_FOUND = inference_pb2.ABORT_OUTCOME_NOT_FOUND


def by_ids(*ids, reason=""):
    return inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=ids), reason=reason)


async def outcomes(rig, request):
    reply = await asyncio.wait_for(rig.inference.Abort(request), 20)
    return [(r.request_id, r.outcome) for r in reply.results]


async def seen(rig, number):
    await until(lambda: len(rig.engine.seen) == number)


async def started(rig, *names):
    """Start requests on a held engine. Each that runs has generated two tokens."""
    calls = []
    # one by one, because calls that are sent together may arrive in any order
    for number, name in enumerate(names, 1):
        calls.append(asyncio.ensure_future(rig.inference.Generate(generate("a", request_id=name))))
        await seen(rig, number)
    rig.engine.step(2)
    await until(lambda: rig.engine.num_steps == 2)
    return calls


def check_aborted(reply, text, message=""):
    (output,) = reply.outputs
    assert output.finish.reason == types_pb2.FINISH_REASON_ABORTED
    assert (output.text, output.finish.message) == (text, message)
    assert reply.usage.completion_tokens == len(text)


async def test_exact_ids():
    """req-1 does not match req-10. Aborted requests end with OK, what they had, and the reason."""
    async with serving(fake(hold=True)) as rig:
        one, ten = await started(rig, "req-1", "req-10")
        assert await outcomes(rig, by_ids("req-1", "req-2", reason="enough")) == [
            ("req-1", ABORTED),
            ("req-2", NOT_FOUND),
        ]
        assert rig.engine.load().pages_used == 1, "freed before the answer"
        check_aborted(await asyncio.wait_for(one, 20), "bc", "enough")
        assert not ten.done()
        rig.engine.release()
        assert (await asyncio.wait_for(ten, 20)).outputs[0].text.endswith("z")
        assert await outcomes(rig, by_ids("req-1", "req-10")) == [("req-1", FINISHED), ("req-10", FINISHED)]


async def test_an_id_named_twice_is_answered_once():
    async with serving(fake(hold=True)) as rig:
        await started(rig, "r")
        assert await outcomes(rig, by_ids("r", "r")) == [("r", ABORTED)]


async def test_prefix():
    async with serving(fake(hold=True)) as rig:
        calls = await started(rig, "job/1", "job/2", "other")
        request = inference_pb2.AbortRequest(request_id_prefix="job/")
        assert sorted(await outcomes(rig, request)) == [("job/1", ABORTED), ("job/2", ABORTED)]
        for call in calls[:2]:
            check_aborted(await asyncio.wait_for(call, 20), "bc")
        assert not calls[2].done()
        assert await outcomes(rig, request) == []
        rig.engine.release()
        await asyncio.wait_for(calls[2], 20)


async def test_all():
    async with serving(fake(hold=True, max_num_seqs=1)) as rig:
        running, waiting = await started(rig, "running", "waiting")
        request = inference_pb2.AbortRequest(all=inference_pb2.AllRequests())
        assert sorted(await outcomes(rig, request)) == [("running", ABORTED), ("waiting", ABORTED)]
        check_aborted(await asyncio.wait_for(running, 20), "bc")
        check_aborted(await asyncio.wait_for(waiting, 20), "")
        assert rig.engine.load().num_waiting == 0


async def test_a_stream_ends_by_the_grammar():
    async with serving(fake(hold=True)) as rig:
        messages = asyncio.create_task(collect(rig.inference.Stream(stream("a", request_id="s"))))
        await until(lambda: bool(rig.engine.seen))
        rig.engine.step(3)
        await until(lambda: rig.engine.num_steps == 3)
        await outcomes(rig, by_ids("s", reason="why not"))
        check_aborted(joined(await messages), "bcd", "why not")


async def test_aborted_while_waiting_has_no_times_it_never_had():
    async with serving(fake(hold=True, max_num_seqs=1)) as rig:
        first, second = await started(rig, "first", "second")
        await outcomes(rig, by_ids("second"))
        timing = (await asyncio.wait_for(second, 20)).timing
        assert not timing.HasField("queue")
        assert not timing.HasField("time_to_first_token")
        assert timing.total.ToNanoseconds() > 0
        rig.engine.release()
        await asyncio.wait_for(first, 20)


# -- before the engine knows the request --


@contextlib.asynccontextmanager
async def tokenizing(monkeypatch, *calls):
    """Yield a server whose tokenizer is busy with the prompts of `calls`, and an event that lets it go on."""
    codec, gate, encoding = slow_codec(monkeypatch)
    async with serving(fake(codec=codec)) as rig:
        running = [asyncio.ensure_future(call(rig)) for call in calls]
        await until(lambda: len(encoding) == len(calls))
        try:
            yield rig, running, gate
        finally:
            gate.set()


def unary(name):
    return lambda rig: rig.inference.Generate(generate("abc", request_id=name))


def streamed(name):
    return lambda rig: collect(rig.inference.Stream(stream("abc", request_id=name)))


@pytest.mark.parametrize(
    "target", [{"request_ids": {"ids": ["j/b", "j/a"]}}, {"request_id_prefix": "j/"}, {"all": {}}], ids=str
)
async def test_a_request_that_is_being_tokenized_is_aborted(target, monkeypatch):
    """It never reaches the engine, and answers as a request that was aborted in the queue."""
    names = ("j/a", "j/b")
    async with tokenizing(monkeypatch, unary(names[0]), streamed(names[1])) as (rig, calls, gate):
        request = inference_pb2.AbortRequest(reason="early", **target)
        assert sorted(await outcomes(rig, request)) == [(name, ABORTED) for name in names]
        gate.set()
        whole, messages = await asyncio.wait_for(asyncio.gather(*calls), 20)
        for reply in (whole, joined(messages)):
            check_aborted(reply, "", "early")
            assert (reply.prompt.token_count, reply.outputs[0].weights[0].version.generation) == (3, 1)
            assert reply.timing.HasField("total")
            assert not reply.timing.HasField("queue")
        assert not rig.engine.seen
        assert await outcomes(rig, by_ids(*names)) == [(name, NOT_FOUND) for name in names]


async def test_others_go_on_when_one_is_aborted_while_tokenized(monkeypatch):
    async with tokenizing(monkeypatch, unary("a"), unary("ab")) as (rig, calls, gate):
        assert await outcomes(rig, by_ids("x", "a")) == [("x", NOT_FOUND), ("a", ABORTED)]
        gate.set()
        aborted, other = await asyncio.wait_for(asyncio.gather(*calls), 20)
        check_aborted(aborted, "")
        assert other.outputs[0].text.startswith("def")


async def test_an_id_is_taken_while_its_prompt_is_tokenized(monkeypatch):
    async with tokenizing(monkeypatch, unary("a")) as (rig, (first,), gate):
        assert (await failure_of(unary("a")(rig))).reason == "DUPLICATE_REQUEST_ID"
        gate.set()
        assert (await asyncio.wait_for(first, 20)).outputs[0].text.startswith("def")


async def test_an_id_is_free_after_a_cancel_while_tokenized(monkeypatch):
    async with tokenizing(monkeypatch, unary("a")) as (rig, (first,), gate):
        first.cancel()
        async with asyncio.timeout(20):
            while await outcomes(rig, by_ids("a")) != [("a", NOT_FOUND)]:
                pass
        gate.set()
        assert (await unary("a")(rig)).outputs[0].text.startswith("def")
        assert len(rig.engine.seen) == 1


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (inference_pb2.AbortRequest(reason="x"), "target"),
        (inference_pb2.AbortRequest(request_id_prefix=""), "request_id_prefix"),
        (inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds()), "request_ids.ids"),
        (by_ids(*map(str, range(10_001))), "request_ids.ids"),
        (by_ids("r", reason="x" * 1001), "reason"),
    ],
)
async def test_an_invalid_target_or_reason_aborts_nothing(request_, field):
    async with serving(fake(hold=True)) as rig:
        (call,) = await started(rig, "r")
        failure = await failure_of(rig.inference.Abort(request_))
        assert (failure.reason, list(failure.violations)) == ("INVALID_FIELD", [field])
        assert rig.engine.load().num_running == 1
        rig.engine.release()
        assert (await asyncio.wait_for(call, 20)).outputs[0].finish.reason == types_pb2.FINISH_REASON_EOS
