"""Panels of a Grafana dashboard, as few words as it takes to say what each shows.

An expression has `@` where the choice of servers belongs: `rate(penstock_steps_total{@}[~])` becomes
`rate(penstock_steps_total{instance=~"$instance"}[$__rate_interval])`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SERVERS = 'instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]


class Form(enum.Enum):
    """How a panel shows its values."""

    LINES = "timeseries"
    STACK = "stack"
    """Lines on top of each other, for parts of a whole."""
    NUMBER = "stat"
    GAUGE = "gauge"
    HEATMAP = "heatmap"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel."""

    expression: str
    legend: str = ""
    """The name of each series; `{{label}}` stands for the value of a label."""
    exemplars: bool = False
    """Whether to show the traces that stand behind a histogram, as points that lead to them."""

    @property
    def promql(self) -> str:
        """The expression as Grafana has it."""
        return self.expression.replace("@", SERVERS).replace("[~]", "[$__rate_interval]")


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    about: str
    """Full sentences: what it shows, and what to do about it."""
    queries: Sequence[Query]
    unit: str = "short"
    """A unit of Grafana's."""
    form: Form = Form.LINES
    width: int = 8
    """Of 24."""
    height: int = 8
    most: float | None = None
    """The upper end of the axis, where there is one."""
    warn_above: float | None = None
    bad_below: float | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    """For a table: labels that it shows, with their titles."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one heading, from left to right, in as many lines as they need."""

    title: str
    panels: Sequence[Panel]


def percentiles(name: str, *shares: float, labels: str = "", exemplars: bool = False) -> list[Query]:
    """Make queries of percentiles of the histogram `name` (without `_bucket`), over all servers and, if
    given, for each value of the labels.
    """
    by = f"le, {labels}" if labels else "le"
    suffix = "".join(f" {{{{{label}}}}}" for label in labels.split(", ") if label)
    return [
        Query(
            f"histogram_quantile({share}, sum by ({by}) (rate({name}_bucket{{@}}[~])))",
            f"p{share * 100:g}{suffix}",
            exemplars,
        )
        for share in shares
    ]


def mean(name: str, legend: str) -> Query:
    """Make a query of the mean of the histogram `name`."""
    return Query(f"sum(rate({name}_sum{{@}}[~])) / sum(rate({name}_count{{@}}[~]))", legend)


def rate(name: str, legend: str, by: str = "") -> Query:
    """Tell how much a counter rises a second, over all servers."""
    return Query(f"sum{f' by ({by})' if by else ''} (rate({name}{{@}}[~]))", legend)
