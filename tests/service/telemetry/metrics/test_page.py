"""The page that scrapers read, as Prometheus' own parsers and promtool read it."""

from __future__ import annotations

import gzip

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from penstock.runtime.measuring.instruments import Instrument, Kind
from penstock.runtime.measuring.registry import Registry
from penstock.service.telemetry.metrics.endpoint import Pages, prefers_openmetrics
from penstock.service.telemetry.metrics.families import families, family_name, prometheus_name
from tests.service.telemetry.metrics.sample_metrics import (
    SPAN_ID,
    TRACE_ID,
    promtool_complaints,
    sample_registry,
)

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


def pages_of(registry: Registry, **options) -> Pages:
    return Pages(lambda: families(registry.snapshot().metrics), **options)


def samples(page: bytes, parse=text_families) -> dict[str, float]:
    """From a sample's name and labels to its value."""
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in parse(page.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("name", "kind", "unit", "expected"),
    [
        ("penstock.outputs.running", Kind.GAUGE, "{output}", "penstock_outputs_running"),
        ("penstock.kv.usage", Kind.GAUGE, "1", "penstock_kv_usage_ratio"),
        ("penstock.memory", Kind.GAUGE, "By", "penstock_memory_bytes"),
        ("penstock.weights.bytes", Kind.COUNTER, "By", "penstock_weights_bytes_total"),
        ("penstock.step.time", Kind.COUNTER, "s", "penstock_step_time_seconds_total"),
        ("penstock.preemptions", Kind.COUNTER, "1", "penstock_preemptions_total"),
        ("penstock.build.info", Kind.GAUGE, "", "penstock_build_info"),
        ("gen_ai.server.request.duration", Kind.HISTOGRAM, "s", "gen_ai_server_request_duration_seconds"),
    ],
)
def test_names(name, kind, unit, expected):
    buckets = (1.0,) if kind is Kind.HISTOGRAM else ()
    assert prometheus_name(Instrument(name, kind, unit, "One.", (), buckets)) == expected


@pytest.mark.parametrize(("accept", "parse"), [("", text_families), (OPENMETRICS, openmetrics_families)])
def test_values_are_those_of_the_registry(accept, parse):
    found = samples(pages_of(sample_registry()).page(accept, "").body, parse)
    assert found["penstock_outputs_running[]"] == 3
    assert found["penstock_kv_usage_ratio[]"] == 0.25
    assert found["penstock_outputs_finished_total[('reason', 'cancelled')]"] == 5
    labels = (
        "('gen_ai_operation_name', 'text_completion'), ('gen_ai_provider_name', 'penstock'), "
        "('gen_ai_request_model', 'demo')"
    )
    name = "gen_ai_server_time_to_first_token_seconds"
    counts = {"0.02": 0, "0.04": 2, "10.0": 2, "+Inf": 3}
    assert {bound: found[f"{name}_bucket[{labels}, ('le', '{bound}')]"] for bound in counts} == counts
    assert found[f"{name}_count[{labels}]"] == 3
    assert found[f"{name}_sum[{labels}]"] == pytest.approx(99.06)


def test_a_label_without_a_value_is_left_out():
    """OpenTelemetry leaves error.type out where there was no error; for Prometheus an empty label is none."""
    found = samples(pages_of(sample_registry()).page("", "").body)
    (counted,) = [key for key in found if key.startswith("gen_ai_server_request_duration_seconds_count")]
    assert "error_type" not in counted


def test_labels_are_escaped():
    found = samples(pages_of(sample_registry()).page("", "").body)
    (info,) = [key for key in found if key.startswith("penstock_build_info")]
    assert repr('a "name"\nof\\two lines') in info


def test_openmetrics_has_exemplars_that_lead_to_a_trace():
    page = pages_of(sample_registry()).page(OPENMETRICS, "")
    assert page.content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    found = [
        (sample.labels["le"], sample.exemplar)
        for family in openmetrics_families(page.body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    ]
    ((bound, exemplar),) = found
    assert bound == "0.04"
    assert exemplar.labels == {"trace_id": TRACE_ID, "span_id": SPAN_ID}
    assert (exemplar.value, float(exemplar.timestamp)) == (0.03, 1_700_000_000.5)


def test_the_text_format_has_no_exemplars():
    page = pages_of(sample_registry()).page("text/plain", "")
    assert page.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert TRACE_ID.encode() not in page.body


def test_the_process_is_measured_beside():
    found = samples(pages_of(Registry()).page("", "").body)
    assert found["process_resident_memory_bytes[]"] > 1e6
    assert found["process_cpu_seconds_total[]"] > 0
    assert found["process_open_fds[]"] > 0
    assert "python_gc_collections_total[('generation', '2')]" in found


def test_promtool_has_nothing_to_say():
    assert promtool_complaints(pages_of(sample_registry()).page("", "").body) == []


def test_promtool_would_say_something():
    """So that the test before can fail."""
    page = b"# HELP some_total A gauge with a counter's name.\n# TYPE some_total gauge\nsome_total 1\n"
    assert promtool_complaints(page) != []


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/plain;version=0.0.4", False),
        (OPENMETRICS, True),
        ("application/openmetrics-text", True),
        ("APPLICATION/OpenMetrics-Text; version=1.0.0; q=1", True),
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.9", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nan,text/plain;q=0.1", False),
        ("application/openmetrics-text;q=1e9", False),
        (";;;,,,=;q=", False),
        ("application/openmetrics-text-not-quite", False),
    ],
)
def test_the_form_is_the_one_that_the_scraper_prefers(accept, expected):
    assert prefers_openmetrics(accept) is expected


@pytest.mark.parametrize(
    ("accept_encoding", "expected"),
    [("gzip", True), ("deflate, GZIP;q=0.5", True), ("", False), ("gzip;q=0", False), ("identity", False)],
)
def test_gzip(accept_encoding, expected):
    page = pages_of(sample_registry()).page("", accept_encoding)
    assert page.is_gzip is expected
    body = gzip.decompress(page.body) if expected else page.body
    assert b"penstock_outputs_running 3.0" in body


def test_a_page_is_served_again_for_a_moment_only():
    now, asked = [100.0], list[None]()

    def ask():
        asked.append(None)
        return families(sample_registry().snapshot().metrics)

    pages = Pages(ask, keep_s=0.25, clock=lambda: now[0])
    first = pages.page("", "")
    now[0] += 0.2
    assert pages.page("", "") is first
    pages.page(OPENMETRICS, "")  # another form
    assert len(asked) == 2
    zipped = pages.page("", "gzip")
    assert gzip.decompress(zipped.body) == first.body
    now[0] += 0.1
    pages.page("", "")
    assert len(asked) == 3
    assert pages.page("", "gzip") is not zipped
    assert len(asked) == 3


def test_a_metric_without_points_is_not_shown():
    registry = Registry()
    registry.gauge(Instrument("penstock.some", Kind.GAUGE, "{one}", "Some.", ("kind",)), dict)
    assert b"penstock_some" not in pages_of(registry).page("", "").body


def test_the_family_of_a_counter_has_no_total():
    """OpenMetrics wants it so: only the samples have it."""
    counter = Instrument("penstock.step.time", Kind.COUNTER, "s", "Time.")
    assert family_name(counter) == "penstock_step_time_seconds"
