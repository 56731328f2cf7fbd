"""A model with state by slot whose every token can be computed by hand: a recurrent layer, a short
convolution and, if it is a hybrid, a layer of paged attention between them.

After tokens t_1 ... t_n the next token is (7 * sum + 5 * state + 2 * t_(n - 1) + 3 * n + 1) mod vocabulary.
The sum of all tokens comes from the paged cache as in `tests.support.models.toy`. The state is recurrent:
state_i = (4 * state_(i - 1) + t_i + 1) mod vocabulary, with state_0 = t_0 = 0. If the state misses a token,
or takes one twice, all later states are wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from penstock.runtime.loading.served_model import ServedModel
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, AttentionOptions
from penstock.runtime.ops.cache_spec import CacheSpec, PagedKV, SlotState
from penstock.runtime.ops.recurrent.operations import RecurrentOps
from tests.support.models.toy import VOCAB, plain_rules, toy_model

_DIM = 4
_FACTOR = 4
STATE = SlotState((jax.ShapeDtypeStruct((), np.dtype(np.int32)),))
NEWEST = SlotState((jax.ShapeDtypeStruct((1,), np.dtype(np.float32)),))
"""The newest token, which the convolution of the next step reads as the token before."""
PAGED = PagedKV(num_kv_heads=1, head_dim=_DIM)


def hybrid_tokens(prompt: Sequence[int], num: int, *, paged: bool = True) -> list[int]:
    """Return the next `num` greedy tokens after `prompt`, by the formula, ignoring EOS."""
    tokens = list(prompt)
    for _ in range(num):
        state = 0
        for token in tokens:
            state = (_FACTOR * state + token + 1) % VOCAB
        before = tokens[-2] if len(tokens) > 1 else 0
        total = 7 * sum(tokens) * paged + 5 * state + 2 * before + 3 * len(tokens) + 1
        tokens.append(total % VOCAB)
    return tokens[len(prompt) :]


class HybridLM(nnx.Module):
    """See the module docstring."""

    def __init__(self, *, paged: bool) -> None:
        self.paged = paged
        self.one = nnx.Param(jnp.ones((1,), jnp.float32))

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv: tuple[Any, ...],
        metas: tuple[AttentionMeta, ...],
        *,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Hidden [T, 4]: the sum, the state, the token before, and the number of tokens."""
        (state,), *pages, (newest,) = kv
        meta = metas[0]
        rows = meta.token_rows
        assert meta.state_from is not None
        assert meta.state_to is not None
        offset = positions - meta.starts[rows]  # index of the token within its row
        last = jnp.maximum(jnp.cumsum(meta.q_lens) - 1, 0)  # index of each row's last token
        is_first = offset == 0

        start = state.at[meta.state_from].get(mode="fill", fill_value=0)[rows]
        factors = jnp.where(is_first, 0, _FACTOR)
        sums = (token_ids + 1 + jnp.where(is_first, _FACTOR * start, 0)) % VOCAB
        _, states = lax.associative_scan(
            lambda a, b: (a[0] * b[0] % VOCAB, (a[1] * b[0] + b[1]) % VOCAB), (factors, sums)
        )
        state = keep(state, states, meta, last)

        kept = newest.at[meta.state_from].get(mode="fill", fill_value=0)[rows, 0]
        tokens = token_ids.astype(jnp.float32)
        before = jnp.where(is_first, kept, jnp.roll(tokens, 1))
        newest = keep(newest, tokens[:, None], meta, last)

        count = (positions + 1).astype(jnp.float32)
        total = jnp.zeros_like(count)
        if self.paged:
            zeros = jnp.zeros((token_ids.shape[0], 1, _DIM), jnp.float32)
            mean, layer = attention(
                zeros, zeros, zeros.at[:, 0, 0].set(tokens), pages[0], meta, AttentionOptions(1.0)
            )
            total, pages = jnp.round(mean[:, 0, 0] * count), [layer]
        hidden = jnp.stack([total, states.astype(jnp.float32), before, count], axis=1)
        return hidden, ((state,), *pages, (newest,))

    def normalized(self, hidden: jax.Array) -> jax.Array:
        return hidden.astype(jnp.float32)

    def logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        total, state, before, count = hidden.T
        following = (7 * total + 5 * state + 2 * before + 3 * count + self.one[...]) % VOCAB
        return 10 * jax.nn.one_hot(following.astype(jnp.int32), VOCAB, dtype=jnp.float32)


def keep(state: jax.Array, after: jax.Array, meta: AttentionMeta, last: jax.Array) -> jax.Array:
    """Return the array of state with what the rows of a step leave there. `after` [T, ...] is the state after
    each token, and `last` int32[R] the index of each row's last token.
    """
    state = state.at[meta.state_to].set(after[last], mode="drop")
    if meta.state_cut is None or meta.state_cut_to is None:
        return state
    first = last - (meta.q_lens - 1)
    cut = jnp.where(meta.state_cut > 0, meta.state_cut_to, state.shape[0])
    return state.at[cut].set(after[first + meta.state_cut - 1], mode="drop")


def hybrid_model(*, paged: bool = True, max_model_len: int = 128) -> ServedModel:
    """Make a ServedModel with a HybridLM, without a tokenizer."""
    graphdef, weights = nnx.split(HybridLM(paged=paged))
    return dataclasses.replace(
        toy_model(max_model_len=max_model_len),
        name="hybrid" if paged else "recurrent",
        architecture="HybridForCausalLM",
        graphdef=graphdef,
        weights=weights,
        hidden_size=4,
        rules=plain_rules(one=(1,)),
        cache=CacheSpec((STATE, PAGED, NEWEST) if paged else (STATE, NEWEST)),
    )
