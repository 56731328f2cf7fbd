"""What encoders add to the scores of attention for how far apart query and key are."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from penstock.runtime.models.configs.encoder import DistanceConfig
from penstock.runtime.models.linear import Linear, project
from penstock.runtime.models.pools import Pools
from penstock.runtime.ops.attention import AttentionOp
from penstock.runtime.ops.both_ways import DistanceScores, attend_both_ways


class Distances(NamedTuple):
    """The table of distances, which all layers share."""

    config: DistanceConfig
    table: jax.Array
    """[entries, heads] of biases, or [entries, E] of vectors."""

    def attention(self, q: jax.Array, k: jax.Array, qkv: Linear, pools: Pools, scale: float) -> AttentionOp:
        """Compute attention that adds the scores. q, k [T, heads, D]; qkv: the layer's product, which also
        makes queries and keys of the table's vectors. Their scores are multiplied by `scale`, as all are.
        """
        config = self.config
        entries = jnp.asarray(np.asarray(config.entries, np.int32))
        if config.kind == "bias":
            shape = (q.shape[0], q.shape[1], config.size)
            scores = DistanceScores(entries, jnp.broadcast_to(self.table.T.astype(jnp.float32), shape), None)
            return functools.partial(attend_both_ways, distances=scores)
        made = project(qkv, self.table, jnp.int32(config.size), pools)
        queries, keys, _ = jnp.split(made, 3, axis=1)

        def of(x: jax.Array, vectors: jax.Array, *, wanted: bool) -> jax.Array | None:
            if not wanted:
                return None
            heads = vectors.reshape(config.size, *x.shape[1:]).astype(jnp.float32)
            precision = jax.lax.Precision.HIGHEST
            wide = x.astype(jnp.float32)
            return jnp.einsum("thd,phd->thp", wide, heads, precision=precision) * np.float32(scale)

        by_queries = of(q, keys, wanted=config.by_queries)
        scores = DistanceScores(entries, by_queries, of(k, queries, wanted=config.by_keys))
        return functools.partial(attend_both_ways, distances=scores)
