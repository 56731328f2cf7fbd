"""Whatever is wrong with an upload: it is told with every bad tensor, and the old weights serve on."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime import Engine
from penstock.runtime.errors import ChecksumMismatch, InvalidRequest, TensorsRefused
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason
from penstock.runtime.updating.interface import Staging, UpdateOutcome
from tests.support.updating import Arrays, begun, bits, changed, described, options, send, tokens

UP, NORM, HEAD = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"


def reasons(error: TensorsRefused) -> dict[str, TensorReason]:
    return {problem.name: problem.reason for problem in error.problems}


def fields(refused: pytest.ExceptionInfo[InvalidRequest]) -> list[str]:
    return [violation.field for violation in refused.value.violations]


def index_of(tensors: Arrays, name: str) -> int:
    return list(tensors).index(name)


def test_the_manifest_is_checked_as_a_whole_before_a_byte(engine: Engine, tensors: Arrays) -> None:
    sent = {tensor.name: tensor for tensor in described(tensors)}
    del sent[NORM]
    sent[UP] = dataclasses.replace(sent[UP], shape=(48, 112))
    sent[HEAD] = dataclasses.replace(sent[HEAD], dtype="I8")
    packed = "model.layers.0.mlp.up_proj.weight"
    sent[packed] = dataclasses.replace(sent[packed], dtype="I4")
    for name in ("ghost", "model.layers.99.mlp.up_proj.weight"):
        sent[name] = SentTensor(name, "F32", (2, 2))
    for check in (engine.updater.begin, engine.updater.validate):
        with pytest.raises(TensorsRefused) as refused:
            check(options(), list(sent.values()))
        assert reasons(refused.value) == {
            NORM: TensorReason.MISSING,
            UP: TensorReason.SHAPE,
            HEAD: TensorReason.DTYPE,
            packed: TensorReason.DTYPE,
            "ghost": TensorReason.UNKNOWN_NAME,
            "model.layers.99.mlp.up_proj.weight": TensorReason.UNKNOWN_NAME,
        }
        found = {problem.name: problem for problem in refused.value.problems}
        assert found[NORM].expected == SentTensor(NORM, "F32", (48,))
        assert found[UP].expected == SentTensor(UP, "F32", (112, 48))
        assert found[UP].received == sent[UP]
        assert found["ghost"].expected is None
    begun(engine, tensors).close()  # the place is free


def test_a_list_that_is_wrong_in_itself_names_its_fields(engine: Engine, tensors: Arrays) -> None:
    sent = described(tensors)
    twice = [*sent, sent[3]]
    twice[0] = dataclasses.replace(twice[0], sha256=b"short")
    with pytest.raises(InvalidRequest, match="is there 2 times") as refused:
        engine.updater.begin(options(), twice)
    assert fields(refused) == ["begin.manifest.tensors", "begin.manifest.tensors[0].sha256"]


@pytest.mark.parametrize("index", [-1, 27, 2**32 - 1])
def test_a_chunk_of_no_tensor(engine: Engine, tensors: Arrays, index: int) -> None:
    upload = begun(engine, tensors)
    with pytest.raises(InvalidRequest, match="must be below 27") as refused:
        upload.write(index, 0, b"1234")
    assert fields(refused) == ["chunk.tensor_index"]
    upload.close()


@pytest.mark.parametrize(("offset", "kind"), [(0, "overlap"), (50, "overlap"), (101, "gap"), (9999, "gap")])
def test_chunks_of_a_tensor_come_without_gap_or_overlap(
    engine: Engine, tensors: Arrays, offset: int, kind: str
) -> None:
    upload = begun(engine, tensors)
    data = tensors[UP].tobytes()
    upload.write(index_of(tensors, UP), 0, data[:100])
    with pytest.raises(InvalidRequest, match=f"is {offset}; the next byte of {UP} is 100") as refused:
        upload.write(index_of(tensors, UP), offset, data[100:200])
    assert fields(refused) == ["chunk.offset"]
    upload.close()


def test_more_bytes_than_a_tensor_has(engine: Engine, tensors: Arrays) -> None:
    upload = begun(engine, tensors)
    index, data = index_of(tensors, NORM), tensors[NORM].tobytes()
    with pytest.raises(TensorsRefused, match="more bytes") as refused:
        upload.write(index, 0, data + b"\0")
    assert reasons(refused.value) == {NORM: TensorReason.INCOMPLETE}
    upload.write(index, 0, b"")  # says nothing, and is nothing
    upload.write(index, 0, data[:4])
    with pytest.raises(TensorsRefused, match="more bytes"):
        upload.write(index, 4, data[4:] + b"\0")
    upload.write(index, 4, data[4:])
    with pytest.raises(TensorsRefused, match="more bytes"):
        upload.write(index, len(data), b"\0")
    upload.close()


def test_a_commit_before_all_bytes_lists_every_tensor_that_lacks_some(
    engine: Engine, tensors: Arrays
) -> None:
    upload = begun(engine, tensors)
    cut, absent = index_of(tensors, UP), index_of(tensors, HEAD)
    total = send(upload, tensors, [i for i in range(len(tensors)) if i not in (cut, absent)])
    upload.write(cut, 0, tensors[UP].tobytes()[:-1])
    with pytest.raises(TensorsRefused, match="fewer bytes") as refused:
        upload.commit(total)
    assert reasons(refused.value) == dict.fromkeys((HEAD, UP), TensorReason.INCOMPLETE)
    upload.close()


@pytest.mark.parametrize("off", [-1, 1])
def test_another_total_than_came(engine: Engine, tensors: Arrays, off: int) -> None:
    upload = begun(engine, tensors)
    total = send(upload, tensors)
    with pytest.raises(InvalidRequest, match=f"is {total + off}; {total} bytes have come") as refused:
        upload.commit(total + off)
    assert fields(refused) == ["commit.total_bytes"]
    upload.close()


@pytest.mark.parametrize("kind", ["crc32c", "sha256"])
def test_every_tensor_that_was_damaged_on_the_way_is_found(
    engine: Engine, tensors: Arrays, kind: str
) -> None:
    if kind == "crc32c":
        sent = described(tensors, checksums=True)
    else:
        sent = [
            dataclasses.replace(tensor, sha256=hashlib.sha256(tensors[tensor.name].tobytes()).digest())
            for tensor in described(tensors)
        ]
    upload = engine.updater.begin(options(), sent)
    total = 0
    for index, (name, tensor) in enumerate(tensors.items()):
        data = bytearray(tensor.tobytes())
        if name in (UP, NORM):
            data[-3] ^= 1  # one bit
        upload.write(index, 0, bytes(data))
        total += len(data)
    with pytest.raises(ChecksumMismatch) as refused:
        upload.commit(total)
    assert reasons(refused.value) == dict.fromkeys((UP, NORM), TensorReason.CHECKSUM)
    upload.close()


@pytest.mark.parametrize("kind", [np.float32, np.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fn])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_on_request(
    engine: Engine, tensors: Arrays, kind: Any, value: float
) -> None:
    bad = {UP: tensors[UP].astype(kind), NORM: tensors[NORM].astype(kind), HEAD: tensors[HEAD].astype(kind)}
    for name in (UP, HEAD):
        bad[name] = np.array(bad[name])
        bad[name].flat[-1] = value  # where there is no infinity, it is NaN
    upload = begun(engine, bad, partial=True, refuse_non_finite=True)
    total = send(upload, bad)
    with pytest.raises(TensorsRefused, match="has NaN or infinity") as refused:
        upload.commit(total)
    assert reasons(refused.value) == dict.fromkeys((UP, HEAD), TensorReason.NON_FINITE)
    upload.close()


def test_an_update_that_cannot_go_live_takes_no_memory(engine: Engine, tensors: Arrays) -> None:
    """One tensor is bad, and all others come after it."""
    num_live = len(jax.live_arrays())
    upload = begun(engine, tensors)
    first, *others = range(len(tensors))
    data = bytearray(list(tensors.values())[first].tobytes())
    data[-1] ^= 1
    upload.write(first, 0, bytes(data))
    total = len(data) + send(upload, tensors, others)
    with pytest.raises(ChecksumMismatch):
        upload.commit(total)
    assert len(jax.live_arrays()) == num_live
    upload.close()


def test_all_that_is_bad_is_told_together(engine: Engine, tensors: Arrays) -> None:
    """NaN, damage and missing bytes, in one error; lost data decides what it is."""
    bad = {name: np.array(tensor) for name, tensor in tensors.items()}
    bad[NORM][0] = np.nan
    sent = described(bad, checksums=True)
    upload = engine.updater.begin(options(refuse_non_finite=True), sent)
    bad[UP][0, 0] += 1  # after the checksum was made
    total = send(upload, bad, [i for i, name in enumerate(bad) if name != HEAD])
    with pytest.raises(ChecksumMismatch) as refused:
        upload.commit(total)
    assert reasons(refused.value) == {
        HEAD: TensorReason.INCOMPLETE,
        UP: TensorReason.CHECKSUM,
        NORM: TensorReason.NON_FINITE,
    }
    upload.close()


def test_a_message_names_the_first_tensors_and_counts_the_rest() -> None:
    error = TensorsRefused([TensorProblem(f"ghost {i:03}", TensorReason.UNKNOWN_NAME) for i in range(300)])
    assert len(error.problems) == 300
    assert "ghost 009" in str(error)
    assert "ghost 010" not in str(error)
    assert "and 290 more" in str(error)


@pytest.mark.parametrize("staging", [Staging.HOST, Staging.DEVICE])
def test_an_upload_that_ends_at_any_chunk_changes_nothing_and_holds_nothing(
    engine: Engine, tensors: Arrays, staging: Staging
) -> None:
    before, answer = bits(engine), tokens(engine)
    new = changed(tensors)
    gc.collect()
    num_live = len(jax.live_arrays())
    for count in range(len(new) + 1):
        upload = begun(engine, new, f"ends after {count}", staging=staging)
        send(upload, new, range(count))
        if count < len(new):
            upload.write(count, 0, list(new.values())[count].tobytes()[:7])
        upload.close()
        upload.close()
        assert len(jax.live_arrays()) == num_live  # no collection was needed
        with pytest.raises(RuntimeError, match="has ended"):
            upload.write(0, 0, b"x")
    assert bits(engine) == before
    assert tokens(engine) == answer
    assert engine.updater.already_committed("ends after 3") is None


def test_an_update_after_refusals_goes_live(engine: Engine, tensors: Arrays) -> None:
    before = bits(engine)
    report = None
    for update_tensors, label in ((changed(tensors), "new"), (tensors, "old")):
        upload = begun(engine, update_tensors, label)
        report = upload.commit(send(upload, update_tensors)).result(60)
        upload.close()
        assert report.outcome is UpdateOutcome.COMMITTED
        assert report.current == engine.weights
        assert report.previous.generation == report.current.generation - 1
        assert report.num_tensors == len(tensors)
        assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert report.staged_s > 0
        assert (bits(engine) == before) == (label == "old")
