"""The sampler in C++: the Python side of `penstock_sample` (src/sample/sample.h).

`penstock.runtime.ops.sampler` is the XLA version, for other platforms. Given the same uniforms both draw the
same tokens, up to rounding. In XLA a filter is 32 passes over the logits; here the few tokens that can still
be chosen are found in one pass, so a step's sampling takes milliseconds even with every feature in use.

How: one pass over logits, history, bias and mask gives the edited row, the largest of each 512 ids, and the
sum that log-probabilities need. The k-th of those largest values bounds top_k, and the lightest weight that
can matter bounds top_p, so only the distances of few tokens from the largest are collected. Where they would
be many, a sample of the row says between which distances the threshold lies, and the next pass proves it. The
threshold is found with a histogram, not with a sort.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from penstock.runtime.ops.native import library


def can_sample() -> bool:
    """Whether `sample` can be used in programs for CPU."""
    return library.available()


def sample(
    logits: Array,
    history: Array,
    bias: Array,
    mask: Array,
    uniforms: Array,
    *,
    slots: Array,
    features: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    presence: Array,
    frequency: Array,
    repetition: Array,
    stop_ids: Array,
    banned: Array,
    num_logprobs: Array,
    num_top: int,
) -> tuple[Array, Array, Array, Array]:
    """Samples the next token of each row: (tokens int32[R], logprobs float32[R], top_ids int32[R, num_top],
    top_logprobs float32[R, num_top]).

    logits float32[R, V]. history int32[F, V] (see `sampling_codes`) and bias float32[F, V] (-inf forbids a
    token): row r uses their row slots[r], int32[R]. mask int32[R, ceil(V / 32)]: bit t % 32 of word t // 32
    says whether t is allowed. uniforms float32[R, 2] in [0, 1). features int32[R]: bits PENALTIES, BIAS and
    MASK. temperature (0: greedy), top_p (1: off), min_p (0: off), presence, frequency and repetition (1: off)
    are float32[R]; top_k int32[R] (0: off). stop_ids int32[R, N] are forbidden where banned, bool or
    int32[R]; ids from V on are skipped. num_logprobs int32[R], -1: none. A row whose slot is F or more is
    padding: its token is 0, and it costs nothing.

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
        temperature,
        top_k,
        top_p,
        min_p,
        presence,
        frequency,
        repetition,
        stop_ids,
        banned.astype(jnp.int32),
        num_logprobs,
    )
    return tokens, logprobs, top_ids, top_logprobs
