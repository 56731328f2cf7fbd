"""Converts what a server tells those who watch it to values. Both clients share these pure functions."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.client.errors import ProtocolError
from penstock.client.replies import messages
from penstock.client.values import watch_values as values
from penstock.v1 import control_pb2, telemetry_pb2

_PHASES = {number: name for name, number in telemetry_pb2.RequestPhase.items()}


def load_report(message: control_pb2.WatchLoadResponse) -> values.LoadReport:
    """Convert one message of WatchLoad. Raises ProtocolError if it has a time that does not exist."""
    return values.LoadReport(
        at=_time(message.at),
        load=messages.load(message.load),
        kv_pages_cached=message.kv_pages_cached,
        max_running_requests=message.max_running_requests,
        totals=_totals(message.totals) if message.HasField("totals") else None,
        rates=_rates(message.rates) if message.HasField("rates") else None,
        latencies=_latencies(message.latencies) if message.HasField("latencies") else None,
        requests=tuple(map(_request, message.requests)),
    )


def _totals(message: telemetry_pb2.LoadTotals) -> values.LoadTotals:
    ended, steps, time = message.ended, message.steps, message.step_time
    return values.LoadTotals(
        since=_time(message.since),
        prompt_tokens=message.prompt_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        generated_tokens=message.generated_tokens,
        recomputed_tokens=message.recomputed_tokens,
        ended=values.EndedRequests(
            eos=ended.eos,
            stop=ended.stop,
            max_tokens=ended.max_tokens,
            context_full=ended.context_full,
            time_limit=ended.time_limit,
            aborted=ended.aborted,
            cancelled=ended.cancelled,
            failed=ended.failed,
            prompt_read=ended.prompt_read,
        ),
        preemptions=message.preemptions,
        steps=values.StepCounts(steps.prefill, steps.decode, steps.mixed, steps.window),
        step_rows=message.step_rows,
        computed_tokens=message.computed_tokens,
        padding_tokens=message.padding_tokens,
        step_time=values.StepTime(
            *map(_seconds, (time.schedule, time.pack, time.dispatch, time.wait, time.emit))
        ),
    )


def _rates(message: telemetry_pb2.LoadRates) -> values.LoadRates:
    return values.LoadRates(
        prompt_tokens_per_second=message.prompt_tokens_per_second,
        generated_tokens_per_second=message.generated_tokens_per_second,
        ended_requests_per_second=message.ended_requests_per_second,
        steps_per_second=message.steps_per_second,
        rows_per_step=message.rows_per_step,
        padding_share=message.padding_share,
        prefix_hit_share=message.prefix_hit_share,
    )


def _latencies(message: telemetry_pb2.LoadLatencies) -> values.LoadLatencies:
    return values.LoadLatencies(
        time_to_first_token=_summary(message.time_to_first_token),
        inter_token=_summary(message.inter_token),
        queue=_summary(message.queue),
        end_to_end=_summary(message.end_to_end),
    )


def _summary(message: telemetry_pb2.LatencySummary) -> values.LatencySummary:
    if not message.count:
        return values.LatencySummary()
    seconds = map(_seconds, (message.mean, message.p50, message.p90, message.p99))
    return values.LatencySummary(message.count, *seconds)


def _request(message: telemetry_pb2.RequestStatus) -> values.RequestStatus:
    phase = _PHASES.get(message.phase, "").removeprefix("REQUEST_PHASE_").lower()
    known = {member.value for member in values.RequestPhase}
    return values.RequestStatus(
        request_id=message.request_id,
        output_index=message.output_index,
        key_id=message.key_id,
        phase=values.RequestPhase(phase) if phase in known else values.RequestPhase.UNKNOWN,
        age=_seconds(message.age),
        prompt_tokens=message.prompt_tokens,
        computed_tokens=message.computed_tokens,
        generated_tokens=message.generated_tokens,
        priority=message.priority,
        preemptions=message.preemptions,
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _time(timestamp: Timestamp) -> datetime:
    try:
        return timestamp.ToDatetime(UTC)
    except (ValueError, OverflowError) as error:
        raise ProtocolError.local(f"the server tells a time that does not exist: {error}") from error
