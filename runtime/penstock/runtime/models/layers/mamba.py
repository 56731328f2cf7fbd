"""The Mamba-2 mixer, which stands in the place of attention: a short convolution over inputs, keys and
queries, and a state that each token decays, adds to and reads (`ops.recurrent.ssd`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.recurrent import MambaConfig
from penstock.runtime.models.layers.conv_weight import ConvWeight
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.linear import Linear, LinearFormat, project, project_float32
from penstock.runtime.models.norms import Norm, Vector
from penstock.runtime.models.pools import PoolPlanners
from penstock.runtime.ops.native.state import can_convolve, can_recur

StateArrays = tuple[jax.Array, ...]


class Mamba(nnx.Module):
    """The mixer of one layer.

    The product that gives each head its time step stays in float, because an error of a decay is one of all
    that the state holds.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: MambaConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        hidden, heads, inner = model.hidden_size, config.num_heads, config.channels

        def product(size: int, parts: dict[str, int], form: LinearFormat) -> Linear:
            return Linear(size, parts, dtype, planners, bias=config.bias, linear=form)

        parts = {"in_proj_gate": inner, "in_proj_inputs": config.conv_channels}
        self.in_proj = product(hidden, parts, linear)
        self.in_proj_steps = product(hidden, {"in_proj_steps": heads}, LinearFormat(packed=linear.packed))
        self.conv1d = ConvWeight(config.num_taps, config.conv_channels, planners, bias=config.conv_bias)
        self.decay = Vector("A_log", heads, planners, float32=True)
        self.dt_bias = Vector("dt_bias", heads, planners, float32=True)
        self.skip = Vector("D", heads, planners, float32=True)
        self.gated_norm = Vector("gated_norm", inner, planners, float32=True)
        self.out_proj = product(inner, {"out_proj": hidden}, linear)
        self.config, self.eps = config, model.rms_norm_eps
        convolves = can_convolve(dtype, config.conv_channels, config.num_taps)
        self.recurs_natively = convolves and can_recur(dtype, config.state_dim, config.head_dim)

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute everything, `recurrent` included."""
        packed = all(linear.packed for linear in (self.in_proj, self.in_proj_steps, self.out_proj))
        return packed and self.recurs_natively

    def __call__(
        self,
        x: jax.Array,
        norm: Norm | None,
        residual: Residual,
        kv: StateArrays,
        inputs: LayerInputs,
    ) -> tuple[jax.Array, StateArrays]:
        """x and what the mixer makes of norm(x): x [T, E] -> ([T, E], the layer's new state)."""
        config, pools, rows, meta = self.config, inputs.pools, inputs.num_tokens, inputs.metas[0]
        kept, state = kv
        made = project(self.in_proj, x, rows, pools, norm=norm)
        steps = project_float32(self.in_proj_steps, x, rows, pools, norm=norm)
        xbc, kept = inputs.recurrent.conv(
            made[:, config.channels :],
            self.conv1d.weight(pools),
            self.conv1d.bias(pools),
            kept,
            meta,
            activation="silu",
        )
        out, state = inputs.recurrent.ssd(
            xbc,
            made[:, : config.channels],
            steps,
            state,
            meta,
            a_log=self.decay(pools),
            dt_bias=self.dt_bias(pools),
            skip=self.skip(pools),
            norm=self.gated_norm(pools),
            eps=self.eps,
            num_groups=config.num_groups,
            dt_limit=config.step_limit,
        )
        return residual.add_projected(self.out_proj, out, x, inputs), (kept, state)
