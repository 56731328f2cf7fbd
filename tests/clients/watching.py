"""A server's side of WatchLoad, written by hand, with one report in both its forms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import grpc
from google.protobuf import text_format

from penstock.client import (
    EndedRequests,
    LatencySummary,
    Load,
    LoadLatencies,
    LoadRates,
    LoadReport,
    LoadTotals,
    RequestPhase,
    RequestStatus,
    StepCounts,
    StepTime,
    WeightsVersion,
)
from penstock.v1 import control_pb2, telemetry_pb2
from tests.clients.failing import Failure

DRAINING = Failure(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is shutting down")

MESSAGE = text_format.Parse(
    """
    at { seconds: 1767322830 nanos: 500000000 }
    load {
      running_requests: 3 queued_requests: 2 queued_prompt_tokens: 900 kv_pages_used: 60 kv_pages_total: 100
      weights { label: "step-7" generation: 7 } loaded_adapters: 5
    }
    kv_pages_cached: 15
    max_running_requests: 64
    totals {
      since { seconds: 1767322800 }
      prompt_tokens: 1000 cached_prompt_tokens: 250 generated_tokens: 4000 recomputed_tokens: 30
      ended {
        eos: 1 stop: 2 max_tokens: 3 context_full: 4 time_limit: 5 aborted: 6 cancelled: 7 failed: 8
        prompt_read: 9
      }
      preemptions: 9
      steps { prefill: 10 decode: 11 mixed: 12 window: 13 }
      step_rows: 92 computed_tokens: 5000 padding_tokens: 1250
      step_time {
        schedule { nanos: 250000000 } pack { nanos: 500000000 } dispatch { seconds: 1 } wait { seconds: 8 }
        emit { nanos: 750000000 }
      }
      proposed_tokens: 800 accepted_tokens: 600
    }
    rates {
      prompt_tokens_per_second: 100.5 generated_tokens_per_second: 1234.5 ended_requests_per_second: 2.5
      steps_per_second: 50.5 rows_per_step: 2.25 padding_share: 0.125 prefix_hit_share: 0.5
      accepted_share: 0.75
    }
    latencies {
      time_to_first_token {
        count: 4 mean { nanos: 125000000 } p50 { nanos: 62500000 } p90 { nanos: 250000000 } p99 { seconds: 2 }
      }
      inter_token {
        count: 5 mean { nanos: 15625000 } p50 { nanos: 7812500 } p90 { nanos: 31250000 } p99 { seconds: 1 }
      }
      queue {}
      end_to_end { count: 6 mean { seconds: 3 } p50 { seconds: 2 } p90 { seconds: 65 } p99 { seconds: 4000 } }
    }
    requests {
      request_id: "oldest" output_index: 1 key_id: "alice" phase: REQUEST_PHASE_DECODE age { seconds: 12 }
      prompt_tokens: 100 computed_tokens: 149 generated_tokens: 50 priority: -2 preemptions: 1
    }
    requests {
      request_id: "second" phase: REQUEST_PHASE_PREFILL age { seconds: 1 nanos: 500000000 } prompt_tokens: 800
      computed_tokens: 512
    }
    requests { request_id: "newest" phase: REQUEST_PHASE_WAITING age { nanos: 250000000 } prompt_tokens: 30 }
    """,
    control_pb2.WatchLoadResponse(),
)
"""A report with every field set, and no two alike."""

REPORT = LoadReport(
    at=datetime(2026, 1, 2, 3, 0, 30, 500_000, UTC),
    load=Load(
        running_requests=3,
        queued_requests=2,
        queued_prompt_tokens=900,
        kv_pages_used=60,
        kv_pages_total=100,
        paused=False,
        weights=WeightsVersion("step-7", 7),
        loaded_adapters=5,
    ),
    kv_pages_cached=15,
    max_running_requests=64,
    totals=LoadTotals(
        since=datetime(2026, 1, 2, 3, 0, 0, 0, UTC),
        prompt_tokens=1000,
        cached_prompt_tokens=250,
        generated_tokens=4000,
        recomputed_tokens=30,
        ended=EndedRequests(1, 2, 3, 4, 5, 6, 7, 8, 9),
        preemptions=9,
        steps=StepCounts(prefill=10, decode=11, mixed=12, window=13),
        step_rows=92,
        computed_tokens=5000,
        padding_tokens=1250,
        step_time=StepTime(schedule=0.25, pack=0.5, dispatch=1.0, wait=8.0, emit=0.75),
        proposed_tokens=800,
        accepted_tokens=600,
    ),
    rates=LoadRates(
        prompt_tokens_per_second=100.5,
        generated_tokens_per_second=1234.5,
        ended_requests_per_second=2.5,
        steps_per_second=50.5,
        rows_per_step=2.25,
        padding_share=0.125,
        prefix_hit_share=0.5,
        accepted_share=0.75,
    ),
    latencies=LoadLatencies(
        time_to_first_token=LatencySummary(4, 0.125, 0.0625, 0.25, 2.0),
        inter_token=LatencySummary(5, 0.015625, 0.0078125, 0.03125, 1.0),
        queue=LatencySummary(),
        end_to_end=LatencySummary(6, 3.0, 2.0, 65.0, 4000.0),
    ),
    requests=(
        RequestStatus("oldest", 1, "alice", RequestPhase.DECODE, 12.0, 100, 149, 50, -2, 1),
        RequestStatus("second", 0, "", RequestPhase.PREFILL, 1.5, 800, 512, 0, 0, 0),
        RequestStatus("newest", 0, "", RequestPhase.WAITING, 0.25, 30, 0, 0, 0, 0),
    ),
)
"""What a client makes of MESSAGE."""


class FakeWatch:
    """Answers every watch with the same reports, and then as it is told."""

    def __init__(self) -> None:
        self.reports: Sequence[control_pb2.WatchLoadResponse] = (MESSAGE,)
        self.may_list = True
        """Whether callers may ask for requests."""
        self.refusal = Failure(grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN", "needs the role control")
        """What a caller that may not list requests is told."""
        self.failures: list[Failure] = []
        """How the next watches end after their reports, one for each; the others wait to be cancelled."""
        self.cancelled = threading.Event()
        """Set when a caller has ended its watch."""
        self.over = threading.Event()
        """Setting it ends the watches that wait."""

    def handle(
        self, request: telemetry_pb2.WatchLoadRequest, context: Any, fail: Callable[[Failure, Any], None]
    ) -> Iterator[control_pb2.WatchLoadResponse]:
        if request.max_requests and not self.may_list:
            fail(self.refusal, context)
        failure = self.failures.pop(0) if self.failures else None
        gone = threading.Event()  # its own caller, and not that of an earlier watch
        if failure is None:
            context.add_callback(self.cancelled.set)
            context.add_callback(gone.set)
        for report in self.reports:
            sent = control_pb2.WatchLoadResponse()
            sent.CopyFrom(report)
            del sent.requests[request.max_requests :]
            yield sent
        if failure is not None:
            fail(failure, context)
        for _ in range(1200):
            if gone.wait(0.05) or self.over.is_set():
                return
