"""Updates that meet: two pushers at once, the same update twice, one that is staged, and compare-and-set."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from penstock.runtime.engine import Engine
from penstock.v1 import control_pb2, types_pb2, weights_pb2
from tests.service.rig import WAIT_S, Kept, Rig, failure_of, serving, taken_apart
from tests.service.weights.answers import Ask, answers
from tests.service.weights.brake import Brake
from tests.service.weights.pushing import (
    ALREADY_COMMITTED,
    COMMITTED,
    STAGED,
    begin,
    chunks,
    commit,
    digest,
    num_bytes,
    push,
    refused,
    send,
    whole,
)
from tests.support.models.table import Tables, random_tables, table_engine

pytestmark = pytest.mark.ci

QUESTION = Ask((3, 1, 4, 1, 5), 30)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = table_engine(random_tables(0))
    yield made
    assert made.compiles_after_warmup == 0
    made.shutdown()


@pytest.fixture
async def rig(engine: Engine) -> AsyncIterator[Rig]:
    async with serving(Kept(engine)) as served:
        yield served


def greedy(tables: Tables, num: int = 30) -> tuple[int, ...]:
    """Return what the tables generate after QUESTION, in numpy."""
    tokens = list(QUESTION.prompt)
    for _ in range(num):
        tokens.append(int(tables.logits(tokens).argmax()))
    return tuple(tokens[len(QUESTION.prompt) :])


async def serves(rig: Rig, tables: Tables, label: str, generation: int) -> None:
    """Check the answer of a server, and what it says of itself."""
    (((version, of_answer, tokens, _),),) = await answers(rig, [QUESTION])
    assert (version, of_answer, tokens) == (label, generation, greedy(tables))
    info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert info.weights == types_pb2.WeightsVersion(label=label, generation=generation)


async def commit_staged(rig: Rig, update_id: str) -> control_pb2.CommitWeightsResponse:
    request = control_pb2.CommitWeightsRequest(update_id=update_id)
    reply: control_pb2.CommitWeightsResponse = await rig.control.CommitWeights(request)
    return reply


async def discard(rig: Rig, update_id: str) -> bool:
    reply = await rig.control.DiscardWeights(control_pb2.DiscardWeightsRequest(update_id=update_id))
    return bool(reply.discarded)


async def test_the_same_update_twice_is_live_once(rig: Rig) -> None:
    """The second answer says what the first did; no chunk of it is looked at, so they may even be missing."""
    tables = random_tables(1)
    messages = whole(tables.tensors(), update_id="one", version_label="first")
    first = await send(rig, messages)
    assert (first.outcome, first.current.generation) == (COMMITTED, 2)
    for repeated in (messages, messages[:1], messages[:2]):
        reply = await send(rig, repeated)
        assert (reply.outcome, reply.current) == (ALREADY_COMMITTED, first.current)
    await serves(rig, tables, "first", 2)
    other = random_tables(2)
    assert (await push(rig, other.tensors(), version_label="second")).current.generation == 3
    reply = await send(rig, messages)
    assert (reply.outcome, reply.current.generation) == (ALREADY_COMMITTED, 3)
    await serves(rig, other, "second", 3)


async def test_a_refused_update_may_be_sent_again_under_its_id(rig: Rig) -> None:
    tables = random_tables(1)
    tensors = tables.tensors()
    await refused(rig, [begin(tensors, update_id="one"), *chunks(tensors), commit(1)])
    reply = await push(rig, tensors, update_id="one", version_label="new")
    assert reply.outcome == COMMITTED
    await serves(rig, tables, "new", 2)


@pytest.mark.sweep
async def test_eight_pushers_at_once(rig: Rig) -> None:
    """One has the place at a time; the others are refused and try again. Each goes live whole, once."""
    tables = [random_tables(i) for i in range(8)]
    ends: Counter[str] = Counter()

    async def pusher(number: int) -> int:
        messages = whole(
            tables[number].tensors(), size=500, update_id=f"of-{number}", version_label=f"{number}"
        )
        while True:
            try:
                reply = await send(rig, messages)
            except grpc.aio.AioRpcError as error:
                ends[taken_apart(error).reason] += 1
                await asyncio.sleep(0.005)
                continue
            assert reply.outcome == COMMITTED
            assert reply.digest == digest(tables[number].tensors())
            return int(reply.current.generation)

    async with asyncio.timeout(120):
        generations = await asyncio.gather(*(pusher(number) for number in range(8)))
    assert sorted(generations) == list(range(2, 10))
    assert set(ends) <= {"UPDATE_UNDER_WAY", "BUSY"}, "BUSY: more calls of one peer than the server takes"
    assert ends["UPDATE_UNDER_WAY"] > 0
    last = generations.index(9)
    await serves(rig, tables[last], f"{last}", 9)


async def test_the_second_of_two_is_told_why(rig: Rig) -> None:
    tensors = random_tables(1).tensors()
    call: Any = None
    async with asyncio.timeout(WAIT_S):
        while True:
            if call is None or call.done():  # the second came first, so this one was refused
                call = rig.inference.UpdateWeights()
                await call.write(begin(tensors, update_id="first"))
            failure = await failure_of(send(rig, [begin(tensors, update_id="second")]))
            if failure.reason == "UPDATE_UNDER_WAY":
                break  # until then the first one's message had not arrived, and this one had no commit
    assert failure.code is grpc.StatusCode.ABORTED
    assert failure.info.metadata["update_id"] == "first"
    assert failure.info.metadata["staged"] == "false"
    assert failure.retry_after_s is not None
    for message in (*chunks(tensors), commit(num_bytes(tensors))):
        await call.write(message)
    await call.done_writing()
    assert (await call).outcome == COMMITTED


@pytest.mark.parametrize("staging", [weights_pb2.STAGING_MODE_HOST, weights_pb2.STAGING_MODE_DEVICE])
async def test_a_staged_update_waits_for_its_commit(rig: Rig, staging: int) -> None:
    old, new = random_tables(0), random_tables(1)
    staged = await push(
        rig, new.tensors(), update_id="s", version_label="new", stage_only=True, staging=staging
    )
    assert (staged.outcome, staged.current, staged.previous) == (STAGED, staged.previous, staged.current)
    assert staged.digest == digest(new.tensors())
    await serves(rig, old, "initial", 1)
    info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert (info.staged_update_id, info.weights_digest) == ("s", b"")
    failure = await refused(rig, whole(old.tensors(), update_id="t"))
    assert (failure.code.name, failure.reason) == ("ABORTED", "UPDATE_UNDER_WAY")
    assert (failure.info.metadata["update_id"], failure.info.metadata["staged"]) == ("s", "true")
    again = await push(rig, new.tensors(), update_id="s", version_label="new", stage_only=True)
    assert again.outcome == STAGED, "a lost reply is asked for again"
    assert not await discard(rig, "t")
    failure = await failure_of(commit_staged(rig, "t"))
    assert (failure.code.name, failure.reason) == ("NOT_FOUND", "UNKNOWN_UPDATE")
    reply = await commit_staged(rig, "s")
    assert (reply.outcome, reply.current.label, reply.current.generation) == (COMMITTED, "new", 2)
    assert reply.previous == types_pb2.WeightsVersion(label="initial", generation=1)
    assert reply.digest == digest(new.tensors())
    await serves(rig, new, "new", 2)
    reply = await commit_staged(rig, "s")
    assert (reply.outcome, reply.current, reply.previous) == (
        ALREADY_COMMITTED,
        reply.previous,
        reply.current,
    )
    assert not await discard(rig, "s")
    info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert (info.staged_update_id, info.weights_digest) == ("", digest(new.tensors()))
    await serves(rig, new, "new", 2)


async def test_a_discarded_update_leaves_nothing(rig: Rig) -> None:
    old, new = random_tables(0), random_tables(1)
    for _ in range(3):
        await push(rig, new.tensors(), update_id="s", stage_only=True)
        assert await discard(rig, "s")
        assert not await discard(rig, "s")
        failure = await failure_of(commit_staged(rig, "s"))
        assert (failure.code.name, failure.reason) == ("NOT_FOUND", "UNKNOWN_UPDATE")
    await serves(rig, old, "initial", 1)
    assert (await push(rig, new.tensors(), update_id="s", version_label="s")).outcome == COMMITTED
    await serves(rig, new, "s", 2)


async def test_commit_and_discard_at_once_have_one_winner(rig: Rig) -> None:
    """Whichever comes first, the others are told that nothing is left to do, or that it is being done."""
    for number in range(10):
        tables = random_tables(number)
        generation = rig.engine.weights.generation
        update_id = f"s{number}"
        await push(rig, tables.tensors(), update_id=update_id, version_label=update_id, stage_only=True)
        calls = [commit_staged(rig, update_id), discard(rig, update_id), commit_staged(rig, update_id)]
        first, dropped, second = await asyncio.gather(*calls, return_exceptions=True)
        ends = Counter(
            commit_of.outcome
            if isinstance(commit_of, control_pb2.CommitWeightsResponse)
            else reason_of(commit_of)
            for commit_of in (first, second)
        )
        if dropped is True:
            assert set(ends) <= {"UNKNOWN_UPDATE", "UPDATE_UNDER_WAY"}
            assert rig.engine.weights.generation == generation
        else:
            assert dropped is False
            assert ends in ({COMMITTED: 1, ALREADY_COMMITTED: 1}, {COMMITTED: 1, "UPDATE_UNDER_WAY": 1})
            await serves(rig, tables, update_id, generation + 1)


def reason_of(error: object) -> str:
    assert isinstance(error, grpc.aio.AioRpcError)
    return taken_apart(error).reason


async def test_a_commit_that_is_asked_for_again_while_requests_are_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is told that the update is under way, not that there is none: it may ask again."""
    brake, tables = Brake(rig.engine, monkeypatch), random_tables(1)
    await push(rig, tables.tensors(), update_id="s", version_label="new", stage_only=True)
    brake.hold(tokens_of=1)  # not after the last step of what was asked before
    running = asyncio.ensure_future(answers(rig, [QUESTION]))
    await brake.holding()
    first = asyncio.ensure_future(commit_staged(rig, "s"))
    await brake.queued("update")
    failure = await failure_of(commit_staged(rig, "s"))
    assert (failure.code.name, failure.reason) == ("ABORTED", "UPDATE_UNDER_WAY")
    assert failure.info.metadata["update_id"] == "s"
    assert failure.retry_after_s is not None
    assert not await discard(rig, "s")
    brake.release()
    assert (await first).outcome == COMMITTED
    assert (await commit_staged(rig, "s")).outcome == ALREADY_COMMITTED
    (((version, _, tokens, _),),) = await running
    assert (version, tokens) == ("initial", greedy(random_tables(0)))
    await serves(rig, tables, "new", 2)


@pytest.mark.parametrize("staged", [False, True])
async def test_compare_and_set_loses_no_update(rig: Rig, staged: bool) -> None:
    """Six trainers each bring four updates, made from the generation that they have read. An update that was
    made from an older one is refused, so the generations that went live follow one another.
    """
    went_live: dict[int, int] = {}
    refusals: set[str] = set()

    async def generation_now() -> int:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        return int(info.weights.generation)

    async def trainer(number: int) -> None:
        done = 0
        while done < 4:
            read = await generation_now()
            update_id = f"{number}-{done}-{read}"
            fields: dict[str, Any] = {"update_id": update_id, "expected_generation": read}
            try:
                reply: Any = await push(rig, random_tables(number).tensors(), stage_only=staged, **fields)
                if staged:
                    reply = await commit_staged(rig, update_id)
            except grpc.aio.AioRpcError as error:
                refusals.add(taken_apart(error).reason)
                await asyncio.sleep(0.002)
                continue
            assert reply.outcome == COMMITTED
            assert reply.previous.generation == read
            assert reply.current.generation not in went_live
            went_live[reply.current.generation] = read
            done += 1

    async with asyncio.timeout(240):
        await asyncio.gather(*(trainer(number) for number in range(6)))
    assert refusals <= {"GENERATION_CHANGED", "UPDATE_UNDER_WAY", "BUSY"}
    assert went_live == {generation + 1: generation for generation in range(1, 25)}


async def test_compare_and_set_is_looked_at_before_a_byte_and_names_both(rig: Rig) -> None:
    tensors = random_tables(1).tensors()
    failure = await refused(rig, [begin(tensors, expected_generation=2)])
    assert (failure.code.name, failure.reason) == ("ABORTED", "GENERATION_CHANGED")
    assert (failure.info.metadata["expected"], failure.info.metadata["current"]) == ("2", "1")
    assert (await push(rig, tensors, expected_generation=1)).outcome == COMMITTED
    failure = await refused(rig, whole(tensors, expected_generation=1))
    assert failure.reason == "GENERATION_CHANGED"


async def test_compare_and_set_is_looked_at_when_the_update_goes_live(rig: Rig) -> None:
    """Other weights may have gone live since it was staged: here those of the program that has the engine."""
    other, staged = random_tables(1), random_tables(2)
    await push(rig, staged.tensors(), update_id="s", stage_only=True, expected_generation=1)
    done = rig.engine.update_weights(other.tensors(), label="other")
    assert (await asyncio.wrap_future(done)).current.generation == 2
    failure = await failure_of(commit_staged(rig, "s"))
    assert (failure.code.name, failure.reason) == ("ABORTED", "GENERATION_CHANGED")
    assert (failure.info.metadata["expected"], failure.info.metadata["current"]) == ("1", "2")
    await serves(rig, other, "other", 2)
    assert await discard(rig, "s")
