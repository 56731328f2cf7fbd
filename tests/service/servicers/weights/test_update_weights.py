"""UpdateWeights, CommitWeights and DiscardWeights with the real updater on the fake engine: what is taken,
answered and refused.

What a refused update leaves behind is test_update_weights_refused's, and what a model computes with new
weights is shown by tests/service/weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.interface import Staging, UpdateOptions, UpdateReport
from penstock.v1 import control_pb2, types_pb2, weights_pb2
from tests.service.rig import Rig, failure_of, generate, serving, until
from tests.service.updatable import updatable
from tests.service.weights_rig import (
    begin,
    bytes_of,
    chunk,
    chunks,
    commit,
    fake_tensors,
    push,
    spec,
    steps,
    written,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

OLD, NEW = fake_tensors(0), fake_tensors(7)
TOTAL = sum(len(data) for _, data in NEW.values())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server_of_file() -> AsyncIterator[Rig]:
    """Serve those tests that change nothing."""
    async with serving(updatable()) as rig:
        yield rig


@pytest.fixture
def rig(server_of_file: Rig) -> Rig:
    """Return the file's server, whose updater has been asked for nothing."""
    server_of_file.engine.updater.events.clear()
    return server_of_file


async def info(rig: Rig) -> control_pb2.GetModelInfoResponse:
    reply: control_pb2.GetModelInfoResponse = await rig.control.GetModelInfo(
        control_pb2.GetModelInfoRequest(), timeout=20
    )
    return reply


async def commit_staged(rig: Rig, update_id: str = "u", **fields: Any) -> control_pb2.CommitWeightsResponse:
    request = control_pb2.CommitWeightsRequest(update_id=update_id, **fields)
    reply: control_pb2.CommitWeightsResponse = await rig.control.CommitWeights(request, timeout=20)
    return reply


async def discard(rig: Rig, update_id: str = "u") -> bool:
    request = control_pb2.DiscardWeightsRequest(update_id=update_id)
    return bool((await rig.control.DiscardWeights(request, timeout=20)).discarded)


def version(label: str, generation: int) -> types_pb2.WeightsVersion:
    return types_pb2.WeightsVersion(label=label, generation=generation)


def report_of(rig: Rig) -> UpdateReport:
    """Return what the updater says of the update "u"."""
    report: UpdateReport | None = rig.engine.updater.already_committed("u")
    assert report is not None
    return report


def duration(time_s: float) -> Duration:
    assert time_s > 0
    seconds, rest = divmod(round(time_s * 1e9), 10**9)
    return Duration(seconds=seconds, nanos=rest)


def digest_of_new() -> bytes:
    """Compute the digest of NEW as weights.proto defines it."""
    lines = [
        f"{name} {sent.dtype} {','.join(map(str, sent.shape))} {hashlib.sha256(data).hexdigest()}\n"
        for name, (sent, data) in sorted(NEW.items())
    ]
    return hashlib.sha256("".join(lines).encode()).digest()


async def test_new_weights_serve() -> None:
    """In chunks of 1,000 bytes, and from both tensors in turn."""
    async with serving(updatable()) as rig:
        mixed = sorted(chunks(NEW, 8), key=lambda step: step.chunk.offset)
        reply = await push(rig, [begin(NEW), *mixed, commit(TOTAL)])
        assert rig.engine.updater.serving == bytes_of(NEW)
        told = await info(rig)
        assert (await rig.inference.Generate(generate("y"))).outputs[0].weights[0].version == reply.current
    assert reply == weights_pb2.UpdateWeightsResponse(
        current=version("new", 2),
        previous=version("initial", 1),
        outcome=weights_pb2.UPDATE_OUTCOME_COMMITTED,
        tensors_updated=2,
        bytes_received=TOTAL,
        staged_in=duration(report_of(rig).staged_s),
        paused_for=duration(report_of(rig).paused_s),
        in_flight=weights_pb2.InFlightReport(),
        digest=digest_of_new(),
    )
    assert (told.weights, told.weights_digest) == (reply.current, reply.digest)
    assert told.weights_since.ToDatetime(UTC) == rig.engine.weights_since


async def test_everything_asked_for_reaches_the_updater() -> None:
    async with serving(updatable()) as rig:
        seen: list[Any] = []
        real = rig.engine.updater.begin

        def begin_seen(options: UpdateOptions, sent: Any) -> Any:
            seen.append((options, sent))
            return real(options, sent)

        rig.engine.updater.begin = begin_seen
        norm, data = NEW["model.norm.weight"]
        first = begin(
            None,
            update_id="id",
            label="label",
            partial=True,
            expected_generation=1,
            in_flight=weights_pb2.IN_FLIGHT_POLICY_WAIT,
            drain_timeout=Duration(seconds=2, nanos=500_000_000),
            staging=weights_pb2.STAGING_MODE_DEVICE,
            refuse_non_finite=True,
        )
        sha256 = hashlib.sha256(data).digest()
        first.begin.manifest.tensors.append(spec(norm, data))
        first.begin.manifest.tensors[0].sha256 = sha256
        await push(rig, [first, chunk(0, 0, data), commit(len(data))])
    ((options, sent),) = seen
    assert options == UpdateOptions(
        update_id="id",
        label="label",
        partial=True,
        expected_generation=1,
        in_flight=InFlightPolicy.WAIT,
        drain_timeout_s=2.5,
        staging=Staging.DEVICE,
        refuse_non_finite=True,
    )
    crc32c = spec(norm, data).crc32c
    assert list(sent) == [SentTensor("model.norm.weight", "F32", (8,), crc32c, sha256)]


async def test_what_is_not_said_has_the_contracts_meaning() -> None:
    async with serving(updatable()) as rig:
        await push(rig, steps(NEW, label="l"))
        assert rig.engine.updater.options == [UpdateOptions(update_id="u", label="l")]


@pytest.mark.parametrize("policy", [2, 3, 4])
async def test_what_became_of_the_running_requests(policy: int) -> None:
    async with serving(updatable(hold=True)) as rig:
        call = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 1)
        report = (await push(rig, steps(NEW, in_flight=policy))).in_flight
        name = {2: "aborted", 3: "kept", 4: "recomputed"}[policy]
        assert report == weights_pb2.InFlightReport(**{name: 1})
        rig.engine.release()
        await asyncio.wait_for(call, 20)


async def test_a_request_that_runs_is_waited_for() -> None:
    async with serving(updatable(hold=True)) as rig:
        call = asyncio.ensure_future(rig.inference.Generate(generate("x")))
        await until(lambda: len(rig.engine.seen) == 1)
        pushing = asyncio.ensure_future(push(rig, steps(NEW)))
        await until(lambda: bool(rig.engine.waiting_changes))
        assert rig.engine.weights.generation == 1
        rig.engine.release()
        assert (await pushing).in_flight == weights_pb2.InFlightReport(waited=1)
        assert (await call).outputs[0].weights[0].version == version("initial", 1)


# -- updates that are known --


@pytest.mark.parametrize("sends", ["everything", "begin only"])
async def test_an_update_that_is_sent_again_is_answered_at_once(sends: str) -> None:
    """Also if only its begin has come: no chunk is waited for."""
    async with serving(updatable()) as rig:
        first = await push(rig, steps(NEW))
        rig.engine.updater.events.clear()
        if sends == "everything":
            reply = await push(rig, steps(NEW))
        else:
            call = rig.inference.UpdateWeights()
            await call.write(begin(NEW))
            reply = await asyncio.wait_for(call, 20)
        assert reply.outcome == weights_pb2.UPDATE_OUTCOME_ALREADY_COMMITTED
        assert (reply.current, reply.previous) == (first.current, first.current)
        assert (reply.digest, reply.tensors_updated) == (first.digest, 2)
        assert rig.engine.updater.events == []
        assert rig.engine.weights.generation == 2


async def test_staged_weights_are_committed() -> None:
    async with serving(updatable()) as rig:
        staged = await push(rig, steps(NEW, stage_only=True))
        assert staged.outcome == weights_pb2.UPDATE_OUTCOME_STAGED
        assert (staged.current, staged.previous) == (version("initial", 1), version("initial", 1))
        assert (await info(rig)).staged_update_id == "u"
        again = await push(rig, [begin(NEW, stage_only=True)])
        assert again.outcome == weights_pb2.UPDATE_OUTCOME_STAGED, "and no chunk was asked for"
        assert rig.engine.updater.serving == bytes_of(OLD)
        reply = await commit_staged(rig)
        assert reply == control_pb2.CommitWeightsResponse(
            current=version("new", 2),
            previous=version("initial", 1),
            outcome=weights_pb2.UPDATE_OUTCOME_COMMITTED,
            paused_for=duration(report_of(rig).paused_s),
            in_flight=weights_pb2.InFlightReport(),
            digest=staged.digest,
        )
        assert rig.engine.updater.serving == bytes_of(NEW)
        second = await commit_staged(rig)
        assert second.outcome == weights_pb2.UPDATE_OUTCOME_ALREADY_COMMITTED
        assert (second.current, second.previous) == (version("new", 2), version("new", 2))
        assert (await info(rig)).staged_update_id == ""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "kept"), ({"in_flight": 4}, "recomputed")],
    ids=["as it began", "another"],
)
async def test_the_policy_of_a_commit(given: dict[str, Any], expected: str) -> None:
    async with serving(updatable(hold=True)) as rig:
        call = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 1)
        await push(rig, steps(NEW, stage_only=True, in_flight=3))
        reply = await commit_staged(rig, **given)
        assert reply.in_flight == weights_pb2.InFlightReport(**{expected: 1})
        rig.engine.release()
        await asyncio.wait_for(call, 20)


async def test_a_commit_that_waits_too_long_leaves_the_update_staged() -> None:
    async with serving(updatable(hold=True)) as rig:
        call = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 1)
        await push(rig, steps(NEW, stage_only=True))
        failure = await failure_of(commit_staged(rig, drain_timeout=Duration(nanos=10_000_000)))
        assert failure.reason == "DRAIN_TIMEOUT"
        assert (await info(rig)).staged_update_id == "u"
        rig.engine.release()
        await call
        assert (await commit_staged(rig)).outcome == weights_pb2.UPDATE_OUTCOME_COMMITTED


async def test_a_client_that_gives_up_its_commit_takes_it_back() -> None:
    async with serving(updatable(hold=True)) as rig:
        call = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 1)
        await push(rig, steps(NEW, stage_only=True))
        committing = rig.control.CommitWeights(control_pb2.CommitWeightsRequest(update_id="u"))
        await until(lambda: bool(rig.engine.waiting_changes))
        waiting = rig.engine.waiting_changes[0].done
        committing.cancel()
        await until(waiting.cancelled)
        rig.engine.release()
        await asyncio.wait_for(call, 20)
        assert rig.engine.weights.generation == 1


async def test_staged_weights_are_discarded() -> None:
    async with serving(updatable()) as rig:
        await push(rig, steps(NEW, stage_only=True))
        assert not await discard(rig, "another")
        assert await discard(rig)
        assert not await discard(rig), "it is gone"
        failure = await failure_of(commit_staged(rig))
        assert (failure.code.name, failure.reason) == ("NOT_FOUND", "UNKNOWN_UPDATE")
        assert (await push(rig, steps(NEW))).outcome == weights_pb2.UPDATE_OUTCOME_COMMITTED


@pytest.mark.parametrize("name", ["CommitWeights", "DiscardWeights"])
async def test_an_id_is_required(rig: Rig, name: str) -> None:
    failure = await failure_of(getattr(rig.control, name)(getattr(control_pb2, f"{name}Request")()))
    assert failure.violations == {"update_id": "must not be empty"}


# -- validation only --


async def test_a_manifest_is_only_validated() -> None:
    """The answer comes without a commit, and takes no place: another update is under way."""
    async with serving(updatable()) as rig:
        other = rig.inference.UpdateWeights()
        await other.write(begin(NEW, update_id="other"))
        await until(lambda: bool(rig.engine.updater.options))
        call = rig.inference.UpdateWeights()
        await call.write(begin(NEW, validate_only=True))
        reply = await asyncio.wait_for(call, 20)
        assert reply == weights_pb2.UpdateWeightsResponse(
            current=version("initial", 1),
            previous=version("initial", 1),
            outcome=weights_pb2.UPDATE_OUTCOME_VALIDATED,
            staged_in=Duration(),
            paused_for=Duration(),
            in_flight=weights_pb2.InFlightReport(),
        )
        assert rig.engine.updater.events == ["begin", "validate"]
        other.cancel()


def described(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, tuple[SentTensor, bytes]]:
    """Describe tensors by dtype and shape, without their bytes."""
    names = {"norm": "model.norm.weight", "embedding": "model.embed_tokens.weight"}
    return {
        (name := names.get(key, key)): (SentTensor(name, dtype, shape), b"")
        for key, (dtype, shape) in tensors.items()
    }


@pytest.mark.parametrize("validate_only", [True, False])
async def test_a_bad_manifest_is_refused_before_any_byte(rig: Rig, validate_only: bool) -> None:
    """With all of its bad tensors, as they are listed and as the model has them."""
    norm, embedding, extra = "model.norm.weight", "model.embed_tokens.weight", "extra"
    for tensors, reasons in (
        (described(norm=("F32", (9,)), extra=("I8", (1,))), ["SHAPE", "UNKNOWN_NAME", "MISSING"]),
        (described(norm=("I8", (8,)), extra=("I8", (1,))), ["DTYPE", "UNKNOWN_NAME", "MISSING"]),
    ):
        call = rig.inference.UpdateWeights()
        await call.write(begin(tensors, validate_only=validate_only))
        failure = await failure_of(call)
        assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_TENSORS")
        assert failure.tensors == dict(zip((norm, extra, embedding), reasons, strict=True))
        (told,) = [one for one in failure.details if isinstance(one, weights_pb2.TensorErrors)]
        errors = {error.name: error for error in told.errors}
        assert errors[norm].expected == spec(NEW[norm][0])
        assert errors[norm].received == spec(tensors[norm][0])
        assert errors[embedding].expected == spec(NEW[embedding][0])
        assert not errors[embedding].HasField("received")
        assert not errors[extra].HasField("expected")
        assert not told.truncated


async def test_a_thousand_bad_tensors_are_cut_to_what_a_status_carries(rig: Rig) -> None:
    unknown = described(**{f"model.nothing.{i}.weight": ("F32", (8,)) for i in range(1000)})
    failure = await failure_of(push(rig, [begin(unknown, partial=True)]))
    assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_TENSORS")
    (told,) = [one for one in failure.details if isinstance(one, weights_pb2.TensorErrors)]
    assert told.truncated
    assert 10 < len(failure.tensors) < 1000
    assert set(failure.tensors.values()) == {"UNKNOWN_NAME"}


# -- files --


def file_of(folder: Path) -> str:
    return written(NEW, folder / "weights.safetensors")


async def test_weights_from_a_file(tmp_path: Path) -> None:
    async with serving(updatable(), weights_roots=(tmp_path,)) as rig:
        reply = await push(rig, [begin(uri=file_of(tmp_path)), commit(0)])
        assert reply.outcome == weights_pb2.UPDATE_OUTCOME_COMMITTED
        assert rig.engine.updater.serving == bytes_of(NEW)
        assert rig.engine.updater.events == ["open_uri", "read", "commit", "close"]


async def test_a_file_is_not_read_before_the_client_has_committed_that(tmp_path: Path) -> None:
    async with serving(updatable(), weights_roots=(tmp_path,)) as rig:
        failure = await failure_of(push(rig, [begin(uri=file_of(tmp_path))]))
        assert failure.violations == {"step": "the stream has ended without commit; nothing has changed"}
        assert rig.engine.updater.events == ["open_uri", "close"]


async def test_a_file_that_was_changed_before_it_was_read_is_refused(tmp_path: Path) -> None:
    uri = file_of(tmp_path)
    async with serving(updatable(), weights_roots=(tmp_path,)) as rig:
        call = rig.inference.UpdateWeights()
        await call.write(begin(uri=uri))
        await until(lambda: bool(rig.engine.updater.options))
        os.utime(tmp_path / "weights.safetensors", ns=(0, 0))
        await call.write(commit(0))
        await call.done_writing()
        failure = await failure_of(call)
        assert (failure.reason, list(failure.violations)) == ("INVALID_FIELD", ["begin.uri"])
        assert rig.engine.updater.serving == bytes_of(OLD)


async def test_a_file_is_only_validated(tmp_path: Path) -> None:
    async with serving(updatable(), weights_roots=(tmp_path,)) as rig:
        reply = await push(rig, [begin(uri=file_of(tmp_path), validate_only=True)])
        assert reply.outcome == weights_pb2.UPDATE_OUTCOME_VALIDATED
        assert rig.engine.updater.events == ["validate_uri"]


@pytest.mark.parametrize("validate_only", [False, True])
async def test_files_need_a_root(rig: Rig, tmp_path: Path, validate_only: bool) -> None:
    first = begin(uri=file_of(tmp_path), validate_only=validate_only)
    failure = await failure_of(push(rig, [first, commit(0)]))
    assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
    assert failure.info.metadata["field"] == "begin.uri"
    assert "--weights-root" in failure.message
    assert rig.engine.updater.events == []


async def test_a_file_elsewhere_is_not_read(tmp_path: Path) -> None:
    """Also not through a link, or by way of `..`; what does not exist is refused alike."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    file_of(outside)
    (root / "link").symlink_to(outside)
    async with serving(updatable(), weights_roots=(root,)) as rig:
        for path in (outside, root / "link", root / ".." / "outside", tmp_path / "nothing"):
            failure = await failure_of(push(rig, [begin(uri=f"file://{path}"), commit(0)]))
            assert (failure.reason, list(failure.violations)) == ("INVALID_FIELD", ["begin.uri"])
            assert "is not below a directory" in failure.message
        assert rig.engine.updater.serving == bytes_of(OLD)


async def test_a_file_has_no_chunks(tmp_path: Path) -> None:
    async with serving(updatable(), weights_roots=(tmp_path,)) as rig:
        failure = await failure_of(push(rig, [begin(uri=file_of(tmp_path)), chunk(0, 0, b"x"), commit(0)]))
        assert failure.violations == {"step": "no chunk may follow a begin with a uri; nothing has changed"}
        assert "read" not in rig.engine.updater.events


# -- what begin must say --

MANIFEST = begin(NEW).begin.manifest
BAD: dict[str, tuple[dict[str, Any], set[str]]] = {
    "no source": ({}, {"begin.source"}),
    "empty uri": ({"uri": ""}, {"begin.uri"}),
    "no id": ({"manifest": MANIFEST, "update_id": ""}, {"begin.update_id"}),
    "long id": ({"manifest": MANIFEST, "update_id": "x" * 129}, {"begin.update_id"}),
    "no label": ({"manifest": MANIFEST, "label": ""}, {"begin.version_label"}),
    "long label": ({"manifest": MANIFEST, "label": "x" * 257}, {"begin.version_label"}),
    "policy": ({"manifest": MANIFEST, "in_flight": 9}, {"begin.in_flight"}),
    "staging": ({"manifest": MANIFEST, "staging": 9}, {"begin.staging"}),
    "negative time": ({"manifest": MANIFEST, "drain_timeout": Duration(seconds=-1)}, {"begin.drain_timeout"}),
    "time without effect": (
        {"manifest": MANIFEST, "in_flight": 2, "drain_timeout": Duration(seconds=1)},
        {"begin.drain_timeout"},
    ),
    "both": ({"manifest": MANIFEST, "stage_only": True, "validate_only": True}, {"begin.stage_only"}),
    "several": ({"update_id": "", "staging": 9}, {"begin.update_id", "begin.staging", "begin.source"}),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_fields_are_named(rig: Rig, name: str) -> None:
    fields, expected = BAD[name]
    failure = await failure_of(push(rig, [begin(**fields), *steps(NEW)[1:]]))
    assert (failure.reason, set(failure.violations)) == ("INVALID_FIELD", expected)
    assert rig.engine.updater.events == []


async def test_bad_tensors_of_a_manifest_are_named(rig: Rig) -> None:
    manifest = weights_pb2.TensorManifest()
    manifest.tensors.add(name="a", dtype=0)
    manifest.tensors.add(name="b", dtype=99)
    manifest.tensors.add(name="", dtype=weights_pb2.DATA_TYPE_F32, sha256=b"short")
    manifest.tensors.add(name="c", dtype=weights_pb2.DATA_TYPE_F32, shape=[1] * 9)
    failure = await failure_of(push(rig, [begin(manifest=manifest)]))
    assert failure.violations == {
        "begin.manifest.tensors[0].dtype": "is required",
        "begin.manifest.tensors[1].dtype": "99 is no value of DataType",
        "begin.manifest.tensors[2].name": "must have from 1 to 512 characters, not 0",
        "begin.manifest.tensors[2].sha256": "must have 32 bytes or none, not 5",
        "begin.manifest.tensors[3].shape": "at most 8 dimensions, not 9",
    }


async def test_an_adapter_is_refused(rig: Rig) -> None:
    failure = await failure_of(push(rig, steps(NEW, adapter="lora")))
    assert (failure.reason, failure.info.metadata["field"]) == ("UNSUPPORTED_FEATURE", "begin.adapter")


async def test_too_many_tensors_are_refused_before_anything_looks_at_them(rig: Rig) -> None:
    """20,001 small ones, and 300,000, which have too many fields for the decoder."""
    one = weights_pb2.TensorSpec(name="t", dtype=weights_pb2.DATA_TYPE_F32)
    manifest = weights_pb2.TensorManifest(tensors=[one] * 20_001)
    failure = await failure_of(push(rig, [begin(manifest=manifest)]))
    assert failure.violations == {"begin.manifest.tensors": "at most 20000 tensors, not 20001"}
    entry = one.SerializeToString()
    tensors = (b"\x0a" + bytes([len(entry)]) + entry) * 300_000
    manifest = weights_pb2.TensorManifest.FromString(tensors)
    failure = await failure_of(push(rig, [begin(manifest=manifest)]))
    assert failure.reason == "INVALID_FIELD"
    assert "fields in all" in next(iter(failure.violations.values()))
    assert rig.engine.updater.events == []


async def test_a_label_may_be_any_text() -> None:
    async with serving(updatable()) as rig:
        label = "pas \U0001f600\n%s {}"
        assert (await push(rig, steps(NEW, label=label))).current.label == label
