"""The table that compares several engines."""

from __future__ import annotations

from bench.report import comparison, facts, grouped


def line(engine, workload, **figures):
    return {
        "engine": engine,
        "workload": workload,
        "figures": figures,
        "commit": "abc",
        "versions": {"python": "3"},
        "options": {},
        "startup": {"ready_s": 1.5},
        "peak_rss_bytes": 2**30,
    }


RECORDS = [
    *(line("a", "W2", output_tokens_per_s=value) for value in (1.0, 3.0, 2.0)),
    line("b", "W3", prefill_tokens_per_s=1000.0),
    line("b", "W2", output_tokens_per_s=7.0, other=1.0),
]


def test_comparison():
    assert comparison(grouped(RECORDS)).splitlines() == [
        "| workload | figure | a | b |",
        "|---|---|---:|---:|",
        "| W2 | output, tok/s | 2 | 7 |",
        "| W3 | prefill, tok/s |  | 1000 |",
    ]


def test_facts():
    first, second = facts(RECORDS).splitlines()
    assert first == "- **a**: peak_rss_bytes 1.00 GiB; commit abc; versions python 3; startup ready_s 1.5"
    assert second.startswith("- **b**")
