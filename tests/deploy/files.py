"""The files of deploy/observability/, taken apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # ships no hints

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "deploy" / "observability"
RULES = PARTS / "prometheus" / "rules" / "penstock.yml"
RULE_TESTS = PARTS / "prometheus" / "tests" / "penstock.yml"
DASHBOARD = PARTS / "grafana" / "dashboards" / "penstock.json"


def yaml_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml_of(RULES)["groups"] for rule in group["rules"]]


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Asked:
    """One expression, and where it stands."""

    place: str
    promql: str


def asked_by_panels() -> Iterator[Asked]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield Asked(f"panel {panel['title']!r} {target['refId']}", target["expr"])


def asked() -> Iterator[Asked]:
    """All expressions of the dashboard and of the rules."""
    yield from asked_by_panels()
    for annotation in dashboard()["annotations"]["list"]:
        yield Asked(f"annotation {annotation['name']!r}", annotation["expr"])
    for rule in alerts():
        yield Asked(f"alert {rule['alert']}", rule["expr"])


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_RANGE = re.compile(r"\[[^\]]*\]")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_WORD = re.compile(r"(?<![\w$.])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?\s*(\(?)")
_OPERATORS = {"and", "or", "unless", "bool"}


@dataclass(frozen=True, slots=True)
class Names:
    """What an expression asks for by name."""

    metrics: Mapping[str, frozenset[str]]
    """Each metric, with the labels by which it is chosen."""
    grouped_by: frozenset[str]
    """Labels by which it is summed or joined."""


def names_in(promql: str) -> Names:
    """Return the names in an expression of PromQL, of the forms that the files here use."""
    plain = _RANGE.sub("", _STRING.sub('""', promql))
    grouped_by = {label.strip() for found in _GROUPING.findall(plain) for label in found.split(",")}
    metrics: dict[str, set[str]] = {}
    for word, choice, call in _WORD.findall(_GROUPING.sub("", plain)):
        if not call and word not in _OPERATORS:
            metrics.setdefault(word, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", choice))
    return Names({name: frozenset(labels) for name, labels in metrics.items()}, frozenset(grouped_by - {""}))
