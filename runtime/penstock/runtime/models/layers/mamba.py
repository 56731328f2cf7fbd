"""The Mamba-2 mixer, which stands in the place of attention: a short convolution over inputs, keys and
queries, and a state that each token decays, adds to and reads (`ops.recurrent.ssd`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.recurrent import MambaConfig
from penstock.runtime.models.layers.conv_weight import ConvWeight
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.linear import Linear, LinearFormat, project, project_float32, summed
from penstock.runtime.models.load_rules import AXIS, Span
from penstock.runtime.models.norms import Norm, Vector
from penstock.runtime.models.pools import PoolPlanners
from penstock.runtime.ops.native.state import can_convolve, can_recur
from penstock.runtime.ops.recurrent.ssd import gated_scan

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

        def product(size: int, cuts: dict[str, tuple[Span, ...]], form: LinearFormat) -> Linear:
            parts = {part: sum(span.size for span in spans) for part, spans in cuts.items()}
            return Linear(size, parts, dtype, planners, bias=config.bias, linear=form, cuts=cuts)

        def vector(name: str, size: int) -> Vector:
            return Vector(name, size, planners, float32=True, pieces=config.pieces)

        of_heads, of_inner = Span(config.pieces, heads), Span(config.pieces, inner)
        of_keys = Span(config.group_pieces, config.num_groups * config.state_dim)
        xbc = (of_inner, of_keys, of_keys)
        self.in_proj = product(hidden, {"in_proj_gate": (of_inner,), "in_proj_inputs": xbc}, linear)
        floats = LinearFormat(packed=linear.packed)
        self.in_proj_steps = product(hidden, {"in_proj_steps": (of_heads,)}, floats)
        self.conv1d = ConvWeight(
            config.num_taps, config.conv_channels, planners, bias=config.conv_bias, spans=xbc
        )
        self.decay, self.dt_bias = vector("A_log", heads), vector("dt_bias", heads)
        self.skip = vector("D", heads)
        self.gated_norm = vector("gated_norm", inner) if config.normed else None
        out, sums = {"out_proj": hidden}, config.pieces
        self.out_proj = Linear(inner, out, dtype, planners, bias=config.bias, linear=linear, sums=sums)
        self.config, self.eps = config, model.rms_norm_eps
        convolves = can_convolve(dtype, config.conv_channels, config.num_taps)
        self.groups_are_cut = config.pieces > config.group_pieces
        whole = config.normed and not self.groups_are_cut
        recurs = can_recur(dtype, config.state_dim, config.head_dim) and whole
        self.recurs_natively = convolves and recurs

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
        """Add to x what the mixer makes of norm(x): x [T, E] -> ([T, E], the layer's new state)."""
        config, pools, rows, meta = self.config, inputs.pools, inputs.num_tokens, inputs.metas[0]
        kept, state = kv
        made = project(self.in_proj, x, rows, pools, norm=norm)
        steps = project_float32(self.in_proj_steps, x, rows, pools, norm=norm)
        if set(config.multipliers) != {1.0}:
            sizes = (config.channels, config.channels, *(2 * (config.num_groups * config.state_dim,)))
            factors = np.repeat(np.array(config.multipliers[:4], np.float32), sizes)
            made = (made.astype(jnp.float32) * factors[None]).astype(made.dtype)
            steps = steps * np.float32(config.multipliers[4])
        xbc, kept = inputs.recurrent.conv(
            made[:, config.channels :],
            self.conv1d.weight(pools),
            self.conv1d.bias(pools),
            kept,
            meta,
            activation="silu",
        )
        gate = made[:, : config.channels]
        if self.groups_are_cut or self.gated_norm is None:
            y, state = gated_scan(
                xbc,
                gate,
                steps,
                state,
                meta,
                a_log=self.decay(pools),
                dt_bias=self.dt_bias(pools),
                skip=self.skip(pools),
                num_groups=config.num_groups,
                dt_limit=config.step_limit,
            )
            out = (y if self.gated_norm is None else self._normalised(y, self.gated_norm(pools))).astype(
                x.dtype
            )
        else:
            out, state = inputs.recurrent.ssd(
                xbc,
                gate,
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

    def _normalised(self, y: jax.Array, weight: jax.Array) -> jax.Array:
        """Normalise y float32 [T, H * P], of heads of one group that other devices have heads of too, over
        all of the group's.
        """
        pieces, groups = self.config.pieces, self.config.group_pieces
        own = jax.nn.one_hot(jax.lax.axis_index(AXIS) * groups // pieces, groups)[None]
        of_groups = summed(jnp.mean(jnp.square(y), axis=1, keepdims=True) * own)
        mean_square = jnp.sum(of_groups * own, axis=1, keepdims=True) * np.float32(groups / pieces)
        return y * jax.lax.rsqrt(mean_square + np.float32(self.eps)) * weight[None]
