"""Computes figures from what a client saw of each request. Pure functions; the statistics are those of
`penstock bench`.

It needs only Penstock's sources and no installation, because the runners of other engines use it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median

from bench.workloads import TABLE, Wave
from penstock.cli.measuring.stats import (
    RequestTrace,
    inter_token_latencies,
    percentile,
    time_per_output_token,
    time_to_first_token,
)

Traces = Sequence[RequestTrace]
"""The traces of one wave, in the order of its jobs."""

UNITS = {
    "decode_tokens_per_s": "tok/s",
    "prefill_tokens_per_s": "tok/s",
    "output_tokens_per_s": "tok/s",
    "wave1_s": "s",
    "wave2_s": "s",
    "late_ttft_s": "s",
    "ttft_s": "s",
    "itl_p50_ms": "ms",
    "itl_p99_ms": "ms",
    "itl_max_ms": "ms",
}


def wall_s(traces: Traces) -> float:
    """Return the seconds from the first submission to the last end."""
    return max(trace.ended for trace in traces) - min(trace.sent for trace in traces)


def figures(jobs: Wave, waves: Sequence[Traces]) -> dict[str, float]:
    """Return all figures of one repeat that apply.

    - decode_tokens_per_s: for each request, tokens after the first message by the time since it; the median
      of all requests.
    - prefill_tokens_per_s: prompt tokens by time to first token, for a single request; decode_s: from its
      first token to its last.
    - output_tokens_per_s: all generated tokens by the wall time of all waves.
    - itl_*: gaps between messages. If jobs came late, only gaps of the other jobs that overlap the wait for a
      late first token.
    - late_ttft_s: the longest time to first token of a late job.

    Raises ValueError if a request failed, or generated another number of tokens than it was asked for.
    """
    for traces in waves:
        _check(jobs, traces)
    every = [trace for traces in waves for trace in traces]
    walls = [wall_s(traces) for traces in waves]
    found = {
        "output_tokens_per_s": sum(trace.completion_tokens for trace in every) / sum(walls),
        "wall_s": sum(walls),
        "ttft_s": median(_ttft(trace) for trace in every),
    }
    if len(waves) > 1:
        found |= {f"wave{number}_s": wall for number, wall in enumerate(walls, 1)}
    if len(every) == 1:
        found["prefill_tokens_per_s"] = every[0].prompt_tokens / _ttft(every[0])
        found["decode_s"] = every[0].arrivals[-1][0] - every[0].arrivals[0][0]
    paces = [pace for trace in every if (pace := time_per_output_token(trace)) is not None]
    if paces:
        found["decode_tokens_per_s"] = 1 / median(paces)
    late = [trace for job, trace in zip(jobs, waves[0], strict=True) if job.after_tokens]
    gaps = _gaps_during(jobs, waves[0]) if late else [g for t in every for g in inter_token_latencies(t)]
    if late:
        found["late_ttft_s"] = max(map(_ttft, late))
    if gaps:
        found |= {
            "itl_p50_ms": 1e3 * percentile(gaps, 50),
            "itl_p99_ms": 1e3 * percentile(gaps, 99),
            "itl_max_ms": 1e3 * max(gaps),
        }
    return found


def _check(jobs: Wave, traces: Traces) -> None:
    for job, trace in zip(jobs, traces, strict=True):
        if trace.error is not None:
            raise ValueError(f"a request failed: {trace.error}")
        if trace.completion_tokens != job.max_tokens:
            raise ValueError(f"asked for {job.max_tokens} tokens, got {trace.completion_tokens}")


def _ttft(trace: RequestTrace) -> float:
    first = time_to_first_token(trace)
    assert first is not None, "checked: every request made its tokens"
    return first


def _gaps_during(jobs: Wave, traces: Traces) -> list[float]:
    """Return the gaps of the early jobs that overlap the time from the first late submission to the last late
    first token.
    """
    pairs = list(zip(jobs, traces, strict=True))
    late = [trace for job, trace in pairs if job.after_tokens]
    begin = min(trace.sent for trace in late)
    end = max(trace.arrivals[0][0] for trace in late)
    gaps: list[float] = []
    for job, trace in pairs:
        if not job.after_tokens:
            times = [time for time, _ in trace.arrivals]
            gaps += [b - a for a, b in itertools.pairwise(times) if b > begin and a < end]
    return gaps


def medians(repeats: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float, float]]:
    """Return the median, least and most of each figure that every repeat has."""
    names = [name for name in repeats[0] if all(name in repeat for repeat in repeats)]
    columns = {name: [repeat[name] for repeat in repeats] for name in names}
    return {name: (median(values), min(values), max(values)) for name, values in columns.items()}


def label(figure: str) -> str:
    """Write a figure's name as people read it, with its unit."""
    words = figure
    for ending in ("_tokens_per_s", "_ms", "_s"):
        words = words.removesuffix(ending)
    return f"{words.replace('_', ' ')}, {UNITS[figure]}"


def table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Write a table for a terminal and for Markdown: for each workload the medians of its repeats, with least
    and most.
    """
    lines = ["| workload | figure | median | least | most |", "|---|---|---:|---:|---:|"]
    for name, repeats in results.items():
        found = medians(repeats)
        for figure in TABLE[name].figures:
            if figure in found:
                cells = " | ".join(f"{value:.4g}" for value in found[figure])
                lines.append(f"| {name} | {label(figure)} | {cells} |")
    return "\n".join(lines)
