"""A causal convolution of a few taps over each channel, on a ragged batch, in plain XLA.

The inputs of the step are laid out row after row, each row behind the K - 1 inputs before it, which its state
holds. Then the inputs that any token reads, and those that a row keeps, lie side by side.
"""

from __future__ import annotations

from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from penstock.runtime.ops.attention import AttentionMeta

ConvActivation = Literal["silu"]


class ConvOp(Protocol):
    """`causal_conv` as layers call it."""

    def __call__(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        state: Array,
        meta: AttentionMeta,
        activation: ConvActivation | None = None,
    ) -> tuple[Array, Array]: ...


def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    state: Array,
    meta: AttentionMeta,
    activation: ConvActivation | None = None,
) -> tuple[Array, Array]:
    """Compute y[t, c] = activation(bias[c] + sum over k of weight[k, c] * x[t - (K - 1) + k, c]), where the
    row's inputs of earlier steps come from `state`, and those before its first token are zeros.

    x [T, C], weight [K, C] and bias [C] in the model's dtype or float32, K at least 2; state float32 [S, K -
    1, C], the oldest input first. Sums and activation are float32. Returns y [T, C] in x's dtype (padding
    tokens hold finite values if x does), and the state with the entries `meta.state_to` and `state_cut_to`
    replaced.
    """
    assert meta.state_from is not None
    assert meta.state_to is not None
    (num_taps, _), (num_tokens, _), num_rows = weight.shape, x.shape, meta.q_lens.shape[0]
    kept = num_taps - 1
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    firsts = jnp.cumsum(meta.q_lens) - meta.q_lens + kept * jnp.arange(num_rows, dtype=jnp.int32)
    by_entries = kept in (1, 2, 4)  # these need no padding, see `put_by_inputs`
    before: Array = jax.lax.platform_dependent(
        state,
        meta.state_from,
        tpu=entries_of if by_entries else entries_by_inputs,
        default=entries_of,
    )
    # Padding tokens lie behind the last row, and padding rows before them.
    places = token + kept * jnp.where(token < meta.num_tokens, meta.token_rows + 1, num_rows)
    laid = jnp.zeros((num_tokens + kept * num_rows, x.shape[1]), jnp.float32)
    laid = laid.at[places].set(x.astype(jnp.float32), unique_indices=True)
    laid = laid.at[_spans(firsts, kept)].set(before, unique_indices=True)

    wide = weight.astype(jnp.float32)
    y = sum(wide[tap][None, :] * laid[places - kept + tap] for tap in range(num_taps))
    assert isinstance(y, jax.Array)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    if activation == "silu":
        y = jax.nn.silu(y)
    entries, ends = meta.state_to, firsts + meta.q_lens
    if meta.state_cut is not None:
        assert meta.state_cut_to is not None
        # In one write, because XLA's TPU backend would copy the whole state between two.
        cut_to = jnp.where(meta.state_cut > 0, meta.state_cut_to, state.shape[0])
        entries = jnp.concatenate([entries, cut_to])
        ends = jnp.concatenate([ends, firsts + meta.state_cut])
    after: Array = jax.lax.platform_dependent(
        state,
        entries,
        laid[_spans(ends, kept)],
        tpu=put_by_entries if by_entries else put_by_inputs,
        default=put_by_entries,
    )
    return y.astype(x.dtype), after


def entries_of(state: Array, entries: Array) -> Array:
    """Return entries int32 [N] of state [S, K - 1, C]: [N, K - 1, C], where those past the end are zeros."""
    return state.at[entries].get(mode="fill", fill_value=0)


def entries_by_inputs(state: Array, entries: Array) -> Array:
    """Do what `entries_of` does in the order of `put_by_inputs`. A 7x would else copy the whole state in each
    decode step.
    """
    inputs = jnp.arange(state.shape[1], dtype=jnp.int32)[:, None]
    found = jnp.swapaxes(state, 0, 1).at[inputs, entries[None]].get(mode="fill", fill_value=0)
    return jnp.swapaxes(found, 0, 1)


def put_by_entries(state: Array, entries: Array, new: Array) -> Array:
    """Replace entries int32 [N] of state [S, K - 1, C] by new [N, K - 1, C]; those past the end stay out."""
    return state.at[entries].set(new, mode="drop")


def put_by_inputs(state: Array, entries: Array, new: Array) -> Array:
    """Do what `put_by_entries` does, in the order in which XLA's TPU backend stores the state where K is 4:
    the oldest inputs of all entries come first, because rows of three would be padded. A loop of decode steps
    would else have another order, and copy the whole state before and after it.
    """
    inputs = jnp.arange(state.shape[1], dtype=jnp.int32)[:, None]
    turned, new = jnp.swapaxes(state, 0, 1), jnp.swapaxes(new, 0, 1)
    return jnp.swapaxes(turned.at[inputs, entries[None]].set(new, mode="drop"), 0, 1)


def _spans(begins: Array, length: int) -> Array:
    """Turn begins int32[R] -> int32[R, length]: the `length` places from each on."""
    return begins[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
