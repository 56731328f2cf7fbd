"""The command line's explanation of every reason that the service can send."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.cli.calling.explain import explain
from penstock.client.error_table import from_rpc_error
from penstock.runtime.errors import UnsupportedFeature
from penstock.service.errors import TABLE
from penstock.v1 import weights_pb2
from tests.clients.failing import Failure

ADDR = "gpu1:50051"
CODES = {row.reason: row.code for row in TABLE.values()}
OWN = {
    "INVALID_FIELD": r"the request is not valid: sampling\.top_p: must be below 1$",
    "UNSUPPORTED_FEATURE": r"this server cannot do that: words; see `penstock info`$",
    "SERVED_ELSEWHERE": r"name that address with --addr",
    "PROMPT_TOO_LONG": r"shorten the prompt, or .* --truncation left",
    "DUPLICATE_REQUEST_ID": r"choose another --request-id",
    "UNAUTHENTICATED": r"PENSTOCK_TOKEN or with --token-file",
    "KEY_EXPIRED": r"the key has expired .* ask the operator",
    "FORBIDDEN": r"the key does not allow this",
    "RATE_LIMITED": r"the rate of your key is used up .* try again in 7 s",
    "QUEUE_FULL": r"the queue of gpu1:50051 is full; try again in 7 s",
    "BUSY": r"gpu1:50051 is busy .* try again in 7 s",
    "COSTLY_GRAMMAR": r"try again in 7 s, or write a simpler grammar",
    "DRAINING": r"gpu1:50051 is shutting down; try again when it is back",
    "NOT_READY": r"gpu1:50051 is still loading; try again in a moment",
    "ENGINE_DEAD": r"the engine of gpu1:50051 is dead .* try again when",
    "GROUP_ENDED": r"the processes of gpu1:50051 start again .* try again when",
    "INVALID_TENSORS": r"the server refused the weights, .* old ones are in use: a: is missing$",
    "CHECKSUM_MISMATCH": r"the server refused the weights, .* old ones are in use: a: is missing$",
    "GENERATION_CHANGED": r"look at the weights in use with `penstock info`, and decide anew",
    "UPDATE_UNDER_WAY": r"words; try again in 7 s",
    "PROFILE_UNDER_WAY": r"words; try again in 7 s",
    "REQUEST_ABORTED": r"words; ask again, if it is still wanted$",
    "UNKNOWN_ADAPTER": r"words; look at those that are there with `penstock adapters list`$",
    "ADAPTER_EXISTS": r"words: with --replace$",
    "UNKNOWN_UPDATE": r"send it with `penstock push-weights`",
    "DRAIN_TIMEOUT": r"allow more with --drain-timeout, or choose another --policy",
}
"""Reasons that have a sentence of their own, and what it tells the user to do."""
FAILED = r"^the server failed \(INTERNAL\): words; its log says more$"
REFUSED = r"^the server refused \({reason}\): words$"
GENERAL = {
    "INTERNAL": FAILED,
    "GENERATION_FAILED": FAILED,
    "PROFILE_FAILED": FAILED,
    "NON_FINITE_LOGITS": FAILED,
    "ENGINE_FAILURE": FAILED,
    "UNAVAILABLE": r"^gpu1:50051 is not available now \(UNAVAILABLE\): words; try again later$",
    "CONFIG": REFUSED,
    "UNKNOWN_ARCHITECTURE": REFUSED,
    "CHECKPOINT": REFUSED,
    "INVALID_REQUEST": REFUSED,
    "EXCEEDS_KV_CAPACITY": REFUSED,
    "RESPONSE_TOO_LARGE": REFUSED,
    "UNKNOWN_MODEL": REFUSED,
    "ADAPTER_REFUSED": REFUSED,
    "ADAPTER_FORMAT": REFUSED,
    "TOO_MANY_ADAPTERS": REFUSED,
    "UNKNOWN_SERVICE": REFUSED,
    "MESSAGE_TOO_LARGE": REFUSED,
    "STALLED_READER": REFUSED,
    "STALLED_SENDER": REFUSED,
    "WEIGHTS_REFUSED": REFUSED,
    "PROFILE_REFUSED": REFUSED,
    "CHANGE_REFUSED": REFUSED,
    "WEIGHTS_TOO_OLD": REFUSED,
    "WEIGHTS_INCOMPLETE": r"^gpu1:50051 is not available now \(WEIGHTS_INCOMPLETE\): words; try again later$",
    "PAUSED": REFUSED,
    "PAUSE_TAKEN_BACK": REFUSED,
}
"""Reasons whose message says everything."""


class FailedCall(grpc.RpcError):
    """A failed call as gRPC raises it."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    def code(self) -> grpc.StatusCode:
        return self._failure.code

    def details(self) -> str:
        return self._failure.message

    def trailing_metadata(self) -> Any:
        return self._failure.trailing_metadata()


def explained(reason: str, code: grpc.StatusCode) -> str:
    violations = [("sampling.top_p", "must be below 1")] if reason == "INVALID_FIELD" else []
    tensors = None
    if reason in ("INVALID_TENSORS", "CHECKSUM_MISMATCH"):
        missing = weights_pb2.TENSOR_ERROR_REASON_MISSING
        tensors = weights_pb2.TensorErrors(errors=[weights_pb2.TensorError(name="a", reason=missing)])
    failure = Failure(
        code, reason, "words", violations=violations, retry_after=Duration(seconds=7), tensors=tensors
    )
    return explain(from_rpc_error(FailedCall(failure)), ADDR)


@pytest.mark.parametrize("reason", CODES)
def test_every_reason_of_the_service_is_explained(reason: str) -> None:
    """A new reason of the service fails here until it is in one of the two tables."""
    text = explained(reason, CODES[reason])
    assert re.search((OWN | GENERAL)[reason].replace("{reason}", reason), text), text
    assert (reason in OWN) != (reason in GENERAL)


def test_the_tables_have_no_reason_that_the_service_lacks() -> None:
    assert set(OWN) | set(GENERAL) == set(CODES)


def test_what_the_service_itself_says_of_a_lacking_feature_is_not_said_twice() -> None:
    message = str(UnsupportedFeature(["level"], "it was started without --otlp-endpoint"))
    failure = Failure(grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FEATURE", message)
    assert explain(from_rpc_error(FailedCall(failure)), ADDR) == (
        "this server cannot do that: level (it was started without --otlp-endpoint); see `penstock info`"
    )
