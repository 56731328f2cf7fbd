"""From rows of panels to the JSON of a Grafana dashboard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from tools.dashboard.panels import DATASOURCE, Form, Json, Panel, Query, Row

WIDTH = 24
SCHEMA_VERSION = 42
"""Of the dashboards of Grafana 12; newer ones convert it."""


def dashboard(title: str, uid: str, about: str, rows: Sequence[Row], variables: Sequence[Json]) -> Json:
    """Make the dashboard as Grafana imports it."""
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["penstock"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "fiscalYearStartMonth": 0,
        "templating": {"list": list(variables)},
        "annotations": {"list": [_weight_updates(), _restarts()]},
        "links": [],
        "panels": list(_placed(rows)),
    }


def _annotation(name: str, expression: str, text: str, color: str) -> Json:
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": Query(expression).promql,
        "step": "15s",
        "titleFormat": name,
        "textFormat": text,
    }


def _weight_updates() -> Json:
    return _annotation(
        "New weights", "changes(penstock_weights_generation{@}[~]) > 0", "{{instance}}", "blue"
    )


def _restarts() -> Json:
    return _annotation(
        "Restart", 'changes(process_start_time_seconds{@, job="penstock"}[~]) > 0', "{{instance}}", "red"
    )


def variable(name: str, label: str, query: str) -> Json:
    """Make a choice at the top of the dashboard, of values that Prometheus knows."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "options": [],
        "regex": "",
        "hide": 0,
        "skipUrlSync": False,
    }


def datasource_variable() -> Json:
    """Make the choice of a Prometheus, for installations that have several."""
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "multi": False,
        "includeAll": False,
        "options": [],
        "regex": "",
        "hide": 0,
        "skipUrlSync": False,
    }


def _placed(rows: Sequence[Row]) -> Iterator[Json]:
    """Yield the panels in order, each with its number and its place."""
    numbers = count(1)
    y = 0
    for row in rows:
        yield {
            "id": next(numbers),
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        }
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            yield {
                "id": next(numbers),
                **_panel(panel),
                "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
            }
            x += panel.width
            height = max(height, panel.height)
        y += height


def _panel(panel: Panel) -> Json:
    kind = Form.LINES if panel.form is Form.STACK else panel.form
    return {
        "type": kind.value,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "targets": [_target(panel, query, chr(ord("A") + i)) for i, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel),
        **({"transformations": _columns(panel)} if panel.form is Form.TABLE else {}),
    }


def _target(panel: Panel, query: Query, letter: str) -> Json:
    now = panel.form is Form.TABLE
    formats = {Form.TABLE: "table", Form.HEATMAP: "heatmap"}
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.promql,
        "legendFormat": query.legend or "__auto",
        "format": formats.get(panel.form, "time_series"),
        "exemplar": query.exemplars,
        "instant": now,
        "range": not now,
    }


def _field(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.warn_above is not None:
        steps.append({"color": "orange", "value": panel.warn_above})
    if panel.bad_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.bad_below}]
    found: Json = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [],
        "color": {"mode": "thresholds" if panel.form in (Form.NUMBER, Form.GAUGE) else "palette-classic"},
        "custom": _custom(panel),
    }
    if panel.most is not None:
        found |= {"min": 0, "max": panel.most}
    elif panel.form in (Form.LINES, Form.STACK):
        found |= {"min": 0}
    return found


def _custom(panel: Panel) -> Json:
    if panel.form not in (Form.LINES, Form.STACK):
        return {}
    stacked = panel.form is Form.STACK
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }


def _options(panel: Panel) -> Json:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    match panel.form:
        case Form.NUMBER:
            return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
        case Form.GAUGE:
            return {"reduceOptions": reduce, "showThresholdLabels": False, "showThresholdMarkers": True}
        case Form.HEATMAP:
            return {
                "calculate": False,
                "cellGap": 1,
                "color": {
                    "mode": "scheme",
                    "scheme": "Oranges",
                    "steps": 64,
                    "exponent": 0.5,
                    "fill": "dark-orange",
                },
                "yAxis": {"unit": panel.unit},
                "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
                "legend": {"show": True},
                "exemplars": {"color": "rgba(255,0,255,0.7)"},
                "filterValues": {"le": 1e-9},
            }
        case Form.TABLE:
            return {"showHeader": True, "cellHeight": "sm"}
        case _:
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }


def _columns(panel: Panel) -> list[Json]:
    return [
        {
            "id": "filterFieldsByName",
            "options": {"include": {"names": list(panel.columns)}},
        },
        {
            "id": "organize",
            "options": {
                "indexByName": {name: i for i, name in enumerate(panel.columns)},
                "renameByName": dict(panel.columns),
            },
        },
    ]
