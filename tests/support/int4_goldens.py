"""Goldens whose matrices int4 holds exactly, so that what PyTorch computes from them in float32 is what a
model in int4 must compute.

A file of tests/golden/int4 has a config, what PyTorch computed, and of each tensor its shape and how its
values are drawn; `tools.golden_int4` made it. In a matrix each 32 inputs of an output have a scale with the
bits of float16, and are -8 to 7 of its steps, -8 among them: `quantise` of `penstock.runtime.ops.codes` finds
these codes again. The values come from numpy's `RandomState`, whose numbers never change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

GROUP = 32
FOLDER = Path(__file__).parents[1] / "golden" / "int4"


def drawn(name: str, shape: Sequence[int], how: Sequence[Any]) -> NDArray[np.float32]:
    """Draw the values of a tensor.

    how: ["codes", axis], where inputs lie along this axis; ["rows"] for a table or a head, whose rows are
    -127 to 127 steps of a scale each, as int8 holds them; ["normal", mean, deviation]; or ["values", all].
    """
    random = np.random.RandomState(crc32(name.encode()))
    if how[0] == "values":
        return np.array(how[1], np.float32).reshape(shape)
    if how[0] == "normal":
        return np.asarray(how[1] + how[2] * random.standard_normal(shape), np.float32)
    if how[0] == "rows":
        numbers = random.randint(-127, 128, shape)
        numbers[:, 0] = 127
        steps = random.randint(512, 1024, (shape[0], 1)) / 2**19
        return (numbers * steps).astype(np.float32)
    lies = list(shape)
    lies[how[1]], lies[-1] = lies[-1], lies[how[1]]
    groups = random.randint(-8, 8, (*lies[:-1], lies[-1] // GROUP, GROUP))
    places = random.randint(0, GROUP, groups.shape[:-1])
    np.put_along_axis(groups, places[..., None], -8, axis=-1)
    steps = random.randint(1024, 2048, places.shape) * random.choice([-1, 1], places.shape) / 2**16
    return np.ascontiguousarray(
        (groups * steps[..., None]).reshape(lies).swapaxes(how[1], -1).astype(np.float32)
    )


def read(name: str) -> dict[str, Any]:
    """Return the golden of a family."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Sequence[Any]]) -> None:
    """Write a golden's checkpoint. tensors: from its names to shape and `how`."""
    (folder / "config.json").write_text(json.dumps(config))
    values = {name: drawn(name, shape, how) for name, (shape, how) in tensors.items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
