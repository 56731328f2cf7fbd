"""The operations of recurrent layers in C++: the Python side of src/state.

They go through a row's tokens one after the other, in prefill as in decode. So the bits of a token's output
and of a row's state depend on that row's tokens alone: not on the rows beside it, the number of threads, or
how its prompt was cut into chunks. Padding tokens and rows cost nothing.

State is written in place: the returned arrays lie in the memory of the arguments, and entries that no row
names keep their bits. In a step, no entry may be written by two rows, nor be written by one and read by
another; a row may write the entry that it reads.

XLA's forms go through a prompt block by block, and are the reference and the fallback. One kernel computes
the delta rule and Mamba-2 with all norms and gates around them: threads share heads and slices of their
state, a slice goes through the first cache once a token, and a decode step reads the state once and writes it
past the caches.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock.runtime.ops.native import library

_MULTIPLE = 16
_MOST_TAPS = 8
_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float32))


class StateRows(NamedTuple):
    """The rows of a step, which lie one after the other from token 0; each int32[R]. An entry past the end of
    the state's arrays stands for zeros where it is read, and for nothing where it is written.
    """

    q_lens: Array
    """How many tokens each row has; 0: a padding row, which reads and writes nothing."""
    read: Array
    """The entry that the row goes on from."""
    written: Array
    """The entry that gets the state after all its tokens."""
    cut: Array | None = None
    """After how many of its tokens the state is kept too; 0: never. None: for no row."""
    cut_to: Array | None = None
    """The entry that gets that state."""

    def operands(self) -> tuple[Array, ...]:
        """Return the operands of the kernels."""
        none = library.absent(jnp.int32)
        cuts = (none, none) if self.cut is None or self.cut_to is None else (self.cut, self.cut_to)
        return self.q_lens, self.read, self.written, *cuts


def can_convolve(dtype: jnp.dtype, channels: int, num_taps: int) -> bool:
    """Say whether the kernel can handle so many channels in `dtype`, and taps for each."""
    return np.dtype(dtype) in _DTYPES and channels % _MULTIPLE == 0 and 2 <= num_taps <= _MOST_TAPS


def can_recur(dtype: jnp.dtype, key_dim: int, value_dim: int) -> bool:
    """Say whether the kernels can handle inputs in `dtype` and heads with a state [key_dim, value_dim]."""
    return np.dtype(dtype) in _DTYPES and key_dim % _MULTIPLE == 0 and value_dim % _MULTIPLE == 0


def convolve(
    x: Array, weight: Array, bias: Array | None, state: Array, rows: StateRows, *, silu: bool
) -> tuple[Array, Array]:
    """Compute `penstock.runtime.ops.recurrent.conv.causal_conv`; see there. Padding tokens give 0."""
    library.load()
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype))
    call = jax.ffi.ffi_call("penstock_conv", shapes, input_output_aliases={3: 1})
    none = library.absent(weight.dtype)
    y, state = call(
        x,
        weight,
        none if bias is None else bias.astype(weight.dtype),
        state,
        *rows.operands(),
        silu=silu,
    )
    return y, state


def gated_delta_net(
    qkv: Array,
    z: Array,
    ba: Array,
    state: Array,
    rows: StateRows,
    *,
    a_log: Array,
    dt_bias: Array,
    norm: Array,
    eps: float,
    num_key_heads: int,
) -> tuple[Array, Array]:
    """Compute `penstock.runtime.ops.recurrent.delta.gated_delta_net`; see there. Padding tokens give 0."""
    return _recur(
        qkv,
        z,
        ba,
        state,
        rows,
        (a_log, dt_bias, library.absent(jnp.float32), norm),
        delta=True,
        key_heads=num_key_heads,
        run=state.shape[3],
        eps=eps,
    )


def mamba2(
    xbc: Array,
    gate: Array,
    dt: Array,
    state: Array,
    rows: StateRows,
    *,
    a_log: Array,
    dt_bias: Array,
    skip: Array,
    norm: Array,
    eps: float,
    num_groups: int,
    dt_limit: tuple[float, float],
) -> tuple[Array, Array]:
    """Compute `penstock.runtime.ops.recurrent.ssd.mamba2`; see there. Padding tokens give 0."""
    return _recur(
        xbc,
        gate,
        dt,
        state,
        rows,
        (a_log, dt_bias, skip, norm),
        delta=False,
        key_heads=num_groups,
        run=state.shape[1] * state.shape[3] // num_groups,
        eps=eps,
        dt_limit=dt_limit,
    )


def _recur(
    mixed: Array,
    gate: Array,
    logits: Array,
    state: Array,
    rows: StateRows,
    parameters: tuple[Array, Array, Array, Array],
    *,
    delta: bool,
    key_heads: int,
    run: int,
    eps: float,
    dt_limit: tuple[float, float] = (0.0, 0.0),
) -> tuple[Array, Array]:
    """Run what the two recurrences have in common; `parameters`: a_log, dt_bias, skip, norm."""
    library.load()
    shapes = (jax.ShapeDtypeStruct(gate.shape, mixed.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype))
    call = jax.ffi.ffi_call("penstock_recurrence", shapes, input_output_aliases={3: 1})
    low, high = dt_limit
    out, state = call(
        mixed,
        gate,
        logits,
        state,
        *parameters,
        *rows.operands(),
        delta=delta,
        key_heads=np.int64(key_heads),
        run=np.int64(run),
        eps=np.float32(eps),
        dt_low=np.float32(low),
        dt_high=np.float32(high),
    )
    return out, state
