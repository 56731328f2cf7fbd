"""The gated delta net of Qwen3-Next and Qwen3.5, which stands in the place of attention: a short convolution
over queries, keys and values, and a state that is changed by the gated delta rule (`ops.recurrent.delta`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.recurrent import DeltaNetConfig
from penstock.runtime.models.layers.conv_weight import ConvWeight
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.linear import Linear, LinearFormat, project, project_float32
from penstock.runtime.models.load_rules import Span
from penstock.runtime.models.norms import Norm, Vector
from penstock.runtime.models.pools import PoolPlanners
from penstock.runtime.ops.native.state import can_convolve, can_recur

StateArrays = tuple[jax.Array, ...]


class DeltaNet(nnx.Module):
    """The gated delta net of one layer.

    The product that gives each head its decay and beta stays in float, because an error of a decay is one of
    all that the state holds.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: DeltaNetConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        hidden, heads, values = model.hidden_size, config.num_value_heads, config.value_channels
        pieces = config.pieces
        of_keys, of_values = Span(config.key_pieces, config.key_channels), Span(pieces, values)
        qkv = (of_keys, of_keys, of_values)
        parts = {"in_proj_qkv": config.conv_channels, "in_proj_z": values}
        cuts = {"in_proj_qkv": qkv, "in_proj_z": (of_values,)}
        self.in_proj = Linear(hidden, parts, dtype, planners, linear=linear, cuts=cuts, apart=True)
        of_heads = {"in_proj_b": heads, "in_proj_a": heads}
        cuts = {part: (Span(pieces, heads),) for part in of_heads}
        floats = LinearFormat(packed=linear.packed)
        self.in_proj_ba = Linear(hidden, of_heads, dtype, planners, linear=floats, cuts=cuts)
        self.conv1d = ConvWeight(config.num_taps, config.conv_channels, planners, bias=False, spans=qkv)
        self.decay = Vector("A_log", heads, planners, float32=True, pieces=pieces)
        self.dt_bias = Vector("dt_bias", heads, planners, float32=True, pieces=pieces)
        self.gated_norm = Vector("gated_norm", config.value_dim, planners, float32=True)
        out = {"out_proj": hidden}
        self.out_proj = Linear(values, out, dtype, planners, linear=linear, sums=pieces)
        self.config, self.eps = config, model.rms_norm_eps
        convolves = can_convolve(dtype, config.conv_channels, config.num_taps)
        self.recurs_natively = convolves and can_recur(dtype, config.key_dim, config.value_dim)

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute everything, `recurrent` too if it is native."""
        linears = (self.in_proj, self.in_proj_ba, self.out_proj)
        return self.recurs_natively and all(linear.packed for linear in linears)

    def __call__(
        self,
        x: jax.Array,
        norm: Norm | None,
        residual: Residual,
        kv: StateArrays,
        inputs: LayerInputs,
    ) -> tuple[jax.Array, StateArrays]:
        """Add to x what the net makes of norm(x): x [T, E] -> ([T, E], the layer's new state)."""
        pools, rows, meta = inputs.pools, inputs.num_tokens, inputs.metas[0]
        kept, state = kv
        made = project(self.in_proj, x, rows, pools, norm=norm)
        ba = project_float32(self.in_proj_ba, x, rows, pools, norm=norm)
        channels = self.config.conv_channels
        qkv, kept = inputs.recurrent.conv(
            made[:, :channels], self.conv1d.weight(pools), None, kept, meta, activation="silu"
        )
        out, state = inputs.recurrent.delta(
            qkv,
            made[:, channels:],
            ba,
            state,
            meta,
            a_log=self.decay(pools),
            dt_bias=self.dt_bias(pools),
            norm=self.gated_norm(pools),
            eps=self.eps,
            num_key_heads=self.config.num_key_heads,
        )
        return residual.add_projected(self.out_proj, out, x, inputs), (kept, state)
