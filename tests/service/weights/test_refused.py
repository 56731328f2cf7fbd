"""Updates that are damaged, wrong or incomplete: each is refused with a typed error that names what is wrong,
the old weights serve on bit for bit, and nothing is left behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.runtime.engine import Engine
from penstock.v1 import control_pb2, weights_pb2
from tests.service.rig import Kept, Rig, serving
from tests.service.weights.answers import answers, asks
from tests.service.weights.fleet import Version, loaded
from tests.service.weights.pushing import (
    COMMITTED,
    VALIDATED,
    Message,
    Tensors,
    begin,
    chunk,
    chunks,
    commit,
    num_bytes,
    push,
    refused,
    send,
    tensor_errors,
    whole,
)
from tests.support.models.tiny import VOCAB

pytestmark = pytest.mark.ci

QUESTIONS = asks(3, vocab=VOCAB, num_tokens=12)
NORM = "model.norm.weight"
Q = "model.layers.1.self_attn.q_proj.weight"
V = "model.layers.0.self_attn.v_proj.weight"
SIZE = 5000
"""Bytes of a chunk: several for most tensors, and no multiple of a row."""


@pytest.fixture(scope="module")
def engine(versions: Mapping[str, Version]) -> Iterator[Engine]:
    """One for all tests here, because none of them changes its weights."""
    made = loaded(versions["initial"].directory)
    yield made
    assert made.weights.generation == 1
    assert made.compiles_after_warmup == 0
    made.shutdown()


@pytest.fixture(scope="module")
def tensors(versions: Mapping[str, Version]) -> Tensors:
    return versions["b"].tensors


@pytest.fixture
async def rig(engine: Engine) -> AsyncIterator[Rig]:
    """Yield a server that must answer after the test as it did before, and take an update."""
    async with serving(Kept(engine)) as served:
        before = await answers(served, QUESTIONS)
        yield served
        assert await answers(served, QUESTIONS) == before
        info = await served.control.GetModelInfo(control_pb2.GetModelInfoRequest(include_tensors=True))
        assert (info.weights.generation, info.staged_update_id, info.weights_digest) == (1, "", b"")
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.pages_used) == (0, 0, 0)
        # The one place for updates is free: an update that is staged takes it, and gives it back.
        specs = {spec.name: np.zeros(tuple(spec.shape), np.float32) for spec in info.tensors}
        staged = await push(served, specs, update_id="probe", stage_only=True)
        assert staged.outcome == weights_pb2.UPDATE_OUTCOME_STAGED
        gone = await served.control.DiscardWeights(control_pb2.DiscardWeightsRequest(update_id="probe"))
        assert gone.discarded


def changed(tensors: Tensors, **names: Any) -> dict[str, Any]:
    """Return the tensors with some replaced, by names in which "__" stands for a dot."""
    return {**tensors, **{name.replace("__", "."): tensor for name, tensor in names.items()}}


def with_value(tensor: Any, value: float) -> Any:
    bad = tensor.copy()
    bad.flat[bad.size // 2] = value
    return bad


def bad_byte(messages: Sequence[Message], index: int) -> list[Message]:
    """One bit of one byte of a tensor is another one than the manifest's checksum is of."""
    broken = [Message.FromString(m.SerializeToString()) for m in messages]
    of_tensor = [m for m in broken if m.WhichOneof("step") == "chunk" and m.chunk.tensor_index == index]
    data = bytearray(of_tensor[-1].chunk.data)
    data[-1] ^= 1
    of_tensor[-1].chunk.data = bytes(data)
    return broken


@pytest.mark.parametrize("name", [NORM, Q, V, "model.embed_tokens.weight"])
async def test_a_corrupted_byte(rig: Rig, tensors: Tensors, name: str) -> None:
    """DATA_LOSS, by either checksum."""
    index = list(tensors).index(name)
    for sums in ({"crc32c": 0}, {"sha256": b""}):
        messages = bad_byte(whole(tensors, size=SIZE), index)
        spec = messages[0].begin.manifest.tensors[index]
        for field, nothing in sums.items():
            setattr(spec, field, nothing)
        failure = await refused(rig, messages)
        assert (failure.code, failure.reason) == (grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH")
        assert failure.tensors == {name: "CHECKSUM"}


async def test_a_manifest_with_everything_wrong_is_told_whole(rig: Rig, tensors: Tensors) -> None:
    """Before a byte is taken: nothing but begin is sent."""
    wrong = dict(tensors)
    del wrong[NORM]
    wrong[Q] = tensors[Q].T.copy()
    wrong[V] = np.zeros(tensors[V].shape, np.int8)
    wrong["model.layers.7.mlp.up_proj.weight"] = tensors[Q]
    failure = await refused(rig, [begin(wrong)])
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TENSORS")
    assert failure.tensors == {
        NORM: "MISSING",
        Q: "SHAPE",
        V: "DTYPE",
        "model.layers.7.mlp.up_proj.weight": "UNKNOWN_NAME",
    }
    told = tensor_errors(failure)
    errors = {error.name: error for error in told.errors}
    assert list(errors[Q].expected.shape) == list(tensors[Q].shape)
    assert list(errors[Q].received.shape) == list(tensors[Q].T.shape)
    assert errors[NORM].expected.name == NORM
    assert not errors[NORM].HasField("received")
    assert not errors["model.layers.7.mlp.up_proj.weight"].HasField("expected")
    assert not told.truncated


async def test_a_thousand_bad_tensors_are_cut_to_what_a_status_carries(rig: Rig, tensors: Tensors) -> None:
    unknown = {f"model.nothing.{i}.weight": tensors[NORM] for i in range(1000)}
    failure = await refused(rig, [begin(unknown, partial=True)])
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TENSORS")
    assert tensor_errors(failure).truncated
    assert 10 < len(failure.tensors) < 1000
    assert set(failure.tensors.values()) == {"UNKNOWN_NAME"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [NORM, Q])
async def test_values_that_are_not_finite(rig: Rig, tensors: Tensors, name: str, value: float) -> None:
    wrong = {**tensors, name: with_value(tensors[name], value)}
    failure = await refused(rig, whole(wrong, size=SIZE, refuse_non_finite=True))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TENSORS")
    assert failure.tensors == {name: "NON_FINITE"}


async def test_a_value_beyond_the_dtype_served(rig: Rig, tensors: Tensors) -> None:
    """3.4e38 is a float32 that no bfloat16 holds."""
    wide = np.asarray(tensors[Q], np.float32)
    failure = await refused(rig, whole({**tensors, Q: with_value(wide, 3.4e38)}, size=SIZE))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TENSORS")
    assert failure.tensors == {Q: "DTYPE"}


Broken = Callable[[Tensors], list[Message]]


def without(messages: list[Message], drop: Callable[[Message], bool]) -> list[Message]:
    kept = [m for m in messages if not drop(m)]
    assert len(kept) < len(messages)
    return kept


def chunk_of(index: int, offset: int) -> Callable[[Message], bool]:
    return lambda m: (
        m.WhichOneof("step") == "chunk" and (m.chunk.tensor_index, m.chunk.offset) == (index, offset)
    )


def swapped(messages: list[Message], at: int) -> list[Message]:
    messages[at], messages[at + 1] = messages[at + 1], messages[at]
    return messages


def one_more(tensors: Tensors) -> list[Message]:
    """Make messages with a byte beyond the end of the last tensor."""
    made = whole(tensors, size=SIZE)
    last = len(tensors) - 1
    end = tensors[list(tensors)[last]].nbytes
    return [*made[:-1], chunk(last, end, b"x"), commit(num_bytes(tensors) + 1)]


OUT_OF_ORDER: Mapping[str, tuple[Broken, str]] = {
    "two chunks change places": (lambda t: swapped(whole(t, size=SIZE), 1), "chunk.offset"),
    "a chunk is missing in the middle": (
        lambda t: without(whole(t, size=SIZE), chunk_of(0, SIZE)),
        "chunk.offset",
    ),
    "the first chunk is missing": (lambda t: without(whole(t, size=SIZE), chunk_of(0, 0)), "chunk.offset"),
    "a chunk comes twice": (
        lambda t: [*(m := whole(t, size=SIZE))[:2], m[1], *m[2:]],
        "chunk.offset",
    ),
    "no such tensor": (
        lambda t: [*(m := whole(t, size=SIZE))[:3], chunk(len(t), 0, b"xx"), *m[3:]],
        "chunk.tensor_index",
    ),
    "fewer bytes in all": (
        lambda t: [*whole(t, size=SIZE)[:-1], commit(num_bytes(t) - 1)],
        "commit.total_bytes",
    ),
    "more bytes in all": (
        lambda t: [*whole(t, size=SIZE)[:-1], commit(num_bytes(t) + 1)],
        "commit.total_bytes",
    ),
    "no count of bytes": (lambda t: [*whole(t, size=SIZE)[:-1], commit(0)], "commit.total_bytes"),
}


@pytest.mark.parametrize("what", OUT_OF_ORDER)
async def test_out_of_order(rig: Rig, tensors: Tensors, what: str) -> None:
    make, field = OUT_OF_ORDER[what]
    failure = await refused(rig, make(tensors))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"), failure
    assert list(failure.violations) == [field]


async def test_a_tensor_with_too_few_bytes(rig: Rig, tensors: Tensors) -> None:
    """The last chunk of one tensor and all of another never come; the count is of what came."""
    index, other = list(tensors).index(Q), list(tensors).index(NORM)
    offset = (tensors[Q].nbytes - 1) // SIZE * SIZE
    messages = without(whole(tensors, size=SIZE), chunk_of(index, offset))
    messages = without(messages, chunk_of(other, 0))
    messages[-1] = commit(num_bytes(tensors) - tensors[NORM].nbytes - (tensors[Q].nbytes - offset))
    failure = await refused(rig, messages)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TENSORS")
    assert failure.tensors == {Q: "INCOMPLETE", NORM: "INCOMPLETE"}


async def test_a_tensor_with_too_many_bytes(rig: Rig, tensors: Tensors) -> None:
    failure = await refused(rig, one_more(tensors))
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT
    assert failure.tensors == {list(tensors)[-1]: "INCOMPLETE"}


def steps(tensors: Tensors) -> Mapping[str, list[Message]]:
    """Streams whose messages come in an order that weights.proto does not know."""
    made = whole(tensors, size=SIZE)
    return {
        "nothing at all": [],
        "no begin": made[1:],
        "commit alone": made[-1:],
        "two begins": [made[0], *made],
        "a chunk after commit": [*made, made[1]],
        "two commits": [*made, made[-1]],
        "a message without a step": [made[0], Message(), *made[1:]],
        "an empty first message": [Message(), *made],
        "commit before the chunks": [made[0], made[-1], *made[1:-1]],
    }


STEPS = (
    "nothing at all", "no begin", "commit alone", "two begins", "a chunk after commit", "two commits",
    "a message without a step", "an empty first message", "commit before the chunks",
)  # fmt: skip


@pytest.mark.parametrize("what", STEPS)
async def test_steps_in_another_order(rig: Rig, tensors: Tensors, what: str) -> None:
    failure = await refused(rig, steps(tensors)[what])
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT, failure
    assert failure.reason == "INVALID_FIELD"


async def test_a_stream_that_ends_without_commit(rig: Rig, tensors: Tensors) -> None:
    """The client says that it is done, after any number of messages."""
    made = whole(tensors, size=SIZE)
    for count in (1, 2, len(made) // 2, len(made) - 1):
        failure = await refused(rig, made[:count])
        assert failure.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.CANCELLED), failure
        assert failure.reason


BEGINS: Mapping[str, tuple[dict[str, Any], str, str]] = {
    "no id": ({"update_id": ""}, "INVALID_ARGUMENT", "begin.update_id"),
    "no label": ({"version_label": ""}, "INVALID_ARGUMENT", "begin.version_label"),
    "no source": ({"manifest": None}, "INVALID_ARGUMENT", "begin.source"),
    "an adapter": ({"adapter": "lora"}, "UNIMPLEMENTED", ""),
    "another scheme": ({"manifest": None, "uri": "gs://bucket/weights"}, "UNIMPLEMENTED", ""),
    "a path that is not allowed": ({"manifest": None, "uri": "file:///etc"}, "", ""),
    "an old generation": ({"expected_generation": 7}, "ABORTED", ""),
    "in place and staged": (
        {"staging": weights_pb2.STAGING_MODE_IN_PLACE, "stage_only": True},
        "INVALID_ARGUMENT",
        "begin.staging",
    ),
    "an unknown policy": ({"in_flight": 77}, "INVALID_ARGUMENT", "begin.in_flight"),
    "an unknown staging": ({"staging": 77}, "INVALID_ARGUMENT", "begin.staging"),
}


@pytest.mark.parametrize("what", BEGINS)
async def test_a_begin_that_is_wrong(rig: Rig, tensors: Tensors, what: str) -> None:
    fields, code, field = BEGINS[what]
    failure = await refused(rig, [begin(tensors, **fields), *chunks(tensors), commit(num_bytes(tensors))])
    assert not code or failure.code.name == code, failure
    assert failure.reason
    if field:
        assert list(failure.violations) == [field], failure
    if what == "an old generation":
        assert failure.reason == "GENERATION_CHANGED"


async def test_a_manifest_that_names_a_tensor_twice(rig: Rig, tensors: Tensors) -> None:
    first = begin(tensors)
    first.begin.manifest.tensors.append(first.begin.manifest.tensors[3])
    failure = await refused(rig, [first])
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT, failure
    assert list(failure.violations) == ["begin.manifest.tensors"]


async def test_a_checksum_of_the_wrong_length(rig: Rig, tensors: Tensors) -> None:
    first = begin(tensors)
    first.begin.manifest.tensors[2].sha256 = b"short"
    failure = await refused(rig, [first])
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert list(failure.violations) == ["begin.manifest.tensors[2].sha256"]


async def test_a_chunk_that_is_too_large(rig: Rig, tensors: Tensors) -> None:
    most = (await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())).max_chunk_bytes
    assert most > 0
    failure = await refused(rig, [begin(tensors), chunk(0, 0, bytes(most + 1))])
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"), failure
    assert list(failure.violations) == ["chunk.data"]


async def test_only_validating_takes_nothing(rig: Rig, tensors: Tensors) -> None:
    reply = await send(rig, [begin(tensors, validate_only=True)])
    assert (reply.outcome, reply.current, reply.digest) == (VALIDATED, reply.previous, b"")
    assert reply.current.generation == 1
    failure = await refused(rig, [begin({Q: tensors[Q].T.copy()}, validate_only=True, partial=True)])
    assert failure.tensors == {Q: "SHAPE"}


async def test_damage_in_place_is_told_by_health_and_mended_by_a_whole_update(
    subject: Any, versions: Mapping[str, Version]
) -> None:
    """Not atomic, as documented: after a failure no request is answered. A part mends nothing, all does."""
    tensors = versions["b"].tensors
    in_place = weights_pb2.STAGING_MODE_IN_PLACE
    async with serving(Kept(subject)) as served:
        assert await served.health_of() == 1
        last = list(tensors).index(NORM)
        failure = await refused(served, bad_byte(whole(tensors, size=SIZE, staging=in_place), last))
        assert failure.reason == "CHECKSUM_MISMATCH"
        assert await served.health_of() == 2
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await answers(served, QUESTIONS)
        assert told.value.code() == grpc.StatusCode.UNAVAILABLE
        await refused(served, whole({Q: tensors[Q]}, partial=True))
        assert await served.health_of() == 2
        reply = await push(served, tensors, version_label="mended")
        assert reply.outcome == COMMITTED
        assert await served.health_of() == 1
        assert (await answers(served, QUESTIONS))[0][0][0] == "mended"
