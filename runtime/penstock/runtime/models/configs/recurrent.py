"""What recurrent layers compute, and what they keep of the tokens that they have seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np

from penstock.runtime.ops.cache_spec import SlotState


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A gated short convolution in the place of attention (LFM2): out(c * conv(b * x)), where b, c and x are
    products of the hidden state.

    channels: of the convolution. num_taps: how many latest tokens, itself included, a token reads. bias: the
    products and the convolution have one.
    """

    channels: int
    num_taps: int
    bias: bool = False

    @property
    def kept(self) -> SlotState:
        """The inputs that the convolution reads of tokens before a step."""
        return SlotState((_float32(self.num_taps - 1, self.channels),))

    def num_weights(self, hidden_size: int) -> int:
        """Of the products with hidden states."""
        return 4 * hidden_size * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """A gated delta net in the place of attention (Qwen3-Next, Qwen3.5).

    num_key_heads: heads of queries and keys, of which each serves equally many of num_value_heads.
    key_dim, value_dim: channels of a head. num_taps: how many latest tokens, itself included, a token's
    convolution reads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    @property
    def key_channels(self) -> int:
        """Channels of the keys of all heads, or of the queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        """Channels of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values, over which the convolution goes."""
        return 2 * self.key_channels + self.value_channels

    @property
    def kept(self) -> SlotState:
        """The inputs that the convolution reads of tokens before a step, and the state of the rule."""
        state = _float32(self.num_value_heads, self.key_dim, self.value_dim)
        return SlotState((_float32(self.num_taps - 1, self.conv_channels), state))

    def num_weights(self, hidden_size: int) -> int:
        """Of the products with hidden states."""
        return hidden_size * (self.conv_channels + 2 * self.value_channels + 2 * self.num_value_heads)


RecurrentConfig: TypeAlias = ShortConvConfig | DeltaNetConfig
"""What stands in the place of attention, and keeps state by slot."""
