"""The process in which `bench.kernels.rival` runs PyTorch: it reads questions from standard input, one a
line, and answers each. It needs only the standard library, PyTorch and `bench.kernels.stacks`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.kernels.stacks import calls_per_run, layers_kept, windows


def main() -> int:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    _answer({"version": torch.__version__, "threads": torch.get_num_threads()})
    weights: list[torch.Tensor] = []
    turns: dict[tuple[int, int], Iterator[list[int]]] = {}
    with torch.inference_mode():
        for question in map(json.loads, sys.stdin):
            if "outputs" in question:
                weights = []  # the old ones go first
                weights, turns = _weights(**question), {}
                _answer({})
            else:
                _answer({"seconds": _seconds(weights, turns, **question)})
    return 0


def _weights(outputs: int, inputs: int, dtype: str, least_bytes: int) -> list[torch.Tensor]:
    one = torch.randn(outputs, inputs).mul_(0.02).to(getattr(torch, dtype))
    return [one.clone() for _ in range(layers_kept(one.nbytes, least_bytes))]


def _seconds(
    weights: list[torch.Tensor],
    turns: dict[tuple[int, int], Iterator[list[int]]],
    rows: int,
    operations: float,
) -> float:
    """Of one layer."""
    calls = calls_per_run(len(weights), operations)
    x = torch.randn(rows, weights[0].shape[1]).to(weights[0].dtype)
    chosen = next(turns.setdefault((rows, calls), windows(weights, calls)))
    began = time.perf_counter()
    for number in chosen:
        torch.nn.functional.linear(x, weights[number])
    return (time.perf_counter() - began) / calls


def _answer(fields: dict[str, Any]) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(main())
