"""Spans and metrics on their way to a collector, and what is counted when it is bad to us."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from penstock.service.telemetry.options import OTLP_PROTOCOLS, OtlpProtocol, TraceLevel
from penstock.service.telemetry.otlp.tracing import Tracing
from tests.service.rig import generate, serving
from tests.support.otlp import OtlpReceiver, tracing_to


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=OTLP_PROTOCOLS)
def receiver(request: pytest.FixtureRequest) -> Iterator[OtlpReceiver]:
    protocol: OtlpProtocol = request.param
    with OtlpReceiver(protocol) as receiver:
        yield receiver


def record(tracing: Tracing, count: int, name: str = "one") -> None:
    """Have spans made and ended."""
    tracer = tracing.provider.get_tracer("test")
    for _ in range(count):
        tracer.start_span(name).end()


async def test_spans_of_a_call_reach_the_collector(receiver: OtlpReceiver) -> None:
    """At the latest when the server stops."""
    tracing = tracing_to(receiver)
    async with serving(tracing=tracing) as rig:
        await rig.inference.Generate(generate("y"))
    spans = {span.name: span for span in receiver.spans}
    names = {"tokenize", "queue", "prefill", "decode"}
    assert set(spans) == {"penstock.v1.InferenceService/Generate", "text_completion fake", *names}
    rpc, request = (
        receiver.span("penstock.v1.InferenceService/Generate"),
        receiver.span("text_completion fake"),
    )
    assert (rpc.kind, rpc.parent_id, request.parent_id) == ("SERVER", "", rpc.span_id)
    assert {child.name for child in receiver.children(request)} == names
    assert (rpc.resource["service.name"], rpc.resource["service.version"]) == ("penstock", "1.2.3")
    assert (tracing.exported, tracing.failed, tracing.dropped, tracing.waiting) == (len(spans), 0, 0, 0)


async def test_level_off_records_nothing(receiver: OtlpReceiver) -> None:
    tracing = tracing_to(receiver, TraceLevel.OFF)
    async with serving(tracing=tracing) as rig:
        await rig.inference.Generate(generate("y", request_id="first"))
        tracing.level = TraceLevel.REQUESTS
        await rig.inference.Generate(generate("y", request_id="second"))
        tracing.level = TraceLevel.OFF
        await rig.inference.Generate(generate("y", request_id="third"))
    request = receiver.span("text_completion fake")
    assert request.attributes["gen_ai.response.id"] == "second"
