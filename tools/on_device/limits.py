"""What a device can do at best, and how near a measurement comes to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.workloads import Workload, jobs
from penstock.runtime import EngineConfig
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.planning.chips import CHIPS, Machine
from penstock.runtime.planning.plan import plan
from tools.on_device.facts import COPY, PRODUCTS

UNKNOWN = "not known"
_KINDS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
}
"""The chips of the table, as JAX calls them. Others of a family have other memory, and so have parts of one.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The rates of a device."""

    bytes_per_s: float
    flops_per_s: float
    """Of products in bfloat16."""
    source: str

    def __str__(self) -> str:
        rates = f"{self.bytes_per_s / 1e9:.0f} GB/s, {self.flops_per_s / 1e12:.0f} TFLOP/s in bf16"
        return f"{rates} ({self.source})"


def limits_of(platform: str, kind: str, facts: Path | None) -> Limits | None:
    """Return what the maker says of the chip, or else what the step `facts` has measured; None if neither is
    known, and for a CPU. `facts`: the step's result.
    """
    if platform == "cpu":
        return None
    if kind in _KINDS:
        chip = CHIPS[_KINDS[kind]]
        return Limits(chip.bytes_per_s, chip.flops_per_s, f"its maker's of {chip.name}")
    try:
        found = json.loads(facts.read_text(encoding="utf-8")) if facts else {}
        return Limits(1e9 * float(found[COPY]), 1e12 * float(found[PRODUCTS]), "measured by facts")
    except (OSError, ValueError, KeyError):
        return None


def of_call(num_bytes: int, seconds: float, limits: Limits | None) -> dict[str, Any]:
    """Tell how near a call that must read and write so many bytes comes to the bandwidth. It is above it if
    the chip's cache has some of them.
    """
    return {
        "bytes needed, MB": num_bytes / 1e6,
        "least, us": 1e6 * num_bytes / limits.bytes_per_s if limits else UNKNOWN,
        "kernel's share of bandwidth": f"{num_bytes / seconds / limits.bytes_per_s:.1%}"
        if limits
        else UNKNOWN,
    }


def of_workload(
    workload: Workload,
    figures: Mapping[str, float],
    model: ModelConfig,
    config: EngineConfig,
    limits: Limits | None,
) -> list[dict[str, Any]]:
    """Tell how near a workload of equal requests comes to the bandwidth in decode, and to the rate of
    products in prefill, as far as it has the figures. Bytes and operations are those of `penstock plan`, of a
    decode step in the middle of the outputs, and of a whole prompt.
    """
    sent = jobs(workload, 0, model.vocab_size)
    rows, prompt, output = len(sent), len(sent[0].token_ids), sent[0].max_tokens
    options = dataclasses.replace(
        config,
        max_num_seqs=rows,
        max_model_len=prompt + output // 2,
        max_num_batched_tokens=max(prompt, rows, 16),  # the fewest that it may be
    )
    # Of the chip only times depend, which are not used here, and whether rows of keys are a TPU's.
    found = plan(model, Machine(CHIPS["h100"]), options)
    assert found.decode is not None
    assert found.prefill is not None
    lines: list[dict[str, Any]] = []
    if pace := figures.get("decode_tokens_per_s"):
        rate = found.decode.bytes * pace
        share = f"{rate / limits.bytes_per_s:.1%} of the bandwidth" if limits else UNKNOWN
        lines.append({"part": "decode", "needed": f"{found.decode.bytes / 1e6:.4g} MB a step"})
        lines[-1] |= {"reached": f"{rate / 1e9:.4g} GB/s", "share": share}
    if pace := figures.get("prefill_tokens_per_s"):
        operations = found.prefill.operations / found.prefill.tokens
        share = f"{operations * pace / limits.flops_per_s:.1%} of the rate" if limits else UNKNOWN
        lines.append({"part": "prefill", "needed": f"{operations / 1e9:.4g} Gflop a token"})
        lines[-1] |= {"reached": f"{operations * pace / 1e12:.4g} TFLOP/s", "share": share}
    return lines
