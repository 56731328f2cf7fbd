"""A model's parameters without its values: abstract state, what a checkpoint's tensors fill of it, and the
flat form for programs.

Each tensor of the checkpoint fills a part of one leaf of the state: all of a product's weight, or some rows
of a fused one, or a place in the pool of norms and biases. With int8 its scales fill a place in another pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.decoder import CausalLM
from penstock.runtime.models.linear import PLAIN, Linear, LinearFormat, RMSNorm
from penstock.runtime.models.registry import ParamPath, family_of
from penstock.runtime.native import linear as native

ModelState: TypeAlias = nnx.State[Any, Any]
Leaves: TypeAlias = Mapping[ParamPath, npt.NDArray[Any]]

_VECTORS: ParamPath = ("vectors",)
_SCALES: ParamPath = ("scales",)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One tensor of the checkpoint: its name, its shape and dtype in the model, and what it fills.

    Its rows (of a vector: its elements) become the rows from `row` on of the leaf at `path`. A matrix is one
    [out, in], and a packed leaf's rows are its outputs.
    """

    hf_name: str
    path: ParamPath
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    row: int = 0
    packed: bool = False
    scales: int | None = None
    """With int8: where in the pool of scales those of its outputs begin."""

    @property
    def int8(self) -> bool:
        return self.scales is not None

    @property
    def num_bytes(self) -> int:
        """Size in memory, without the scales of int8."""
        return int(np.prod(self.shape, dtype=np.int64)) * (1 if self.int8 else self.dtype.itemsize)

    @property
    def parts(self) -> dict[ParamPath, tuple[slice, ...]]:
        """The leaves that it fills, and which part of each."""
        rows, unit = self.shape[0], native.BLOCK_OUT if self.packed else 1
        parts: dict[ParamPath, tuple[slice, ...]] = {
            self.path: (slice(self.row // unit, (self.row + rows) // unit),)
        }
        if self.scales is not None:
            parts[_SCALES] = (slice(None), slice(self.scales, self.scales + rows))
        return parts

    def fill(self, leaves: Leaves, begin: int, values: npt.NDArray[Any]) -> None:
        """Put the tensor's rows from `begin` on, in this spec's dtype, where they belong in host arrays.

        Of a packed leaf, rows come in whole blocks of 16.
        """
        end, unit = begin + len(values), native.BLOCK_OUT if self.packed else 1
        parts = self.parts
        if self.scales is not None:
            values, scales = native.quantize(values)
            leaves[_SCALES][parts[_SCALES]][:, begin:end] = scales
        target = leaves[self.path][parts[self.path]][begin // unit : end // unit]
        if self.packed:
            native.pack_into(target, np.ascontiguousarray(values))
        else:
            target[...] = values


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
    """One for each tensor of the checkpoint; a tied head has none of its own."""
    return _param_specs(config, model_dtype(config, dtype), linear)


@functools.lru_cache(maxsize=8)
def _param_specs(
    config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat
) -> tuple[ParamSpec, ...]:
    family = family_of(config.architecture)
    model = nnx.eval_shape(lambda: family.build(config, dtype, linear))
    fills = [
        fill
        for path, module in nnx.iter_modules(model)
        for fill in _fills(cast(ParamPath, path), module, dtype, family.tensor_name)
    ]
    return tuple(spec for _, spec in sorted(fills, key=lambda fill: fill[0]))


def _fills(
    path: ParamPath, module: nnx.Module, dtype: np.dtype[np.generic], name: Callable[[ParamPath], str]
) -> Iterator[tuple[ParamPath, ParamSpec]]:
    """The tensors of one module, by the paths that they would have as leaves of their own."""
    if isinstance(module, RMSNorm):
        place = module.weight_at
        tensor: ParamPath = (*path, "weight")
        yield tensor, ParamSpec(name(tensor), _VECTORS, (place.size,), dtype, place.begin)
    elif isinstance(module, Linear):
        row = 0
        for part, size in module.parts:
            layer = (*path[:-1], part)
            tensor = (*layer, "weight")
            scales = None if module.scale_at is None else module.scale_at.begin + row
            shape = (size, module.in_size)
            weight = (*path, "weight")
            yield tensor, ParamSpec(name(tensor), weight, shape, dtype, row, module.packed, scales)
            if module.bias_at is not None:
                tensor = (*layer, "bias")
                yield tensor, ParamSpec(name(tensor), _VECTORS, (size,), dtype, module.bias_at.begin + row)
            row += size


def leaf_shapes(
    config: ModelConfig, dtype: npt.DTypeLike | None = None, linear: LinearFormat = PLAIN
) -> dict[ParamPath, jax.ShapeDtypeStruct]:
    """Every leaf of the state by its path, in the state's order."""
    leaves = _flat(config, model_dtype(config, dtype), linear)
    return {cast(ParamPath, path): leaf for path, leaf in leaves}


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
    leaves = {
        path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaf_shapes(config, dtype, linear).items()
    }
    for spec in specs:
        if len(spec.shape) > 1:
            value = generator.standard_normal(spec.shape, np.float32) * np.float32(std)
        else:
            value = np.full(spec.shape, 0.0 if spec.hf_name.endswith(".bias") else 1.0, np.float32)
        spec.fill(leaves, 0, value.astype(spec.dtype))
    return state_of(config, {path: jnp.asarray(leaf) for path, leaf in leaves.items()}, dtype, linear)
