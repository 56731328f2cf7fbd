"""Norms, and other small parameters that have places in the model's pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.load_rules import Cut, LoadRule, ParamPath, Span, StoredAt, Target
from penstock.runtime.models.pools import FLOATS, VECTORS, Place, PoolPlanners, Pools


def vector_rule(
    tensor: ParamPath,
    place: Place,
    dtype: np.dtype[np.generic],
    stored: StoredAt,
    pool: ParamPath = VECTORS,
    cut: Cut | None = None,
) -> tuple[ParamPath, LoadRule]:
    """Return the rule that puts a norm or bias into its place in a pool."""
    whole = sum(span.whole for span in cut.spans) if cut is not None and cut.along == "rows" else place.size
    there = stored(tensor, (whole,))
    rule = LoadRule(
        sources=there.sources,
        targets=(Target(pool, begin=place.begin),),
        num_rows=place.size,
        dtype=dtype,
        decode=there.decode,
        cut=cut,
    )
    return tensor, rule


class Vector(nnx.Module):
    """A small parameter that is no norm and no bias of a product, such as one number for each head."""

    def __init__(
        self, name: str, size: int, planners: PoolPlanners, *, float32: bool = False, pieces: int = 1
    ) -> None:
        """`name`: the last part of its path in the checkpoint. float32: it keeps this dtype in a model of any
        dtype. pieces: into how many it is cut, of which one has `size`.
        """
        self.name, self.float32, self.cut = name, float32, Cut(along="rows", spans=(Span(pieces, size),))
        self.at = (planners.floats if float32 else planners.vectors).take(size)

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`."""
        tensor = (*path[:-1], self.name)
        if self.float32:
            yield vector_rule(tensor, self.at, np.dtype(np.float32), stored, FLOATS, self.cut)
        else:
            yield vector_rule(tensor, self.at, dtype, stored, cut=self.cut)

    def __call__(self, pools: Pools) -> jax.Array:
        """Return the values, [size]."""
        pool = pools.floats if self.float32 else pools.vectors
        assert pool is not None
        return pool[self.at.columns]


class RMSNorm(nnx.Module):
    """Root mean square norm over the last dimension, in float32 (Zhang and Sennrich 2019), times `offset` +
    weight.
    """

    def __init__(
        self, size: int, eps: float, planners: PoolPlanners, *, offset: float = 0.0, pieces: int = 1
    ) -> None:
        """pieces: into how many the channels are cut, of which one has `size`."""
        self.weight_at = planners.vectors.take(size)
        self.eps, self.offset = eps, offset
        self.cut = Cut(along="rows", spans=(Span(pieces, size),))

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`."""
        yield vector_rule((*path, "weight"), self.weight_at, dtype, stored, cut=self.cut)

    def __call__(self, x: jax.Array, pools: Pools, mean_square: jax.Array | None = None) -> jax.Array:
        """Normalise x [..., size] -> the same shape and dtype. mean_square: that of all channels, float32
        [..., 1], where they are cut.
        """
        wide = x.astype(jnp.float32)
        if mean_square is None:
            mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        weight = pools.vectors[self.weight_at.columns].astype(jnp.float32) + np.float32(self.offset)
        weight = weight.reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * jax.lax.rsqrt(mean_square + np.float32(self.eps)) * weight).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm over the last dimension, in float32 (Ba et al. 2016), with weight and bias, or without."""

    def __init__(
        self,
        size: int,
        eps: float,
        planners: PoolPlanners,
        *,
        weight: bool = True,
        bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        """offset: added to the weights."""
        self.weight_at = planners.vectors.take(size) if weight else None
        self.bias_at = planners.vectors.take(size) if bias else None
        self.eps, self.offset = eps, offset

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`."""
        for name, place in (("weight", self.weight_at), ("bias", self.bias_at)):
            if place is not None:
                yield vector_rule((*path, name), place, dtype, stored)

    def __call__(self, x: jax.Array, pools: Pools) -> jax.Array:
        """Normalise x [..., size] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + np.float32(self.eps))

        def of(place: Place) -> jax.Array:
            values = pools.vectors[place.columns].astype(jnp.float32)
            return values.reshape((1,) * (x.ndim - 1) + (-1,))

        if self.weight_at is not None:
            y = y * (of(self.weight_at) + np.float32(self.offset))
        if self.bias_at is not None:
            y = y + of(self.bias_at)
        return y.astype(x.dtype)


class HeadNorms(nnx.Module):
    """Layer norms of heads, each with weights of its own and without biases."""

    def __init__(self, num_heads: int, dim: int, eps: float, planners: PoolPlanners) -> None:
        self.weight_at = planners.vectors.take(num_heads * dim)
        self.num_heads, self.dim = num_heads, dim
        self.norm = LayerNorm(dim, eps, planners, weight=False, bias=False)

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`."""
        for head in range(self.num_heads):
            place = Place(self.weight_at.begin + head * self.dim, self.dim)
            yield vector_rule((*path, head, "weight"), place, dtype, stored)

    def __call__(self, x: jax.Array, pools: Pools) -> jax.Array:
        """Normalise x [T, heads, dim] -> the same shape and dtype."""
        weight = pools.vectors[self.weight_at.columns].astype(jnp.float32)
        y = self.norm(x.astype(jnp.float32), pools) * weight.reshape(1, self.num_heads, self.dim)
        return y.astype(x.dtype)


Norm: TypeAlias = RMSNorm | LayerNorm


def unit_mean_square(x: jax.Array, eps: float) -> jax.Array:
    """Divide x [..., size] by the root mean square of the last dimension, in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + np.float32(eps))).astype(x.dtype)


def hidden_norm(config: ModelConfig, planners: PoolPlanners) -> Norm:
    """Make a norm of the model's hidden states."""
    size, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
    if config.norm == "rms":
        return RMSNorm(size, eps, planners, offset=offset)
    weight, bias = config.norm != "layer_alone", config.norm == "layer"
    return LayerNorm(size, eps, planners, weight=weight, bias=bias, offset=offset)
