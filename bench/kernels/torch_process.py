"""The process in which `bench.kernels.rival` runs PyTorch. It answers as `bench.child` says, and needs only
the standard library, PyTorch and `bench.kernels.stacks`.

oneDNN is called by the operators that PyTorch's compiler uses. `torch.nn.functional.linear` would not call
it: in float32 that is MKL, and in bfloat16, on processors without instructions for it, loops of PyTorch's own
that make 3 to 7 GFLOP/s.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator

import torch

from bench.child import answer, own_output
from bench.kernels.stacks import calls_per_run, layers_kept, windows

_ONEDNN = torch.ops.mkldnn


def main() -> int:
    answers = own_output()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtypes = ["float32"]
    if _ONEDNN._is_mkldnn_bf16_supported():
        dtypes.append("bfloat16")
    threads = torch.get_num_threads()
    answer({"version": torch.__version__, "threads": threads, "dtypes": dtypes}, answers)
    layers: dict[str, Layers] = {}
    with torch.inference_mode():
        for question in map(json.loads, sys.stdin):
            if "outputs" in question:
                layers = {}  # the old ones go first
                layers = {dtype: Layers(dtype, **question) for dtype in dtypes}
                answer({}, answers)
            else:
                dtype = question.pop("dtype")
                answer({"seconds": layers[dtype].seconds(**question)}, answers)
    return 0


class Layers:
    """The packed weights of one product of several layers, in one dtype."""

    def __init__(self, dtype: str, *, outputs: int, inputs: int, least_bytes: int) -> None:
        one = torch.randn(outputs, inputs).mul_(0.02).to(getattr(torch, dtype))
        self._inputs, self._dtype = inputs, one.dtype
        kept = range(layers_kept(one.nbytes, least_bytes))
        self._layers = [_ONEDNN._reorder_linear_weight(one) for _ in kept]
        self._turns: dict[tuple[int, int], Iterator[list[int]]] = {}

    def seconds(self, rows: int, operations: float) -> float:
        """Return the seconds of one layer. `operations` are those of one."""
        calls = calls_per_run(len(self._layers), operations)
        x = torch.randn(rows, self._inputs).to(self._dtype)
        turns = self._turns.setdefault((rows, calls), windows(self._layers, calls))
        chosen = next(turns)
        began = time.perf_counter()
        for number in chosen:
            _ONEDNN._linear_pointwise(x, self._layers[number], None, "none", [], "")
        return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    sys.exit(main())
