"""How the embeddings of images join a step: they take the place of tokens' embeddings, and those of further
depth are added to what the first layers give.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class MediaInputs(NamedTuple):
    """What a step of a model that reads images has beside its tokens. T tokens."""

    positions: jax.Array
    """By which M-RoPE turns each token: time, row and column, int32 [3, T]."""
    rows: jax.Array | None = None
    """The row of `embeddings` that each token has, int32 [T]. Past their end: the token is no part of an
    image. None: no token is."""
    embeddings: tuple[jax.Array, ...] | None = None
    """Embeddings of images [rows, E]: what replaces those of tokens, then what is added after layer 0, 1,
    and so on."""
    reach: jax.Array | None = None
    """See `AttentionMeta.reach`; None: no token sees one behind it."""

    def replace(self, x: jax.Array) -> jax.Array:
        """Turn x [T, E], the tokens' embeddings -> the same with those of images in their places."""
        if self.rows is None or self.embeddings is None:
            return x
        return jnp.where(self._is_image[:, None], self._rows_of(self.embeddings[0], x), x)

    def add(self, x: jax.Array, layer: int) -> jax.Array:
        """Turn x [T, E], what `layer` gives -> the same with what is added to tokens of images there."""
        if self.rows is None or self.embeddings is None or layer + 1 >= len(self.embeddings):
            return x
        added = self._rows_of(self.embeddings[layer + 1], x)
        return jnp.where(self._is_image[:, None], x + added, x)

    @property
    def _is_image(self) -> jax.Array:
        assert self.rows is not None
        assert self.embeddings is not None
        return self.rows < self.embeddings[0].shape[0]

    def _rows_of(self, embeddings: jax.Array, x: jax.Array) -> jax.Array:
        return embeddings.at[self.rows].get(mode="clip").astype(x.dtype)
