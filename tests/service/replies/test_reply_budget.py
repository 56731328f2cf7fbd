"""Bytes of replies: what could never be sent is refused, and what waits is counted, for one request and for
all.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from penstock.runtime.requests.request import Finish, FinishReason, StepOutput, StoppingParams
from penstock.runtime.text.assembler import Assembler
from penstock.service.errors import Busy, ResponseTooLarge
from penstock.service.replies.outputs import Buffer, RequestReader, ServerSwitchboard, StallLog
from penstock.service.replies.reply_budget import ReplyBudget, ReplyLimits
from penstock.v1 import control_pb2
from tests.service.h2peer import Peer
from tests.service.rig import (
    CODEC,
    collect,
    failure_of,
    fake,
    generate,
    ids,
    read_all,
    serving,
    stream,
    until,
)
from tests.support.models.byte_text import EOS

KIB = 1024


def limits(one: int = 64 * KIB, everybody: int = 1024 * KIB) -> ReplyLimits:
    return ReplyLimits(max_response_bytes=one, max_buffered_response_bytes=everybody)


def budget(one: int = 64 * KIB, everybody: int = 1024 * KIB) -> ReplyBudget:
    return ReplyBudget(limits(one, everybody))


# -- what could never be sent --


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stopping": {"max_tokens": 20_000}}, {"stopping.max_tokens"}),
        ({"stopping": {"max_tokens": 2_000}, "sampling": {"n": 8}}, {"stopping.max_tokens", "sampling.n"}),
        (
            {"stopping": {"max_tokens": 1_000}, "sampling": {"n": 2}, "output": {"logprobs": 20}},
            {"stopping.max_tokens", "sampling.n", "output.logprobs"},
        ),
    ],
)
async def test_a_reply_that_could_not_be_sent_is_refused(fields: dict[str, Any], named: set[str]) -> None:
    engine = fake(max_model_len=32_000, scripts={"a": [*ids("b"), EOS]})
    async with serving(engine, replies=limits()) as rig:
        failure = await failure_of(rig.inference.Generate(generate("a", **fields)))
        assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "RESPONSE_TOO_LARGE")
        assert failure.info.metadata["max_bytes"] == str(64 * KIB)
        assert set(failure.violations) == named
        assert rig.engine.seen == [], "nothing was begun"
        messages = await collect(rig.inference.Stream(stream("a", **fields)))
        assert messages[-1].HasField("summary"), "a stream need not fit as a whole"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling": {"n": 8}, "output": {"logprobs": 20}},
        {"stopping": {"max_tokens": 2**32 - 1}, "context": {"cap_max_tokens": True}},
    ],
)
async def test_a_reply_that_could_be_large_is_not_refused_for_that(fields: dict[str, Any]) -> None:
    """It may end early: it sets no limit, or the limit is the context."""
    engine = fake(max_model_len=8_000, scripts={"a": [*ids("b"), EOS]})
    async with serving(engine, replies=limits()) as rig:
        reply = await rig.inference.Generate(generate("a", **fields))
    assert reply.outputs[0].text == "b"


async def test_a_prompt_whose_logprobs_are_too_large_is_refused() -> None:
    fields: dict[str, Any] = {
        "prompt_token_ids": {"ids": [97] * 1000},
        "output": {"prompt_logprobs": 20},
        "stopping": {"max_tokens": 1},
    }
    async with serving(fake(max_model_len=8_000), replies=limits()) as rig:
        for call in (
            rig.inference.Generate(generate(**fields)),
            rig.inference.Stream(stream(**fields)).read(),
        ):
            failure = await failure_of(call)
            assert failure.reason == "RESPONSE_TOO_LARGE"
            assert set(failure.violations) == {"output.prompt_logprobs"}
        fields["output"] = {"prompt_logprobs": 1}
        reply = await rig.inference.Generate(generate(**fields))
        assert len(reply.prompt.logprobs.top) == 1000


# -- what waits --


async def test_a_reply_that_grows_too_large_ends() -> None:
    """It set no limit, so its size was not known beforehand."""
    async with serving(fake(max_model_len=100_000, tokens_per_step=100), replies=limits()) as rig:
        request = generate("a", stopping={"ignore_eos": True}, output={"logprobs": 20}, request_id="long")
        failure = await failure_of(rig.inference.Generate(request))
        assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "RESPONSE_TOO_LARGE")
        assert "output" in failure.violations
        await until(lambda: rig.engine.load().pages_used == 0)
        assert rig.engine.cancelled == ["long"]


async def test_a_stream_that_is_read_may_be_of_any_size() -> None:
    async with serving(fake(max_model_len=2_000, hold=True), replies=limits()) as rig:
        call = rig.inference.Stream(
            stream("a", stopping={"ignore_eos": True}, output={"logprobs": 20}, min_tokens_per_message=100)
        )
        size = (await call.read()).ByteSize()
        for _ in range(19):
            rig.engine.step(100)
            size += (await call.read()).ByteSize()
        rig.engine.release()
        async for message in read_all(call):
            size += message.ByteSize()
    assert size > 4 * 64 * KIB


async def test_new_requests_are_refused_while_too_much_waits() -> None:
    """The request with the largest share is ended when the budget is used up; then there is room again."""
    tokens = {"ids": [97]}
    async with serving(
        fake(max_model_len=100_000, hold=True, max_num_seqs=4), replies=limits(1024 * KIB, 64 * KIB)
    ) as rig:
        fields: dict[str, Any] = {
            "prompt_token_ids": tokens,
            "stopping": {"ignore_eos": True},
            "output": {"logprobs": 20},
        }
        large = asyncio.ensure_future(rig.inference.Generate(generate(**fields, request_id="large")))
        await until(lambda: len(rig.engine.seen) == 1)
        counted = rig.serving.budget
        while (before := counted.used) < 50 * KIB:
            rig.engine.step()
            await until(lambda before=before: counted.used > before)  # type: ignore[misc]
        small = {**fields, "output": {}}
        failure = await failure_of(rig.inference.Generate(generate(**small)))
        assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
        assert failure.info.metadata["limit"] == "max_buffered_response_bytes"
        assert failure.info.metadata["max"] == str(64 * KIB)
        assert not large.done()
        rig.engine.step(100)
        failure = await failure_of(large)
        assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
        rig.engine.release()
        small["stopping"] = {"max_tokens": 3}
        assert len((await rig.inference.Generate(generate(**small))).outputs[0].token_ids) == 3


async def test_nothing_is_left_of_a_budget() -> None:
    """After replies, streams, refusals and cancels."""
    async with serving(fake(max_model_len=5_000)) as rig:
        counted = rig.serving.budget
        await rig.inference.Generate(generate("a", sampling={"n": 3}))
        await collect(rig.inference.Stream(stream("a", output={"logprobs": 3})))
        await failure_of(rig.inference.Generate(generate("a", request_id="\0")))
        call = rig.inference.Stream(stream("a", stopping={"ignore_eos": True}))
        await call.read()
        call.cancel()
        await until(lambda: counted.num_shares == 0)
        assert counted.used == 0


PROMPT: dict[str, Any] = {
    "prompt_token_ids": {"ids": [97] * 1000},
    "output": {"prompt_logprobs": 20},
    "stopping": {"ignore_eos": True},
}
PROMPT_BYTES = 1000 * 20 * 10
"""The least size of that many candidates of the prompt."""


async def test_logprobs_of_the_prompt_count_until_the_reply_is_sent() -> None:
    async with serving(fake(max_model_len=2_000, hold=True)) as rig:
        counted = rig.serving.budget
        reply = asyncio.ensure_future(rig.inference.Generate(generate(**PROMPT)))
        await until(lambda: len(rig.engine.seen) == 1)
        rig.engine.step()
        await until(lambda: counted.used > PROMPT_BYTES)
        rig.engine.release()
        await reply
        await until(lambda: counted.num_shares == 0 and counted.used == 0)


async def test_logprobs_of_the_prompt_count_until_a_stream_has_begun() -> None:
    """They are taken long before: gRPC holds them while their peer reads nothing."""
    async with serving(fake(max_model_len=2_000, hold=True)) as rig, Peer(rig.server.address) as peer:
        counted = rig.serving.budget
        call = await peer.call("/penstock.v1.InferenceService/Stream", stream(**PROMPT).SerializeToString())
        await until(lambda: len(rig.engine.seen) == 1)
        rig.engine.step()
        await peer.until(lambda: peer.headers(call))
        assert counted.used > PROMPT_BYTES
        for number in (0, call):
            await peer.open_window(number, 1024 * KIB)
        await until(lambda: counted.used == 0)
        assert counted.num_shares == 1, "the stream goes on"


async def test_tokenize_counts_before_its_ids_are_made_until_they_are_sent() -> None:
    request = control_pb2.TokenizeRequest(text="a" * 10_000)
    async with (
        serving(fake(max_model_len=20_000), replies=limits(64 * KIB, 64 * KIB)) as rig,
        Peer(rig.server.address) as peer,
    ):
        counted = rig.serving.budget
        method = "/penstock.v1.ControlService/Tokenize"
        calls = [await peer.call(method, request.SerializeToString()) for _ in range(2)]
        await peer.until(lambda: all(peer.headers(call) for call in calls))
        assert counted.used == 60_000
        failure = await failure_of(rig.control.Tokenize(request))
        assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
        assert failure.info.metadata["limit"] == "max_buffered_response_bytes"
        for number in (0, *calls):
            await peer.open_window(number, 1024 * KIB)
        await until(lambda: counted.num_shares == 0 and counted.used == 0)
        assert len((await rig.control.Tokenize(request)).token_ids) == 10_000


async def test_ids_that_could_not_be_sent_are_refused() -> None:
    async with serving(fake(max_model_len=20_000), replies=limits(10_000)) as rig:
        failure = await failure_of(rig.control.Tokenize(control_pb2.TokenizeRequest(text="a" * 5_000)))
        assert (failure.reason, set(failure.violations)) == ("RESPONSE_TOO_LARGE", {"text"})


# -- readers and the budget --


async def test_what_waits_to_be_sent_is_not_ended_for_room() -> None:
    """That would free nothing, because its reply is in gRPC. A request that still runs is ended instead."""
    counted, engine = budget(everybody=230), fake()
    board = ServerSwitchboard(asyncio.get_running_loop())
    end = Finish(FinishReason.EOS)

    def begun(name: str) -> tuple[RequestReader, Buffer]:
        reader = RequestReader(engine, name, counted, StallLog(), collects=True)
        buffer = Buffer(engine, board, name, Assembler(StoppingParams(), CODEC), reader)
        reader.reads([buffer])
        return reader, buffer

    sent = [begun(name) for name in ("a", "b")]
    for reader, buffer in sent:
        buffer.deliver(StepOutput("", (97,) * 25, finish=end))
        await reader.take()
        reader.close()
    assert counted.used == 200
    reader, buffer = begun("c")
    buffer.deliver(StepOutput("", (97,) * 10))
    with pytest.raises(Busy):
        await reader.take()
    assert counted.used == 200, "gRPC still has both"
    for one, _ in sent:
        one.forget()
    reader.forget()
    assert (counted.used, counted.num_shares) == (0, 0)


# -- the budget alone --


def test_the_largest_is_ended_when_all_together_are_too_much() -> None:
    counted = budget(everybody=100)
    errors: list[tuple[str, Exception]] = []
    shares = {
        name: counted.share(partial(lambda name, error: errors.append((name, error)), name)) for name in "abc"
    }
    shares["a"].add(50)
    shares["b"].add(20)
    counted.check_room()
    shares["c"].add(20)
    with pytest.raises(Busy):
        counted.check_room()
    shares["c"].add(20)
    ((name, error),) = errors
    assert (name, type(error)) == ("a", Busy)
    shares["a"].close()
    shares["a"].close()
    shares["a"].add(1000)
    assert counted.used == 60
    counted.check_room()


def test_one_that_is_too_large_is_ended() -> None:
    counted = budget(one=10)
    errors: list[Exception] = []
    share = counted.share(errors.append)
    share.add(10)
    share.add(-5)
    share.add(5)
    assert not errors
    share.add(1)
    assert [type(error) for error in errors] == [ResponseTooLarge]
