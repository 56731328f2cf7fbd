"""Grafana's dashboard: it is what tools/dashboard writes, and asks for metrics and labels that there are."""

from __future__ import annotations

from itertools import combinations

import pytest

from penstock.runtime.measuring.engine_instruments import ENGINE_INSTRUMENTS
from penstock.runtime.measuring.instruments import Instrument, Kind
from penstock.service.telemetry.metrics.families import prometheus_name, underscored
from penstock.service.telemetry.metrics.service_instruments import SERVICE_INSTRUMENTS
from tests.deploy.files import DASHBOARD, Asked, asked, dashboard, names_in
from tools.dashboard.penstock import text

OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus gives every series that it scrapes."""
NOT_OURS: dict[str, set[str]] = {
    "up": set(),
    "ALERTS": {"alertname", "alertstate"},
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
    "process_start_time_seconds": set(),
    "process_open_fds": set(),
    "process_max_fds": set(),
}
"""What Prometheus makes itself, and what prometheus_client says of any process, with their labels."""


def series_of(instrument: Instrument) -> dict[str, set[str]]:
    """Return the names of an instrument's series, with their labels."""
    name = prometheus_name(instrument)
    labels = {underscored(label) for label in instrument.labels}
    if instrument.kind is not Kind.HISTOGRAM:
        return {name: labels}
    return {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}


KNOWN = NOT_OURS | {
    name: labels
    for instrument in (*ENGINE_INSTRUMENTS, *SERVICE_INSTRUMENTS)
    for name, labels in series_of(instrument).items()
}


def test_the_file_is_what_the_tool_writes() -> None:
    assert DASHBOARD.read_text(encoding="utf-8") == text(), "run: python -m tools.dashboard"


@pytest.mark.parametrize("one", list(asked()), ids=lambda one: one.place)
def test_dashboard_and_rules_ask_for_metrics_and_labels_that_exist(one: Asked) -> None:
    names = names_in(one.promql)
    assert names.metrics
    assert set(names.metrics) <= set(KNOWN)
    for metric, chosen_by in names.metrics.items():
        assert chosen_by <= KNOWN[metric] | OF_PROMETHEUS, metric
    together = set[str]().union(*(KNOWN[metric] for metric in names.metrics))
    assert names.grouped_by <= together | OF_PROMETHEUS


def test_names_are_found_in_expressions() -> None:
    found = names_in('sum by (le, x) (rate(a_bucket{b=~"c", d!="e{f}"}[5m])) / on (job) g unless h == 1')
    assert found.metrics == {"a_bucket": {"b", "d"}, "g": set(), "h": set()}
    assert found.grouped_by == {"le", "x", "job"}


def test_every_instrument_is_on_the_dashboard_or_named_here_with_a_reason() -> None:
    """A number that nobody can see may as well not be counted."""
    elsewhere = {
        "penstock_output_running_time_seconds": "prefill and decode, which have a panel, together",
    }
    shown = {name for one in asked() for name in names_in(one.promql).metrics}
    unseen = [
        prometheus_name(instrument)
        for instrument in (*ENGINE_INSTRUMENTS, *SERVICE_INSTRUMENTS)
        if not shown & set(series_of(instrument)) and prometheus_name(instrument) not in elsewhere
    ]
    assert unseen == []


def test_panels_do_not_lie_on_each_other_and_have_a_title_and_an_explanation() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_every_choice_of_the_dashboard_is_used() -> None:
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "instance"]
    assert "$model" in variables["instance"]["query"]["query"]
    for one in asked():
        if not one.place.startswith("alert"):
            assert "$instance" in one.promql or "ALERTS" in one.promql, one
