"""Linear layers, and what decoders build from them, over any format of weights.

Weights keep the checkpoint's own [out, in] layout, or are packed for the CPU kernels (`native.linear`), or
are int8 with one scale for each output, or codes with scales by group (`ops.codes`). Layers that
have the same input, such as q, k and v, are one product whose outputs lie side by side. Norms, biases and
scales of outputs have places in the model's pools (`pools`).

The functions below are the fusions that the kernels have; for other formats they are composed of plain
operations with the same meaning (`ops.products`).

Shapes: T tokens, E hidden_size. `num_rows` int32 []: rows of x from this one on are padding, which kernels
skip and whose results are undefined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import Activation
from penstock.runtime.models.load_rules import (
    AXIS,
    Cut,
    LoadRule,
    ParamPath,
    Put,
    Span,
    StoredAt,
    Target,
    copy_rows,
    pack_code_rows,
    pack_rows,
    quantize_and_pack_rows,
    quantize_rows,
)
from penstock.runtime.models.norms import LayerNorm, Norm, RMSNorm, vector_rule
from penstock.runtime.models.pools import SCALES, Place, PoolPlanners, Pools
from penstock.runtime.ops import collectives
from penstock.runtime.ops.adapters import AdapterPlace, LinearAdapters, added, delta
from penstock.runtime.ops.cache_spec import TPU_LANES
from penstock.runtime.ops.codes import OUTPUTS, CodeForm, matmul_codes, rows_of
from penstock.runtime.ops.experts import ExpertsOp, experts
from penstock.runtime.ops.native import float32 as native_float32
from penstock.runtime.ops.native import linear as native
from penstock.runtime.ops.native.activations import Activation as GateActivation
from penstock.runtime.ops.native.norm import Plain, can_normalize, normalize
from penstock.runtime.ops.products import (
    as_stored,
    gated,
    has_outputs_last,
    matmul_int8,
    matmul_transposed,
    read_as_stored,
)


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """How linear weights are stored. Layers that cannot be cut into the kernels' tiles stay unpacked."""

    packed: bool = False
    """As tiles for the native CPU kernels; activations must be bfloat16."""
    int8: bool = False
    """As int8 with one float32 scale for each output; the kernels quantize activations on the way."""
    float32: bool = False
    """As tiles of float32 for the kernel of such layers, in encoders in float32. The weights are not
    `packed`, because the other kernels take no activations in float32."""
    codes: CodeForm | None = None
    """As these bytes, whether or not they are `packed` for the kernels. Layers that cannot be cut into tiles
    are int8, and so are tables of embeddings and heads: in 4 bits they alone would cost a third of the
    accuracy that all layers cost."""
    kept: tuple[tuple[ParamPath, CodeForm], ...] = ()
    """Leaves that hold a checkpoint's codes as they are, each as these bytes, whatever the others hold. Of a
    layer whose parts have codes of different kinds, it has those of the parts (`LoadRule.apart`)."""
    experts: ExpertsOp = field(default=experts, repr=False)
    """Computes mixtures of experts whose weights are not packed. It is left out of the text by which kept
    programs are found, because the backend decides it, and a function's text has its place in memory."""

    def of(self, out_sizes: Iterable[int], in_size: int) -> LinearFormat:
        """Return the format of a layer whose parts have these numbers of outputs."""
        can_pack = native_float32.can_pack if self.float32 else native.can_pack
        if all(can_pack(size, in_size) for size in out_sizes):
            return self
        return replace(self.of_table(), packed=False)

    def of_table(self) -> LinearFormat:
        """Return the format of a table of embeddings and of a head, of which neither codes are made nor tiles
        of float32.
        """
        whole = replace(self, float32=False)
        return whole if self.codes is None else LinearFormat(packed=self.packed, int8=True)

    def weight(self, out_size: int, in_size: int, dtype: jnp.dtype, *stacked: int) -> nnx.Param[jax.Array]:
        """Make a weight [*stacked, out_size, in_size] of zeros in this format."""
        if self.codes is not None:
            return nnx.Param(jnp.zeros((*stacked, *self.codes.shape(out_size, in_size)), jnp.uint8))
        shape: tuple[int, ...] = (out_size, in_size)
        if self.packed or self.float32:
            shape = native.packed_shape(out_size, in_size, int8=self.int8, float32=self.float32)
        return nnx.Param(jnp.zeros((*stacked, *shape), jnp.int8 if self.int8 else dtype))

    @property
    def put(self) -> Put:
        """How rows are put into a leaf."""
        return pack_code_rows if self.codes is not None else PUTS[self.packed or self.float32, self.int8]

    @property
    def outputs_per_entry(self) -> int:
        """How many outputs an entry of a leaf has."""
        return native.BLOCK_OUT if self.packed or self.float32 or self.codes is not None else 1


PLAIN = LinearFormat()


PUTS: Mapping[tuple[bool, bool], Put] = {
    (False, False): copy_rows,
    (True, False): pack_rows,
    (False, True): quantize_rows,
    (True, True): quantize_and_pack_rows,
}
"""(packed, int8) to how rows are put into a leaf."""


def part_rules(
    layer: ParamPath,
    shape: tuple[int, int],
    dtype: np.dtype[np.generic],
    stored: StoredAt,
    linear: LinearFormat,
    *,
    leaf: ParamPath,
    at: tuple[int, ...] = (),
    row: int,
    scale_at: int | None,
    bias_at: int | None,
    spans: tuple[Span, ...] = (),
    sums: int = 1,
    may_keep: bool = False,
    apart: ParamPath | None = None,
) -> Iterator[tuple[ParamPath, LoadRule]]:
    """Yield the rules of one layer of a checkpoint, whose weight [out, in] is the rows from `row` on of a
    leaf, or of the matrix `at` that the leaf stacks. scale_at, bias_at: where its scales and its bias begin
    in their pools; None: it has none. `shape` is that of one device. spans: how the outputs are cut; none:
    they are not. sums: into how many the inputs are cut. may_keep, apart: see `LoadRule`; packed floats may
    always be kept.
    """
    block = linear.outputs_per_entry
    tensor: ParamPath = (*layer, "weight")
    targets = [Target(leaf, at=at, begin=row // block, rows_per_entry=block)]
    if scale_at is not None:
        targets.append(Target(SCALES, begin=scale_at))
    there = stored(tensor, (sum(span.whole for span in spans) or shape[0], shape[1] * sums))
    by_rows = Cut(along="rows", spans=spans) if spans else None
    rule = LoadRule(
        sources=there.sources,
        targets=tuple(targets),
        num_rows=shape[0],
        dtype=dtype,
        decode=there.decode,
        kept=there.kept if there.kept is not None and there.kept.fits(OUTPUTS, shape[1]) else None,
        may_keep=may_keep or (linear.put is pack_rows and not linear.float32),
        apart=apart,
        put=linear.put,
        cut=by_rows if sums == 1 else Cut(along="columns", spans=(Span(sums, shape[1]),)),
    )
    yield tensor, rule
    if bias_at is not None:
        of_bias = by_rows if sums == 1 else Cut(along="first")
        yield vector_rule((*layer, "bias"), Place(bias_at, shape[0]), dtype, stored, cut=of_bias)


class Linear(nnx.Module):
    """y = x W^T + b: one layer of a checkpoint, or several with the same input, whose outputs lie side by
    side.

    `parts` maps the names of these layers in the checkpoint to their numbers of outputs. The weight is in one
    of the formats; `scale_at` and `bias_at` are places in the pools. If a checkpoint has codes of different
    kinds for the parts, as GGUF files with mixed types, neighbours of one kind have a leaf for themselves,
    under the name of the first one; else all have the leaf "weight".
    """

    may_keep = False
    """Whether a checkpoint's codes can also take the place of floats that are not packed."""

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        dtype: jnp.dtype,
        planners: PoolPlanners,
        *,
        bias: bool = False,
        linear: LinearFormat = PLAIN,
        cuts: Mapping[str, tuple[Span, ...]] | None = None,
        sums: int = 1,
        apart: bool = False,
    ) -> None:
        """Sizes are those of one device. cuts: how the outputs of a part are cut, if they are. sums: into how
        many the inputs are cut; what the devices compute is added up then. apart: whether the parts may have
        codes of different kinds. Those of a gate may not, because one kernel multiplies both.
        """
        self.cuts, self.sums = tuple((cuts or {}).get(part, ()) for part in parts), sums
        out_size = sum(parts.values())
        self.in_size, self.parts = in_size, tuple(parts.items())
        split = (spans for spans in self.cuts if any(span.pieces > 1 for span in spans))
        sizes = [span.size for spans in split for span in spans]
        self.form = linear.of((*parts.values(), *sizes), in_size)
        self.weight = self.form.weight(out_size, in_size, dtype)
        self.may_part = apart and 1 < len(parts) <= native.MOST_WEIGHTS
        self.leaves: tuple[tuple[str, LinearFormat, int], ...] = (("weight", self.form, out_size),)
        """The names, formats and numbers of outputs of its leaves."""
        self.scale_at: Place | None = planners.scales.take(out_size) if self.form.int8 else None
        self.bias_at: Place | None = planners.vectors.take(out_size) if bias else None
        self.adapter_at: AdapterPlace | None = None
        """Where adapters have their matrices for it; None: none may change it. See `models.adapted`."""

    @property
    def packed(self) -> bool:
        """Whether the native kernels multiply it."""
        return self.form.packed

    def multiplied(
        self,
        x: jax.Array,
        num_rows: jax.Array,
        pools: Pools,
        *,
        plain: Plain | None = None,
        residual: jax.Array | None = None,
        norm: LayerNorm | None = None,
    ) -> jax.Array:
        """Compute norm(residual + plain(product(x))) by the kernel of layers in float32: x [T, in] ->
        [T, out].
        """
        assert self.adapter_at is None, "adapters change no encoders"
        weight, bias = (None, None) if norm is None else (norm.weight_at, norm.bias_at)
        return native_float32.multiply(
            x,
            self.weight[...],
            pools.vectors,
            num_rows=num_rows,
            bias_at=None if self.bias_at is None else self.bias_at.begin,
            plain=plain,
            residual=residual,
            eps=None if norm is None else norm.eps,
            norm_at=None if weight is None else weight.begin,
            norm_bias_at=None if bias is None else bias.begin,
            offset=0.0 if norm is None else norm.offset,
        )

    def keep(self, form: CodeForm) -> None:
        """Have a checkpoint's codes as the weight, in a model whose weights are packed for native kernels."""
        self.form, out_size = LinearFormat(packed=True, codes=form), sum(dict(self.parts).values())
        self.weight = self.form.weight(out_size, self.in_size, jnp.dtype(jnp.uint8))
        self.leaves = (("weight", self.form, out_size),)

    def keep_apart(self, forms: Mapping[str, CodeForm]) -> None:
        """Have a checkpoint's codes as the weights of these parts, and floats as those of the others, in a
        model whose weights are packed for native kernels.
        """
        assert self.may_part, "only rules that say so are kept apart"
        dtype, leaves = self.weight.dtype, list[tuple[str, LinearFormat, int]]()
        for codes, run in groupby(self.parts, key=lambda part: forms.get(part[0])):
            names, sizes = zip(*run, strict=True)
            form = LinearFormat(packed=True, codes=codes)
            setattr(self, names[0], form.weight(sum(sizes), self.in_size, dtype))
            leaves.append((names[0], form, sum(sizes)))
        del self.weight
        self.leaves = tuple(leaves)

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`; each part of the outputs is a tensor."""
        row = begin = 0
        leaves = iter(self.leaves)
        leaf, form, outputs = next(leaves)
        for (part, size), spans in zip(self.parts, self.cuts, strict=True):
            if row == begin + outputs:
                begin, (leaf, form, outputs) = row, next(leaves)
            yield from part_rules(
                (*path[:-1], part),
                (size, self.in_size),
                dtype,
                stored,
                form,
                leaf=(*path, leaf),
                row=row - begin,
                scale_at=None if self.scale_at is None else self.scale_at.begin + row,
                bias_at=None if self.bias_at is None else self.bias_at.begin + row,
                spans=spans,
                sums=self.sums,
                may_keep=self.may_keep,
                apart=(*path, part) if self.may_part else None,
            )
            row += size

    @property
    def outputs_are_cut(self) -> bool:
        """Whether a device has only some of the outputs."""
        return any(span.pieces > 1 for spans in self.cuts for span in spans)

    def operands(self, pools: Pools) -> tuple[native.Packed, ...]:
        """Return the operands of the native kernel, those of each leaf."""
        found, row = list[native.Packed](), 0
        for name, _, outputs in self.leaves:
            packed = native.Packed(
                getattr(self, name)[...],
                None if self.scale_at is None else pools.scales,
                None if self.bias_at is None else pools.vectors,
                0 if self.scale_at is None else self.scale_at.begin + row,
                0 if self.bias_at is None else self.bias_at.begin + row,
            )
            found.append(packed)
            row += outputs
        return tuple(found)

    def scale(self, pools: Pools) -> jax.Array | None:
        """Return the scale of each output, float32 [out], with int8; else None."""
        if self.scale_at is None or pools.scales is None:
            return None
        return pools.scales[self.scale_at.columns]

    def product(self, x: jax.Array, pools: Pools) -> jax.Array:
        """Compute x [T, in] -> float32 [T, out]; for unpacked weights only."""
        scale = self.scale(pools)
        if self.form.codes is not None:
            y = matmul_codes(x, self.weight[...])
        else:
            x, weight = read_as_stored(x, self.weight[...])
            y = matmul_transposed(x, weight) if scale is None else matmul_int8(x, weight, scale)
        if self.bias_at is not None:
            y = y + pools.vectors[self.bias_at.columns].astype(jnp.float32)[None, :]
        if self.adapter_at is None or pools.adapters is None:
            return y
        return added(y, delta(x, pools.adapters, self.adapter_at), pools.adapters)


class Embedding(Linear):
    """A table [V, E]; where the model ties them, it is also the output head."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: jnp.dtype,
        planners: PoolPlanners,
        linear: LinearFormat = PLAIN,
        *,
        name: str = "embed_tokens",
        pieces: int = 1,
        may_keep: bool = False,
    ) -> None:
        """`name`: what its path in the checkpoint ends in. pieces: into how many the tokens are cut, of which
        one has `vocab_size`. may_keep: whether nothing reads the table but lookups and products, so that a
        checkpoint's codes can take its place.
        """
        parts, cuts = {name: vocab_size}, {name: (Span(pieces, vocab_size),)}
        super().__init__(hidden_size, parts, dtype, planners, linear=linear.of_table(), cuts=cuts)
        self.dtype, self.num_tokens = jnp.dtype(dtype), vocab_size
        self.may_keep = may_keep and native.can_pack(vocab_size, hidden_size)

    def __call__(self, token_ids: jax.Array, pools: Pools) -> jax.Array:
        """Look up token_ids int32 [T] -> [T, E]. Ids outside the table, which only padding has, read its
        edge, or zeros if it is cut.
        """
        if not self.outputs_are_cut:
            return self._rows(token_ids, pools)
        own = token_ids - jax.lax.axis_index(AXIS) * self.num_tokens
        is_here = (own >= 0) & (own < self.num_tokens)
        rows = self._rows(jnp.clip(own, 0, self.num_tokens - 1), pools)
        return summed(jnp.where(is_here[:, None], rows, 0)).astype(rows.dtype)

    def _rows(self, token_ids: jax.Array, pools: Pools) -> jax.Array:
        """Read the rows of the device's own table: int32 [T] -> [T, E]."""
        table = self.weight[...]
        if self.form.codes is not None:
            return rows_of(table, token_ids, self.in_size, self.dtype)
        by_bits = self._gathered_by_bits if table.dtype.itemsize == 2 else self._gathered
        in_blocks = table.shape[0] % TPU_LANES == 0
        tokens_last = not self.packed and in_blocks and has_outputs_last(table)
        rows: jax.Array = jax.lax.platform_dependent(
            table,
            token_ids,
            cpu=by_bits,
            tpu=rows_by_blocks if tokens_last else self._gathered,
            default=self._gathered,
        )
        scales = self.scale(pools)
        if scales is None:
            return rows
        scale = scales.at[token_ids].get(mode="clip")
        return (rows.astype(jnp.float32) * scale[:, None]).astype(self.dtype)

    def _gathered(self, table: jax.Array, token_ids: jax.Array) -> jax.Array:
        if not self.packed:
            return table.at[token_ids].get(mode="clip")
        ids = jnp.clip(token_ids, 0, table.shape[0] * native.BLOCK_OUT - 1)
        rows = table[ids // native.BLOCK_OUT, :, :, ids % native.BLOCK_OUT]
        return rows.reshape(ids.shape[0], -1)

    def _gathered_by_bits(self, table: jax.Array, token_ids: jax.Array) -> jax.Array:
        """Gather bits, because of floats XLA's CPU backend would first copy the whole table to float32. On
        TPUs the bits would be a copy of the table.
        """
        # Without the barrier XLA would move the cast out of a loop of steps, where it is a copy.
        table, token_ids = jax.lax.optimization_barrier((table, token_ids))
        rows = self._gathered(jax.lax.bitcast_convert_type(table, jnp.uint16), token_ids)
        return jax.lax.bitcast_convert_type(rows, table.dtype)


def rows_by_blocks(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Read rows token_ids int32 [T] of a table [V, E] -> [T, E], each out of the block of 128 tokens that has
    it; V is a multiple of that. XLA's TPU backend stores a table by blocks of so many tokens where
    `has_outputs_last`. It would copy the whole table to gather rows.
    """
    table = as_stored(table)

    def row(token: jax.Array) -> jax.Array:
        # In a loop of steps XLA moves the constraint above to before that loop, where it is lost.
        block = as_stored(jax.lax.dynamic_slice_in_dim(table, token // TPU_LANES * TPU_LANES, TPU_LANES))
        is_it = jnp.arange(TPU_LANES, dtype=jnp.int32) == token % TPU_LANES
        found = jnp.where(is_it[:, None], block, jnp.zeros((), block.dtype)).astype(jnp.float32)
        return found.sum(axis=0).astype(table.dtype)

    rows: jax.Array = jax.lax.map(row, jnp.clip(token_ids, 0, table.shape[0] - 1))
    return rows


def project(
    linear: Linear, x: jax.Array, num_rows: jax.Array, pools: Pools, *, norm: Norm | None = None
) -> jax.Array:
    """Compute linear(norm(x)): x [T, in] -> [T, out] in x's dtype."""
    if linear.sums > 1 or linear.form.float32:
        return project_float32(linear, x, num_rows, pools, norm=norm).astype(x.dtype)
    x, norm = _read(linear, x, norm, num_rows, pools)
    if linear.packed:
        options, adapters = _norm_options(norm, pools), _adapters(linear, pools)
        return native.linear(x, linear.operands(pools), num_rows=num_rows, adapters=adapters, **options)
    return linear.product(x if norm is None else norm(x, pools), pools).astype(x.dtype)


def project_apart(
    linear: Linear, x: jax.Array, num_rows: jax.Array, pools: Pools, *, norm: Norm | None = None
) -> Sequence[jax.Array]:
    """Compute linear(norm(x)) like `project`, with each part of the outputs in an array of its own, which the
    kernel of layers in float32 writes at once; XLA would copy the parts of one array.
    """
    widths = [size for _, size in linear.parts]
    if linear.sums > 1 or not linear.form.float32 or len(widths) > native_float32.MOST_PARTS:
        made = project(linear, x, num_rows, pools, norm=norm)
        return [made[:, begin:end] for begin, end in pairwise((0, *accumulate(widths)))]
    assert linear.adapter_at is None, "adapters change no encoders"
    return native_float32.multiply_apart(
        x if norm is None else norm(x, pools),
        linear.weight[...],
        pools.vectors,
        widths,
        num_rows=num_rows,
        bias_at=None if linear.bias_at is None else linear.bias_at.begin,
    )


def project_float32(
    linear: Linear, x: jax.Array, num_rows: jax.Array, pools: Pools, *, norm: Norm | None = None
) -> jax.Array:
    """Compute linear(norm(x)), not rounded to x's dtype: x [T, in] -> float32 [T, out]."""
    x, norm = _read(linear, x, norm, num_rows, pools)
    if linear.packed:
        y = native.linear(
            x,
            linear.operands(pools),
            num_rows=num_rows,
            out_dtype=np.float32,
            adapters=_adapters(linear, pools),
            **_norm_options(norm, pools),
        )
    elif linear.form.float32:
        y = linear.multiplied(x if norm is None else norm(x, pools), num_rows, pools)
    else:
        y = linear.product(x if norm is None else norm(x, pools), pools)
    return y if linear.sums == 1 else summed(y)


def summed(y: jax.Array) -> jax.Array:
    """Sum over the devices what each of them computed of an array, in float32."""
    with jax.named_scope("sum"):
        return collectives.summed(y.astype(jnp.float32), AXIS)


def add_projected(
    linear: Linear,
    x: jax.Array,
    residual: jax.Array,
    num_rows: jax.Array,
    pools: Pools,
    *,
    multiplier: float = 1.0,
    norm: Norm | None = None,
) -> jax.Array:
    """Compute norm(residual [T, out] + multiplier * linear(x)), x [T, in] -> [T, out]."""
    if linear.form.float32 and linear.sums == 1 and multiplier == 1.0 and not isinstance(norm, RMSNorm):
        return linear.multiplied(x, num_rows, pools, residual=residual, norm=norm)
    if linear.sums > 1 or linear.form.float32:
        y = project_float32(linear, x, num_rows, pools) * np.float32(multiplier)
        y = (residual.astype(jnp.float32) + y).astype(residual.dtype)
    elif linear.packed:
        y = native.linear(
            x,
            linear.operands(pools),
            num_rows=num_rows,
            residual=residual,
            scale=multiplier,
            adapters=_adapters(linear, pools),
        )
    else:
        y = residual + (linear.product(x, pools) * np.float32(multiplier)).astype(x.dtype)
    return y if norm is None else norm(y, pools)


def add_normalised(
    x: jax.Array,
    residual: jax.Array,
    num_rows: jax.Array,
    pools: Pools,
    *,
    norm: Norm | None,
    multiplier: float,
    natively: bool,
) -> jax.Array:
    """Compute residual + multiplier * norm(x), all [T, E]; natively: by the CPU kernel, which takes
    bfloat16.
    """
    if isinstance(norm, LayerNorm):
        x, norm = norm(x, pools), None
    if natively and norm is None:
        return normalize(x, num_rows=num_rows, residual=residual, scale=multiplier, eps=None)
    if natively:
        options = _norm_options(norm, pools)
        return normalize(x, num_rows=num_rows, residual=residual, scale=multiplier, **options)
    y = x if norm is None else norm(x, pools)
    return residual + (y if multiplier == 1.0 else y * np.asarray(multiplier, y.dtype))


def project_activated(
    linear: Linear, x: jax.Array, num_rows: jax.Array, pools: Pools, *, norm: Norm | None, plain: Plain
) -> jax.Array | None:
    """Compute plain(linear(norm(x))) in one kernel, x [T, in] -> [T, out]; None where there is none."""
    if not linear.form.float32 or linear.sums > 1:
        return None
    return linear.multiplied(x if norm is None else norm(x, pools), num_rows, pools, plain=plain)


def project_gated(
    gate_up: Linear,
    x: jax.Array,
    num_rows: jax.Array,
    pools: Pools,
    *,
    norm: Norm | None = None,
    activation: Activation = "silu",
) -> jax.Array:
    """Compute activation(gate(norm(x))) * up(norm(x)), with the activation in float32; x [T, in] ->
    [T, out / 2]. The first half of the layer's outputs is the gate's.
    """
    x, norm = _read(gate_up, x, norm, num_rows, pools)
    if gate_up.packed:
        return native.linear(
            x,
            gate_up.operands(pools),
            num_rows=num_rows,
            gate=activation,
            adapters=_adapters(gate_up, pools),
            **_norm_options(norm, pools),
        )
    both = _as_rounded(project(gate_up, x, num_rows, pools, norm=norm))
    return gated(activation, both.astype(jnp.float32)).astype(x.dtype)


def _as_rounded(x: jax.Array) -> jax.Array:
    """Return x, which is rounded, as it is. On a TPU XLA would leave out that it is rounded, and so write and
    read it in float32, which is twice the bytes.
    """
    rounded: jax.Array = jax.lax.platform_dependent(x, tpu=jax.lax.optimization_barrier, default=lambda x: x)
    return rounded


def project_gate(
    gate: Linear,
    x: jax.Array,
    up: jax.Array,
    num_rows: jax.Array,
    pools: Pools,
    *,
    norm: Norm | None = None,
    activation: GateActivation,
) -> jax.Array:
    """Compute activation(gate(norm(x))) * up, with the activation in float32: x [T, in], up [T, out] ->
    [T, out].
    """
    x, norm = _read(gate, x, norm, num_rows, pools)
    if gate.packed:
        return native.linear(
            x,
            gate.operands(pools),
            num_rows=num_rows,
            gate=activation,
            up=up,
            adapters=_adapters(gate, pools),
            **_norm_options(norm, pools),
        )
    opened = project(gate, x, num_rows, pools, norm=norm)
    return gated(activation, jnp.concatenate([opened, up], axis=1).astype(jnp.float32)).astype(x.dtype)


def logits(
    head: Linear,
    x: jax.Array,
    num_rows: jax.Array,
    pools: Pools,
    *,
    norm: Norm | None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> jax.Array:
    """Compute norm(x) [R, E] times the head and `scale`: float32 [R, V]. With `softcap`, logits l become
    softcap * tanh(l / softcap).
    """
    x, of_product = _read(head, x, norm, num_rows, pools)
    if head.packed:
        out = native.linear(
            x,
            head.operands(pools),
            num_rows=num_rows,
            scale=scale,
            softcap=0.0 if softcap is None else softcap,
            out_dtype=np.float32,
            **_norm_options(of_product, pools),
        )
    else:
        out = head.product(x if of_product is None else of_product(x, pools), pools)
        if scale != 1.0:
            out = out * np.float32(scale)
        if softcap is not None:
            out = np.float32(softcap) * jnp.tanh(out / np.float32(softcap))
    if head.outputs_are_cut:
        with jax.named_scope("gather"):
            out = collectives.gathered(out, AXIS)
    return out


def _read(
    linear: Linear, x: jax.Array, norm: Norm | None, num_rows: jax.Array, pools: Pools
) -> tuple[jax.Array, RMSNorm | None]:
    """Return what a product reads, and the norm that it must apply itself: a layer norm is computed before
    the product.
    """
    if isinstance(norm, LayerNorm):
        return normalised(x, norm, num_rows, pools, natively=linear.packed), None
    return x, norm


def normalised(x: jax.Array, norm: Norm, num_rows: jax.Array, pools: Pools, *, natively: bool) -> jax.Array:
    """Compute norm(x), [T, E], where no product normalises what it reads. natively: by the CPU kernel."""
    if not natively or not can_normalize(x.shape[1]):
        return norm(x, pools)
    if isinstance(norm, RMSNorm):
        return normalize(x, num_rows=num_rows, **_norm_options(norm, pools))
    weight, bias = norm.weight_at, norm.bias_at
    return normalize(
        x,
        num_rows=num_rows,
        eps=norm.eps,
        norm=None if weight is None else pools.vectors,
        norm_at=0 if weight is None else weight.begin,
        offset=norm.offset,
        centred=True,
        bias=None if bias is None else pools.vectors,
        bias_at=0 if bias is None else bias.begin,
    )


def _adapters(linear: Linear, pools: Pools) -> LinearAdapters | None:
    """Return the adapters of a layer; None where there can be none."""
    rows, at = pools.adapters, linear.adapter_at
    return None if rows is None or at is None else LinearAdapters(rows, at)


def _norm_options(norm: RMSNorm | None, pools: Pools) -> native.NormOptions:
    if norm is None:
        return {}
    at = norm.weight_at.begin
    return {"norm": pools.vectors, "norm_at": at, "eps": norm.eps, "offset": norm.offset}
