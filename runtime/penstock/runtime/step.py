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

from penstock.runtime.attention import AttentionMeta, make_meta
from penstock.runtime.packing import FEEDBACK, Layout
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
        self, token_ids: Array, positions: Array, kv: KVCache, meta: AttentionMeta
    ) -> tuple[Array, KVCache]:
        """int32[T] tokens and positions -> hidden [T, E] and the updated cache."""
        ...

    def logits(self, hidden: Array, num_rows: Array) -> Array:
        """[R, E] -> float32[R, V]; rows from num_rows, int32[], on are padding and may hold anything."""
        ...


StepFn = Callable[[Weights, KVCache, RowState, Array], tuple[Array, KVCache, RowState]]


def make_step(
    rebuild: Callable[[Weights], StepModel], layout: Layout, *, page_size: int, num_pages: int, num_top: int
) -> StepFn:
    """The step function of one program key. Its result array is int32[R, 2 + 2 * num_top]; see `read_row`."""

    def step(
        weights: Weights, kv: KVCache, state: RowState, packed: Array
    ) -> tuple[Array, KVCache, RowState]:
        model = rebuild(weights)
        batch = layout.unpack(packed)
        meta, token_rows = make_meta(
            starts=batch.starts,
            q_lens=batch.q_lens,
            page_table=batch.page_table,
            num_tokens=layout.key.tokens,
            decode_only=layout.key.decode_only,
            page_size=page_size,
            num_pages=num_pages,
        )
        fed_back = state.tokens[jnp.minimum(batch.slots, state.tokens.shape[0] - 1)][token_rows]
        tokens = jnp.where(batch.tokens == FEEDBACK, fed_back, batch.tokens)
        hidden, kv = model(tokens, meta.positions, kv, meta)
        last = jnp.maximum(jnp.cumsum(batch.q_lens) - 1, 0)
        raw = model.logits(hidden[last], jnp.sum((batch.q_lens > 0).astype(jnp.int32)))
        row = jnp.arange(layout.key.rows, dtype=jnp.int32)[:, None]
        allowed = raw.at[row, batch.bans].set(-jnp.inf, mode="drop")
        sampled = sample(allowed, batch.sampling, batch.any_sampling)
        result = lax.cond(
            batch.any_logprobs,
            lambda: _result(sampled, *token_logprobs(raw, sampled, num_top)),
            lambda: jnp.zeros((layout.key.rows, 2 + 2 * num_top), jnp.int32).at[:, 0].set(sampled),
        )
        slots = jnp.where(batch.samples, batch.slots, state.tokens.shape[0])
        return result, kv, RowState(state.tokens.at[slots].set(sampled, mode="drop"))

    return step


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
