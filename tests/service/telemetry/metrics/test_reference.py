"""docs/reference/metrics.md lists every metric as it is defined."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from penstock.runtime.measuring import engine_instruments as engine
from penstock.runtime.measuring.engine_instruments import ENGINE_INSTRUMENTS
from penstock.runtime.measuring.instruments import Instrument
from penstock.runtime.measuring.output_meters import END_REASONS
from penstock.service.telemetry.metrics.families import (
    CACHE_CONFIG_INFO,
    FINISHED_REASONS,
    VIEWS,
    family_name,
    prometheus_name,
)
from penstock.service.telemetry.metrics.service_instruments import SERVICE_INSTRUMENTS

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "metrics.md").read_text()


def row(instrument: Instrument) -> str:
    """Return the line of the page's table for this metric."""
    labels = ", ".join(f"`{label}`" for label in instrument.labels) or "-"
    unit = f"`{instrument.unit}`"
    names = f"`{prometheus_name(instrument)}` | `{instrument.name}`"
    return f"| {names} | {instrument.kind.value} | {unit} | {labels} | {instrument.description} |"


def section(heading: str) -> str:
    _, found, rest = PAGE.partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


@pytest.mark.parametrize(
    ("heading", "instruments"), [("Engine", ENGINE_INSTRUMENTS), ("Service", SERVICE_INSTRUMENTS)]
)
def test_the_tables_have_every_metric(heading, instruments):
    rows = [line for line in section(heading).splitlines() if line.startswith("| `")]
    assert rows == [row(instrument) for instrument in instruments]


def test_vllms_names_are_listed_with_what_they_show():
    rows = dict(re.findall(r"^\| `(vllm:\S+)` \| `(\S+?)` \|$", section("vLLM's names"), re.M))
    assert rows == {view.name: prometheus_name(view.source) for view in VIEWS}
    assert CACHE_CONFIG_INFO in section("vLLM's names")
    assert set(FINISHED_REASONS) == set(END_REASONS)
    for ours, theirs in FINISHED_REASONS.items():
        assert re.search(rf"^\| `{theirs}` \| .*`{ours}`.* \|$", section("vLLM's names"), re.M), ours


def test_names_cannot_be_mixed_up():
    """Two metrics of one name would make the page unreadable for Prometheus."""
    families = [family_name(instrument) for instrument in (*ENGINE_INSTRUMENTS, *SERVICE_INSTRUMENTS)]
    assert len(families) == len(set(families))


def test_names_are_those_of_the_semantic_conventions():
    """The conventions are the witness, so that dashboards made for them read our metrics."""
    conventions = {
        engine.TIME_TO_FIRST_TOKEN: gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
        engine.TIME_PER_OUTPUT_TOKEN: gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
        engine.REQUEST_DURATION: gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION,
    }
    for instrument, name in conventions.items():
        assert (instrument.name, instrument.unit) == (name, "s")
        assert instrument.labels[:3] == (
            gen_ai_attributes.GEN_AI_OPERATION_NAME,
            gen_ai_attributes.GEN_AI_PROVIDER_NAME,
            gen_ai_attributes.GEN_AI_REQUEST_MODEL,
        )
    assert engine.REQUEST_DURATION.labels[3] == error_attributes.ERROR_TYPE
