"""The sampler in C++: the Python side of `penstock_sample` (src/sample/sample.h).

`penstock.runtime.ops.sampler` is the XLA version, for other platforms. Given the same uniforms both draw the
same tokens, up to rounding. In XLA a filter is 32 passes over the logits; here the few tokens that can still
be chosen are found in one pass, so a step's sampling takes milliseconds even with every feature in use.

How: one pass over logits, history, bias and mask gives the edited row, the largest of each 512 ids, and the
sum that log-probabilities need. The k-th of those largest values bounds top_k, and the lightest weight that
can matter bounds top_p, so only the distances of few tokens from the largest are collected. Where they would
be many, a sample of the row says between which distances the threshold lies, and the next pass proves it. The
threshold is found with a histogram, not with a sort.

Rows are spread over threads whole; the last few, or a single one, in blocks of 8,192 ids, which give the same
bits. On two cores 16 rows of 151,936 tokens take 0.3 ms greedily, and 1.2 ms with every feature on.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from penstock.runtime.ops.native import library
from penstock.runtime.ops.sampler import RowState, Sampled, uniforms
from penstock.runtime.ops.sampling_codes import BIAS, MASK, NON_FINITE, PENALTIES, SAMPLING
from penstock.runtime.ops.sampling_rows import SamplingRows
from penstock.runtime.requests.constraint import mask_words
from penstock.runtime.requests.sampling import FLOATS, INTS, SamplingNumbers

_GREEDY = SamplingNumbers(temperature=0.0)


def sample(
    logits: Array,
    history: Array,
    bias: Array,
    mask: Array,
    uniforms: Array,
    *,
    slots: Array,
    features: Array,
    ints: Array,
    floats: Array,
    stop_ids: Array,
    banned: Array,
    num_logprobs: Array,
    num_top: int,
) -> tuple[Array, Array, Array, Array]:
    """Sample the next token of each row: (tokens int32[R], logprobs float32[R], top_ids int32[R, num_top],
    top_logprobs float32[R, num_top]).

    logits float32[R, V]. history int32[F, V] (see `sampling_codes`) and bias float32[F, V] (-inf forbids a
    token): row r uses their row slots[r], int32[R]. mask int32[R, ceil(V / 32)]: bit t % 32 of word t // 32
    says whether t is allowed. uniforms float32[R, 2] in [0, 1). features int32[R]: bits PENALTIES, BIAS and
    MASK. ints int32[R, ...] and floats float32[R, ...] are those of `SamplingRows`; a temperature of 0 is
    greedy. stop_ids int32[R, N] are forbidden where banned, bool or int32[R]; ids from V on are skipped.
    num_logprobs int32[R], -1: none. A row whose slot is F or more is padding: its token is 0, and it costs
    nothing.

    The order of the steps is that of `penstock.runtime.ops.sampler`. If bias, mask and bans leave no token
    with a finite logit, only the mask counts; if that leaves none either, the first token of the mask is
    taken or, without a mask, the largest logit. The first uniform picks a chunk of 512 ids by its mass, the
    second a token in it. Greedy rows take the first largest logit.

    Log-probabilities are those of the raw logits, the likeliest first, and among equals the smallest id
    first. Columns from num_logprobs[r] or V on are 0, as is all of a row with -1. Beside a token NON_FINITE
    there are zeros.

    A row's result depends on its own inputs alone, to the bit: not on other rows or the number of threads.
    """
    library.load()
    num_rows = logits.shape[0]
    call = jax.ffi.ffi_call(
        "penstock_sample",
        (
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_top), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, num_top), jnp.float32),
        ),
    )
    tokens, logprobs, top_ids, top_logprobs = call(
        logits,
        history,
        bias,
        mask,
        uniforms,
        slots,
        features,
        ints,
        floats,
        stop_ids,
        banned.astype(jnp.int32),
        num_logprobs,
    )
    return tokens, logprobs, top_ids, top_logprobs


def native_token_logprobs(
    logits: Array, tokens: Array, num_top: int, num_rows: Array
) -> tuple[Array, Array, Array]:
    """Compute `token_logprobs` by the native sampler. A mask allows each row its own token alone, so the
    sampler takes that token and reports it.
    """
    count, vocab = logits.shape
    row = jnp.arange(count)
    mask = jnp.zeros((count, mask_words(vocab)), jnp.int32).at[row, tokens // 32].set(1 << tokens % 32)

    def every(value: int) -> Array:
        return jnp.full((count,), value, jnp.int32)

    def numbers(names: Sequence[str], dtype: type[np.generic]) -> Array:
        greedy = np.array([getattr(_GREEDY, name) for name in names], dtype)
        return jnp.broadcast_to(greedy, (count, len(names)))

    taken, sampled, ids, values = sample(
        logits,
        jnp.zeros((1, vocab), jnp.int32),  # one slot, of which no row reads the history or the biases
        jnp.zeros((1, vocab), jnp.float32),
        mask,
        jnp.zeros((count, 2), jnp.float32),
        slots=jnp.where(row < num_rows, 0, 1),  # rows of a slot that is not there are padding
        features=every(MASK),
        ints=numbers(INTS, np.int32),
        floats=numbers(FLOATS, np.float32),
        stop_ids=jnp.full((count, 1), vocab, jnp.int32),
        banned=every(0),
        num_logprobs=every(num_top),
        num_top=num_top,
    )
    unknown = taken == NON_FINITE
    return jnp.where(unknown, jnp.nan, sampled), ids, jnp.where(unknown[:, None], jnp.nan, values)


def native_sample(
    logits: Array, state: RowState, rows: SamplingRows, flags: Array, mask: Array | None, *, num_top: int
) -> Sampled:
    """Run `sample` by the native CPU kernel. Both draw the same tokens, up to rounding."""
    num_rows, vocab = logits.shape
    drawn = lax.cond(
        (flags & SAMPLING) != 0, lambda: uniforms(rows), lambda: jnp.zeros((num_rows, 2), jnp.float32)
    )
    return Sampled(
        *sample(
            logits,
            state.history,
            state.bias,
            jnp.zeros((num_rows, mask_words(vocab)), jnp.int32) if mask is None else mask,
            drawn,
            slots=jnp.where(rows.slots < state.tokens.shape[0], rows.feature_slots, state.history.shape[0]),
            features=rows.features & (PENALTIES | BIAS | (0 if mask is None else MASK)),
            ints=rows.ints,
            floats=rows.floats,
            stop_ids=rows.stop_ids,
            banned=rows.banned,
            num_logprobs=rows.num_logprobs,
            num_top=num_top,
        )
    )
