"""A model's parameters without its values: abstract state, checkpoint names, and the flat form for programs.

Order is one and the same everywhere: `param_specs`, `state_to_leaves` and `jax.tree.leaves(state)` agree, so
leaf i of the compiled program's weights argument is the parameter that `param_specs(config)[i]` describes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.decoder import CausalLM
from penstock.runtime.models.registry import ParamPath, family_of

ModelState: TypeAlias = nnx.State[Any, Any]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its name in checkpoints, its path in the nnx state, its shape and dtype."""

    hf_name: str
    path: ParamPath
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def model_dtype(config: ModelConfig, dtype: npt.DTypeLike | None = None) -> np.dtype[np.generic]:
    """`dtype`, or for None and "auto" the checkpoint's own (float32 where config.json names none)."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        dtype = config.dtype or "float32"
    return jnp.dtype(dtype)


def abstract_model(
    config: ModelConfig, dtype: npt.DTypeLike | None = None
) -> tuple[nnx.GraphDef[CausalLM], ModelState]:
    """(graphdef, state of ShapeDtypeStructs): the model's structure, using no memory for weights."""
    return _abstract_model(config, model_dtype(config, dtype))


@functools.lru_cache(maxsize=8)
def _abstract_model(
    config: ModelConfig, dtype: np.dtype[np.generic]
) -> tuple[nnx.GraphDef[CausalLM], ModelState]:
    build = family_of(config.architecture).build
    return nnx.split(nnx.eval_shape(lambda: build(config, dtype)))


def param_specs(config: ModelConfig, dtype: npt.DTypeLike | None = None) -> tuple[ParamSpec, ...]:
    """Every parameter, one per tensor of the checkpoint; a tied head has none of its own."""
    return _param_specs(config, model_dtype(config, dtype))


@functools.lru_cache(maxsize=8)
def _param_specs(config: ModelConfig, dtype: np.dtype[np.generic]) -> tuple[ParamSpec, ...]:
    name = family_of(config.architecture).tensor_name
    flat = nnx.to_flat_state(_abstract_model(config, dtype)[1])
    paths = ((cast(ParamPath, path), variable) for path, variable in flat)
    return tuple(ParamSpec(name(path), path, variable.shape, variable.dtype) for path, variable in paths)


def state_to_leaves(state: ModelState) -> tuple[jax.Array, ...]:
    """The arrays of a state as a flat tuple, the cheapest form to pass to a compiled program."""
    return tuple(jax.tree.leaves(state))


def leaves_to_state(config: ModelConfig, leaves: Sequence[jax.Array]) -> ModelState:
    """The state with these leaves; inside a traced function it costs nothing at run time."""
    structure = jax.tree.structure(abstract_model(config)[1])
    state: ModelState = jax.tree.unflatten(structure, leaves)
    return state


def bind(config: ModelConfig, leaves: Sequence[jax.Array]) -> CausalLM:
    """The model with these weights: `bind(config, leaves)(token_ids, positions, kv, meta)` inside jax.jit."""
    return nnx.merge(abstract_model(config)[0], leaves_to_state(config, leaves))


def random_state(
    config: ModelConfig, dtype: npt.DTypeLike | None = None, seed: int = 0, std: float = 0.02
) -> ModelState:
    """Weights from N(0, std), norms one, biases zero: for tests and benches without a checkpoint."""
    specs = param_specs(config, dtype)
    generator = np.random.default_rng(seed)
    leaves: list[jax.Array] = []
    for spec in specs:
        if len(spec.shape) > 1:
            value = generator.standard_normal(spec.shape, np.float32) * np.float32(std)
        else:
            value = np.full(spec.shape, 0.0 if spec.path[-1] == "bias" else 1.0, np.float32)
        leaves.append(jnp.asarray(value.astype(spec.dtype)))
    return leaves_to_state(config, leaves)
