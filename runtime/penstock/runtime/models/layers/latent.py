"""Latent attention (DeepSeek-V2, arXiv 2405.04434): all heads share one small vector of each cached token.

The paper's form makes of a token's latent a key and a value for each head. Here the heads' matrices are
applied on the other side instead, which is the same product in another order: a query is turned into a query
of the latent itself, and what attention sums up are latents, of which each head then makes its value. So
nothing of the size of all heads' keys is ever made, and attention reads a cached vector once for all heads.
This costs 2 latent_dim + rope_dim products for each pair of positions and head, where the paper's form costs
nope_dim + rope_dim + value_dim: for DeepSeek V3 1088 and 320. Prompts take this form too.

Shapes: T tokens, H heads, L latent_dim, N nope_dim, R rope_dim, V value_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from penstock.runtime.models import rope
from penstock.runtime.models.config import LatentConfig, ModelConfig
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.linear import Linear, LinearFormat, project
from penstock.runtime.models.load_rules import (
    Cut,
    LoadRule,
    ParamPath,
    Span,
    StoredAt,
    Target,
    copy_rows,
    pack_rows,
)
from penstock.runtime.models.norms import Norm, RMSNorm
from penstock.runtime.models.pools import PoolPlanners
from penstock.runtime.ops.adapters import AdapterPlace, AdapterRows, added, where_any
from penstock.runtime.ops.attention import AttentionOptions
from penstock.runtime.ops.native import linear as native
from penstock.runtime.ops.native.experts import PackedExperts, batched
from penstock.runtime.ops.native.linear import can_rotate, rotate
from penstock.runtime.ops.native.norm import can_normalize, normalize


class LatentAttention(nnx.Module):
    """The attention of one layer."""

    def __init__(
        self,
        model: ModelConfig,
        config: LatentConfig,
        group: int,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        """`group`: the cache group of the layer, see `LayerInputs.metas`."""
        hidden, heads, rank = model.hidden_size, config.num_heads, config.query_rank
        query = heads * (config.nope_dim + config.rope_dim)

        def product(size: int, name: str, out: int, *, bias: bool, pieces: int = 1, sums: int = 1) -> Linear:
            return Linear(
                size,
                {name: out},
                dtype,
                planners,
                bias=bias,
                linear=linear,
                cuts={name: (Span(pieces, out),)},
                sums=sums,
            )

        if rank is None:
            self.q_a_proj = self.q_a_layernorm = None
            self.q_proj = product(hidden, "q_proj", query, bias=False, pieces=config.pieces)
        else:
            self.q_a_proj = product(hidden, "q_a_proj", rank, bias=config.bias)
            self.q_a_layernorm = RMSNorm(rank, config.norm_eps, planners)
            self.q_proj = product(rank, "q_b_proj", query, bias=False, pieces=config.pieces)
        kept = config.latent_dim + config.rope_dim
        self.kv_a_proj = product(hidden, "kv_a_proj_with_mqa", kept, bias=config.bias)
        self.kv_a_layernorm = RMSNorm(config.latent_dim, config.norm_eps, planners)
        self.key_up = HeadProducts(config, dtype, linear, keys=True)
        self.value_up = HeadProducts(config, dtype, linear, keys=False)
        self.o_proj = product(
            heads * config.value_dim, "o_proj", hidden, bias=config.bias, sums=config.pieces
        )
        self.config, self.group = config, group
        self.rotates_natively = linear.packed and can_rotate(config.rope_dim, config.rope_dim)
        self.normalises_natively = linear.packed and can_normalize(config.latent_dim)

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute everything but `attention` itself."""
        linears = (self.q_a_proj, self.q_proj, self.kv_a_proj, self.o_proj)
        packed = all(product is None or product.packed for product in linears)
        absorbed = self.key_up.packed and self.value_up.packed
        return packed and absorbed and self.rotates_natively and self.normalises_natively

    def __call__(
        self,
        x: jax.Array,
        norm: Norm | None,
        residual: Residual,
        kv: jax.Array,
        inputs: LayerInputs,
    ) -> tuple[jax.Array, jax.Array]:
        """Add to x what attention to norm(x) gives: x [T, E] -> ([T, E], the layer's new cache)."""
        config, pools, rows = self.config, inputs.pools, inputs.num_tokens
        num_tokens = x.shape[0]
        if self.q_a_proj is None:
            q = project(self.q_proj, x, rows, pools, norm=norm)
        else:
            q = project(self.q_a_proj, x, rows, pools, norm=norm)
            q = project(self.q_proj, q, rows, pools, norm=self.q_a_layernorm)
        q = q.reshape(num_tokens, config.num_heads, -1)
        kept = project(self.kv_a_proj, x, rows, pools, norm=norm)
        latent = self._normalised(kept[:, : config.latent_dim], inputs)
        q_turned, k_turned = self._rotated(q[..., config.nope_dim :], kept[:, config.latent_dim :], inputs)
        q_latent = self.key_up(q[..., : config.nope_dim], inputs)
        out, kv = inputs.attention(
            jnp.concatenate([q_latent, q_turned], axis=2),
            jnp.concatenate([latent[:, None], k_turned], axis=2),
            None,
            kv,
            inputs.metas[self.group],
            AttentionOptions(config.scale, value_dim=config.latent_dim),
        )
        values = self.value_up(out, inputs).reshape(num_tokens, -1)
        return residual.add_projected(self.o_proj, values, x, inputs), kv

    def _normalised(self, latent: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Normalise latent [T, L] by its norm."""
        norm, pools = self.kv_a_layernorm, inputs.pools
        if not self.normalises_natively:
            return norm(latent, pools)
        at, rows = norm.weight_at.begin, inputs.num_tokens
        return normalize(latent, num_rows=rows, eps=norm.eps, norm=pools.vectors, norm_at=at)

    def _rotated(self, q: jax.Array, k: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        """Turn q [T, H, R] and k [T, R] -> q [T, H, R] and k [T, 1, R], rotated."""
        config = self.config
        cos, sin = inputs.angles.cos_sin(config.rope, config.rope_dim)
        if not self.rotates_natively:
            return rope.rotate(q, cos, sin), rope.rotate(k[:, None], cos, sin)
        rows = inputs.num_tokens
        return rotate(q, cos, sin, num_rows=rows), rotate(k[:, None], cos, sin, num_rows=rows)


class HeadProducts(nnx.Module):
    """y[t, h] = x[t, h] W_h^T: a product for each head, with a weight [out, in] of its own.

    The weights are rows of the checkpoint's kv_b_proj, which has for each head N rows that make its key of a
    latent, and then V rows that make its value. For `keys`, W_h is the transpose of the first, [L, N]: it
    makes of a query one of the latent. Else W_h is the second, [V, L]. They stay in the model's dtype where
    other weights are int8, because they are few.
    """

    def __init__(self, config: LatentConfig, dtype: jnp.dtype, linear: LinearFormat, *, keys: bool) -> None:
        latent = config.latent_dim
        out_size, in_size = (latent, config.nope_dim) if keys else (config.value_dim, latent)
        self.packed = linear.packed and native.can_pack(out_size, in_size)
        matrix = native.packed_shape(out_size, in_size, int8=False) if self.packed else (out_size, in_size)
        self.weight = nnx.Param(jnp.zeros((config.num_heads, *matrix), dtype))
        self.keys, self.config, self.in_size = keys, config, in_size
        self.adapter_at: AdapterPlace | None = None
        """Where adapters have their matrices for all of kv_b_proj; None: none may change it."""

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`; each head has a rule."""
        config, leaf = self.config, (*path, "weight")
        per_head = config.nope_dim + config.value_dim
        first, num_rows = (0, config.nope_dim) if self.keys else (config.nope_dim, config.value_dim)
        tensor: ParamPath = (*path[:-1], "kv_b_proj", "weight")
        of_piece = config.num_heads * per_head
        there = stored(tensor, (config.pieces * of_piece, config.latent_dim))
        if self.keys:
            put = pack_columns if self.packed else copy_columns
            block = self.in_size // self.weight.shape[2] if self.packed else 1
        else:
            put = pack_rows if self.packed else copy_rows
            block = native.BLOCK_OUT if self.packed else 1
        for head in range(config.num_heads):
            begin = head * per_head + first
            sources = tuple(
                dataclasses.replace(source, begin=source.begin + begin) for source in there.sources
            )
            target = Target(leaf, at=(head,), axis=1 if self.keys else 0, rows_per_entry=block)
            rule = LoadRule(
                sources=sources,
                targets=(target,),
                num_rows=num_rows,
                dtype=dtype,
                decode=there.decode,
                put=put,
                cut=Cut(along="rows", spans=(Span(config.pieces, of_piece),)),
            )
            yield tensor, rule

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Compute x [T, H, in] -> [T, H, out] in x's dtype."""
        weight, rows = self.weight[...], inputs.pools.adapters
        if self.packed:
            y = batched(x, PackedExperts(weight), num_rows=inputs.num_tokens)
        else:
            precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
            options: Any = {"precision": precision, "preferred_element_type": jnp.float32}
            y = jnp.einsum("thk,hnk->thn", x, weight, **options).astype(x.dtype)
        if rows is None or self.adapter_at is None:
            return y
        return added(y.astype(jnp.float32), self._delta(x, rows, self.adapter_at), rows).astype(x.dtype)

    def _delta(self, x: jax.Array, rows: AdapterRows, place: AdapterPlace) -> jax.Array:
        """Compute what the tokens' adapters of kv_b_proj add: x [T, H, in] -> float32 [T, H, out]. For keys
        the product is that with the transpose, so B comes before A.
        """
        config, heads = self.config, x.shape[1]

        def made(x: jax.Array, rows: AdapterRows) -> jax.Array:
            wide, a = x.astype(jnp.float32), rows.a(place, 0)
            b = rows.b(place, 0).reshape(len(x), rows.rank, heads, -1)
            precision = jax.lax.Precision.HIGHEST
            if self.keys:
                small = jnp.einsum("thn,trhn->thr", wide, b[..., : config.nope_dim], precision=precision)
                return jnp.einsum("thr,tlr->thl", small, a, precision=precision)
            small = jnp.einsum("thl,tlr->thr", wide, a, precision=precision)
            return jnp.einsum("thr,trhv->thv", small, b[..., config.nope_dim :], precision=precision)

        return where_any(made, x, rows, place, (heads, config.latent_dim if self.keys else config.value_dim))


def copy_columns(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Make the rows columns of the part."""
    parts[0][...] = rows[0].T


def pack_columns(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Pack the rows, as columns, into tiles for the native kernels."""
    tiles = np.empty(parts[0].shape, parts[0].dtype)
    native.pack_into(tiles, np.ascontiguousarray(rows[0].T))
    parts[0][...] = tiles
