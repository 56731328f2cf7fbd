"""Takes a recurrent layer's state through the rows of a ragged batch, in two forms.

A recurrent layer goes through a row's tokens in order, and passes a state from each to the next. The
recurrent form does this for one token of each row at once, and computes all rows of one token; programs of
decode steps have no others. The chunked form computes a block of tokens of one row at once, from the state
before them to the state after them. Blocks are computed one after the other, and end where the state must be
known: at the row's end, and after `AttentionMeta.state_cut` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.attention import AttentionMeta

StepRows = Callable[[Array, Array], tuple[Array, Array]]
"""(the index of one token of each row int32[R], state before them [R, ...]) -> (outputs [R, ...], state after
them [R, ...])."""
StepBlock = Callable[[Array, Array, Array], tuple[Array, Array]]
"""(indices of tokens int32[Q], which of them are no padding bool[Q], state before them [...]) -> (outputs [Q,
...], state after them [...]). Padding comes last, and its indices are those of any tokens, also of other
rows, so what they hold must be replaced and not multiplied by zero."""


def scan_rows(
    meta: AttentionMeta,
    state: Array,
    out: jax.ShapeDtypeStruct,
    *,
    step_rows: StepRows,
    step_block: StepBlock,
    block_tokens: int,
) -> tuple[Array, Array]:
    """Return (outputs by token [T, ...], the new state [S, ...]).

    Rows go on from their entries `state_from` of the state, write their entries `state_to`, and with a
    `state_cut` other than 0 also `state_cut_to`. No row may write an entry that another one reads. All other
    entries keep their bits. out: shape and dtype of one token's output; padding tokens get zeros.

    Raises ValueError if `meta` does not say where the state is.
    """
    singles = _make_singles(meta, state.shape[0])
    made, state = _step_singles(singles, state, step_rows)
    padded = (1,) * len(out.shape)
    real = jnp.arange(meta.positions.shape[0], dtype=jnp.int32) < meta.num_tokens
    if meta.block_tokens.shape[1] == 1:  # a program of decode steps: row i has token i, or none
        return jnp.where(real.reshape(-1, *padded), made, 0), state
    blocks = _make_blocks(meta, state.shape[0], block_tokens)
    in_blocks, state = _scan_blocks(blocks, state, out, step_block)
    of_rows = singles.is_single[meta.token_rows].reshape(-1, *padded)
    outputs = jnp.where(of_rows, made[meta.token_rows], in_blocks)
    return jnp.where(real.reshape(-1, *padded), outputs, 0), state


def decays(log_decay: Array) -> Array:
    """Turn log_decay [H, Q] -> [H, Q, Q]: what is left of what token j wrote when token i has decayed it, for
    j <= i; 0 for others. Sums of logarithms are those of the tokens between, and no difference of sums from
    the block's beginning, in which small decays would be lost beside large ones.
    """
    num = log_decay.shape[1]
    later = jnp.tril(jnp.ones((num, num), bool), -1)
    # Entry [l, j] is token l's logarithm if l > j, so the sum over l up to i is that from j + 1 to i.
    terms = jnp.where(later[None], log_decay[:, :, None], 0)
    return jnp.where(jnp.tril(jnp.ones((num, num), bool))[None], jnp.exp(jnp.cumsum(terms, axis=1)), 0)


class _Singles(NamedTuple):
    """The rows of one token. R rows, S entries of state."""

    is_single: Array  # bool[R]
    tokens: Array  # int32[R] index of the row's token; of any other row that of some token
    read: Array  # int32[R] the entry that the row goes on from; past the end: zeros
    written: Array  # int32[R] the entry that the state after the token is written to; past the end: nowhere
    cut_to: Array | None  # int32[R] another such entry


def _make_singles(meta: AttentionMeta, num_entries: int) -> _Singles:
    single, past = meta.q_lens == 1, jnp.int32(num_entries)
    firsts = jnp.minimum(jnp.cumsum(meta.q_lens) - meta.q_lens, meta.positions.shape[0] - 1)
    entries = _entries(meta)
    cut_to = None
    if entries.cut is not None:
        cut_to = jnp.where(single & (entries.cut == 1), entries.cut_to, past)
    return _Singles(
        single,
        firsts,
        jnp.where(single, entries.read, past),
        jnp.where(single, entries.written, past),
        cut_to,
    )


def _step_singles(singles: _Singles, state: Array, step: StepRows) -> tuple[Array, Array]:
    """Return (outputs by row [R, ...], which are undefined for rows of more tokens; the new
    state [S, ...]).
    """
    made, after = step(singles.tokens, state.at[singles.read].get(mode="fill", fill_value=0))
    for entries in (singles.written, singles.cut_to):
        if entries is not None:
            state = state.at[entries].set(after, mode="drop")
    return made, state


class _Blocks(NamedTuple):
    """B blocks of Q tokens, of which the first `num_used` are used, row after row. S entries of state."""

    num_used: Array  # int32[]
    tokens: Array  # int32[B, Q] index into the T tokens; any valid index where padded
    used: Array  # bool[B, Q]
    is_first: Array  # bool[B] whether the block begins its row; else it goes on from the block before it
    read: Array  # int32[B] the entry that the first block of a row goes on from; past the end: zeros
    written: Array  # int32[B] the entry that the state after the block is written to; past the end: nowhere
    cut_to: Array | None  # int32[B] another such entry
    places: Array  # int32[T] where each token stands in the flattened [B * Q] blocks; 0 if it is in none


def _make_blocks(meta: AttentionMeta, num_entries: int, block_tokens: int) -> _Blocks:
    """Cut the rows of at least two tokens into blocks."""
    num_tokens, num_rows = meta.positions.shape[0], meta.q_lens.shape[0]
    firsts = jnp.cumsum(meta.q_lens) - meta.q_lens
    lengths = jnp.where(meta.q_lens > 1, meta.q_lens, 0)
    entries = _entries(meta)
    # A row with a cut is two stretches, [0, cut) and [cut, length).
    ends = lengths[:, None]
    if entries.cut is not None:
        ends = jnp.stack([jnp.minimum(entries.cut, lengths), lengths], axis=1)
    begins = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    per_row = ends.shape[1]
    begins, ends = begins.reshape(-1), ends.reshape(-1)
    in_stretch = -(-(ends - begins) // block_tokens)
    block_ends = jnp.cumsum(in_stretch)
    block_firsts = block_ends - in_stretch

    # A block holds at least one token, and only a stretch's last block is not full.
    num_blocks = min(num_tokens, num_tokens // block_tokens + num_rows * per_row)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    num_used = block_ends[-1]
    stretch = jnp.searchsorted(block_ends, block, side="right").astype(jnp.int32)
    stretch = jnp.minimum(stretch, num_rows * per_row - 1)
    row = stretch // per_row
    begin = begins[stretch] + (block - block_firsts[stretch]) * block_tokens
    end = jnp.minimum(begin + block_tokens, ends[stretch])
    offsets = begin[:, None] + jnp.arange(block_tokens, dtype=jnp.int32)[None, :]
    used = (block < num_used)[:, None] & (offsets < end[:, None])
    cut_to = None
    if entries.cut is not None:
        cut_to = jnp.where(end == entries.cut[row], entries.cut_to[row], num_entries)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    offset = token - firsts[meta.token_rows]
    own = meta.token_rows * per_row
    if entries.cut is not None:
        own = own + (offset >= entries.cut[meta.token_rows]).astype(jnp.int32)
    since = offset - begins[own]
    place = (block_firsts[own] + since // block_tokens) * block_tokens + since % block_tokens
    has_block = (token < meta.num_tokens) & (lengths[meta.token_rows] > 0)
    return _Blocks(
        num_used,
        jnp.where(used, firsts[row][:, None] + offsets, 0),
        used,
        begin == 0,
        entries.read[row],
        jnp.where(end == lengths[row], entries.written[row], num_entries),
        cut_to,
        jnp.where(has_block, place, 0),
    )


def _scan_blocks(
    blocks: _Blocks, state: Array, out: jax.ShapeDtypeStruct, step: StepBlock
) -> tuple[Array, Array]:
    """Return (outputs by token [T, ...], which are undefined for tokens in no block; the new
    state [S, ...]).
    """
    num_blocks, block_tokens = blocks.tokens.shape
    outputs = jnp.zeros((num_blocks, block_tokens, *out.shape), out.dtype)

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, before, outputs = carry
        entry = state.at[blocks.read[i]].get(mode="fill", fill_value=0)
        before = jnp.where(blocks.is_first[i], entry, before)
        made, after = step(blocks.tokens[i], blocks.used[i], before)
        for entries in (blocks.written, blocks.cut_to):
            if entries is not None:
                state = state.at[entries[i]].set(after, mode="drop")
        return state, after, lax.dynamic_update_index_in_dim(outputs, made, i, 0)

    carry = (state, jnp.zeros(state.shape[1:], state.dtype), outputs)
    # The number of blocks is not known when the program is compiled, and unused ones would cost as much.
    state, _, outputs = lax.fori_loop(jnp.int32(0), blocks.num_used, body, carry)
    return outputs.reshape(-1, *out.shape)[blocks.places], state


class _Entries(NamedTuple):
    """Entries of state by row, each int32[R]; see `AttentionMeta`. cut None: no row keeps its state."""

    read: Array
    written: Array
    cut: Array | None
    cut_to: Array


def _entries(meta: AttentionMeta) -> _Entries:
    if meta.state_from is None or meta.state_to is None:
        raise ValueError("meta: recurrent layers need state_from and state_to")
    if meta.state_cut is None or meta.state_cut_to is None:
        return _Entries(meta.state_from, meta.state_to, None, meta.state_to)
    return _Entries(meta.state_from, meta.state_to, meta.state_cut, meta.state_cut_to)


def computed_once(state: Array) -> Array:
    """Return the state after a token, of which something is computed beside it. XLA's GPU backend would
    compute it for that a second time, from the cache; and because this may be after the cache is written, it
    would copy the whole cache before.
    """
    once: Array = lax.platform_dependent(state, cuda=lax.optimization_barrier, default=lambda state: state)
    return once
