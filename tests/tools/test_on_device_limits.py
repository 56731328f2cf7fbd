"""What a run on a device counts beside its times: numbers computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.workloads import Group, Workload
from penstock.runtime import EngineConfig
from penstock.runtime.models.registry import parse_config
from tests.support.models.configs import TINY
from tests.support.native.attention import Shape
from tools.on_device.kernels import ExpertSizes, attention_bytes, experts_bytes
from tools.on_device.limits import Limits, limits_of, of_call, of_workload

LIMITS = Limits(bytes_per_s=1e9, flops_per_s=1e12, source="by hand")
PRODUCTS = 4 * 8 * (4 + 2 + 2) + 16 * 8 + 3 * 16 * 8
"""Queries, keys and values; the output; the MLP."""


def heads(queries: int, keys: int, dim: int, value_dim: int | None = None) -> Shape:
    return Shape(queries, keys, dim, 64, 5, 3, 2, 6, dtype="bfloat16", value_dim=value_dim)


def test_pages_in_use_are_counted_with_queries_and_results() -> None:
    # Two pages of 64 keys and values of 8 heads of 128 channels, for each of 3 rows; 5 tokens of each.
    pages = 3 * 2 * 64 * 2 * 8 * 128 * 2
    assert attention_bytes(heads(16, 8, 128), 3, 5, 65) == pages + 2 * 3 * 5 * 16 * 128 * 2


def test_latents_in_use_are_counted_once_with_queries_and_narrower_results() -> None:
    pages = 3 * 2 * 64 * 576 * 2
    found = attention_bytes(heads(16, 1, 576, 512), 3, 5, 65)
    assert found == pages + 3 * 5 * 16 * (576 + 512) * 2


def test_an_expert_that_two_rows_choose_is_counted_once() -> None:
    sizes = ExpertSizes(hidden=8, inner=4, num_experts=6, per_token=2, rows=(2,), checked=2)
    assert experts_bytes(sizes, np.array([[0, 5], [5, 1]])) == 3 * (3 * 4 * 8 * 2) + 2 * 2 * 8 * 2


def test_a_call_is_compared_with_the_bandwidth() -> None:
    columns = ["bytes needed, MB", "least, us", "kernel's share of bandwidth"]
    assert of_call(2_000_000, 0.008, LIMITS) == dict(zip(columns, [2.0, 2000.0, "25.0%"], strict=True))
    assert of_call(2_000_000, 0.008, None) == dict(zip(columns, [2.0, "not known", "not known"], strict=True))


@pytest.mark.ci
def test_a_workload_is_compared_with_the_bandwidth_and_the_rate() -> None:
    workload = Workload("X", "", (Group(2, (30, 30), (20, 20)),), ())
    figures = {"decode_tokens_per_s": 1e5, "prefill_tokens_per_s": 1e8}
    told = [
        of_workload(workload, figures, parse_config(TINY), EngineConfig(), limits)
        for limits in (LIMITS, None)
    ]
    # Norms are padded to 32 numbers. Rows have 40 tokens in the middle, and one more is written; a key and a
    # value of a token have 2 heads of 4 channels. Of the table of embeddings 2 rows are read.
    decode = 2 * (PRODUCTS + 5 * 32 + 100 * 8 + 2 * 8) + 2 * (40 + 1) * 2 * 2 * 4 * 2
    # The head has one token. A token attends to itself and those before, with two products of 4 channels.
    prefill = (30 * 2 * PRODUCTS + 2 * 100 * 8 + (30 * 31 // 2) * 4 * 4 * 4) / 30
    assert told[0] == [
        {
            "part": "decode",
            "needed": f"{decode / 1e6:.4g} MB a step",
            "reached": f"{decode * 1e5 / 1e9:.4g} GB/s",
            "share": f"{decode * 1e5 / 1e9:.1%} of the bandwidth",
        },
        {
            "part": "prefill",
            "needed": f"{prefill / 1e9:.4g} Gflop a token",
            "reached": f"{prefill * 1e8 / 1e12:.4g} TFLOP/s",
            "share": f"{prefill * 1e8 / 1e12:.1%} of the rate",
        },
    ]
    assert [line["share"] for line in told[1]] == ["not known", "not known"]


def test_limits_are_the_makers_or_else_measured(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"copy, GB/s": 2.0, "bf16 products, TFLOP/s": 3.0}))
    known = limits_of("gpu", "NVIDIA H200", facts)
    assert known is not None
    assert (known.bytes_per_s, known.flops_per_s) == (4800e9, 989e12)
    # A part of the chip has a part of its bandwidth.
    assert limits_of("gpu", "NVIDIA H200 MIG 1g.18gb", facts) == Limits(2e9, 3e12, "measured by facts")
    assert limits_of("gpu", "NVIDIA H200 MIG 1g.18gb", tmp_path / "none") is None
    assert limits_of("gpu", "NVIDIA H200 MIG 1g.18gb", None) is None
    assert limits_of("cpu", "cpu", facts) is None
