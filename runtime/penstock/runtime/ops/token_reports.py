"""The log-probabilities of sampled tokens as one array of integers, which the host reads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from penstock.runtime.ops.sampler import Sampled
from penstock.runtime.ops.sampling_codes import LOGPROBS
from penstock.runtime.requests.request import TokenLogprobs


def report(sampled: Sampled, flags: Array) -> Array:
    """Log-probabilities as the host reads them, int32[R, 1 + 2 * num_top], see `read_logprobs`; zeros if no
    row wants any.
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
    """Reads one row of `report`: the sampled token's log-probability (the bits of a float32), the likeliest
    tokens, and their log-probabilities. Returns the first `wanted` likeliest tokens.
    """
    ids = row[1 : 1 + wanted].tolist()
    values = row[1 + num_top : 1 + num_top + wanted].view(np.float32).tolist()
    return TokenLogprobs(float(row[:1].view(np.float32)[0]), tuple(zip(ids, values, strict=True)))
