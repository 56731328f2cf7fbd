"""Converts what an engine measures to the contract's messages."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.runtime.adapters.interface import AdapterInfo
from penstock.runtime.loop.interface import WeightsVersion
from penstock.runtime.measuring.engine_metrics import EngineLatencies, EngineMetrics, EngineRates
from penstock.runtime.measuring.recent import Distribution
from penstock.runtime.requests.request import SEPARATOR
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.status import OutputStatus, Phase
from penstock.service.access.ownership import own_id, owner_of
from penstock.service.replies import messages
from penstock.v1 import control_pb2, telemetry_pb2

_PHASES = {
    Phase.WAITING: telemetry_pb2.REQUEST_PHASE_WAITING,
    Phase.PREFILL: telemetry_pb2.REQUEST_PHASE_PREFILL,
    Phase.DECODE: telemetry_pb2.REQUEST_PHASE_DECODE,
}


def load_response(
    load: Load, *, is_paused: bool, weights: WeightsVersion, adapters: Sequence[AdapterInfo]
) -> control_pb2.GetLoadResponse:
    """Tell how busy the engine is. `adapters` are all that are in memory."""
    return control_pb2.GetLoadResponse(
        running_requests=load.num_running,
        queued_requests=load.num_waiting,
        queued_prompt_tokens=load.waiting_prompt_tokens,
        kv_pages_used=load.pages_used,
        kv_pages_total=load.pages_total,
        paused=is_paused,
        weights=messages.weights_version(weights),
        loaded_adapters=sum(info.state == "loaded" for info in adapters),
    )


def report_of(
    load: Load,
    metrics: EngineMetrics | None,
    *,
    at_ns: int,
    is_paused: bool,
    weights: WeightsVersion,
    adapters: Sequence[AdapterInfo],
    max_running: int,
) -> control_pb2.WatchLoadResponse:
    """Return all that watchers are told but the requests. `at_ns` is in Unix time; without `metrics` what is
    measured is not set.
    """
    report = control_pb2.WatchLoadResponse(
        load=load_response(load, is_paused=is_paused, weights=weights, adapters=adapters),
        kv_pages_cached=load.pages_cached,
        max_running_requests=max_running,
    )
    report.at.FromNanoseconds(at_ns)
    if metrics is not None:
        report.totals.CopyFrom(_totals(metrics))
        report.rates.CopyFrom(_rates(metrics.rates))
        report.latencies.CopyFrom(_latencies(metrics.latencies))
    return report


def _totals(metrics: EngineMetrics) -> telemetry_pb2.LoadTotals:
    totals = metrics.totals
    ended, steps, time_s = totals.ended, totals.steps, totals.step_time_s
    since = Timestamp()
    since.FromNanoseconds(int(metrics.started_at_s * 1e9))
    return telemetry_pb2.LoadTotals(
        since=since,
        prompt_tokens=totals.prompt_tokens,
        cached_prompt_tokens=totals.cached_tokens,
        generated_tokens=totals.generated_tokens,
        recomputed_tokens=totals.recomputed_tokens,
        ended=telemetry_pb2.EndedRequests(
            eos=ended.get("eos", 0),
            stop=ended.get("stop", 0),
            max_tokens=ended.get("max_tokens", 0),
            context_full=ended.get("context_full", 0),
            time_limit=ended.get("time_limit", 0),
            aborted=ended.get("aborted", 0),
            cancelled=ended.get("cancelled", 0),
            failed=ended.get("error", 0),
            prompt_read=ended.get("prompt_read", 0),
        ),
        preemptions=totals.preemptions,
        steps=telemetry_pb2.StepCounts(
            prefill=steps.get("prefill", 0),
            decode=steps.get("decode", 0),
            mixed=steps.get("mixed", 0),
            window=steps.get("window", 0),
        ),
        step_rows=totals.step_rows,
        computed_tokens=totals.computed_tokens,
        padding_tokens=totals.padding_tokens,
        step_time=telemetry_pb2.StepTime(
            schedule=_duration(time_s.get("schedule", 0.0)),
            pack=_duration(time_s.get("pack", 0.0)),
            dispatch=_duration(time_s.get("dispatch", 0.0)),
            wait=_duration(time_s.get("wait", 0.0)),
            emit=_duration(time_s.get("emit", 0.0)),
        ),
        proposed_tokens=totals.proposed_tokens,
        accepted_tokens=totals.accepted_tokens,
    )


def _rates(rates: EngineRates) -> telemetry_pb2.LoadRates:
    return telemetry_pb2.LoadRates(
        prompt_tokens_per_second=rates.prompt_tokens_per_s,
        generated_tokens_per_second=rates.generated_tokens_per_s,
        ended_requests_per_second=rates.ended_per_s,
        steps_per_second=rates.steps_per_s,
        rows_per_step=rates.rows_per_step,
        padding_share=rates.padding_share,
        prefix_hit_share=rates.prefix_hit_share,
        accepted_share=rates.accepted_share,
    )


def _latencies(latencies: EngineLatencies) -> telemetry_pb2.LoadLatencies:
    return telemetry_pb2.LoadLatencies(
        time_to_first_token=_summary(latencies.time_to_first_token),
        inter_token=_summary(latencies.inter_token),
        queue=_summary(latencies.queue),
        end_to_end=_summary(latencies.end_to_end),
    )


def _summary(found: Distribution) -> telemetry_pb2.LatencySummary:
    if not found.count:
        return telemetry_pb2.LatencySummary()
    return telemetry_pb2.LatencySummary(
        count=found.count,
        mean=_duration(found.mean),
        p50=_duration(found.p50),
        p90=_duration(found.p90),
        p99=_duration(found.p99),
    )


def request_status(output: OutputStatus, now_ns: int) -> telemetry_pb2.RequestStatus:
    """Tell where an output stands; `now_ns` is in monotonic time. Its id is the one that its caller sent."""
    _, _, index = output.request_id.partition(SEPARATOR)
    return telemetry_pb2.RequestStatus(
        request_id=own_id(output.request_id),
        output_index=int(index or 0),
        key_id=owner_of(output.request_id),
        phase=_PHASES[output.phase],
        age=_duration((now_ns - output.received_ns) / 1e9),
        prompt_tokens=output.num_prompt,
        computed_tokens=output.num_computed,
        generated_tokens=output.num_generated,
        priority=output.priority,
        preemptions=output.preemptions,
    )


def _duration(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made
