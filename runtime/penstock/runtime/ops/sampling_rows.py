"""What the samplers read of each row."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from penstock.runtime.requests.sampling import FLOATS, INTS


class SamplingRows(NamedTuple):
    """The rows' sampling parameters."""

    slots: Array  # int32[R] the rows' slots; from S on: padding
    feature_slots: Array  # int32[R] rows of `RowState.history` and `bias`; only with PENALTIES or BIAS
    positions: Array  # int32[R] absolute position of the token that is drawn
    stop_ids: Array  # int32[R, N] EOS and stop ids; vocabulary size or above where unused
    banned: Array  # bool[R] whether these are forbidden in this step
    features: Array  # int32[R] bits
    num_logprobs: Array  # int32[R] likeliest tokens to report, -1 = not even that of the token itself
    ints: Array  # int32[R, len(INTS)] the whole numbers of `SamplingNumbers`
    floats: Array  # float32[R, len(FLOATS)] its other numbers
    seed: Array  # uint32[R, 2]: high and low word

    def number(self, name: str) -> Array:
        """Return a number of `SamplingNumbers`: int32[R] if it is whole, else float32[R]."""
        return self.ints[:, INTS.index(name)] if name in INTS else self.floats[:, FLOATS.index(name)]
