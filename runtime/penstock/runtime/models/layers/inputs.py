"""What every layer reads and none changes, and how a layer's parts join the residual stream."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from penstock.runtime.models import rope
from penstock.runtime.models.config import QueryScaling
from penstock.runtime.models.layers.distances import Distances
from penstock.runtime.models.linear import Linear, add_normalised, add_projected, project
from penstock.runtime.models.norms import Norm
from penstock.runtime.models.pools import Pools
from penstock.runtime.models.rope import RopeConfig
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp
from penstock.runtime.ops.recurrent.operations import RecurrentOps


class Angles:
    """What depends on the tokens' positions alone. Layers with the same rotation share one computation."""

    def __init__(self, positions: jax.Array, rotary: jax.Array | None = None) -> None:
        """positions: int32 [T]. rotary: the positions by which M-RoPE turns, int32 [3, T]; None: all three
        are `positions`.
        """
        self._positions, self._rotary = positions, rotary
        self._turns: dict[tuple[RopeConfig, int], tuple[jax.Array, jax.Array]] = {}
        self._scales: dict[QueryScaling, jax.Array] = {}

    def cos_sin(self, config: RopeConfig, rotary_dim: int) -> tuple[jax.Array, jax.Array]:
        """Compute cosines and sines of RoPE's angles, each float32 [T, rotary_dim / 2]."""
        key = (config, rotary_dim)
        if key not in self._turns:
            rotary = self._rotary if config.sections else None
            self._turns[key] = rope.cos_sin(config, rotary_dim, self._positions if rotary is None else rotary)
        return self._turns[key]

    def query_scale(self, scaling: QueryScaling) -> jax.Array:
        """Return what the queries of each token are multiplied by, float32 [T]."""
        if scaling not in self._scales:
            position = (self._positions + scaling.shift).astype(jnp.float32)
            steps = jnp.floor(position / np.float32(scaling.length))
            self._scales[scaling] = np.float32(1) + np.float32(scaling.strength) * jnp.log1p(steps)
        return self._scales[scaling]


class LayerInputs(NamedTuple):
    """The values that every layer reads and none changes."""

    angles: Angles
    metas: tuple[AttentionMeta, ...]
    """One for each group of the cache's layers. They differ in pages only."""
    attention: AttentionOp
    recurrent: RecurrentOps
    pools: Pools
    shared_kv: dict[int, tuple[jax.Array, jax.Array]]
    """Layer to its keys and values of this step [T, K, D], for later layers that share them."""
    distances: Distances | None = None
    """What an encoder adds to scores for how far apart query and key are; None: nothing."""

    @property
    def num_tokens(self) -> jax.Array:
        """How many tokens are not padding, int32 []; these come first."""
        return self.metas[0].num_tokens


class Passed(NamedTuple):
    """What one layer hands to the next."""

    x: jax.Array
    """The hidden states [T, E]."""
    of_layers: jax.Array | None
    """The tokens' embeddings for each layer [T, layers, size], if the model has such."""


class Residual(NamedTuple):
    """How an attention or an MLP joins the residual stream: sum_norm(x + multiplier * norm(y))."""

    norm: Norm | None = None
    multiplier: float = 1.0
    natively: bool = False
    """Whether the CPU kernel does it where no product can."""
    onto: jax.Array | None = None
    """What is added to, if it is not x."""
    sum_norm: Norm | None = None

    def add_projected(self, linear: Linear, y: jax.Array, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Add linear(y): y [T, in], x [T, E] -> [T, E]."""
        if self.onto is not None:
            x = self.onto
        if self.norm is None:
            multiplier, rows, pools = self.multiplier, inputs.num_tokens, inputs.pools
            return add_projected(linear, y, x, rows, pools, multiplier=multiplier, norm=self.sum_norm)
        return self.add(project(linear, y, inputs.num_tokens, inputs.pools), x, inputs)

    def add(self, y: jax.Array, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Add y: y and x [T, E] -> [T, E]."""
        joined = add_normalised(
            y,
            x,
            inputs.num_tokens,
            inputs.pools,
            norm=self.norm,
            multiplier=self.multiplier,
            natively=self.natively,
        )
        return joined if self.sum_norm is None else self.sum_norm(joined, inputs.pools)
