"""The array that a request's sampling adds to the logits. No jax."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.sampling import ResolvedSampling

_HUGE = 1e30
"""Above every logit, and so far below float32's largest number that sums of a few such numbers stay finite.
"""


def bias_row(sampling: ResolvedSampling, vocab_size: int) -> NDArray[np.float32]:
    """Return what is added to each token's logit, float32[V]; -inf where a token is never allowed. All ids
    must be below `vocab_size`.
    """
    if sampling.allowed_token_ids:
        row = np.full(vocab_size, -np.inf, np.float32)
        row[np.fromiter(sampling.allowed_token_ids, np.int64)] = 0.0
    else:
        row = np.zeros(vocab_size, np.float32)
    if sampling.logit_bias:
        count = len(sampling.logit_bias)
        # Other threads may run between the values of a generator, but not while `np.array` takes all pairs.
        tokens = np.fromiter((token for token, _ in sampling.logit_bias), np.int64, count)
        biases = np.fromiter((bias for _, bias in sampling.logit_bias), np.float64, count)
        bounded = np.where(biases == -np.inf, biases, np.clip(biases, -_HUGE, _HUGE)).astype(np.float32)
        np.add.at(row, tokens, bounded)
    row[[word[0] for word in sampling.bad_words if len(word) == 1]] = -np.inf
    return row
