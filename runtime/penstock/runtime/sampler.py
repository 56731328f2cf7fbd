"""Drawing the next token from logits, inside the compiled step.

Order of filters as in Hugging Face's processors: temperature, top_k, top_p, min_p; ties at a threshold are
all kept. Thresholds come from a radix select over the floats' bits (32 counting passes) instead of a sort,
which XLA does slowly for wide vocabularies. The draw is exact and takes two uniforms: one picks a chunk of
the vocabulary by its mass, the second a token inside it. Both come from fold_in(key(seed), position), so a
request's tokens do not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

_CHUNK = 512
_ARGMAX_CHUNK = 128
_TINY = 1e-30
"""Below every probability that matters, and far from float32's denormals, which compute as 0."""


class SamplingRows(NamedTuple):
    """Sampling parameters, one entry a row."""

    temperature: Array  # float32[R]; 0 = greedy
    top_k: Array  # int32[R]; 0 = off
    top_p: Array  # float32[R]; 1 = off
    min_p: Array  # float32[R]; 0 = off
    seed: Array  # uint32[R, 2]: high and low word
    positions: Array  # int32[R] absolute position of the token that is drawn


def _ordered_bits(x: Array) -> Array:
    """uint32 keys that compare as the float32 values do (NaN aside)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _largest_threshold(keys: Array, weights: Array, need: Array) -> Array:
    """Largest key t per row for which the weights of entries with key >= t sum to at least `need`.

    keys uint32[R, V], weights float32[R, V], need float32[R] -> uint32[R]; 0 where even all together fall
    short.
    """

    def bit(i: Array, t: Array) -> Array:
        trial = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.where(keys >= trial[:, None], weights, 0.0).sum(axis=1)
        return jnp.where(mass >= need, trial, t)

    threshold: Array = lax.fori_loop(0, 32, bit, jnp.zeros(need.shape, jnp.uint32))
    return threshold


def filter_logits(logits: Array, rows: SamplingRows) -> Array:
    """Scale float32[R, V] logits by temperature and set what top_k, top_p and min_p cut to -inf."""
    vocab = logits.shape[1]
    # From the peak down, so that a tiny temperature overflows to -inf and never to several +inf.
    scaled = logits - logits.max(axis=1, keepdims=True)
    scaled /= jnp.where(rows.temperature > 0, jnp.maximum(rows.temperature, _TINY), 1.0)[:, None]

    def cut_top_k(x: Array) -> Array:
        k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab).astype(jnp.float32)
        keys = _ordered_bits(x)
        threshold = _largest_threshold(keys, jnp.ones_like(x), k)
        return jnp.where(keys >= threshold[:, None], x, -jnp.inf)

    def cut_top_p(x: Array) -> Array:
        probs = jax.nn.softmax(x, axis=1)
        # By probability and not by logit: an impossible token (-inf) then never survives a rounded total.
        keys = _ordered_bits(probs)
        # Where top_p underflows to 0 even no token at all would be enough.
        need = jnp.maximum(rows.top_p, _TINY) * probs.sum(axis=1)
        threshold = _largest_threshold(keys, probs, need)
        keep = (keys >= threshold[:, None]) | (rows.top_p >= 1.0)[:, None]
        return jnp.where(keep, x, -jnp.inf)

    scaled = lax.cond(jnp.any(rows.top_k > 0), cut_top_k, lambda x: x, scaled)
    scaled = lax.cond(jnp.any(rows.top_p < 1.0), cut_top_p, lambda x: x, scaled)
    floor = scaled.max(axis=1) + jnp.log(rows.min_p)  # log(0) = -inf keeps all
    return jnp.where(scaled >= floor[:, None], scaled, -jnp.inf)


def _first_past(masses: Array, uniform: Array) -> Array:
    """Index drawn by inverse CDF: float32[R, N] masses (not normalised) and uniforms in [0, 1) -> int32[R].

    Only entries with positive mass are ever drawn, whatever the rounding of the running sums.
    """
    sums = jnp.cumsum(masses, axis=1)
    past = (sums > (uniform * sums[:, -1])[:, None]) & (masses > 0)
    drawn = jnp.argmax(past, axis=1)
    return jnp.where(past.any(axis=1), drawn, jnp.argmax(masses, axis=1)).astype(jnp.int32)


def draw(filtered: Array, rows: SamplingRows) -> Array:
    """Draw one token per row from float32[R, V] log-weights -> int32[R]."""
    num_rows, vocab = filtered.shape

    def uniforms(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (2,), jnp.float32)

    u = jax.vmap(uniforms)(rows.seed, rows.positions)
    weights = jnp.exp(filtered - filtered.max(axis=1, keepdims=True))
    chunk = min(_CHUNK, vocab)
    chunks = jnp.pad(weights, ((0, 0), (0, -vocab % chunk))).reshape(num_rows, -1, chunk)
    which = _first_past(chunks.sum(axis=2), u[:, 0])
    inner = jnp.take_along_axis(chunks, which[:, None, None], axis=1)[:, 0]
    return which * chunk + _first_past(inner, u[:, 1])


def argmax(logits: Array) -> Array:
    """Index of the first largest value of each row of float32[R, V] -> int32[R].

    In two passes, because a maximum is a vector operation and XLA's argmax on CPU is not (0.4 ms against 3.5
    for 16 rows of 152k).
    """
    num_rows, vocab = logits.shape
    whole = vocab // _ARGMAX_CHUNK * _ARGMAX_CHUNK
    tail = jnp.argmax(logits[:, whole:], axis=1) + whole if whole < vocab else None
    if whole == 0:
        assert tail is not None
        return tail.astype(jnp.int32)
    chunks = logits[:, :whole].reshape(num_rows, -1, _ARGMAX_CHUNK)
    which = jnp.argmax(chunks.max(axis=2), axis=1)
    inner = jnp.take_along_axis(chunks, which[:, None, None], axis=1)[:, 0]
    best = which * _ARGMAX_CHUNK + jnp.argmax(inner, axis=1)
    if tail is not None:
        better = jnp.take_along_axis(logits, tail[:, None], axis=1) > inner.max(axis=1, keepdims=True)
        best = jnp.where(better[:, 0], tail, best)
    return best.astype(jnp.int32)


def sample(logits: Array, rows: SamplingRows, any_sampling: Array) -> Array:
    """Next token of each row: float32[R, V] -> int32[R]. `any_sampling` false (all greedy) skips the filters
    and the draw.
    """
    greedy = argmax(logits)

    def mixed(x: Array) -> Array:
        return jnp.where(rows.temperature > 0, draw(filter_logits(x, rows), rows), greedy)

    tokens: Array = lax.cond(any_sampling, mixed, lambda _: greedy, logits)
    return tokens


def token_logprobs(logits: Array, tokens: Array, num_top: int) -> tuple[Array, Array, Array]:
    """Log-probabilities under raw logits: sampled float32[R], top ids int32[R, num_top] and theirs float32[R,
    num_top].
    """
    norm = jax.nn.logsumexp(logits, axis=1)
    sampled = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - norm
    if num_top == 0:
        empty = jnp.zeros((logits.shape[0], 0))
        return sampled, empty.astype(jnp.int32), empty.astype(jnp.float32)
    values, ids = lax.top_k(logits, num_top)
    return sampled, ids.astype(jnp.int32), values - norm[:, None]
