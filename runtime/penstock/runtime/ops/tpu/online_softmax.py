"""The online softmax (Milakov and Gimelshein 2018) of the kernels for TPUs, page by page. No array is kept
here: the kernels give their own memory on the chip.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

_LOW = -1e30
"""Below all scores, and finite, so that differences of such scores are numbers."""


class OnlineSoftmax(NamedTuple):
    """What is known of the pages so far, for several heads of R queries each; all float32."""

    peaks: Any
    """The largest score of each query, [heads, R, lanes], the same in all lanes."""
    totals: Any
    """The sum of exp(score - peak), likewise."""
    sums: Any
    """The values, added up with these weights, [heads, R, dim]."""

    def begin(self) -> None:
        """Forget all pages."""
        self.peaks[...] = jnp.full(self.peaks.shape, _LOW, jnp.float32)
        self.totals[...] = jnp.zeros(self.totals.shape, jnp.float32)
        self.sums[...] = jnp.zeros(self.sums.shape, jnp.float32)

    def take(
        self,
        head: int,
        queries: Array,
        keys: Array,
        values: Array,
        seen: Array,
        *,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Take in a page. queries bfloat16[R, dim]; keys, values bfloat16[page, dim], of which no value may
        be NaN; seen bool[R, page]: what each query attends to.
        """
        scores = scale * lax.dot_general(
            queries, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen, scores, _LOW)
        peak = self.peaks[head, :, :1]
        top = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
        fade = jnp.exp(peak - top)
        weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
        total = self.totals[head, :, :1] * fade + weights.sum(axis=1, keepdims=True)
        self.sums[head] = self.sums[head] * fade + jnp.dot(
            weights.astype(jnp.bfloat16), values, preferred_element_type=jnp.float32
        )
        self.peaks[head] = jnp.broadcast_to(top, self.peaks.shape[1:])
        self.totals[head] = jnp.broadcast_to(total, self.totals.shape[1:])

    def result(self, head: int, sink: Array | None) -> Array:
        """Return the mean of the values, float32[R, dim]; 0 for a query that attends to nothing. sink: one
        more score, without a value, float32[R, 1] or [1, 1].
        """
        peak, total = self.peaks[head, :, :1], self.totals[head, :, :1]
        fade = jnp.ones_like(peak)
        if sink is not None:
            top = jnp.maximum(peak, sink)
            fade = jnp.exp(peak - top)
            total = total * fade + jnp.exp(sink - top)
        mean: Array = self.sums[head] * fade / jnp.maximum(total, 1e-30)
        return mean
