"""oneDNN through PyTorch, as a rival of the native products, in a process of its own.

The process (`bench.kernels.torch_process`) runs in an environment that has PyTorch, such as those that
`bench.rivals` makes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.child import Child
from bench.kernels.lines import Product

ROOT = Path(__file__).resolve().parents[2]
_REST_S = 0.3
"""PyTorch's threads go on spinning for so long after a product; until then they would take time from ours."""


class OneDNN:
    """oneDNN's products in each dtype of weights and activations that it has on this processor: in float32,
    and in bfloat16 where there are instructions for it. It packs the weights once, as ours are.
    """

    def __init__(self, environment: Path) -> None:
        """`environment` is the folder of a virtual environment. Raises RuntimeError if the process does not
        come up.
        """
        python = str(environment / "bin" / "python")
        self._child = Child(
            [python, "-m", "bench.kernels.torch_process"], os.environ | {"PYTHONPATH": str(ROOT)}
        )
        try:
            self.about: Mapping[str, Any] = self._child.answer()
        except RuntimeError:
            self.close()
            raise

    def prepare(self, product: Product, least_bytes: int) -> None:
        """Make the weights of one product's layers."""
        self._child.ask({"outputs": product.outputs, "inputs": product.inputs, "least_bytes": least_bytes})

    def runners(self, rows: int, operations: float) -> dict[str, Callable[[], float]]:
        """Map the name of each dtype to a function that runs some of the layers and returns the seconds of
        one.
        """
        found: dict[str, Callable[[], float]] = {}
        for dtype in self.about["dtypes"]:
            found[f"oneDNN {dtype}"] = partial(self._seconds, dtype, rows, operations)
        for run in found.values():
            run()  # compiles
        return found

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def _seconds(self, dtype: str, rows: int, operations: float) -> float:
        found = self._child.ask({"dtype": dtype, "rows": rows, "operations": operations})
        time.sleep(_REST_S)
        return float(found["seconds"])
