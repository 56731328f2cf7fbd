"""Weight updates of the real engine, with a golden checkpoint, from the peer's side.

The witness for new weights is a fresh engine that has loaded them from a file; the witness for old weights is
what the server answered before. Both must agree token for token, and in every log-probability.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from penstock.runtime.engine import Engine
from penstock.runtime.sent_tensors import SentTensor
from penstock.v1 import control_pb2, weights_pb2
from tests.service.h2peer import DATA, Peer, frame, grpc_message
from tests.service.rig import Kept, Rig, failure_of, generate, read_all, serving, stream, until
from tests.service.weights_rig import Step, begin, commit, push, steps, written
from tests.support.goldens import CONFIG, GOLDEN

pytestmark = pytest.mark.ci

Tensors = dict[str, tuple[SentTensor, bytes]]
CHECKPOINT = GOLDEN / "qwen3"
PROMPT = "def decode(self, text):"
UPDATE = "/penstock.v1.InferenceService/UpdateWeights"
NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
NORM = "model.norm.weight"


def tensors_of(file: Path) -> Tensors:
    """Return the tensors of a safetensors file."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        sent = SentTensor(name, entry["dtype"], tuple(entry["shape"]))
        found[name] = (sent, data[8 + size + first : 8 + size + end])
    return found


def disturbed(tensors: Tensors, seed: int) -> Tensors:
    """Other weights: every value with noise."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, (sent, data) in tensors.items():
        values = np.frombuffer(data, np.float32)
        noise = rng.normal(1.0, 0.5, values.shape).astype(np.float32)
        new[name] = (sent, (values * noise).tobytes())
    return new


OLD = tensors_of(CHECKPOINT / "model.safetensors")
NEW = disturbed(OLD, 1)
TOTAL = sum(len(data) for _, data in OLD.values())
Answer = tuple[tuple[int, ...], bytes]


async def answer(rig: Rig) -> Answer:
    """Return what the server generates greedily: token ids, and all log-probabilities bit for bit."""
    request = generate(
        PROMPT,
        sampling={"temperature": 0},
        stopping={"max_tokens": 24, "ignore_eos": True},
        output={"logprobs": 4},
        cache={"bypass_prefix_cache": True},
    )
    output = (await asyncio.wait_for(rig.inference.Generate(request), 60)).outputs[0]
    return tuple(output.token_ids), output.logprobs.SerializeToString(deterministic=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    loaded = Engine.from_pretrained(str(CHECKPOINT), CONFIG)
    loaded.start()
    yield Kept(loaded)
    assert loaded.compiles_after_warmup == 0
    assert loaded.load().pages_used == 0
    loaded.shutdown()


@pytest.fixture(scope="module")
def new_answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Return what a fresh server answers that has loaded the new weights from a file."""
    folder = tmp_path_factory.mktemp("new") / "qwen3"
    shutil.copytree(CHECKPOINT, folder)
    written(NEW, folder / "model.safetensors")

    async def ask() -> Answer:
        async with serving(Engine.from_pretrained(str(folder), CONFIG)) as rig:
            return await answer(rig)

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def old_answer(engine: Any) -> Answer:
    """Return what the weights of the start answer."""

    async def ask() -> Answer:
        async with serving(engine) as rig:
            return await answer(rig)

    return asyncio.run(ask())


number = iter(range(1, 1000))


def new_id() -> str:
    return f"update-{next(number)}"


async def restored(rig: Rig) -> None:
    """Push the weights of the start."""
    reply = await push(rig, steps(OLD, size=1 << 21, update_id=new_id()))
    assert reply.outcome == weights_pb2.UPDATE_OUTCOME_COMMITTED


@pytest.mark.parametrize("staging", weights_pb2.StagingMode.values())
async def test_pushed_weights_answer_as_if_they_had_been_loaded(
    engine: Any, staging: Any, new_answer: Answer, old_answer: Answer
) -> None:
    """In chunks that end in the middle of values; and back to the old weights, bit for bit."""
    assert old_answer != new_answer
    async with serving(engine) as rig:
        before = engine.weights.generation
        reply = await push(rig, steps(NEW, size=7001, update_id=new_id(), label="new", staging=staging))
        assert (reply.current.label, reply.current.generation) == ("new", before + 1)
        assert (reply.tensors_updated, reply.bytes_received) == (len(NEW), TOTAL)
        assert await answer(rig) == new_answer
        await restored(rig)
        assert await answer(rig) == old_answer


async def test_weights_of_a_file_answer_as_if_they_had_been_loaded(
    engine: Any, tmp_path: Path, new_answer: Answer, old_answer: Answer
) -> None:
    written(NEW, tmp_path / "model.safetensors")
    async with serving(engine, weights_roots=(tmp_path,)) as rig:
        reply = await push(rig, [begin(uri=f"file://{tmp_path}", update_id=new_id()), commit(0)])
        assert (reply.tensors_updated, reply.bytes_received) == (len(NEW), TOTAL)
        assert await answer(rig) == new_answer
        digest = (await push(rig, steps(NEW, update_id=new_id()))).digest
        assert digest == reply.digest, "the same tensors"
        await restored(rig)
        assert await answer(rig) == old_answer


async def test_a_file_elsewhere_is_not_read(engine: Any, tmp_path: Path, old_answer: Answer) -> None:
    """Also not through a link, or by way of `..`."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    written(NEW, outside / "model.safetensors")
    (root / "link").symlink_to(outside)
    async with serving(engine, weights_roots=(root,)) as rig:
        for path in (outside, root / "link", root / ".." / "outside", root / "nothing"):
            failure = await failure_of(
                push(rig, [begin(uri=f"file://{path}", update_id=new_id()), commit(0)])
            )
            assert (failure.reason, list(failure.violations)) == ("INVALID_FIELD", ["begin.uri"])
        assert await answer(rig) == old_answer


# -- what goes wrong leaves the old weights --


def _with(name: str, sent: SentTensor | None = None, data: bytes | None = None) -> Tensors:
    """Return the new weights, with one tensor described or filled otherwise."""
    old_sent, old_data = NEW[name]
    return NEW | {name: (sent or old_sent, old_data if data is None else data)}


def _spoiled_byte() -> list[Step]:
    messages = steps(NEW)
    data = messages[3].chunk.data
    messages[3].chunk.data = bytes([data[0] ^ 1]) + data[1:]
    return messages


def _not_a_number() -> list[Step]:
    data = NEW[NORM][1]
    values = np.frombuffer(data, np.float32).copy()
    values[5] = np.nan
    return steps(_with(NORM, data=values.tobytes()), refuse_non_finite=True)


def _short() -> list[Step]:
    return [
        step for step in steps(NEW) if step.chunk.tensor_index != len(NEW) - 1 or not step.HasField("chunk")
    ]


def _swapped() -> list[Step]:
    messages = steps(NEW)
    messages[1], messages[2] = messages[2], messages[1]
    return messages


SPOILED: dict[str, tuple[Callable[[], list[Step]], str, dict[str, str]]] = {
    "a byte": (_spoiled_byte, "CHECKSUM_MISMATCH", {"model.embed_tokens.weight": "CHECKSUM"}),
    "not a number": (_not_a_number, "INVALID_TENSORS", {NORM: "NON_FINITE"}),
    "truncated": (_short, "INVALID_TENSORS", {list(NEW)[-1]: "INCOMPLETE"}),
    "shape": (
        lambda: steps(_with(NORM, sent=SentTensor(NORM, "F32", (24, 2)))),
        "INVALID_TENSORS",
        {NORM: "SHAPE"},
    ),
    "dtype": (
        lambda: steps(_with(NORM, sent=SentTensor(NORM, "I8", (48,)))),
        "INVALID_TENSORS",
        {NORM: "DTYPE"},
    ),
    "name": (
        lambda: steps({**NEW, "extra": (SentTensor("extra", "F32", (1,)), bytes(4))}),
        "INVALID_TENSORS",
        {"extra": "UNKNOWN_NAME"},
    ),
    "missing": (
        lambda: steps({name: one for name, one in NEW.items() if name != NORM}),
        "INVALID_TENSORS",
        {NORM: "MISSING"},
    ),
    "reordered": (_swapped, "INVALID_FIELD", {}),
    "commit twice": (lambda: [*steps(NEW), commit(TOTAL)], "INVALID_FIELD", {}),
    "no commit": (lambda: steps(NEW)[:-1], "INVALID_FIELD", {}),
    "total": (lambda: [*steps(NEW)[:-1], commit(TOTAL - 1)], "INVALID_FIELD", {}),
    "generation": (lambda: steps(NEW, expected_generation=10**6), "GENERATION_CHANGED", {}),
}


@pytest.mark.parametrize("name", SPOILED)
async def test_a_spoiled_upload_leaves_the_old_weights(engine: Any, name: str, old_answer: Answer) -> None:
    make, reason, tensors = SPOILED[name]
    async with serving(engine) as rig:
        generation = engine.weights.generation
        messages = make()
        messages[0].begin.update_id = new_id()
        failure = await failure_of(push(rig, messages))
        assert failure.reason == reason
        assert not tensors or failure.tensors == tensors
        assert engine.weights.generation == generation
        assert await answer(rig) == old_answer


async def test_a_pusher_that_dies_between_any_two_messages_leaves_the_old_weights(
    engine: Any, old_answer: Answer
) -> None:
    """One connection for each number of messages, up to all of them without the stream's end. The next push
    is taken.
    """
    messages = steps(NEW, size=1 << 21, update_id="dies")
    framed = [grpc_message(message.SerializeToString()) for message in messages]
    async with serving(engine) as rig:
        generation = engine.weights.generation
        for count in range(len(framed) + 1):
            async with Peer(rig.server.address) as peer:
                call = await peer.call(UPDATE, None, end=False)
                for data in framed[:count]:
                    for at in range(0, len(data), 16_384):
                        await peer.send(frame(DATA, 0, call, data[at : at + 16_384]))
                await asyncio.sleep(0.02)  # so that some of it is taken in
        assert engine.weights.generation == generation
        assert await answer(rig) == old_answer
        await taken(rig, steps(OLD, update_id=new_id()))
        assert await answer(rig) == old_answer


async def taken(rig: Rig, messages: list[Step]) -> weights_pb2.UpdateWeightsResponse:
    """Push until the server has noticed that the pusher before is gone."""
    while True:
        pushing = asyncio.ensure_future(push(rig, messages))
        await asyncio.wait([pushing], timeout=60)
        if pushing.exception() is None:
            return pushing.result()
        failure = await failure_of(pushing)
        assert failure.reason == "UPDATE_UNDER_WAY"
        await asyncio.sleep(0.05)


async def test_of_two_pushers_at_once_one_is_refused(
    engine: Any, old_answer: Answer, new_answer: Answer
) -> None:
    async with serving(engine) as rig:
        first = rig.inference.UpdateWeights()
        messages = steps(NEW, update_id=new_id())
        for message in messages[:-1]:
            await first.write(message)
        failure = await failure_of(push(rig, steps(disturbed(OLD, 2), update_id=new_id())))
        assert failure.reason == "UPDATE_UNDER_WAY"
        assert await answer(rig) == old_answer
        await first.write(messages[-1])
        await first.done_writing()
        assert (await asyncio.wait_for(first, 60)).outcome == weights_pb2.UPDATE_OUTCOME_COMMITTED
        assert await answer(rig) == new_answer
        await restored(rig)


async def test_an_update_sent_again_changes_nothing(engine: Any, new_answer: Answer) -> None:
    async with serving(engine) as rig:
        messages = steps(NEW, update_id=new_id())
        first, second = await push(rig, messages), await push(rig, messages)
        assert second.outcome == weights_pb2.UPDATE_OUTCOME_ALREADY_COMMITTED
        assert (second.current, second.digest) == (first.current, first.digest)
        assert await answer(rig) == new_answer
        await restored(rig)


# -- around running requests --


async def test_spans_name_the_weights_of_each_token(engine: Any) -> None:
    """Under KEEP requests go on across two updates. The labels are those of the updates, also of the one that
    serves no more.
    """
    async with serving(engine) as rig:
        fields: dict[str, Any] = {
            "sampling": {"temperature": 0},
            "stopping": {"max_tokens": 200, "ignore_eos": True},
        }
        call = rig.inference.Stream(stream(PROMPT, **fields))
        whole = asyncio.ensure_future(rig.inference.Generate(generate(PROMPT, **fields)))
        started = (await asyncio.wait_for(call.read(), 60)).started
        await asyncio.wait_for(call.read(), 60)
        for label in ("second", "third"):
            keep = {"in_flight": weights_pb2.IN_FLIGHT_POLICY_KEEP}
            reply = await push(rig, steps(OLD, size=1 << 21, update_id=new_id(), label=label, **keep))
            assert reply.in_flight.kept <= 2
        told = [m.delta.weights.label async for m in read_all(call) if m.delta.HasField("weights")]
        spans = (await asyncio.wait_for(whole, 60)).outputs[0].weights
    assert all(span.version.label for span in spans)
    generations = [span.version.generation for span in spans]
    assert generations == sorted(generations)
    assert generations[0] >= started.weights.generation
    assert set(told) <= {"second", "third"}


async def test_a_paused_server_takes_an_update_and_goes_on_with_it(engine: Any, new_answer: Answer) -> None:
    async with serving(engine) as rig:
        await rig.control.Pause(control_pb2.PauseRequest(free_kv_cache=True), timeout=60)
        asking = asyncio.ensure_future(answer(rig))
        await until(lambda: engine.load().num_waiting == 1)
        await push(rig, steps(NEW, update_id=new_id()))
        assert not asking.done()
        await rig.control.Resume(control_pb2.ResumeRequest(), timeout=60)
        assert await asking == new_answer
        await restored(rig)


async def test_a_failed_update_in_place_ends_service_until_a_full_one(
    engine: Any, old_answer: Answer
) -> None:
    async with serving(engine) as rig:
        watch = rig.health.Watch(health_pb2.HealthCheckRequest())
        assert (await asyncio.wait_for(watch.read(), 20)).status == SERVING
        messages = steps(NEW, update_id=new_id(), staging=weights_pb2.STAGING_MODE_IN_PLACE)
        failure = await failure_of(push(rig, messages[:-1]))
        assert failure.reason == "INVALID_FIELD"
        await until(lambda: not engine.ready)
        assert (await failure_of(answer(rig))).reason == "WEIGHTS_INCOMPLETE"
        assert (await asyncio.wait_for(watch.read(), 20)).status == NOT_SERVING
        await restored(rig)
        assert (await asyncio.wait_for(watch.read(), 20)).status == SERVING
        watch.cancel()
        assert await answer(rig) == old_answer


async def test_only_some_tensors(engine: Any, old_answer: Answer) -> None:
    """A partial update with the tensor that it has already changes no bit, but counts as an update."""
    async with serving(engine) as rig:
        before = engine.weights.generation
        some: Tensors = {NORM: OLD[NORM]}
        reply = await push(rig, steps(some, update_id=new_id(), partial=True))
        assert (reply.tensors_updated, reply.current.generation) == (1, before + 1)
        assert await answer(rig) == old_answer
