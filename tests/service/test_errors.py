"""The table of statuses: every class of the error tree has a row, and every row reaches the client."""

from __future__ import annotations

import asyncio
import copy
import pickle
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.runtime import errors
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason
from penstock.service import access_errors
from penstock.service import errors as service_errors
from penstock.service.errors import (
    DETAILS_KEY,
    TABLE,
    Busy,
    StalledReader,
    StalledSender,
    UnknownService,
    row_of,
    to_status,
)
from penstock.v1 import weights_pb2
from tests.service.rig import failure_of, fake, generate, serving, stream, until


def tree(root: type[errors.PenstockError]) -> list[type[errors.PenstockError]]:
    return [root, *(below for child in root.__subclasses__() for below in tree(child))]


ALL = [cls for cls in tree(errors.PenstockError) if cls.__module__.startswith("penstock.")]


def test_the_walk_sees_the_tree() -> None:
    assert {errors.InvalidRequest, errors.QueueFull, StalledReader} <= set(ALL)
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_class_is_mapped(cls: type[errors.PenstockError]) -> None:
    assert cls in TABLE, f"{cls.__name__} has no row in penstock.service.errors.TABLE"
    assert TABLE[cls].reason.isupper()


def test_reasons_tell_classes_apart() -> None:
    reasons = [row.reason for row in TABLE.values()]
    assert len(set(reasons)) == len(reasons)


BAD_TENSOR = TensorProblem("w", TensorReason.CHECKSUM)
SAMPLES = [
    (errors.InvalidRequest([errors.Violation("a.b", "bad")]), "INVALID_ARGUMENT", "INVALID_FIELD", {}),
    (errors.UnsupportedFeature(["n", "m"]), "UNIMPLEMENTED", "UNSUPPORTED_FEATURE", {"field": "n,m"}),
    (
        errors.PromptTooLong(9, 8),
        "INVALID_ARGUMENT",
        "PROMPT_TOO_LONG",
        {"prompt_tokens": "9", "max_prompt_tokens": "8"},
    ),
    (
        errors.ExceedsKVCapacity(9, 8),
        "INVALID_ARGUMENT",
        "EXCEEDS_KV_CAPACITY",
        {"needed_tokens": "9", "capacity_tokens": "8"},
    ),
    (errors.QueueFull(3, 1.5), "RESOURCE_EXHAUSTED", "QUEUE_FULL", {"limit": "3"}),
    (
        errors.CostlyGrammar("constraint.regex", 60.0),
        "RESOURCE_EXHAUSTED",
        "COSTLY_GRAMMAR",
        {"field": "constraint.regex"},
    ),
    (errors.Draining(), "UNAVAILABLE", "DRAINING", {}),
    (errors.NotReady(), "UNAVAILABLE", "NOT_READY", {}),
    (errors.DuplicateRequestId("r"), "ALREADY_EXISTS", "DUPLICATE_REQUEST_ID", {"request_id": "r"}),
    (errors.UnknownModel("x", "y"), "NOT_FOUND", "UNKNOWN_MODEL", {"model": "x", "served_model": "y"}),
    (errors.EngineFailure("gone"), "INTERNAL", "ENGINE_FAILURE", {}),
    (errors.EngineDead("gone"), "UNAVAILABLE", "ENGINE_DEAD", {}),
    (errors.GroupEnded("gone"), "UNAVAILABLE", "GROUP_ENDED", {"cause": "gone"}),
    (errors.GenerationError("no"), "INTERNAL", "GENERATION_FAILED", {}),
    (errors.NonFiniteLogits(), "INTERNAL", "NON_FINITE_LOGITS", {}),
    (
        errors.WeightsTooOld(7, 3),
        "FAILED_PRECONDITION",
        "WEIGHTS_TOO_OLD",
        {"min_generation": "7", "generation": "3"},
    ),
    (errors.WeightsIncomplete("the sender left"), "UNAVAILABLE", "WEIGHTS_INCOMPLETE", {}),
    (errors.ChangeRefused("no"), "FAILED_PRECONDITION", "CHANGE_REFUSED", {}),
    (errors.DrainTimeout(0.5), "DEADLINE_EXCEEDED", "DRAIN_TIMEOUT", {"timeout_s": "0.5"}),
    (errors.PausedWithRequests(2), "FAILED_PRECONDITION", "PAUSED", {"requests": "2"}),
    (errors.PauseTakenBack(), "ABORTED", "PAUSE_TAKEN_BACK", {}),
    (errors.WeightsError("no"), "FAILED_PRECONDITION", "WEIGHTS_REFUSED", {}),
    (errors.TensorsRefused([BAD_TENSOR]), "INVALID_ARGUMENT", "INVALID_TENSORS", {"tensors": "1"}),
    (errors.ChecksumMismatch([BAD_TENSOR]), "DATA_LOSS", "CHECKSUM_MISMATCH", {"tensors": "1"}),
    (errors.GenerationChanged(2, 3), "ABORTED", "GENERATION_CHANGED", {"expected": "2", "current": "3"}),
    (
        errors.UpdateUnderWay("u", staged=True),
        "ABORTED",
        "UPDATE_UNDER_WAY",
        {"update_id": "u", "staged": "true"},
    ),
    (errors.UnknownUpdate("u"), "NOT_FOUND", "UNKNOWN_UPDATE", {"update_id": "u"}),
    (errors.CheckpointError(missing=["w"]), "FAILED_PRECONDITION", "CHECKPOINT", {}),
    (StalledReader(2), "RESOURCE_EXHAUSTED", "STALLED_READER", {"limit_s": "2"}),
    (UnknownService("x"), "NOT_FOUND", "UNKNOWN_SERVICE", {"service": "x"}),
    (StalledSender(2), "RESOURCE_EXHAUSTED", "STALLED_SENDER", {"limit_s": "2"}),
    (Busy("max_rpcs", 7, 1.5), "RESOURCE_EXHAUSTED", "BUSY", {"limit": "max_rpcs", "max": "7"}),
    (access_errors.Unauthenticated("no"), "UNAUTHENTICATED", "UNAUTHENTICATED", {}),
    (
        access_errors.KeyExpired("k", datetime(2026, 11, 22, tzinfo=UTC)),
        "UNAUTHENTICATED",
        "KEY_EXPIRED",
        {"expired": "2026-11-22T00:00:00+00:00"},
    ),
    (access_errors.Forbidden("no"), "PERMISSION_DENIED", "FORBIDDEN", {}),
    (
        access_errors.RateLimited("requests_per_minute", 6, 10.0),
        "RESOURCE_EXHAUSTED",
        "RATE_LIMITED",
        {"limit": "requests_per_minute", "per_minute": "6"},
    ),
    (ValueError("secret"), "INTERNAL", "INTERNAL", {}),
]


@pytest.mark.parametrize(("error", "code", "reason", "metadata"), SAMPLES, ids=lambda v: type(v).__name__)
async def test_every_row_reaches_the_client(error, code, reason, metadata) -> None:
    """Raised by the engine's submit, over a real channel."""
    engine = fake()

    def submit(request, sink, prepared=None):
        raise error

    engine.submit = submit  # type: ignore[method-assign]
    async with serving(engine) as rig:
        failure = await failure_of(rig.inference.Generate(generate("a")))
        streamed = await failure_of(rig.inference.Stream(generate("a")).read())
    for f in (failure, streamed):
        assert (f.code.name, f.reason, dict(f.info.metadata)) == (code, reason, metadata)
        assert "secret" not in f.message
        assert f.message


@pytest.mark.parametrize("error", [row[0] for row in SAMPLES], ids=lambda v: type(v).__name__)
def test_every_error_can_be_pickled(error: Exception) -> None:
    """With everything that it knows, including notes."""
    error = copy.copy(error)
    error.add_note("seen by a pool")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


MIDWAY = [
    (errors.NonFiniteLogits(), "INTERNAL", "NON_FINITE_LOGITS"),
    (errors.GenerationError("no"), "INTERNAL", "GENERATION_FAILED"),
    (
        errors.InvalidRequest([errors.Violation("constraint.regex", "stuck")]),
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
    ),
    (RuntimeError("secret"), "INTERNAL", "INTERNAL"),
]


@pytest.mark.parametrize(("error", "code", "reason"), MIDWAY, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_output_that_cannot_go_on_ends_its_rpc_only(error, code, reason, streamed) -> None:
    """One of three outputs fails after two tokens: the request's other outputs are freed, and other requests
    go on.
    """
    engine = fake(hold=True)
    fields: dict[str, Any] = {"request_id": "r", "sampling": {"n": 3}}
    async with serving(engine) as rig:
        other = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        if streamed:
            call = rig.inference.Stream(stream("a", **fields))
            ending = failure_of(drained(call))
        else:
            ending = failure_of(rig.inference.Generate(generate("a", **fields)))
        failing = asyncio.ensure_future(ending)
        await until(lambda: len(engine.seen) == 4)
        engine.step(2)
        await until(lambda: engine.num_steps == 2)
        engine.fail("r\x001", error)
        failure = await failing
        assert (failure.code.name, failure.reason) == (code, reason)
        assert "secret" not in failure.message
        await until(lambda: engine.load().num_running == 1)
        assert sorted(engine.cancelled) == ["r", "r\x002"]
        again = rig.inference.Generate(generate("y", request_id="r"))
        engine.release()
        assert (await again).outputs[0].text == "z", "the id is free"
        assert (await other).outputs[0].text == "bcdefghijklmnopqrstuvwxyz"


async def drained(call: Any) -> None:
    """Read a stream to its end."""
    async for message in call:
        assert message.WhichOneof("event") in ("started", "delta")


def details(error: Exception, kind: type) -> list[Any]:
    found = []
    for packed in to_status(error).details:
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    return found


def test_retry_info() -> None:
    (retry,) = details(errors.QueueFull(3, 1.5), error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToNanoseconds() == 1_500_000_000


def test_subclasses_take_the_row_above() -> None:
    class Finer(errors.QueueFull):
        pass

    try:
        assert row_of(Finer(1)) is TABLE[errors.QueueFull]
    finally:
        del Finer


@pytest.mark.parametrize("text", ["x" * 100_000, "\U0001f600" * 50_000, "%\n" * 50_000])
def test_statuses_fit_the_metadata_limit(text: str) -> None:
    """8 KiB for message (escaped) and details (base64) together, however long the caller's values are."""
    for error in (
        errors.InvalidRequest([errors.Violation(text, text)] * 500),
        errors.UnsupportedFeature([text] * 500),
        errors.UnknownModel(text, text),
        errors.DuplicateRequestId(text),
        errors.EngineFailure(text),
    ):
        status = to_status(error)
        size = 3 * len(status.message) + len(status.SerializeToString()) * 4 // 3 + len(DETAILS_KEY)
        assert size < 8000


def test_violations_that_do_not_fit_are_counted() -> None:
    (bad,) = details(
        errors.InvalidRequest([errors.Violation(f"f{i}", "d" * 100) for i in range(500)]),
        error_details_pb2.BadRequest,
    )
    shown = len(bad.field_violations) - 1
    assert 10 <= shown < 500
    assert bad.field_violations[-1].description == f"and {500 - shown} more violations"


def test_bad_tensors_are_listed() -> None:
    sent = SentTensor("extra", "F32", (2, 3))
    wanted = SentTensor("gone", "BF16", (4,))
    problems = [
        TensorProblem("extra", TensorReason.UNKNOWN_NAME, None, sent),
        TensorProblem("gone", TensorReason.MISSING, wanted, None),
    ]
    (found,) = details(errors.TensorsRefused(problems), weights_pb2.TensorErrors)
    extra = weights_pb2.TensorSpec(name="extra", dtype=weights_pb2.DATA_TYPE_F32, shape=[2, 3])
    gone = weights_pb2.TensorSpec(name="gone", dtype=weights_pb2.DATA_TYPE_BF16, shape=[4])
    expected = weights_pb2.TensorErrors()
    unknown, missing = weights_pb2.TENSOR_ERROR_REASON_UNKNOWN_NAME, weights_pb2.TENSOR_ERROR_REASON_MISSING
    expected.errors.add(name="extra", reason=unknown, received=extra)
    expected.errors.add(name="gone", reason=missing, expected=gone)
    assert found == expected


def test_every_reason_of_a_bad_tensor_is_in_the_contract() -> None:
    names = {f"TENSOR_ERROR_REASON_{reason.name}" for reason in TensorReason}
    assert names == set(weights_pb2.TensorErrorReason.keys()) - {"TENSOR_ERROR_REASON_UNSPECIFIED"}


@pytest.mark.parametrize("name", ["model.layers.{}.mlp.down_proj.weight", "{}" + "\U0001f600" * 5000])
def test_bad_tensors_that_do_not_fit_are_left_out(name: str) -> None:
    """Of a thousand, also with names that are far too long, as many as fit, and a note that there are
    more.
    """
    tensor = SentTensor(name.format(1), "F8_E4M3", (2**63,) * 40, 2**32 - 1, b"x" * 32)
    problems = [TensorProblem(name.format(i), TensorReason.SHAPE, tensor, tensor) for i in range(1000)]
    error = errors.TensorsRefused(problems)
    (found,) = details(error, weights_pb2.TensorErrors)
    assert found.truncated
    assert 1 <= len(found.errors) < 1000
    status = to_status(error)
    assert 3 * len(status.message) + len(status.SerializeToString()) * 4 // 3 + len(DETAILS_KEY) < 8000
    (info,) = details(error, error_details_pb2.ErrorInfo)
    assert info.metadata["tensors"] == "1000"


async def test_a_long_status_arrives() -> None:
    """Over a real channel: the client gets our error, and not one about metadata."""
    async with serving(fake(max_model_len=10_000)) as rig:
        failure = await failure_of(rig.inference.Generate(generate("a", model="\U0001f600" * 100_000)))
        many = generate(prompt_token_ids={"ids": [2**32 - 1] * 5000}, stopping={"stop": [""] * 5000})
        violations = await failure_of(rig.inference.Generate(many))
    assert failure.reason == "UNKNOWN_MODEL"
    assert violations.reason == "INVALID_FIELD"


def test_codes_are_grpc_codes() -> None:
    assert all(isinstance(row.code, grpc.StatusCode) for row in service_errors.TABLE.values())
