"""The arithmetic of `penstock bench`: pure functions over what the client of each request saw."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cli.calling.screen import visible

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request as its client saw it. Times are in seconds, all on one clock."""

    sent: float
    arrivals: tuple[tuple[float, int], ...]
    """The time and the number of tokens of each message that brought tokens."""
    ended: float
    prompt_tokens: int
    error: str | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)


def time_to_first_token(trace: RequestTrace) -> float | None:
    """Return the seconds from sending the request to the first message with tokens; None without such a
    message.
    """
    return trace.arrivals[0][0] - trace.sent if trace.arrivals else None


def time_per_output_token(trace: RequestTrace) -> float | None:
    """Return the seconds per token after the first message; None if no token came after it."""
    after_first = sum(count for _, count in trace.arrivals[1:])
    return (trace.arrivals[-1][0] - trace.arrivals[0][0]) / after_first if after_first else None


def inter_token_latencies(trace: RequestTrace) -> list[float]:
    """Return the seconds between messages with tokens: what a reader waits, however many tokens each message
    brings.
    """
    times = [time for time, _ in trace.arrivals]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Compute the percentile with linear interpolation between ranks, as NumPy computes it by default. Needs
    at least one value, in any order.
    """
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of one latency, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """Compute the distribution of these values; None if there are none."""
    if not values:
        return None
    return Distribution(sum(values) / len(values), *(percentile(values, p) for p in PERCENTILES))


@dataclass(frozen=True, slots=True)
class Report:
    """What a run measured. Throughputs count finished requests over the time from the first send to the last
    end.
    """

    completed: int
    failed: int
    errors: dict[str, int]
    """How often each error happened."""
    duration: float
    prompt_tokens: int
    completion_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    time_to_first_token: Distribution | None
    time_per_output_token: Distribution | None
    inter_token_latency: Distribution | None
    end_to_end: Distribution | None


def report(traces: Sequence[RequestTrace]) -> Report:
    """Summarize a run. Failed requests count only in `failed` and in the duration."""
    done = [trace for trace in traces if trace.error is None]
    duration = max((t.ended for t in traces), default=0.0) - min((t.sent for t in traces), default=0.0)
    prompt_tokens = sum(t.prompt_tokens for t in done)
    completion_tokens = sum(t.completion_tokens for t in done)

    def rate(count: int) -> float:
        return count / duration if duration > 0 else 0.0

    errors: dict[str, int] = {}
    for trace in traces:
        if trace.error is not None:
            errors[trace.error] = errors.get(trace.error, 0) + 1
    return Report(
        completed=len(done),
        failed=len(traces) - len(done),
        errors=errors,
        duration=duration,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        requests_per_second=rate(len(done)),
        output_tokens_per_second=rate(completion_tokens),
        total_tokens_per_second=rate(prompt_tokens + completion_tokens),
        time_to_first_token=distribution([t for t in map(time_to_first_token, done) if t is not None]),
        time_per_output_token=distribution([t for t in map(time_per_output_token, done) if t is not None]),
        inter_token_latency=distribution([gap for trace in done for gap in inter_token_latencies(trace)]),
        end_to_end=distribution([t.ended - t.sent for t in done]),
    )


def table(result: Report) -> str:
    """Format a report for a terminal, with latencies in milliseconds."""
    lines = [
        f"requests       {result.completed} completed, {result.failed} failed, in {result.duration:.2f} s",
        f"tokens         {result.prompt_tokens} in, {result.completion_tokens} out",
        f"throughput     {result.requests_per_second:.2f} requests/s",
        f"               {result.output_tokens_per_second:.1f} output tokens/s",
        f"               {result.total_tokens_per_second:.1f} tokens/s, prompts included",
        "",
        f"{'latency (ms)':<24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name, latency in (
        ("time to first token", result.time_to_first_token),
        ("time per output token", result.time_per_output_token),
        ("inter-token latency", result.inter_token_latency),
        ("end to end", result.end_to_end),
    ):
        values = (latency.mean, latency.p50, latency.p90, latency.p99) if latency is not None else ()
        cells = "".join(f"{value * 1e3:>10.2f}" for value in values) or f"{'-':>10}" * 4
        lines.append(f"{name:<24}{cells}")
    lines += [f"failed {count} times: {visible(error)}" for error, count in result.errors.items()]
    return "\n".join(lines)
