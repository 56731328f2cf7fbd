"""A model's parameters without its values: abstract state, checkpoint names, and the flat form for programs.

A parameter of the checkpoint is one leaf of the state, but for int8 formats, which keep its scales in a
second.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.decoder import CausalLM
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.registry import ParamPath, family_of
from penstock.runtime.native import linear as native

ModelState: TypeAlias = nnx.State[Any, Any]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its name in checkpoints, its path in the nnx state, its shape and dtype there."""

    hf_name: str
    path: ParamPath
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    packed: bool = False
    int8: bool = False
    """How it is kept, see `linear.LinearFormat`."""

    @property
    def num_bytes(self) -> int:
        """Size in memory, without the scales of int8."""
        return int(np.prod(self.shape, dtype=np.int64)) * (1 if self.int8 else self.dtype.itemsize)

    def stored(self, value: npt.NDArray[np.generic]) -> dict[ParamPath, npt.NDArray[np.generic]]:
        """State leaves by path for a value of this spec's shape and dtype: packed or quantized as kept."""
        leaves: dict[ParamPath, npt.NDArray[np.generic]] = {}
        if self.int8:
            value, leaves[(*self.path[:-1], "scale")] = native.quantize(value)
        leaves[self.path] = native.pack(value) if self.packed else value
        return leaves


def model_dtype(config: ModelConfig, dtype: npt.DTypeLike | None = None) -> np.dtype[np.generic]:
    """`dtype`, or for None and "auto" the checkpoint's own (float32 where config.json names none)."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        dtype = config.dtype or "float32"
    return jnp.dtype(dtype)


def abstract_model(
    config: ModelConfig, dtype: npt.DTypeLike | None = None, linear: LinearFormat = PLAIN
) -> tuple[nnx.GraphDef[CausalLM], ModelState]:
    """(graphdef, state of ShapeDtypeStructs): the model's structure, using no memory for weights."""
    return _abstract_model(config, model_dtype(config, dtype), linear)


@functools.lru_cache(maxsize=8)
def _abstract_model(
    config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat
) -> tuple[nnx.GraphDef[CausalLM], ModelState]:
    build = family_of(config.architecture).build
    return nnx.split(nnx.eval_shape(lambda: build(config, dtype, linear)))


def param_specs(
    config: ModelConfig, dtype: npt.DTypeLike | None = None, linear: LinearFormat = PLAIN
) -> tuple[ParamSpec, ...]:
    """Every parameter, one per tensor of the checkpoint; a tied head has none of its own."""
    return _param_specs(config, model_dtype(config, dtype), linear)


@functools.lru_cache(maxsize=8)
def _param_specs(
    config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat
) -> tuple[ParamSpec, ...]:
    name = family_of(config.architecture).tensor_name
    kept = {cast(ParamPath, path): leaf for path, leaf in _flat(config, dtype, linear)}
    specs: list[ParamSpec] = []
    for untyped, leaf in _flat(config, dtype, PLAIN):
        path = cast(ParamPath, untyped)
        packed, int8 = kept[path].ndim > leaf.ndim, kept[path].dtype == np.int8
        specs.append(ParamSpec(name(path), path, leaf.shape, leaf.dtype, packed, int8))
    return tuple(specs)


def _flat(config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat) -> Any:
    return nnx.to_flat_state(_abstract_model(config, dtype, linear)[1])


def state_of(
    config: ModelConfig,
    values: Mapping[ParamPath, jax.Array],
    dtype: npt.DTypeLike | None = None,
    linear: LinearFormat = PLAIN,
) -> ModelState:
    """The state with these leaves by path; KeyError names one that is absent."""
    structure = jax.tree.structure(abstract_model(config, dtype, linear)[1])
    state: ModelState = jax.tree.unflatten(
        structure, [values[path] for path, _ in _flat(config, model_dtype(config, dtype), linear)]
    )
    return state


def state_to_leaves(state: ModelState) -> tuple[jax.Array, ...]:
    """The arrays of a state as a flat tuple, the cheapest form to pass to a compiled program."""
    return tuple(jax.tree.leaves(state))


def bind(
    config: ModelConfig,
    leaves: Sequence[jax.Array],
    dtype: npt.DTypeLike | None = None,
    linear: LinearFormat = PLAIN,
) -> CausalLM:
    """The model with these weights: `bind(config, leaves)(token_ids, positions, kv, meta)` inside jax.jit."""
    graphdef, state = abstract_model(config, dtype, linear)
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))


def random_state(
    config: ModelConfig,
    dtype: npt.DTypeLike | None = None,
    seed: int = 0,
    std: float = 0.02,
    linear: LinearFormat = PLAIN,
) -> ModelState:
    """Weights from N(0, std), norms one, biases zero: for tests and benches without a checkpoint."""
    specs = param_specs(config, dtype, linear)
    generator = np.random.default_rng(seed)
    leaves: dict[ParamPath, jax.Array] = {}
    for spec in specs:
        if len(spec.shape) > 1:
            value = generator.standard_normal(spec.shape, np.float32) * np.float32(std)
        else:
            value = np.full(spec.shape, 0.0 if spec.path[-1] == "bias" else 1.0, np.float32)
        stored = spec.stored(value.astype(spec.dtype))
        leaves |= {path: jnp.asarray(leaf) for path, leaf in stored.items()}
    return state_of(config, leaves, dtype, linear)
