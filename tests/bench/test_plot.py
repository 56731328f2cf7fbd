"""The picture of throughput against concurrency."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from bench.plot import drawing, main, round_up, series
from bench.svg import HEIGHT

SVG = "{http://www.w3.org/2000/svg}"


def line(engine, workload, value):
    return {"engine": engine, "workload": workload, "figures": {"output_tokens_per_s": value}}


def test_series_are_medians_by_level():
    lines = [line("a", "C4", value) for value in (30.0, 10.0, 20.0)]
    lines += [line("a", "C1", 5.0), line("b", "C1", 6.0), line("a", "W1", 99.0)]
    assert series(lines) == {"a": {1: 5.0, 4: 20.0}, "b": {1: 6.0}}


@pytest.mark.parametrize(("value", "up"), [(1.0, 1), (1.1, 2), (20, 20), (21, 50), (0.7, 1), (999, 1000)])
def test_round_up(value, up):
    assert round_up(value) == pytest.approx(up)


def test_points_lie_where_they_should():
    root = ET.fromstring(drawing({"one & two": {1: 0.0, 32: 100.0}}))
    points = next(root.iter(f"{SVG}polyline")).attrib["points"].split()
    (left, low), (right, high) = (map(float, point.split(",")) for point in points)
    # The line goes from the left edge of the axes to the right one, and from the bottom to the top.
    assert (left, right, low, high) == (70, 720 - 170, HEIGHT - 50, 30)
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert "one & two" in labels
    assert [label for label in labels if label in {"0", "20", "100"}] == ["0", "20", "100"]


def test_command(tmp_path, capsys):
    data, out = tmp_path / "data.jsonl", tmp_path / "out.svg"
    data.write_text(json.dumps(line("a", "C1", 1.5)) + "\n")
    assert main([str(data), "--out", str(out)]) == 0
    assert ET.fromstring(out.read_text()).tag == f"{SVG}svg"
    data.write_text("")
    assert main([str(data), "--out", str(out)]) == 1
    assert "--workloads concurrency" in capsys.readouterr().err
