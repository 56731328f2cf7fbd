"""What recurrent layers compute, and what they keep of the tokens that they have seen."""

from __future__ import annotations

import math
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
    pieces: int = 1
    """Into how many pieces the channels are cut (`cutting`). The number of channels is that of one piece."""

    @property
    def kept(self) -> SlotState:
        """The inputs that the convolution reads of tokens before a step."""
        return SlotState((_float32(self.num_taps - 1, self.channels),))

    def num_weights(self, hidden_size: int) -> int:
        """Count the weights of the products with hidden states."""
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
    pieces: int = 1
    """Into how many pieces the heads of values are cut (`cutting`). Numbers of heads are those of one
    piece."""
    key_pieces: int = 1
    """The same for the heads of queries and keys. If there are fewer pieces than devices, several devices
    have the same one."""

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
        """Count the weights of the products with hidden states."""
        return hidden_size * (self.conv_channels + 2 * self.value_channels + 2 * self.num_value_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """A Mamba-2 mixer in the place of attention (Granite 4), or beside it (Falcon-H1).

    head_dim, state_dim: channels of a head's inputs, and of its keys and queries. num_groups: the heads of a
    group have one key and one query, and are normalised together. num_taps: how many latest tokens, itself
    included, a token's convolution reads. conv_bias, bias: whether the convolution has a bias, and the
    products. step_limit: the least and the largest time step. normed: outputs are normalised behind their
    gates. multipliers: of what hidden states become: gates, inputs, keys, queries, and time steps.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    num_taps: int
    conv_bias: bool = True
    bias: bool = False
    step_limit: tuple[float, float] = (0.0, math.inf)
    normed: bool = True
    multipliers: tuple[float, ...] = (1.0,) * 5
    pieces: int = 1
    """Into how many pieces the heads are cut (`cutting`). Numbers of heads and groups are those of one
    piece."""
    group_pieces: int = 1
    """The same for the groups. If there are fewer pieces than devices, several devices have heads of one
    group."""

    @property
    def channels(self) -> int:
        """Inputs of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Inputs, keys and queries, over which the convolution goes."""
        return self.channels + 2 * self.num_groups * self.state_dim

    @property
    def kept(self) -> SlotState:
        """The inputs that the convolution reads of tokens before a step, and the heads' state."""
        state = _float32(self.num_heads, self.state_dim, self.head_dim)
        return SlotState((_float32(self.num_taps - 1, self.conv_channels), state))

    def num_weights(self, hidden_size: int) -> int:
        """Count the weights of the products with hidden states."""
        return hidden_size * (2 * self.channels + self.conv_channels + self.num_heads)


RecurrentConfig: TypeAlias = ShortConvConfig | DeltaNetConfig | MambaConfig
"""What stands in the place of attention, and keeps state by slot."""
