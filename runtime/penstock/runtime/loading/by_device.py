"""Makes the leaves of a model that is cut over devices for one device after the other, so that host memory
holds what one device has of a leaf, and not the whole leaf.

While they are made, what a device has of a leaf is a leaf of its own, with one entry along its first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy.typing as npt
from jax.sharding import NamedSharding

from penstock.runtime.loading.leaves import LeafShape, Parts
from penstock.runtime.models.load_rules import LoadRule, ParamPath, Target


def rules_of_each(rules: Sequence[LoadRule]) -> list[LoadRule]:
    """Return the rules of a cut model, which fill a leaf of each device."""

    def of_one(target: Target) -> Target:
        return replace(target, path=(*target.path, target.at[0]), at=(0, *target.at[1:]))

    return [replace(rule, targets=tuple(map(of_one, rule.targets))) for rule in rules]


def shapes_of_each(shapes: Mapping[ParamPath, LeafShape]) -> dict[ParamPath, LeafShape]:
    """Return the shapes of the leaves of each device."""
    return {
        (*path, device): jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)
        for path, leaf in shapes.items()
        for device in range(leaf.shape[0])
    }


class LeavesOnDevices:
    """Puts what each device has of a leaf there, and joins a leaf when all devices of the process have
    theirs.
    """

    def __init__(self, sharding_of: Callable[[ParamPath], NamedSharding]) -> None:
        """sharding_of: tells that of a whole leaf, which is cut along its first axis."""
        self.leaves: dict[ParamPath, jax.Array] = {}
        self._sharding_of, self._parts = sharding_of, dict[ParamPath, dict[int, jax.Array]]()

    def take(self, path: ParamPath, leaf: npt.NDArray[Any], parts: Parts) -> None:
        """See `TakeLeaf`."""
        whole, number = path[:-1], path[-1]
        assert isinstance(number, int)
        sharding, own = self._sharding_of(whole), jax.process_index()
        devices = [device for device in sharding.mesh.devices.flat if device.process_index == own]
        placed = self._parts.setdefault(whole, {})
        placed[number] = jax.block_until_ready(jax.device_put(leaf, devices[number]))
        if len(placed) == len(devices):
            shape = (sharding.mesh.size, *leaf.shape[1:])
            in_order = [placed[number] for number in sorted(placed)]
            self.leaves[whole] = jax.make_array_from_single_device_arrays(shape, sharding, in_order)
            del self._parts[whole]
