"""The compiled step: input tokens, model, sampler and state update in one program, and its ahead-of-time
compilation.

Weights, KV cache and row state are arguments, so new weights need no recompile; KV cache and state are
donated, so a step updates them in place. What the host reads back is one int32 array per step,
`OutputLayout`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from penstock.runtime.attention import AttentionMeta, AttentionOp, make_meta, paged_attention
from penstock.runtime.packing import FEEDBACK, Layout, Unpacked
from penstock.runtime.request import TokenLogprobs
from penstock.runtime.sampler import sample, token_logprobs

KVCache = tuple[Array, ...]
Weights = tuple[Array, ...]
"""The model's state as flat leaves: flattening nnx's own tree on every call costs milliseconds of Python."""


class RowState(NamedTuple):
    """What stays on the device between steps, one entry per slot."""

    tokens: Array  # int32[max_num_seqs] the token each slot sampled last


class StepModel(Protocol):
    """What the step asks of a model; `penstock.runtime.models.decoder.CausalLM` is one."""

    def __call__(
        self, token_ids: Array, positions: Array, kv: KVCache, meta: AttentionMeta, *, attention: AttentionOp
    ) -> tuple[Array, KVCache]:
        """int32[T] tokens and positions -> hidden [T, E] and the updated cache."""
        ...

    def logits(self, hidden: Array, num_rows: Array) -> Array:
        """[R, E] -> float32[R, V]; rows from num_rows, int32[], on are padding and may hold anything."""
        ...


StepOut = tuple[Array, KVCache, RowState]
StepFn = Callable[[Weights, KVCache, RowState, Array], StepOut]
NO_TOKEN = -1


def make_step(
    rebuild: Callable[[Weights], StepModel],
    layout: Layout,
    *,
    page_size: int,
    num_pages: int,
    num_top: int,
    max_steps: int = 1,
    attention: AttentionOp = paged_attention,
) -> StepFn:
    """The step function of one program key. Its result is int32[max_steps, R, 2 + 2 * num_top]: by row the
    token, or NO_TOKEN where it made none in that step, and see `read_logprobs`.

    max_steps above 1 makes it a loop of decode steps, of which a call runs as many as its header says, or
    fewer when every row has ended.
    """

    def forward(
        model: StepModel, kv: KVCache, batch: Unpacked, tokens: Array, starts: Array
    ) -> tuple[Array, KVCache]:
        meta, token_rows = make_meta(
            starts=starts,
            q_lens=batch.q_lens,
            page_table=batch.page_table,
            num_tokens=layout.key.tokens,
            decode_only=layout.key.decode_only,
            page_size=page_size,
            num_pages=num_pages,
        )
        tokens = jnp.where(batch.tokens == FEEDBACK, tokens[token_rows], batch.tokens)
        hidden, kv = model(tokens, meta.positions, kv, meta, attention=attention)
        last = jnp.maximum(jnp.cumsum(batch.q_lens) - 1, 0)
        num_rows = jnp.sum((batch.q_lens > 0).astype(jnp.int32))
        return model.logits(hidden[last], num_rows), kv

    def choose(raw: Array, batch: Unpacked, step: Array) -> tuple[Array, Array]:
        """(token int32[R], what the host reads of it int32[R, 2 + 2 * num_top])."""
        row = jnp.arange(layout.key.rows, dtype=jnp.int32)[:, None]
        banned = step < batch.bans
        ids = jnp.where(banned[:, None], batch.stop_ids, jnp.int32(raw.shape[1]))
        allowed = lax.cond(jnp.any(banned), lambda: raw.at[row, ids].set(-jnp.inf, mode="drop"), lambda: raw)
        rows = batch.sampling._replace(positions=batch.sampling.positions + step)
        sampled = sample(allowed, rows, batch.any_sampling)
        read = lax.cond(
            batch.any_logprobs,
            lambda: _result(sampled, *token_logprobs(raw, sampled, num_top)),
            lambda: jnp.zeros((layout.key.rows, 2 + 2 * num_top), jnp.int32).at[:, 0].set(sampled),
        )
        return sampled, read

    def keep(state: RowState, batch: Unpacked, sampled: Array) -> RowState:
        slots = jnp.where(batch.max_samples > 0, batch.slots, state.tokens.shape[0])
        return RowState(state.tokens.at[slots].set(sampled, mode="drop"))

    def last_tokens(state: RowState, batch: Unpacked) -> Array:
        return state.tokens[jnp.minimum(batch.slots, state.tokens.shape[0] - 1)]

    def single(weights: Weights, kv: KVCache, state: RowState, packed: Array) -> StepOut:
        model, batch = rebuild(weights), layout.unpack(packed)
        raw, kv = forward(model, kv, batch, last_tokens(state, batch), batch.starts)
        sampled, read = choose(raw, batch, jnp.int32(0))
        return read[None], kv, keep(state, batch, sampled)

    def window(weights: Weights, kv: KVCache, state: RowState, packed: Array) -> StepOut:
        model, batch = rebuild(weights), layout.unpack(packed)

        def more(carry: _Window) -> Array:
            # The first step runs even where no row samples: a prefill chunk of one token must be written.
            return (carry.step == 0) | ((carry.step < batch.num_steps) & jnp.any(carry.alive))

        def turn(carry: _Window) -> _Window:
            raw, kv = forward(model, carry.kv, batch, carry.tokens, batch.starts + carry.made)
            sampled, read = choose(raw, batch, carry.step)
            read = read.at[:, 0].set(jnp.where(carry.alive, read[:, 0], NO_TOKEN))
            ended = (sampled[:, None] == batch.stop_ids).any(axis=1) & (carry.step >= batch.bans)
            step = carry.step + 1
            alive = carry.alive & ~ended & (step < batch.max_samples)
            return _Window(
                step=step,
                # A row that has ended repeats its last step while the others go on: the same token at the
                # same position, so what it writes is what is there.
                alive=alive,
                made=carry.made + alive.astype(jnp.int32),
                tokens=jnp.where(alive, sampled, carry.tokens),
                sampled=jnp.where(carry.alive, sampled, carry.sampled),
                kv=kv,
                result=carry.result.at[carry.step].set(read),
            )

        rows = layout.key.rows
        first = jnp.where(batch.tokens == FEEDBACK, last_tokens(state, batch), batch.tokens)
        batch = batch._replace(tokens=jnp.full_like(batch.tokens, FEEDBACK))
        end = lax.while_loop(
            more,
            turn,
            _Window(
                step=jnp.int32(0),
                alive=batch.max_samples > 0,
                made=jnp.zeros((rows,), jnp.int32),
                tokens=first,
                sampled=jnp.zeros((rows,), jnp.int32),
                kv=kv,
                result=jnp.full((max_steps, rows, 2 + 2 * num_top), NO_TOKEN, jnp.int32),
            ),
        )
        return end.result, end.kv, keep(state, batch, end.sampled)

    return window if max_steps > 1 else single


class _Window(NamedTuple):
    """What a loop of decode steps carries."""

    step: Array  # int32[]
    alive: Array  # bool[R] rows that make a token in the next step
    made: Array  # int32[R] positions the row has advanced
    tokens: Array  # int32[R] input of the next step
    sampled: Array  # int32[R] the row's newest token
    kv: KVCache
    result: Array  # int32[max_steps, R, 2 + 2 * num_top]


def _result(sampled: Array, logprob: Array, top_ids: Array, top_logprobs: Array) -> Array:
    bits = lax.bitcast_convert_type(jnp.concatenate([logprob[:, None], top_logprobs], axis=1), jnp.int32)
    return jnp.concatenate([sampled[:, None], bits[:, :1], top_ids, bits[:, 1:]], axis=1)


def read_logprobs(row: np.ndarray, num_top: int, wanted: int) -> TokenLogprobs:
    """One row of the result array as the `wanted` likeliest tokens and the sampled one's log-probability."""
    ids = row[2 : 2 + wanted].tolist()
    values = row[2 + num_top : 2 + num_top + wanted].view(np.float32).tolist()
    return TokenLogprobs(float(row[1:2].view(np.float32)[0]), tuple(zip(ids, values, strict=True)))


def compile_step(
    step: StepFn, weights: Any, kv: Any, state: Any, packed_size: int, sharding: jax.sharding.Sharding
) -> jax.stages.Compiled:
    """Lower and compile for the shapes and shardings of `weights`, `kv` and `state` (arrays or
    ShapeDtypeStructs).
    """
    packed = jax.ShapeDtypeStruct((packed_size,), jnp.int32, sharding=sharding)
    return jax.jit(step, donate_argnums=(1, 2)).lower(weights, kv, state, packed).compile()
