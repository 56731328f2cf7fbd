"""Which requests belong to which caller, on a real server: ids, Abort, and what one caller can learn of
another.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.service.access.ownership import engine_id, own_id, owner_of, told_id
from penstock.v1 import inference_pb2, types_pb2
from tests.service.codecs import slow_codec
from tests.service.key_rig import CONTROL, INFER, as_, key, serving_keys
from tests.service.rig import collect, failure_of, fake, generate, joined, serving, stream, until
from tests.support.otlp import Recorder

ABORTED = inference_pb2.ABORT_OUTCOME_ABORTED
FINISHED = inference_pb2.ABORT_OUTCOME_ALREADY_FINISHED
NOT_FOUND = inference_pb2.ABORT_OUTCOME_NOT_FOUND
ALL = inference_pb2.AbortRequest(all=inference_pb2.AllRequests())
KEYS = (key("alice"), key("bob"), key("boss", CONTROL), key("al"))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.json"


def by_ids(*ids: str) -> inference_pb2.AbortRequest:
    return inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=ids))


def by_prefix(prefix: str) -> inference_pb2.AbortRequest:
    return inference_pb2.AbortRequest(request_id_prefix=prefix)


async def outcomes(rig, request, name: str) -> list[tuple[str, Any]]:
    reply = await asyncio.wait_for(rig.inference.Abort(request, **as_(name)), 20)
    return sorted((r.request_id, r.outcome) for r in reply.results)


async def started(rig, *requests: tuple[str, str]) -> list[asyncio.Future[Any]]:
    """Start requests (caller, id) that run on a held engine."""
    calls = []
    for number, (name, request_id) in enumerate(requests, 1):
        request = generate("a", request_id=request_id)
        calls.append(asyncio.ensure_future(rig.inference.Generate(request, **as_(name))))
        await seen(rig, number)
    return calls


async def seen(rig, number: int) -> None:
    await until(lambda: len(rig.engine.seen) == number)


async def ended(rig, *calls: asyncio.Future[Any]) -> list[bool]:
    """Say whether each request was aborted, once the engine may go on."""
    rig.engine.release()
    replies = [await asyncio.wait_for(call, 20) for call in calls]
    return [r.outputs[0].finish.reason == types_pb2.FINISH_REASON_ABORTED for r in replies]


async def test_ids_of_others_are_not_found(file):
    async with serving_keys(file, *KEYS, engine=fake(hold=True)) as rig:
        calls = await started(rig, ("alice", "r"), ("bob", "s"))
        assert await outcomes(rig, by_ids("r", "s", "t"), "bob") == [
            ("r", NOT_FOUND),
            ("s", ABORTED),
            ("t", NOT_FOUND),
        ]
        assert await ended(rig, *calls) == [False, True]
        assert await outcomes(rig, by_ids("r"), "bob") == [("r", NOT_FOUND)], "nor when it has ended"
        assert await outcomes(rig, by_ids("r"), "alice") == [("r", FINISHED)]


@pytest.mark.parametrize("request_", [ALL, by_prefix("job/")], ids=["all", "prefix"])
async def test_all_and_prefixes_touch_only_ones_own(file, request_):
    """Also if one caller's id is the beginning of another's."""
    async with serving_keys(file, *KEYS, engine=fake(hold=True)) as rig:
        mine = ("al", "job/1")
        calls = await started(rig, mine, ("alice", "job/1"), ("bob", "job/2"))
        assert await outcomes(rig, request_, "al") == [("job/1", ABORTED)]
        assert await outcomes(rig, request_, "al") == []
        assert await ended(rig, *calls) == [True, False, False]


@pytest.mark.parametrize("request_", [ALL, by_prefix("r"), by_ids("r")], ids=["all", "prefix", "ids"])
async def test_a_request_that_is_still_tokenized_is_its_callers_own(file, monkeypatch, request_):
    """The engine does not know it yet, so another table is searched."""
    codec, gate, encoding = slow_codec(monkeypatch)
    async with serving_keys(file, *KEYS, engine=fake(codec=codec)) as rig:
        calls = [
            asyncio.ensure_future(rig.inference.Generate(generate("abc", request_id="r"), **as_(name)))
            for name in ("alice", "bob", "al")
        ]
        try:
            await until(lambda: len(encoding) == 3)
            assert (await outcomes(rig, request_, "alice")) == [("r", ABORTED)]
            boss = await outcomes(rig, by_ids("r", "s"), "boss")
            assert boss == [("r", ABORTED), ("s", NOT_FOUND)]
        finally:
            gate.set()
        replies = [await asyncio.wait_for(call, 20) for call in calls]
        assert [r.outputs[0].finish.reason for r in replies] == [types_pb2.FINISH_REASON_ABORTED] * 3


async def test_a_request_of_another_that_is_still_tokenized_is_not_found(file, monkeypatch):
    codec, gate, encoding = slow_codec(monkeypatch)
    async with serving_keys(file, *KEYS, engine=fake(codec=codec)) as rig:
        request = generate("abc", request_id="r")
        call = asyncio.ensure_future(rig.inference.Generate(request, **as_("alice")))
        try:
            await until(lambda: len(encoding) == 1)
            assert await outcomes(rig, by_ids("r"), "bob") == [("r", NOT_FOUND)]
            assert await outcomes(rig, by_prefix("r"), "bob") == []
            assert await outcomes(rig, ALL, "bob") == []
        finally:
            gate.set()
        assert (await asyncio.wait_for(call, 20)).outputs[0].text.endswith("z")


@pytest.mark.parametrize(
    ("request_", "results", "which"),
    [
        (ALL, [("job/1", ABORTED)] * 2 + [("other", ABORTED)], [True, True, True]),
        (by_prefix("job/"), [("job/1", ABORTED)] * 2, [True, True, False]),
        (by_ids("job/1", "x"), [("job/1", ABORTED), ("x", NOT_FOUND)], [True, True, False]),
    ],
    ids=["all", "prefix", "ids"],
)
async def test_control_reaches_everybodys(file, request_, results, which):
    async with serving_keys(file, *KEYS, engine=fake(hold=True)) as rig:
        calls = await started(rig, ("alice", "job/1"), ("bob", "job/1"), ("bob", "other"))
        assert await outcomes(rig, request_, "boss") == results
        assert await ended(rig, *calls) == which


async def test_control_has_requests_of_its_own(file):
    async with serving_keys(file, key("boss", CONTROL | INFER), engine=fake(hold=True)) as rig:
        calls = await started(rig, ("boss", "r"), ("boss", "s"))
        assert await outcomes(rig, by_ids("r"), "boss") == [("r", ABORTED)]
        assert await ended(rig, *calls) == [True, False]
        assert await outcomes(rig, by_ids("r", "s"), "boss") == [("r", FINISHED), ("s", FINISHED)]


async def test_two_callers_may_use_one_id(file):
    """Neither learns of the other. A caller's own second request with the id is refused, with the id that it
    sent.
    """
    engine = fake(hold=True)
    async with serving_keys(file, *KEYS, engine=engine) as rig:
        calls = await started(rig, ("alice", "r"), ("bob", "r"))
        failure = await failure_of(rig.inference.Generate(generate("a", request_id="r"), **as_("bob")))
        assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        assert dict(failure.info.metadata) == {"request_id": "r"}
        assert "'r' is active" in failure.message
        engine.release()
        for call in calls:
            reply = await asyncio.wait_for(call, 20)
            assert (reply.request_id, reply.outputs[0].text) == ("r", "bcdefghijklmnopqrstuvwxyz")


async def test_callers_see_the_ids_that_they_sent(file):
    """In streams and errors, and with an id of the greatest length."""
    longest = "r" * 128
    async with serving_keys(file, key("k" * 64)) as rig:
        messages = await collect(rig.inference.Stream(stream("a", request_id=longest), **as_("k" * 64)))
        assert joined(messages).request_id == longest
        failure = await failure_of(
            rig.inference.Generate(generate("a", request_id="mine", model="x"), **as_("k" * 64))
        )
        named = [d for d in failure.details if isinstance(d, error_details_pb2.RequestInfo)]
        assert [info.request_id for info in named] == ["mine"]
        too_long = await failure_of(
            rig.inference.Generate(generate("a", request_id=longest + "r"), **as_("k" * 64))
        )
        assert list(too_long.violations) == ["request_id"]


async def test_several_outputs_end_together(file):
    engine = fake(hold=True)
    async with serving_keys(file, *KEYS, engine=engine) as rig:
        request = generate("a", request_id="r", sampling={"n": 3})
        call = asyncio.ensure_future(rig.inference.Generate(request, **as_("alice")))
        await until(lambda: len(engine.seen) == 3)
        assert await outcomes(rig, by_ids("r"), "bob") == [("r", NOT_FOUND)]
        assert await outcomes(rig, by_ids("r"), "alice") == [("r", ABORTED)]
        reply = await asyncio.wait_for(call, 20)
        assert [o.finish.reason for o in reply.outputs] == [types_pb2.FINISH_REASON_ABORTED] * 3


async def test_the_log_says_whose_request_stalled(file, caplog):
    caplog.set_level(logging.INFO)
    engine = fake(hold=True)
    async with serving_keys(file, *KEYS, engine=engine, stall_limit_s=0.2) as rig:
        call = rig.inference.Stream(
            stream("a", request_id="r", stopping={"ignore_eos": True}), **as_("alice")
        )
        await call.read()
        call.cancel()
        await until(lambda: engine.load().num_running == 0)
    assert "\x01" not in caplog.text
    assert "\\x01" not in caplog.text


@pytest.mark.parametrize("private", [False, True])
async def test_a_private_cache_is_ones_own(file, private):
    """The engine shares prefixes among equal salts; with private_cache no other caller can have this one's
    salt.
    """
    engine = fake()
    entries = [key("alice", private_cache=private), key("bob", private_cache=private), key("carol")]
    async with serving_keys(file, *entries, engine=engine) as rig:
        for name in ("alice", "bob", "carol"):
            for salt in ("", "s", ""):
                request = generate("a", cache={"cache_salt": salt})
                await asyncio.wait_for(rig.inference.Generate(request, **as_(name)), 20)
        salts = [request.cache.salt for request in engine.seen]
        assert salts[6:] == ["", "s", ""]
        for own in (salts[:3], salts[3:6]):
            assert own[0] == own[2] != own[1]
        if private:
            assert not set(salts[:3]) & set(salts[3:])
            assert not set(salts[3:6]) & set(salts[6:])
            bypass = generate("a", cache={"bypass_prefix_cache": True})
            await asyncio.wait_for(rig.inference.Generate(bypass, **as_("alice")), 20)
            assert engine.seen[-1].cache.bypass
        else:
            assert salts[:3] == salts[3:6] == salts[6:]


@pytest.mark.parametrize("request_id", ["\x01", "\x01alice\x01r", "a\x01b"])
async def test_without_keys_any_id_is_ones_own(request_id):
    async with serving(fake(hold=True)) as rig:
        calls = await started(rig, ("x", request_id), ("x", "\x01\x01other"))
        reply = await rig.inference.Abort(by_prefix(request_id[:1] + request_id[1:2]))
        aborted = [r.request_id for r in reply.results]
        assert request_id in aborted
        reply = await rig.inference.Abort(by_ids(request_id))
        assert [(r.request_id, r.outcome) for r in reply.results] == [(request_id, FINISHED)]
        rig.engine.release()
        assert (await asyncio.wait_for(calls[0], 20)).request_id == request_id


@pytest.mark.parametrize("owner", ["", "a", "a.b"])
@pytest.mark.parametrize("request_id", ["r", "\x01", "\x01a\x01r", "\x01\x01r", "a\x01r"])
def test_ids_go_to_the_engine_and_back(owner, request_id):
    made = engine_id(owner, request_id)
    assert (owner_of(made), own_id(made)) == (owner, request_id)
    assert own_id(made + "\x007") == request_id
    assert made.startswith(engine_id(owner, request_id[:1]))


def test_no_two_requests_become_one():
    owners, ids = ("", "a", "b"), ("r", "\x01r", "\x01a\x01r", "\x01\x01r", "a\x01r", "\x01\x01\x01r")
    assert len({engine_id(owner, i) for owner in owners for i in ids}) == len(owners) * len(ids)


def test_how_logs_call_them():
    assert told_id(engine_id("", "r")) == "'r'"
    assert told_id(engine_id("alice", "r\n") + "\x003") == r"'r\n' of 'alice'"


async def test_traces_have_the_callers_own_id_and_no_key(file):
    recorder = Recorder()
    entries = [key("alice", private_cache=True)]
    async with serving_keys(file, *entries, tracing=recorder.tracing) as rig:
        request = generate("a", request_id="r", cache={"cache_salt": "s"})
        await asyncio.wait_for(rig.inference.Generate(request, **as_("alice")), 20)
        await failure_of(rig.inference.Generate(request, **as_("nobody")))
    spans = recorder.finished
    assert "r" in {span.attributes.get("gen_ai.response.id") for span in spans}
    told = "".join(str(span) for span in spans)
    for secret in ("psk_", "\\u0001", *(seen.cache.salt for seen in rig.engine.seen)):
        assert secret not in told
