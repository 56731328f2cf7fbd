"""oneDNN through PyTorch, as a rival of the native products: `torch.nn.functional.linear` in a process of its
own.

The process (`bench.kernels.torch_process`) runs in an environment that has PyTorch, such as those that
`bench.rivals` makes. It is asked for one run at a time, and waits for a line in between.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.kernels.lines import Product

ROOT = Path(__file__).resolve().parents[2]
_REST_S = 0.3
"""PyTorch's threads go on spinning for so long after a product; until then they would take time from ours."""


class Rival:
    """PyTorch's linear layers in one dtype of weights and activations."""

    def __init__(self, environment: Path, dtype: str) -> None:
        """`environment` is the folder of a virtual environment; dtype "bfloat16" or "float32"."""
        self.name = f"torch {dtype}"
        self._dtype = dtype
        self._process = subprocess.Popen(
            [str(environment / "bin" / "python"), "-m", "bench.kernels.torch_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.about = self._answer()

    def prepare(self, product: Product, least_bytes: int) -> None:
        """Makes the weights of one product's layers."""
        self._ask(outputs=product.outputs, inputs=product.inputs, dtype=self._dtype, least_bytes=least_bytes)

    def runner(self, rows: int, operations: float) -> Callable[[], float]:
        """A function that runs some of the layers and returns the seconds of one."""

        def seconds() -> float:
            answer: float = self._ask(rows=rows, operations=operations)["seconds"]
            time.sleep(_REST_S)
            return answer

        seconds()
        return seconds

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"PyTorch's process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
