"""What the samplers read of each row."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array


class SamplingRows(NamedTuple):
    """The rows' sampling parameters."""

    slots: Array  # int32[R] the rows' slots; from S on: padding
    feature_slots: Array  # int32[R] rows of `RowState.history` and `bias`; only with PENALTIES or BIAS
    positions: Array  # int32[R] absolute position of the token that is drawn
    stop_ids: Array  # int32[R, N] EOS and stop ids; vocabulary size or above where unused
    banned: Array  # bool[R] whether these are forbidden in this step
    features: Array  # int32[R] bits
    num_logprobs: Array  # int32[R] likeliest tokens to report, -1 = not even that of the token itself
    top_k: Array  # int32[R]; 0 = off
    temperature: Array  # float32[R]; 0 = greedy
    top_p: Array  # float32[R]; 1 = off
    min_p: Array  # float32[R]; 0 = off
    presence_penalty: Array  # float32[R]
    frequency_penalty: Array  # float32[R]
    repetition_penalty: Array  # float32[R]
    seed: Array  # uint32[R, 2]: high and low word
