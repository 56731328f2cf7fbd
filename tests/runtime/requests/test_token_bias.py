"""The array that a request adds to the logits, from its biases, allowed tokens and bad words."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.requests.token_bias import bias_row

VOCAB = 20
TOKENS = st.integers(0, VOCAB - 1)
BIASES = st.one_of(st.floats(-1e38, 1e38), st.sampled_from([-math.inf, 1e300, -1e300, 3e38, -3e38, 0.0]))


def one_by_one(sampling: ResolvedSampling) -> np.ndarray:
    """Return the array by its definition: 0 for allowed tokens, plus each bias within its bounds, and -inf
    for forbidden tokens.
    """
    allowed = sampling.allowed_token_ids or range(VOCAB)
    row = np.array([0.0 if i in allowed else -np.inf for i in range(VOCAB)], np.float32)
    for token, bias in sampling.logit_bias:
        row[token] += np.float32(bias if bias == -math.inf else min(max(bias, -1e30), 1e30))
    for word in sampling.bad_words:
        if len(word) == 1:
            row[word[0]] = -np.inf
    return row


@given(
    st.lists(st.tuples(TOKENS, BIASES), max_size=30).map(tuple),
    st.lists(TOKENS, max_size=5).map(tuple),
    st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), max_size=4).map(tuple),
)
def test_it_is_what_each_bias_alone_would_make(logit_bias, allowed, words):
    sampling = ResolvedSampling(logit_bias=logit_bias, allowed_token_ids=allowed, bad_words=words)
    row = bias_row(sampling, VOCAB)
    assert row.dtype == np.float32
    assert_array_equal(row, one_by_one(sampling))
