"""Temperature and the filters that keep the likeliest tokens, in plain XLA.

The order is temperature, top_k, top_p, min_p, as with Hugging Face's processors, and all ties at a threshold
are kept. `native/src/sample/sample_row.cc` has the same filters in C++. Thresholds are found by a radix
select over the floats' bits (32 counting passes), not by a sort.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.sampling_rows import SamplingRows

_TINY = 1e-30
"""Below every probability that matters, and far above float32's denormals, which compute as 0."""


def _ordered_bits(x: Array) -> Array:
    """Return uint32 keys that compare as the float32 values do (NaN aside)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _largest_threshold(keys: Array, weights: Array, need: Array) -> Array:
    """Find for each row the largest key t for which the weights of all entries with key >= t sum to at least
    `need`.

    keys uint32[R, V], weights float32[R, V], need float32[R] -> uint32[R]; 0 if even all entries together
    fall short.
    """

    def bit(i: Array, t: Array) -> Array:
        trial = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.where(keys >= trial[:, None], weights, 0.0).sum(axis=1)
        return jnp.where(mass >= need, trial, t)

    threshold: Array = lax.fori_loop(0, 32, bit, jnp.zeros(need.shape, jnp.uint32))
    return threshold


def filter_logits(logits: Array, rows: SamplingRows) -> Array:
    """Divide logits float32[R, V] by the temperature, and set those that top_k, top_p and min_p remove to
    -inf.
    """
    vocab = logits.shape[1]
    temperature, top_k, top_p = rows.number("temperature"), rows.number("top_k"), rows.number("top_p")
    # Relative to the largest logit, so that a tiny temperature overflows to -inf and never to several +inf.
    scaled = logits - logits.max(axis=1, keepdims=True)
    scaled /= jnp.where(temperature > 0, jnp.maximum(temperature, _TINY), 1.0)[:, None]

    def cut_top_k(x: Array) -> Array:
        k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab).astype(jnp.float32)
        keys = _ordered_bits(x)
        threshold = _largest_threshold(keys, jnp.ones_like(x), k)
        return jnp.where(keys >= threshold[:, None], x, -jnp.inf)

    def cut_top_p(x: Array) -> Array:
        probs = jax.nn.softmax(x, axis=1)
        # The threshold is a probability, not a logit, so an impossible token (-inf) never survives rounding.
        keys = _ordered_bits(probs)
        # If top_p underflowed to 0, no token at all would be enough.
        need = jnp.maximum(top_p, _TINY) * probs.sum(axis=1)
        threshold = _largest_threshold(keys, probs, need)
        keep = (keys >= threshold[:, None]) | (top_p >= 1.0)[:, None]
        return jnp.where(keep, x, -jnp.inf)

    scaled = lax.cond(jnp.any(top_k > 0), cut_top_k, lambda x: x, scaled)
    scaled = lax.cond(jnp.any(top_p < 1.0), cut_top_p, lambda x: x, scaled)
    floor = scaled.max(axis=1) + jnp.log(rows.number("min_p"))  # log(0) = -inf keeps all
    return jnp.where(scaled >= floor[:, None], scaled, -jnp.inf)
