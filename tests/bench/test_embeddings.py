"""The parts of bench/embeddings that need no model and no other engine."""

from __future__ import annotations

from typing import Any

from bench.embeddings.__main__ import Side, table, workloads


def side(name: str, first: list[float], taken: list[float]) -> Side:
    """Make an engine that took these seconds for each workload, and half of them of the processor."""
    child: Any = None
    seconds = dict.fromkeys(workloads(), taken)
    halves = {workload: [each / 2 for each in taken] for workload in workloads()}
    return Side(name, child, seconds, halves, dict.fromkeys(workloads(), first))


def test_the_table_has_medians_and_tells_another_model() -> None:
    """How many times as fast the first engine was is the median of the repeats' ratios (1, 3 and 4 here)."""
    sides = [side("one", [1.0, 0.0], [4.0, 1.0, 2.0]), side("two", [0.6, 0.8], [4.0, 4.0, 6.0])]
    lines = table(sides).splitlines()
    first, second = (line.strip("| ").split(" | ") for line in lines[2:4])
    workload = "512 queries of 8 words, at once"
    assert first == [workload, "one", "256.0", "128.0", "512.0", "1.00", "1.95", "1.00000"]
    assert second == [workload, "two", "128.0", "85.3", "128.0", "3.00", "3.91", "0.60000: another model!"]
    assert len(lines) == 2 + 2 * len(workloads())


def test_texts_have_as_many_words_as_their_names_say() -> None:
    found = {
        name: (len(groups), {len(group) for group in groups}, {len(text.split()) for text in groups[0]})
        for name, groups in workloads().items()
    }
    assert list(found.values()) == [(1, {512}, {8}), (1, {128}, {120}), (64, {1}, {8})]
