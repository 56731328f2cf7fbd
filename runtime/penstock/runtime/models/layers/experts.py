"""Mixtures of experts (Shazeer et al. 2017, arXiv 1701.06538): each token has a few experts of its own, which
a router chooses, and maybe one that all tokens share.

The weights of a layer's experts are two stacked leaves, of which the kernels read only the experts that are
chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import ExpertsConfig, ModelConfig
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.layers.router import Router
from penstock.runtime.models.linear import LinearFormat, normalised, part_rules, summed
from penstock.runtime.models.load_rules import AXIS, Cut, LoadRule, ParamPath, Span, StoredAt
from penstock.runtime.models.norms import Norm
from penstock.runtime.models.pools import Place, PoolPlanners, Pools
from penstock.runtime.ops import experts as xla
from penstock.runtime.ops.adapters import AdapterPlace, ExpertAdapters
from penstock.runtime.ops.codes import CodeForm
from penstock.runtime.ops.native import experts as native
from penstock.runtime.ops.native.norm import normalize


class StackedLinear(nnx.Module):
    """One linear layer of each expert: [experts, out, in], in any format of weights.

    `parts` maps names of layers in the checkpoint to their numbers of outputs, which lie side by side.
    """

    def __init__(
        self,
        num_experts: int,
        in_size: int,
        parts: dict[str, int],
        dtype: jnp.dtype,
        planners: PoolPlanners,
        linear: LinearFormat,
        *,
        bias: bool,
        numbered: bool,
        pieces: int = 1,
        sums: int = 1,
        expert_pieces: int = 1,
    ) -> None:
        """num_experts: those of one device. numbered: the path of a parameter has the expert's number.
        linear: the format as it is; the caller knows that the weights can have it. pieces, sums: into how
        many the outputs and the inputs are cut. expert_pieces: see `ExpertsConfig`.
        """
        self.pieces, self.sums, self.expert_pieces = pieces, sums, expert_pieces
        out_size = sum(parts.values())
        self.num_experts, self.in_size, self.out_size = num_experts, in_size, out_size
        self.parts, self.numbered = tuple(parts.items()), numbered
        self.form = linear
        self.weight = linear.weight(out_size, in_size, dtype, num_experts)
        size = num_experts * out_size
        self.scale_at: Place | None = planners.scales.take(size) if linear.int8 else None
        self.bias_at: Place | None = planners.vectors.take(size) if bias else None
        self.adapter_at: AdapterPlace | None = None
        """Where adapters have their matrices for it; see `models.adapted`."""

    def keep(self, form: CodeForm) -> None:
        """Have a checkpoint's codes as the weights (`Linear.keep`)."""
        self.form = LinearFormat(packed=True, codes=form)
        self.weight = self.form.weight(self.out_size, self.in_size, jnp.dtype(jnp.uint8), self.num_experts)

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`; each expert has a tensor for each part of the outputs."""
        for expert in range(self.num_experts):
            for of_devices in zip(
                *(
                    self._rules_of(expert, expert + device * self.num_experts, path, dtype, stored)
                    for device in range(self.expert_pieces)
                ),
                strict=True,
            ):
                tensor, rule = of_devices[0]
                if self.expert_pieces > 1:
                    sources = tuple(own.sources for _, own in of_devices)
                    rule = replace(rule, cut=Cut(along="sources", sources=sources))
                yield tensor, rule

    def _rules_of(
        self, expert: int, number: int, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """Yield the rules by which the checkpoint's expert of this number becomes one of the leaf."""
        row, above = 0, (*path[:-1], number) if self.numbered else path[:-1]
        for part, size in self.parts:
            place = expert * self.out_size + row
            yield from part_rules(
                (*above, part),
                (size, self.in_size),
                dtype,
                stored,
                self.form,
                leaf=(*path, "weight"),
                at=(expert,),
                row=row,
                scale_at=None if self.scale_at is None else self.scale_at.begin + place,
                bias_at=None if self.bias_at is None else self.bias_at.begin + place,
                spans=(Span(self.pieces, size),),
                sums=self.sums,
            )
            row += size

    def operands(self, pools: Pools) -> native.PackedExperts:
        """Return the operands of the native kernels."""
        return native.PackedExperts(
            self.weight[...],
            None if self.scale_at is None else pools.scales,
            None if self.bias_at is None else pools.vectors,
            0 if self.scale_at is None else self.scale_at.begin,
            0 if self.bias_at is None else self.bias_at.begin,
        )

    def stacked(self, pools: Pools) -> xla.StackedExperts:
        """Return the operands of XLA's form; for unpacked weights only."""
        shape = (self.num_experts, self.out_size)
        scale = bias = None
        if self.scale_at is not None and pools.scales is not None:
            scale = pools.scales[self.scale_at.columns].reshape(shape)
        if self.bias_at is not None:
            bias = pools.vectors[self.bias_at.columns].reshape(shape)
        return xla.StackedExperts(self.weight[...], scale, bias)


class ExpertStack(nnx.Module):
    """Gated MLPs, of which each token has some."""

    def __init__(
        self,
        model: ModelConfig,
        config: ExpertsConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
        *,
        is_shared: bool = False,
    ) -> None:
        """is_shared: this is the expert that all tokens have."""
        hidden, inner = model.hidden_size, config.intermediate_size
        num_experts, pieces, dealt = config.num_experts, config.pieces, config.expert_pieces
        if is_shared:
            assert config.shared_size is not None
            num_experts, inner, pieces, dealt = 1, config.shared_size, config.shared_pieces, 1
        form = linear.of((inner,), hidden).of((hidden,), inner)
        self.packed, self.config, self.is_shared = form.packed, config, is_shared
        self.expert_pieces, self.num_own = dealt, num_experts // dealt
        self.linear = linear  # its text leaves the operation out, and kept programs are found by texts

        def stacked(in_size: int, parts: dict[str, int], *, pieces: int = 1, sums: int = 1) -> StackedLinear:
            return StackedLinear(
                self.num_own,
                in_size,
                parts,
                dtype,
                planners,
                form,
                bias=config.bias,
                numbered=not is_shared,
                pieces=pieces,
                sums=sums,
                expert_pieces=dealt,
            )

        self.gate_up_proj = stacked(hidden, {"gate_proj": inner, "up_proj": inner}, pieces=pieces)
        self.down_proj = stacked(inner, {"down_proj": hidden}, sums=pieces)

    def __call__(self, x: jax.Array, ids: jax.Array, weights: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Compute the sum of what its experts give each token: x [T, E], ids and weights [T, k] -> [T, E].
        Experts of other devices give nothing here.
        """
        config, pools, adapters = self.config, inputs.pools, self._adapters(inputs.pools)
        if self.expert_pieces > 1:
            ids = ids - jax.lax.axis_index(AXIS) * self.num_own
            ids = jnp.where((ids >= 0) & (ids < self.num_own), ids, native.NO_EXPERT)
        if self.packed:
            return native.experts(
                x,
                ids,
                weights,
                self.gate_up_proj.operands(pools),
                self.down_proj.operands(pools),
                num_rows=inputs.num_tokens,
                activation=config.activation,
                limit=config.limit,
                weigh_input=config.weigh_input,
                adapters=adapters,
            )
        is_real = jnp.arange(len(x), dtype=jnp.int32)[:, None] < inputs.num_tokens
        compute = xla.experts if self.is_shared else self.linear.experts
        return compute(
            x,
            jnp.where(is_real, ids, native.NO_EXPERT),  # padding needs no expert's weights
            weights,
            self.gate_up_proj.stacked(pools),
            self.down_proj.stacked(pools),
            activation=config.activation,
            limit=config.limit,
            weigh_input=config.weigh_input,
            adapters=adapters,
        )

    def _adapters(self, pools: Pools) -> ExpertAdapters | None:
        """Return the adapters of the step's tokens; None where none can change these experts."""
        rows, gate_up, down = pools.adapters, self.gate_up_proj.adapter_at, self.down_proj.adapter_at
        if rows is None or gate_up is None or down is None:
            return None
        has_room = rows.has_room(gate_up) and rows.has_room(down)
        return ExpertAdapters(rows, gate_up, down) if has_room else None


class Experts(nnx.Module):
    """A mixture of experts in the place of an MLP."""

    def __init__(
        self,
        model: ModelConfig,
        config: ExpertsConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        self.is_cut = config.is_cut
        self.router = Router(model, config, dtype, linear, planners)
        self.experts = ExpertStack(model, config, dtype, linear, planners)
        self.shared_expert = (
            None
            if config.shared_size is None
            else ExpertStack(model, config, dtype, linear, planners, is_shared=True)
        )

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute this layer."""
        shared_packed = self.shared_expert is None or self.shared_expert.packed
        return self.router.packed and self.experts.packed and shared_packed

    def __call__(self, x: jax.Array, norm: Norm | None, residual: Residual, inputs: LayerInputs) -> jax.Array:
        """Add to x what the experts make of norm(x): x [T, E] -> [T, E]."""
        rows, pools = inputs.num_tokens, inputs.pools
        normed = x if norm is None else normalised(x, norm, rows, pools, natively=self.is_native)
        choice = self.router(normed, inputs)
        y = self.experts(normed, choice.ids, choice.weights, inputs)
        if self.shared_expert is not None:
            only = jnp.zeros(choice.shared.shape, jnp.int32)
            shared = self.shared_expert(normed, only, choice.shared, inputs)
            # XLA might fuse two sums, in some programs, and leave out the rounding between them.
            y = (
                normalize(shared, num_rows=inputs.num_tokens, eps=None, residual=y)
                if self.is_native
                else y + shared
            )
        return residual.add(summed(y).astype(y.dtype) if self.is_cut else y, x, inputs)
