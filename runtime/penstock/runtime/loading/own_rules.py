"""Which rules fill the leaves of the devices that this process has, where a model is cut over the devices of
several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
from jax.sharding import Mesh

from penstock.runtime.models.load_rules import LoadRule, LoadRules, ParamPath


def own_devices(mesh: Mesh) -> range:
    """Return the numbers of this process's devices on the mesh."""
    return devices_of(mesh, jax.process_index())


def devices_of(mesh: Mesh, process: int) -> range:
    """Return the numbers of a process's devices on the mesh. Those of a process lie side by side."""
    own = [number for number, device in enumerate(mesh.devices.flat) if device.process_index == process]
    return range(own[0], own[-1] + 1)


def own_rules(rules: LoadRules, own: range, devices: int) -> LoadRules:
    """Select the rules of all `devices` that fill the leaves of these alone, whose entries count from 0."""
    if len(own) == devices:
        return rules
    return replace(
        rules, rules=tuple(_moved(rule, own.start) for rule in rules.rules if _device(rule) in own)
    )


def rules_of_leaves(rules: LoadRules, has: Callable[[ParamPath], bool]) -> LoadRules:
    """Return the rules that fill the leaves which `has` names, and what they do in these alone: the leaves of
    a stage, where another process has the other stages.
    """
    kept = ((rule, tuple(target for target in rule.targets if has(target.path))) for rule in rules.rules)
    return replace(rules, rules=tuple(replace(rule, targets=own) for rule, own in kept if own))


def own_shapes(
    shapes: Mapping[ParamPath, jax.ShapeDtypeStruct], own: range, devices: int
) -> dict[ParamPath, jax.ShapeDtypeStruct]:
    """Return the shapes of what these of all `devices` have of the leaves."""
    before = () if devices == 1 else (len(own),)
    return {
        path: jax.ShapeDtypeStruct((*before, *leaf.shape[len(before) :]), leaf.dtype)
        for path, leaf in shapes.items()
    }


def _device(rule: LoadRule) -> int:
    """Return the device whose entry of the leaves a rule fills."""
    return rule.targets[0].at[0]


def _moved(rule: LoadRule, by: int) -> LoadRule:
    if not by:  # those of a leader are its own as they are, and there may be tens of thousands
        return rule
    targets = tuple(replace(target, at=(target.at[0] - by, *target.at[1:])) for target in rule.targets)
    return replace(rule, targets=targets)
