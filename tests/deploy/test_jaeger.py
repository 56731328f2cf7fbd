"""A real Jaeger takes the spans of a real server, over both protocols, and shows them with their links.

Jaeger is built on OpenTelemetry's collector, whose receiver it uses. It is a Go module
(github.com/jaegertracing/jaeger/cmd/jaeger), and no package of Debian's.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml  # type: ignore[import-untyped]  # ships no hints

from penstock.client import Client
from tests.support.demo_server import served_demo
from tests.support.prometheus import free_port

PROGRAM = shutil.which("jaeger")
WAIT_S = 120.0

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(PROGRAM is None, reason="no jaeger here")]


@dataclass(frozen=True, slots=True)
class Jaeger:
    """Where it takes spans, and where it answers questions."""

    grpc: str
    http: str
    query: str

    def traces(self, **parameters: Any) -> list[Any]:
        """Traces of Penstock's, newest first."""
        asked = urlencode({"service": "penstock", "limit": 1000, **parameters})
        with urlopen(f"http://{self.query}/api/traces?{asked}", timeout=30) as reply:
            return list(json.load(reply)["data"])


def config(jaeger: Jaeger) -> dict[str, Any]:
    return {
        "receivers": {
            "otlp": {
                "protocols": {"grpc": {"endpoint": jaeger.grpc}, "http": {"endpoint": jaeger.http}},
            }
        },
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "main"}},
        "extensions": {
            "jaeger_storage": {"backends": {"main": {"memory": {"max_traces": 10_000}}}},
            "jaeger_query": {
                "storage": {"traces": "main"},
                "http": {"endpoint": jaeger.query},
                "grpc": {"endpoint": f"127.0.0.1:{free_port()}"},
            },
        },
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
            "telemetry": {"metrics": {"level": "none"}},
        },
    }


@pytest.fixture(scope="module")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    folder: Path = tmp_path_factory.mktemp("jaeger")
    made = Jaeger(*(f"127.0.0.1:{free_port()}" for _ in range(3)))
    (folder / "config.yml").write_text(yaml.safe_dump(config(made)))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [str(PROGRAM), "--config", str(folder / "config.yml")],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            until_s = time.monotonic() + WAIT_S
            while True:
                with contextlib.suppress(URLError):
                    made.traces()
                    break
                ended = process.poll() is not None or time.monotonic() > until_s
                assert not ended, (folder / "log").read_text()
                time.sleep(0.1)
            yield made
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_request_and_its_steps_are_shown_and_linked(jaeger: Jaeger, protocol: str) -> None:
    endpoint = f"http://{jaeger.grpc if protocol == 'grpc' else jaeger.http}"
    trace_id, request_id = uuid.uuid4().hex, uuid.uuid4().hex
    flags = ["--otlp-endpoint", endpoint, "--otlp-protocol", protocol]
    with served_demo(*flags) as address, Client(address) as client:
        client.generate(
            "Once upon a time",
            max_tokens=40,
            ignore_eos=True,
            request_id=request_id,
            metadata={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"},
        )
        trace = wait_for(jaeger, request_id)
    assert trace["traceID"] == trace_id
    spans = {span["spanID"]: span for span in trace["spans"]}
    (request,) = (span for span in spans.values() if request_id in str(span["tags"]))
    assert request["operationName"] == "text_completion demo"
    names = [span["operationName"] for span in spans.values() if request["spanID"] in parents(span)]
    assert sorted(names) == sorted(["tokenize", "submit", "queue", "prefill", "decode", "reply"])
    linked = {
        link["traceID"]
        for span in spans.values()
        if span["operationName"] in ("prefill_chunk", "decode_window")
        for link in span["references"]
        if link["refType"] == "FOLLOWS_FROM"
    }
    steps = {step["traceID"]: step for step in jaeger.traces(operation="engine.step")}
    assert linked
    assert linked <= set(steps)
    for trace_id in linked:
        by_name = {span["operationName"]: span for span in steps[trace_id]["spans"]}
        assert set(by_name) == {"engine.step", "schedule", "pack", "dispatch", "wait", "emit"}
        assert request["spanID"] in {link["spanID"] for link in by_name["engine.step"]["references"]}


def wait_for(jaeger: Jaeger, request_id: str) -> Any:
    """Return the trace of a request, when its RPC has come, which is sent with the last ones."""
    until_s = time.monotonic() + WAIT_S
    while True:
        for trace in jaeger.traces(tags=json.dumps({"gen_ai.response.id": request_id})):
            if any(span["operationName"].startswith("penstock.v1.") for span in trace["spans"]):
                return trace
        assert time.monotonic() < until_s
        time.sleep(0.2)


def parents(span: Any) -> set[str]:
    return {link["spanID"] for link in span["references"] if link["refType"] == "CHILD_OF"}
