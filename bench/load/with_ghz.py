"""Runs ghz (https://ghz.sh), a load generator in Go, and reads its report."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.load.process import Cpu, cpu

_PROTOS = Path(__file__).parents[2] / "protos"
_S = 1e9


@dataclass(frozen=True, slots=True)
class Report:
    """What ghz says of one run, and what the server took."""

    method: str
    streams: int
    requests: int
    tokens: int
    seconds: float
    p50_s: float
    """Of whole calls."""
    p99_s: float
    cpu: Cpu


def head() -> str:
    """Write the first two lines of a table of these reports."""
    columns = ["ghz", "streams", "requests/s", "tokens/s", "p50, ms", "p99, ms", "event loop, µs/token"]
    columns += ["host, µs/token", "all, µs/token"]
    return f"| {' | '.join(columns)} |\n|---|" + "---:|" * (len(columns) - 1)


def row(report: Report) -> str:
    """Write a line of the table."""
    each = 1e6 / report.tokens
    figures = [
        f"{report.requests / report.seconds:,.1f}",
        f"{report.tokens / report.seconds:,.0f}",
        f"{1e3 * report.p50_s:,.0f}",
        f"{1e3 * report.p99_s:,.0f}",
        f"{report.cpu.loop * each:,.1f}",
        f"{report.cpu.host * each:,.1f}",
        f"{(report.cpu.host + report.cpu.model) * each:,.1f}",
    ]
    return "| " + " | ".join([report.method, str(report.streams), *figures]) + " |"


def run(
    ghz: Path, address: str, pid: int, *, method: str, streams: int, requests: int, tokens: int
) -> Report:
    """Send so many requests, so many at once over one connection, each for `tokens` tokens. `method` is
    Stream or Generate. Raises RuntimeError if a call fails.
    """
    asked = {
        "prompt": "Once upon a time {{.RequestNumber}}",
        "sampling": {"temperature": 0},
        "stopping": {"maxTokens": tokens, "ignoreEos": True},
    }
    command = [
        str(ghz), "--insecure", "--import-paths", str(_PROTOS),
        "--proto", str(_PROTOS / "penstock/v1/inference.proto"),
        "--call", f"penstock.v1.InferenceService/{method}",
        "--concurrency", str(streams), "--total", str(requests), "--connections", "1",
        "--timeout", "120s", "--data", json.dumps(asked), "--format", "json", address,
    ]  # fmt: skip
    before = cpu(pid)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    used = cpu(pid) - before
    if done.returncode:
        raise RuntimeError(f"ghz ended with {done.returncode}: {done.stderr.strip()}")
    return read(json.loads(done.stdout), method, streams, tokens, used)


def read(told: dict[str, object], method: str, streams: int, tokens: int, used: Cpu) -> Report:
    """Make a report of ghz's JSON. Raises RuntimeError if a call failed."""
    codes = told["statusCodeDistribution"]
    if codes != {"OK": told["count"]}:
        raise RuntimeError(f"ghz: {told['count']} calls ended with {codes}: {told.get('errorDistribution')}")
    latencies = told["latencyDistribution"]
    assert isinstance(latencies, list)
    at = {one["percentage"]: one["latency"] / _S for one in latencies}
    count, total = told["count"], told["total"]
    assert isinstance(count, int)
    assert isinstance(total, int)
    return Report(method, streams, count, count * tokens, total / _S, at[50], at[99], used)
