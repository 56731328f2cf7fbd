"""Converts what came of weight updates and pauses to the contract's messages."""

from __future__ import annotations

from datetime import datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.runtime.loop.interface import InFlightReport, Paused
from penstock.runtime.updating.interface import UpdateOutcome, UpdateReport
from penstock.service.replies.messages import weights_version
from penstock.v1 import control_pb2, weights_pb2

_OUTCOMES = {
    UpdateOutcome.COMMITTED: weights_pb2.UPDATE_OUTCOME_COMMITTED,
    UpdateOutcome.STAGED: weights_pb2.UPDATE_OUTCOME_STAGED,
    UpdateOutcome.VALIDATED: weights_pb2.UPDATE_OUTCOME_VALIDATED,
    UpdateOutcome.ALREADY_COMMITTED: weights_pb2.UPDATE_OUTCOME_ALREADY_COMMITTED,
}


def update_response(report: UpdateReport) -> weights_pb2.UpdateWeightsResponse:
    """The answer to UpdateWeights."""
    return weights_pb2.UpdateWeightsResponse(
        current=weights_version(report.current),
        previous=weights_version(report.previous),
        outcome=_OUTCOMES[report.outcome],
        tensors_updated=report.num_tensors,
        bytes_received=report.num_bytes,
        staged_in=_duration(report.staged_s),
        paused_for=_duration(report.paused_s),
        in_flight=in_flight(report.in_flight),
        digest=report.digest,
    )


def commit_response(report: UpdateReport) -> control_pb2.CommitWeightsResponse:
    """The answer to CommitWeights."""
    return control_pb2.CommitWeightsResponse(
        current=weights_version(report.current),
        previous=weights_version(report.previous),
        outcome=_OUTCOMES[report.outcome],
        paused_for=_duration(report.paused_s),
        in_flight=in_flight(report.in_flight),
        digest=report.digest,
    )


def pause_response(paused: Paused) -> control_pb2.PauseResponse:
    """The answer to Pause."""
    return control_pb2.PauseResponse(in_flight=in_flight(paused.in_flight), freed_bytes=paused.freed_bytes)


def in_flight(report: InFlightReport) -> weights_pb2.InFlightReport:
    """What became of the running requests."""
    return weights_pb2.InFlightReport(
        waited=report.waited, aborted=report.aborted, kept=report.kept, recomputed=report.recomputed
    )


def timestamp(moment: datetime) -> Timestamp:
    """A moment, which has a time zone."""
    made = Timestamp()
    made.FromDatetime(moment)
    return made


def _duration(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made
