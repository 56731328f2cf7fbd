"""Dozens of updates in a row, under load: the memory of the server stays where it was."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from bench.checkpoint import Shape, write_checkpoint
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc, weights_pb2
from tests.service.cli.test_serve import process
from tests.service.rig import stream
from tests.service.update_calls import update_weights
from tests.service.weights.answers import Ask, ask_one, bits
from tests.service.weights.pushing import (
    ABORT,
    COMMITTED,
    KEEP,
    RECOMPUTE,
    STAGED,
    WAIT,
    Message,
    Tensors,
    whole,
)
from tests.support.models.compilation_cache import TEST_CACHE

SHAPE = Shape(256, 512, 4, 4, 2, 64, 2048, 300, 4096)
TOLERANCE = 16 << 20
"""Bytes that the server may have grown by afterwards. The weights take 6 MB."""
WARM_UP, COUNT = 12, 24
"""Updates before memory is measured, and until it is measured again. Each costs three seconds. One that kept
a ninth of its weights would be found.
"""
CALLERS = 3
ENGINE = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "256")
HOST, DEVICE, IN_PLACE = (
    weights_pb2.STAGING_MODE_HOST,
    weights_pb2.STAGING_MODE_DEVICE,
    weights_pb2.STAGING_MODE_IN_PLACE,
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    found = {}
    for seed, label in enumerate(("a", "b")):
        found[label] = tmp_path_factory.mktemp(label)
        write_checkpoint(found[label], SHAPE, seed)
    return found


@pytest.fixture(scope="module")
def tensors(checkpoints: Mapping[str, Path]) -> Mapping[str, Tensors]:
    return {
        label: {name: np.asarray(entry.map()) for name, entry in find_tensors(directory).items()}
        for label, directory in checkpoints.items()
    }


def resident(pid: int) -> int:
    """Bytes of memory that no file backs, which the process holds."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


class Calls:
    """Stubs, as the helpers of these tests take them."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self.control: Any = control_pb2_grpc.ControlServiceStub(channel)

    async def send(self, messages: list[Message]) -> weights_pb2.UpdateWeightsResponse:
        return await update_weights(self.address, messages)


class Trainer:
    """Pushes one set of weights after the other, in every way, with failures in between."""

    def __init__(self, calls: Calls, tensors: Mapping[str, Tensors]) -> None:
        self._calls = calls
        self._made = {label: whole(of_one, size=1 << 20) for label, of_one in tensors.items()}
        self._rng = random.Random(5)
        self._number = 0

    def _messages(self, label: str, **fields: Any) -> list[Message]:
        self._number += 1
        first = Message.FromString(self._made[label][0].SerializeToString())
        given = {"update_id": f"u{self._number}", "version_label": label, **fields}
        for name, value in given.items():
            setattr(first.begin, name, value)
        return [first, *self._made[label][1:]]

    async def update(self, label: str) -> None:
        """One update that goes live, after one that does not."""
        await self._failure(label)
        policy = self._rng.choice((WAIT, ABORT, KEEP, RECOMPUTE))
        staging = self._rng.choice((HOST, HOST, DEVICE, IN_PLACE))
        stage_only = staging != IN_PLACE and self._rng.random() < 0.3
        messages = self._messages(label, in_flight=policy, staging=staging, stage_only=stage_only)
        reply = await self._calls.send(messages)
        if stage_only:
            assert reply.outcome == STAGED
            update_id = messages[0].begin.update_id
            reply = await self._calls.control.CommitWeights(
                control_pb2.CommitWeightsRequest(update_id=update_id)
            )
        assert reply.outcome == COMMITTED

    async def _failure(self, label: str) -> None:
        kind = self._rng.choice(("none", "none", "cut", "damaged", "discarded"))
        staging = self._rng.choice((HOST, DEVICE))
        messages = self._messages(label, staging=staging, stage_only=kind == "discarded")
        if kind == "cut":
            begun = self._calls.inference.UpdateWeights()
            for message in messages[: self._rng.randrange(1, len(messages))]:
                await begun.write(message)
            begun.cancel()
            await asyncio.wait([asyncio.ensure_future(begun.code())])
            await self._place_is_free(label)
        elif kind == "damaged":
            last = len(messages) - 2
            bad = Message.FromString(messages[last].SerializeToString())
            bad.chunk.data = bytes(len(bad.chunk.data))
            messages[last] = bad
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await self._calls.send(messages)
            assert told.value.code() is grpc.StatusCode.DATA_LOSS
        elif kind == "discarded":
            await self._calls.send(messages)
            update_id = messages[0].begin.update_id
            request = control_pb2.DiscardWeightsRequest(update_id=update_id)
            assert (await self._calls.control.DiscardWeights(request)).discarded

    async def _place_is_free(self, label: str) -> None:
        """Wait until an update would be begun, and begin none: its first chunk is out of order."""
        async with asyncio.timeout(60):
            while True:
                with pytest.raises(grpc.aio.AioRpcError) as told:
                    await self._calls.send([*self._messages(label)[:1], self._made[label][2]])
                if told.value.code() is not grpc.StatusCode.ABORTED:
                    return
                await asyncio.sleep(0.01)


async def caller(calls: Calls, number: int, over: asyncio.Event, ended: list[int]) -> None:
    """Streams without end; what an update aborts ends with OK."""
    rng = random.Random(number)
    while not over.is_set():
        prompt = [rng.randrange(SHAPE.vocab_size) for _ in range(rng.randint(1, 60))]
        fields = Ask(tuple(prompt), rng.randint(100, 190), seed=number).fields
        fields["output"] = {"text": False}
        async for _ in calls.inference.Stream(stream(**fields, min_tokens_per_message=16)):
            pass
        ended.append(number)


async def told(calls: Calls) -> Any:
    """Return what the server answers now, bit for bit."""
    output = await ask_one(calls, Ask((5, 6, 7), 30))  # type: ignore[arg-type]  # it has what is used of a rig
    return list(output.token_ids), bits(output.logprobs, 0, 30)


@pytest.mark.timeout(1800)
@pytest.mark.sweep
async def test_memory_stays_where_it_was(
    checkpoints: Mapping[str, Path], tensors: Mapping[str, Tensors]
) -> None:
    """After WARM_UP updates, everything that a server makes when it is first needed is there, or takes less
    than TOLERANCE.
    """
    with process(
        str(checkpoints["a"]), "--port", "0", *ENGINE, "--compilation-cache", str(TEST_CACHE)
    ) as server:
        address = await asyncio.to_thread(lambda: server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1])
        async with grpc.aio.insecure_channel(address) as channel:
            calls = Calls(address, channel)
            trainer = Trainer(calls, tensors)
            over, ended = asyncio.Event(), list[int]()
            answers: dict[str, Any] = {"a": await told(calls)}
            async with asyncio.TaskGroup() as group:
                for number in range(CALLERS):
                    group.create_task(caller(calls, number, over, ended))
                for number in range(WARM_UP):
                    await trainer.update("ba"[number % 2])
                    if number == 0:
                        answers["b"] = await told(calls)
                before, num_ended = await settled(server.popen.pid), len(ended)
                for number in range(COUNT):
                    label = "ba"[number % 2]
                    await trainer.update(label)
                    if number % 10 < 2:
                        assert await told(calls) == answers[label]
                after = await settled(server.popen.pid)
                over.set()
            assert answers["a"] != answers["b"]
            assert len(ended) > num_ended, "it was under load"
            load = await calls.control.GetLoad(control_pb2.GetLoadRequest())
            assert load.weights.generation == 1 + WARM_UP + COUNT
            assert (load.running_requests, load.queued_requests, load.kv_pages_used) == (0, 0, 0)
            assert after < before + TOLERANCE, (
                f"{(after - before) / COUNT / 1e3:.0f} kB for each of {COUNT} updates"
            )


async def settled(pid: int) -> int:
    """Return the least memory within two seconds: requests come and go meanwhile."""
    least, until = resident(pid), time.monotonic() + 2
    while time.monotonic() < until:
        await asyncio.sleep(0.05)
        least = min(least, resident(pid))
    return least
