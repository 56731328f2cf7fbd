"""Makes LoRA adapters of random values that change all linear layers of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.checkpoint import blocks, safetensors_header
from penstock.runtime.adapters.peft import CONFIG_NAME, TENSORS_NAME
from penstock.runtime.loading.safetensors_files import find_tensors

Tensors = dict[str, NDArray[Any]]
_NAME = "base_model.model.{}.lora_{}.weight"
_SPREAD = 7919
"""How far the values of an adapter begin behind those of the one before."""


@dataclass(frozen=True)
class Maker:
    """Makes adapters of one rank for one checkpoint. Those of different numbers have different values."""

    shapes: Mapping[str, tuple[int, int]]
    """Outputs and inputs of each layer that they change, by its name in the checkpoint."""
    rank: int
    _values: NDArray[Any] = field(init=False, repr=False)
    """The values of all adapters: each matrix is another part of them."""

    def __post_init__(self) -> None:
        most = self.rank * max(max(shape) for shape in self.shapes.values())
        drawn = next(blocks(2 * most + (1 << 20), 0.0, np.random.default_rng(0)))
        object.__setattr__(self, "_values", drawn)

    @classmethod
    def of(cls, checkpoint: Path, rank: int) -> Maker:
        """Make one for all linear layers of a checkpoint's decoder."""
        entries = find_tensors(checkpoint)
        found = {name: entry.shape for name, entry in entries.items() if ".layers." in name}
        return cls(
            {name.removesuffix(".weight"): shape for name, shape in found.items() if len(shape) == 2}, rank
        )

    @property
    def config(self) -> dict[str, Any]:
        """What adapter_config.json has."""
        targets = sorted({name.rpartition(".")[2] for name in self.shapes})
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": 2 * self.rank, "target_modules": targets}

    def tensors(self, number: int) -> Tensors:
        """Make the matrices of one adapter, by the names that PEFT gives them."""
        made: Tensors = {}
        for name, (out_size, in_size) in self.shapes.items():
            for half, shape in (("A", (self.rank, in_size)), ("B", (out_size, self.rank))):
                size = shape[0] * shape[1]
                begin = (number + len(made)) * _SPREAD % (len(self._values) - size)
                made[_NAME.format(name, half)] = self._values[begin : begin + size].reshape(shape)
        return made

    def write(self, folder: Path, number: int) -> None:
        """Write one adapter as PEFT does, unless the folder is there."""
        if folder.is_dir():
            return
        part = folder.with_name(f".{folder.name}.part")  # a name that no adapter can have
        part.mkdir(parents=True, exist_ok=True)
        (part / CONFIG_NAME).write_text(json.dumps(self.config))
        tensors = self.tensors(number)
        with (part / TENSORS_NAME).open("wb") as file:
            file.write(safetensors_header({name: tensor.shape for name, tensor in tensors.items()}))
            for tensor in tensors.values():
                file.write(tensor.tobytes())
        part.rename(folder)  # last, so a folder of this name is always complete
