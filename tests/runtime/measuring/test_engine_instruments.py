"""The definitions of the engine's metrics, compared with OpenTelemetry's conventions."""

from __future__ import annotations

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes

from penstock.runtime.measuring import engine_instruments as defined
from penstock.runtime.measuring.instruments import Instrument, Kind
from penstock.runtime.measuring.registry import Registry

# "SHOULD be specified with ExplicitBucketBoundaries of", docs/gen-ai/gen-ai-metrics.md in
# open-telemetry/semantic-conventions; the package of the conventions has names and units only.
SPECIFIED = [
    (
        defined.REQUEST_DURATION,
        gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION,
        "[0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]",
    ),
    (
        defined.TIME_PER_OUTPUT_TOKEN,
        gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
        "[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]",
    ),
    (
        defined.TIME_TO_FIRST_TOKEN,
        gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
        "[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]",
    ),
]


@pytest.mark.parametrize(("instrument", "name", "buckets"), SPECIFIED, ids=[row[1] for row in SPECIFIED])
def test_gen_ai_instruments_are_those_of_the_conventions(
    instrument: Instrument, name: str, buckets: str
) -> None:
    assert instrument.name == name
    assert instrument.kind is Kind.HISTOGRAM
    assert instrument.unit == "s"
    assert str(list(instrument.buckets)) == buckets
    assert instrument.labels[:3] == (
        gen_ai_attributes.GEN_AI_OPERATION_NAME,
        gen_ai_attributes.GEN_AI_PROVIDER_NAME,
        gen_ai_attributes.GEN_AI_REQUEST_MODEL,
    )
    has_errors = instrument is defined.REQUEST_DURATION
    assert instrument.labels[3:] == ((error_attributes.ERROR_TYPE,) if has_errors else ())


def test_every_definition_is_listed_once() -> None:
    found = [value for value in vars(defined).values() if isinstance(value, Instrument)]
    assert sorted(one.name for one in defined.ENGINE_INSTRUMENTS) == sorted({one.name for one in found})
    assert len(found) == len(defined.ENGINE_INSTRUMENTS)


def test_a_registry_takes_them_all() -> None:
    registry = Registry()
    for instrument in defined.ENGINE_INSTRUMENTS:
        if instrument.kind is Kind.HISTOGRAM:
            registry.histogram(instrument)
        elif instrument.kind is Kind.COUNTER:
            registry.counter(instrument)
        else:
            registry.gauge(instrument, dict)
    assert tuple(m.instrument for m in registry.snapshot().metrics) == defined.ENGINE_INSTRUMENTS


@pytest.mark.parametrize("instrument", defined.ENGINE_INSTRUMENTS, ids=lambda one: one.name)
def test_every_description_is_one_for_operators(instrument: Instrument) -> None:
    assert instrument.description.endswith(".")
    assert instrument.unit in ("s", "By", "1") or instrument.unit.strip("{}").isalpha()
