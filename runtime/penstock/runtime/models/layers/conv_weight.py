"""The weight of a convolution over each channel, of a few taps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx

from penstock.runtime.models.load_rules import Cut, LoadRule, ParamPath, Span, StoredAt, Target
from penstock.runtime.models.norms import vector_rule
from penstock.runtime.models.pools import VECTORS, PoolPlanners, Pools


class ConvWeight(nnx.Module):
    """K taps for each of C channels. A checkpoint has them as [C, 1, K]; in the model's pool they are
    [K, C], so that the channels of one tap lie side by side.
    """

    def __init__(
        self, num_taps: int, channels: int, planners: PoolPlanners, *, bias: bool, spans: tuple[Span, ...]
    ) -> None:
        """spans: how the channels are cut over devices, of which one has `channels`."""
        self.cut = Cut(along="rows", spans=spans)
        self.num_taps, self.channels = num_taps, channels
        self.weight_at = planners.vectors.take(num_taps * channels)
        self.bias_at = planners.vectors.take(channels) if bias else None

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`."""
        begin, channels = self.weight_at.begin, self.channels
        whole = sum(span.whole for span in self.cut.spans)
        there = stored((*path, "weight"), (whole, 1, self.num_taps))
        rule = LoadRule(
            sources=there.sources,
            targets=tuple(Target(VECTORS, begin=begin + tap * channels) for tap in range(self.num_taps)),
            num_rows=channels,
            dtype=dtype,
            decode=there.decode,
            put=tap_by_tap,
            cut=self.cut,
        )
        yield (*path, "weight"), rule
        if self.bias_at is not None:
            yield vector_rule((*path, "bias"), self.bias_at, dtype, stored, cut=self.cut)

    def weight(self, pools: Pools) -> jax.Array:
        """Return the taps [K, C], of which the last is the token's own."""
        return pools.vectors[self.weight_at.columns].reshape(self.num_taps, self.channels)

    def bias(self, pools: Pools) -> jax.Array | None:
        """Return the bias [C], if there is one."""
        return None if self.bias_at is None else pools.vectors[self.bias_at.columns]


def tap_by_tap(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Write each tap of channels [n, 1, K] to a part of its own."""
    for tap, part in enumerate(parts):
        part[...] = rows[0][:, 0, tap]
