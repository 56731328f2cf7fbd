"""Samples the next token from logits, inside the compiled step, in plain XLA: for accelerators, and as the
reference for the native CPU kernel (`native.sample`).

The steps, in this order: repetition penalty (Hugging Face's); frequency and presence penalty (OpenAI's);
bias; what is forbidden (a bias of -inf, stop ids before min_tokens, a constraint's mask); then Hugging Face's
processors: temperature, top_k, top_p, min_p, which keep all ties at a threshold. If all tokens are forbidden,
only the mask counts, and without a mask nothing is forbidden.

Temperature and the filters are in `filters`. The draw is exact and takes two uniforms: one picks a chunk of
the vocabulary by its mass, the other a token inside it. Both come from fold_in(key(seed), position), so a
request's tokens do not depend on what else is in the batch.

`report` makes of the log-probabilities of sampled tokens one array of integers, which the host reads
(`read_logprobs`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from penstock.runtime.ops.filters import filter_logits
from penstock.runtime.ops.sampling_codes import (
    BANNED,
    BIAS,
    IN_PROMPT,
    LOGPROBS,
    MASK,
    NON_FINITE,
    PENALTIES,
    SAMPLING,
)
from penstock.runtime.ops.sampling_rows import SamplingRows
from penstock.runtime.requests.request import TokenLogprobs

_CHUNK = 512
_ARGMAX_CHUNK = 128


class RowState(NamedTuple):
    """What stays on the device between steps. It has one entry for each of S slots, or of F feature slots."""

    tokens: Array  # int32[S] the token each slot sampled last
    # For each group of layers int32[S, P], pages of the KV cache; entries past a row's end, or before its
    # sliding window, are stale and of no account.
    tables: tuple[Array, ...]
    history: Array  # int32[F, V] how often each token was generated, plus IN_PROMPT; only where PENALTIES
    bias: Array  # float32[F, V] added to the logits, -inf = forbidden; only where BIAS
    held: Array | None = None  # int32[S] after how many positions copy 0 of each slot's state stands
    guesses: Array | None = None  # int32[S, K] what a draft model guesses to follow; None where there is none
    # int32[S, CONTEXT] the newest tokens after the slot's last text window; None where windows read no text.
    recent: Array | None = None


class Sampled(NamedTuple):
    """One token for each row and, with LOGPROBS, log-probabilities under the raw logits."""

    tokens: Array  # int32[R]; NON_FINITE where there is none
    logprobs: Array  # float32[R]
    top_ids: Array  # int32[R, num_top] likeliest first
    top_logprobs: Array  # float32[R, num_top]


class SamplerOp(Protocol):
    """Samples the next token of each row."""

    def __call__(
        self,
        logits: Array,
        state: RowState,
        rows: SamplingRows,
        flags: Array,
        mask: Array | None,
        *,
        num_top: int,
    ) -> Sampled:
        """Sample from logits float32[R, V], raw; flags int32[]; mask int32[R, ceil(V / 32)], packed bits, or
        None if no row has MASK.
        """
        ...


def _first_past(masses: Array, uniform: Array) -> Array:
    """Draw an index by inverse CDF: masses float32[R, N] (not normalised) and uniforms in [0, 1) -> int32[R].

    Only entries with positive mass are ever drawn, whatever the rounding of the running sums.
    """
    sums = jnp.cumsum(masses, axis=1)
    past = (sums > (uniform * sums[:, -1])[:, None]) & (masses > 0)
    drawn = jnp.argmax(past, axis=1)
    return jnp.where(past.any(axis=1), drawn, jnp.argmax(masses, axis=1)).astype(jnp.int32)


def uniforms(rows: SamplingRows) -> Array:
    """Draw float32[R, 2] in [0, 1): the random numbers for each row's next token."""

    def of(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (2,), jnp.float32)

    return jax.vmap(of)(rows.seed, rows.positions)


def draw(filtered: Array, rows: SamplingRows) -> Array:
    """Draw one token for each row from log-weights float32[R, V] -> int32[R]."""
    num_rows, vocab = filtered.shape
    u = uniforms(rows)
    weights = jnp.exp(filtered - filtered.max(axis=1, keepdims=True))
    chunk = min(_CHUNK, vocab)
    chunks = jnp.pad(weights, ((0, 0), (0, -vocab % chunk))).reshape(num_rows, -1, chunk)
    which = _first_past(chunks.sum(axis=2), u[:, 0])
    inner = jnp.take_along_axis(chunks, which[:, None, None], axis=1)[:, 0]
    return which * chunk + _first_past(inner, u[:, 1])


def argmax(logits: Array) -> Array:
    """Return the index of the first largest value of each row of float32[R, V] -> int32[R].

    It takes two passes, because a maximum is a vector operation and XLA's argmax on CPU is not (0.4 ms
    against 3.5 ms for 16 rows of 152k).
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


def sample(
    logits: Array, state: RowState, rows: SamplingRows, flags: Array, mask: Array | None, *, num_top: int
) -> Sampled:
    """Sample in XLA, as a `SamplerOp`. This skips what no row asks for, by `flags`."""
    sampled: Sampled = lax.cond(
        flags == 0,
        lambda: _sample_greedily(logits, num_top),
        lambda: _sample_any(logits, state, rows, flags, mask, num_top=num_top),
    )
    return sampled


def _sample_greedily(logits: Array, num_top: int) -> Sampled:
    """Return what `sample` gives where no row asks for anything: one condition costs a GPU less than each of
    those that it would skip.
    """
    tokens = jnp.where(jnp.isfinite(logits.max(axis=1)), argmax(logits), NON_FINITE)
    return Sampled(tokens, *_no_logprobs(logits.shape[0], num_top))


def _no_logprobs(num_rows: int, num_top: int) -> tuple[Array, Array, Array]:
    none = jnp.zeros((num_rows, num_top))
    return none.sum(axis=1).astype(jnp.float32), none.astype(jnp.int32), none.astype(jnp.float32)


def _sample_any(
    logits: Array, state: RowState, rows: SamplingRows, flags: Array, mask: Array | None, *, num_top: int
) -> Sampled:
    peak = logits.max(axis=1)
    shaped = _shape(logits, state, rows, flags, mask)
    greedy = argmax(shaped)

    def mixed(x: Array) -> Array:
        return jnp.where(rows.number("temperature") > 0, draw(filter_logits(x, rows), rows), greedy)

    tokens = lax.cond(_any(flags, SAMPLING), mixed, lambda _: greedy, shaped)
    tokens = jnp.where(jnp.isfinite(peak), tokens, NON_FINITE)
    logprobs, top_ids, top_logprobs = lax.cond(
        _any(flags, LOGPROBS),
        lambda: token_logprobs(logits, jnp.maximum(tokens, 0), num_top),
        lambda: _no_logprobs(logits.shape[0], num_top),
    )
    return Sampled(tokens, logprobs, top_ids, top_logprobs)


def _any(flags: Array, bit: int) -> Array:
    return (flags & bit) != 0


def _shape(logits: Array, state: RowState, rows: SamplingRows, flags: Array, mask: Array | None) -> Array:
    """Return the logits with penalties and bias, and -inf where a token is forbidden."""
    num_rows, vocab = logits.shape

    def has(bit: int) -> Array:
        return ((rows.features & bit) != 0)[:, None]

    def penalise(x: Array) -> Array:
        history = jnp.where(has(PENALTIES), state.history[rows.feature_slots], 0)
        counts = (history & (IN_PROMPT - 1)).astype(jnp.float32)
        factor = jnp.where(history != 0, rows.number("repetition_penalty")[:, None], 1.0)
        x = jnp.where(x > 0, x / factor, x * factor)
        present = (counts > 0).astype(jnp.float32)
        return (
            x
            - counts * rows.number("frequency_penalty")[:, None]
            - present * rows.number("presence_penalty")[:, None]
        )

    def add_bias(x: Array) -> Array:
        return x + jnp.where(has(BIAS), state.bias[rows.feature_slots], 0.0)

    def ban(x: Array) -> Array:
        ids = jnp.where(rows.banned[:, None], rows.stop_ids, jnp.int32(vocab))
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        return x.at[row, ids].set(-jnp.inf, mode="drop")

    def cut(x: Array) -> Array:
        assert mask is not None
        return jnp.where(_unpack_bits(mask, vocab) | ~has(MASK), x, -jnp.inf)

    def keep(x: Array) -> Array:
        return x

    penalised = lax.cond(_any(flags, PENALTIES), penalise, keep, logits)
    shaped = lax.cond(_any(flags, BIAS), add_bias, keep, penalised)
    shaped = lax.cond(_any(flags, BANNED), ban, keep, shaped)
    if mask is not None:
        shaped = lax.cond(_any(flags, MASK), cut, keep, shaped)

    def relent(x: Array) -> Array:
        fallback = penalised if mask is None else cut(penalised)
        return jnp.where((x.max(axis=1) > -jnp.inf)[:, None], x, fallback)

    result: Array = lax.cond(_any(flags, BIAS | BANNED | MASK), relent, keep, shaped)
    return result


def _unpack_bits(mask: Array, vocab: int) -> Array:
    """Unpack bits int32[R, ceil(V / 32)] -> bool[R, V]."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32).reshape(1, 1, 32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab] != 0


class LogprobsOp(Protocol):
    """`token_logprobs`, or an operation with the same meaning."""

    def __call__(
        self, logits: Array, tokens: Array, num_top: int, num_rows: Array
    ) -> tuple[Array, Array, Array]: ...


def token_logprobs(
    logits: Array, tokens: Array, num_top: int, num_rows: Array | None = None
) -> tuple[Array, Array, Array]:
    """Compute log-probabilities under raw logits float32[R, V]: of `tokens` float32[R], then the likeliest
    ids int32[R, num_top] and their log-probabilities float32[R, num_top]. Beside a logit of NaN or +inf, or
    without a finite one, probabilities are NaN and ids undefined. Results of rows from `num_rows`, int32[],
    on are undefined too; here they are computed all the same.
    """
    norm = jax.nn.logsumexp(logits, axis=1)
    norm = jnp.where(jnp.isfinite(logits.max(axis=1)), norm, jnp.nan)
    sampled = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - norm
    values, ids = top_values(logits, num_top)
    return sampled, ids, values - norm[:, None]


def top_values(logits: Array, count: int) -> tuple[Array, Array]:
    """Find the `count` largest values of each row of float32[R, V] and their ids, largest first, equal values
    by id.

    This takes two passes, as `argmax` does: the values lie in the `count` chunks with the largest maxima (of
    equal maxima, in the first), and a top_k over the whole row is slow on every backend.
    """
    num_rows, vocab = logits.shape
    logits = jnp.where(logits == 0.0, 0.0, logits)  # top_k takes -0 for less than 0
    if vocab <= 2 * count * _ARGMAX_CHUNK or count == 0:
        return lax.top_k(logits, count)
    padding = -vocab % _ARGMAX_CHUNK
    chunks = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    chunks = chunks.reshape(num_rows, -1, _ARGMAX_CHUNK)
    _, which = lax.top_k(chunks.max(axis=2), count)
    which = jnp.sort(which, axis=1)  # so that of equal values the smaller id comes first
    inner = jnp.take_along_axis(chunks, which[:, :, None], axis=1).reshape(num_rows, -1)
    values, at = lax.top_k(inner, count)
    chunk = jnp.take_along_axis(which, at // _ARGMAX_CHUNK, axis=1)
    return values, chunk * _ARGMAX_CHUNK + at % _ARGMAX_CHUNK


def report(sampled: Sampled, flags: Array) -> Array:
    """Return log-probabilities as the host reads them, int32[R, 1 + 2 * num_top], see `read_logprobs`; zeros
    if no row wants any.
    """

    def full() -> Array:
        values = jnp.concatenate([sampled.logprobs[:, None], sampled.top_logprobs], axis=1)
        bits = lax.bitcast_convert_type(values, jnp.int32)
        return jnp.concatenate([bits[:, :1], sampled.top_ids, bits[:, 1:]], axis=1)

    def nothing() -> Array:
        num_rows, num_top = sampled.top_ids.shape
        return jnp.zeros((num_rows, 1 + 2 * num_top), jnp.int32)

    result: Array = lax.cond((flags & LOGPROBS) != 0, full, nothing)
    return result


def read_logprobs(row: np.ndarray, num_top: int, wanted: int) -> TokenLogprobs:
    """Read one row of `report`: the sampled token's log-probability (the bits of a float32), the likeliest
    tokens, and their log-probabilities. Returns the first `wanted` likeliest tokens.
    """
    ids = row[1 : 1 + wanted].tolist()
    values = row[1 + num_top : 1 + num_top + wanted].view(np.float32).tolist()
    return TokenLogprobs(float(row[:1].view(np.float32)[0]), tuple(zip(ids, values, strict=True)))
