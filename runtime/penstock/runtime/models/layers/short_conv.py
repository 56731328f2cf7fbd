"""The gated short convolution of LFM2, which stands in the place of attention: out(c * conv(b * x)), where b,
c and x are products of the hidden state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.recurrent import ShortConvConfig
from penstock.runtime.models.layers.conv_weight import ConvWeight
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.linear import Linear, LinearFormat, project
from penstock.runtime.models.load_rules import Span
from penstock.runtime.models.norms import Norm
from penstock.runtime.models.pools import PoolPlanners
from penstock.runtime.ops.native.state import can_convolve

StateArrays = tuple[jax.Array, ...]


class ShortConv(nnx.Module):
    """The convolution of one layer."""

    def __init__(
        self,
        model: ModelConfig,
        config: ShortConvConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        hidden, channels, bias = model.hidden_size, config.channels, config.bias
        span = Span(config.pieces, channels)
        parts, cuts = {"in_proj": 3 * channels}, {"in_proj": (span, span, span)}
        self.in_proj = Linear(hidden, parts, dtype, planners, bias=bias, linear=linear, cuts=cuts)
        self.conv = ConvWeight(config.num_taps, channels, planners, bias=bias, spans=(span,))
        out, sums = {"out_proj": hidden}, config.pieces
        self.out_proj = Linear(channels, out, dtype, planners, bias=bias, linear=linear, sums=sums)
        self.config = config
        self.convolves_natively = can_convolve(dtype, channels, config.num_taps)

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute everything but `recurrent.conv`, and the two products of elements
        around it, each of which XLA rounds once between two kernels.
        """
        return self.convolves_natively and self.in_proj.packed and self.out_proj.packed

    def __call__(
        self,
        x: jax.Array,
        norm: Norm | None,
        residual: Residual,
        kv: StateArrays,
        inputs: LayerInputs,
    ) -> tuple[jax.Array, StateArrays]:
        """Add to x what the convolution makes of norm(x): x [T, E] -> ([T, E], the layer's new state)."""
        channels, pools = self.config.channels, inputs.pools
        (state,) = kv
        made = project(self.in_proj, x, inputs.num_tokens, pools, norm=norm)
        b, c, value = (made[:, at * channels : (at + 1) * channels] for at in range(3))
        y, state = inputs.recurrent.conv(
            b * value, self.conv.weight(pools), self.conv.bias(pools), state, inputs.metas[0]
        )
        return residual.add_projected(self.out_proj, c * y, x, inputs), (state,)
