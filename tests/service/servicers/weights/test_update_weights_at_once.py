"""Updates that meet: one that is staged and asked for by several, compare-and-set, and one that is sent again
because its reply was lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest

from penstock.v1 import control_pb2, weights_pb2
from tests.service.h2peer import DATA, END_STREAM, Peer, frame, grpc_message
from tests.service.rig import WAIT_S, Rig, failure_of, generate, serving, taken_apart, until
from tests.service.updatable import updatable
from tests.service.weights_rig import Step, bytes_of, fake_tensors, push, steps

COMMITTED = weights_pb2.UPDATE_OUTCOME_COMMITTED
ALREADY_COMMITTED = weights_pb2.UPDATE_OUTCOME_ALREADY_COMMITTED
NEW = fake_tensors(7)


async def commit_staged(rig: Rig, update_id: str) -> control_pb2.CommitWeightsResponse:
    request = control_pb2.CommitWeightsRequest(update_id=update_id)
    reply: control_pb2.CommitWeightsResponse = await rig.control.CommitWeights(request, timeout=WAIT_S)
    return reply


async def discard(rig: Rig, update_id: str) -> bool:
    request = control_pb2.DiscardWeightsRequest(update_id=update_id)
    return bool((await rig.control.DiscardWeights(request, timeout=WAIT_S)).discarded)


def reason_of(error: object) -> str:
    assert isinstance(error, grpc.aio.AioRpcError)
    return taken_apart(error).reason


@pytest.mark.ci
async def test_commit_and_discard_at_once_have_one_winner() -> None:
    """Whichever comes first, the others are told that nothing is left to do, or that it is being done."""
    async with serving(updatable()) as rig:
        for number in range(10):
            tensors, update_id = fake_tensors(number + 10), f"s{number}"
            before = (rig.engine.updater.serving, rig.engine.weights.generation)
            await push(rig, steps(tensors, update_id=update_id, stage_only=True))
            calls = [commit_staged(rig, update_id), discard(rig, update_id), commit_staged(rig, update_id)]
            first, dropped, second = await asyncio.gather(*calls, return_exceptions=True)
            ends = Counter(
                one.outcome if isinstance(one, control_pb2.CommitWeightsResponse) else reason_of(one)
                for one in (first, second)
            )
            if dropped is True:
                assert set(ends) <= {"UNKNOWN_UPDATE", "UPDATE_UNDER_WAY"}
                assert (rig.engine.updater.serving, rig.engine.weights.generation) == before
            else:
                assert dropped is False
                assert ends in ({COMMITTED: 1, ALREADY_COMMITTED: 1}, {COMMITTED: 1, "UPDATE_UNDER_WAY": 1})
                assert rig.engine.updater.serving == bytes_of(tensors)
                assert rig.engine.weights.generation == before[1] + 1


async def test_a_commit_that_is_asked_for_again_while_requests_are_waited_for() -> None:
    """The second is told that the update is under way, not that there is none: it may ask again."""
    async with serving(updatable(hold=True)) as rig:
        running = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 1)
        await push(rig, steps(NEW, update_id="s", stage_only=True))
        first = asyncio.ensure_future(commit_staged(rig, "s"))
        await until(lambda: bool(rig.engine.waiting_changes))
        failure = await failure_of(commit_staged(rig, "s"))
        assert (failure.code.name, failure.reason) == ("ABORTED", "UPDATE_UNDER_WAY")
        assert failure.info.metadata["update_id"] == "s"
        assert failure.retry_after_s is not None
        assert not await discard(rig, "s")
        rig.engine.release()
        assert (await first).outcome == COMMITTED
        assert (await commit_staged(rig, "s")).outcome == ALREADY_COMMITTED
        assert (await running).outputs[0].weights[0].version.generation == 1


@pytest.mark.ci
@pytest.mark.parametrize("staged", [False, True])
async def test_compare_and_set_loses_no_update(staged: bool) -> None:
    """Four trainers each bring three updates, made from the generation that they have read. An update that
    was made from an older one is refused, so the generations that went live follow one another.
    """
    went_live: dict[int, int] = {}
    refusals: set[str] = set()

    async def trainer(rig: Rig, number: int) -> None:
        done = 0
        while done < 3:
            info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
            read = int(info.weights.generation)
            update_id = f"{number}-{done}-{read}"
            fields: dict[str, Any] = {"update_id": update_id, "expected_generation": read}
            try:
                reply: Any = await push(rig, steps(fake_tensors(number), stage_only=staged, **fields))
                if staged:
                    reply = await commit_staged(rig, update_id)
            except grpc.aio.AioRpcError as error:
                refusals.add(reason_of(error))
                await asyncio.sleep(0.002)
                continue
            assert reply.outcome == COMMITTED
            assert reply.previous.generation == read
            assert reply.current.generation not in went_live
            went_live[reply.current.generation] = read
            done += 1

    async with serving(updatable()) as rig, asyncio.timeout(3 * WAIT_S):
        await asyncio.gather(*(trainer(rig, number) for number in range(4)))
    assert refusals <= {"GENERATION_CHANGED", "UPDATE_UNDER_WAY", "BUSY"}
    assert went_live == {generation + 1: generation for generation in range(1, 13)}


async def test_an_update_that_was_made_from_other_weights_names_both_generations() -> None:
    """It is refused before a byte has come, and when it would go live: another one may have gone live since
    it was staged.
    """
    async with serving(updatable()) as rig:
        staged = steps(NEW, update_id="s", stage_only=True, expected_generation=1)
        await push(rig, staged)
        rig.engine.go_live("another")
        late = await failure_of(commit_staged(rig, "s"))
        assert await discard(rig, "s")
        early = await failure_of(push(rig, staged[:1]))
        for failure in (late, early):
            assert (failure.code.name, failure.reason) == ("ABORTED", "GENERATION_CHANGED")
            assert (failure.info.metadata["expected"], failure.info.metadata["current"]) == ("1", "2")


# -- after the commit was sent: the update goes live or it does not, and the sender finds out which --


async def again(rig: Rig, messages: list[Step]) -> weights_pb2.UpdateWeightsResponse:
    """Send an update until it does not find itself under way."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await push(rig, messages)
            except grpc.aio.AioRpcError as error:
                assert reason_of(error) == "UPDATE_UNDER_WAY"  # noqa: PT017 -- it may succeed at once
                await asyncio.sleep(0.01)


@pytest.mark.ci
@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_reply_that_is_lost_can_be_asked_for_again(how: str) -> None:
    """Whenever its sender is gone, an update that is sent again under its id goes live exactly once."""
    async with serving(updatable()) as rig:
        for attempt in range(12):
            tensors = fake_tensors(attempt + 10)
            generation = rig.engine.weights.generation
            messages = steps(tensors, update_id=f"try-{attempt}")
            async with Peer(rig.server.address) as peer:
                stream = await peer.call("/penstock.v1.InferenceService/UpdateWeights", None, end=False)
                for message in messages:
                    data = grpc_message(message.SerializeToString())
                    await peer.send(frame(DATA, 0, stream, data))
                await peer.send(frame(DATA, END_STREAM, stream))
                await asyncio.sleep(0.002 * attempt)
                if how == "reset":
                    await peer.reset(stream)
            for reply in (await again(rig, messages), await push(rig, messages)):
                assert reply.current.generation == rig.engine.weights.generation == generation + 1
            assert reply.outcome == ALREADY_COMMITTED
            assert rig.engine.updater.serving == bytes_of(tensors)
