"""The parts of bench/embeddings that need no model and no other engine."""

from __future__ import annotations

from typing import Any

from bench.embeddings.__main__ import Side, table, workloads


def side(name: str, first: list[float]) -> Side:
    """Make an engine that took 1, 2 and 4 seconds for each workload, and half of it of the processor."""
    child: Any = None
    seconds = {workload: [4.0, 1.0, 2.0] for workload in workloads()}
    halves = {workload: [2.0, 0.5, 1.0] for workload in workloads()}
    return Side(name, child, seconds, halves, dict.fromkeys(workloads(), first))


def test_the_table_has_medians_and_tells_another_model() -> None:
    lines = table([side("one", [1.0, 0.0]), side("two", [0.6, 0.8])]).splitlines()
    workload, *figures = lines[2].strip("| ").split(" | ")
    assert (workload, figures) == (
        "512 queries of 8 words, at once",
        ["one", "256.0", "128.0", "512.0", "1.95", "1.00000"],
    )
    assert lines[3].endswith("| 0.60000: another model! |")
    assert len(lines) == 2 + 2 * len(workloads())


def test_texts_have_as_many_words_as_their_names_say() -> None:
    found = {
        name: (len(groups), {len(group) for group in groups}, {len(text.split()) for text in groups[0]})
        for name, groups in workloads().items()
    }
    assert list(found.values()) == [(1, {512}, {8}), (1, {128}, {120}), (64, {1}, {8})]
