"""EagleHead: a layer that guesses what another model, its target, says next (EAGLE-3, Li et al. 2025,
arXiv 2503.01840).

It reads each token together with what `fc` makes of three hidden states of the position before, which layers
of the target have read there. For each further guess it reads what its own layer gave, before the last norm.
Its keys and values of position i are those of token i with the hidden states of position i - 1, so all that a
page keeps depends on the tokens of this page and of those before it. Position i turns queries and keys as
i - 1: the head counts from the first token that has a hidden state before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import AttentionConfig, MLPConfig, ModelConfig
from penstock.runtime.models.configs.eagle import HIDING_CHANNELS, NUM_TAPS
from penstock.runtime.models.decoder import CausalLM
from penstock.runtime.models.layers.attention import Attention
from penstock.runtime.models.layers.inputs import Angles, LayerInputs, Residual
from penstock.runtime.models.layers.mlp import MLP
from penstock.runtime.models.linear import PLAIN, Embedding, Linear, LinearFormat, logits, project
from penstock.runtime.models.load_rules import LoadRule, ParamPath, Source, StoredAt, Target
from penstock.runtime.models.norms import hidden_norm
from penstock.runtime.models.pools import PooledModel, PoolPlanners
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, AttentionOptions
from penstock.runtime.ops.recurrent.operations import RecurrentOps

_HIDDEN_KEY = float(-(2**15))
"""The number in a key that nobody attends to. Any dtype of models has it, and times the scale of any head it
is so low that its weight in a softmax is 0."""


class TokenMap(nnx.Module):
    """How far behind a token of the head the same token of its target is, int32 [draft_vocab_size]."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.shift = nnx.Param(jnp.zeros((num_tokens,), jnp.int32))

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`."""
        int64 = np.dtype(np.int64)
        yield (
            path,
            LoadRule(
                sources=(Source("d2t", (self.num_tokens,), dtype=int64),),
                targets=(Target((*path, "shift")),),
                num_rows=self.num_tokens,
                dtype=int64,
            ),
        )


class EagleHead(PooledModel):
    """The layer, with what is before and behind it. At position 0 there is no hidden state before the token,
    so nobody may attend to it. Attention has no option for that: the key of position 0 has a number in a
    channel more that makes its scores lower than any other, and the queries have a one there.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, linear: LinearFormat = PLAIN) -> None:
        eagle, (layer,), hidden = config.eagle, config.layers, config.hidden_size
        assert eagle is not None, "the config is that of a head"
        assert isinstance(layer.attention, AttentionConfig)
        assert isinstance(layer.mlp, MLPConfig)
        planners = PoolPlanners.new()
        self.config = config
        self.embed_tokens = (
            Embedding(config.vocab_size, hidden, dtype, planners) if eagle.has_embeddings else None
        )
        read, made = NUM_TAPS * eagle.target_hidden_size, {"fc": hidden}
        self.fc = Linear(read, made, dtype, planners, bias=eagle.fc_bias, linear=linear)
        self.input_norm, self.hidden_norm = hidden_norm(config, planners), hidden_norm(config, planners)
        self.self_attn = Attention(config, layer.attention, 0, 0, dtype, linear, planners, in_size=2 * hidden)
        self.mlp_norm = hidden_norm(config, planners)
        self.mlp = MLP(config, layer.mlp, dtype, linear, planners)
        self.norm = hidden_norm(config, planners)
        guessed = {"lm_head": eagle.draft_vocab_size}
        self.lm_head = Linear(hidden, guessed, dtype, planners, linear=linear.of_table())
        self.token_map = TokenMap(eagle.draft_vocab_size) if eagle.maps_tokens else None
        self.adds_to_normed = eagle.adds_to_normed
        self.take_pools(planners, dtype)

    def __call__(
        self,
        embedded: jax.Array,
        before: jax.Array,
        kv: Any,
        meta: AttentionMeta,
        *,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[jax.Array, Any]:
        """Compute embeddings of tokens and the hidden states before them, both [T, E] -> hidden states before
        the last norm [T, E], and the new cache of the attention.
        """
        pools = self.pools
        inputs = LayerInputs(
            angles=Angles(jnp.maximum(meta.positions - 1, 0)),
            metas=(meta,),
            attention=_hiding_the_first(attention),
            recurrent=recurrent,
            pools=pools,
            shared_kv={},
        )
        normed = self.hidden_norm(before, pools)
        both = jnp.concatenate([self.input_norm(embedded, pools), normed], axis=-1)
        joined = Residual(onto=normed if self.adds_to_normed else before)
        x, kv = self.self_attn(both, None, joined, kv, inputs)
        return self.mlp(x, self.mlp_norm, Residual(), inputs), kv


class HeadOfTarget(NamedTuple):
    """A head beside the model for which it guesses. See `PredictingModel`."""

    head: EagleHead
    target: CausalLM

    def kept(self, tapped: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """Turn what the layers of the taps have read, [T, NUM_TAPS * E of the target], into one hidden state
        [T, E].
        """
        return project(self.head.fc, tapped, num_tokens, self.head.pools)

    def predict(
        self,
        token_ids: jax.Array,
        before: jax.Array,
        kv: tuple[Any, ...],
        meta: AttentionMeta,
        *,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Do what `CausalLM.predict` does, with the embeddings of the target where the head has none."""
        own = self.head.embed_tokens
        if own is None:
            embedded = self.target.embed_tokens(token_ids, self.target.pools)
        else:
            embedded = own(token_ids, self.head.pools)
        hidden, entry = self.head(embedded, before, kv[0], meta, attention=attention, recurrent=recurrent)
        return hidden, (entry,)

    def predicted_logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        """Turn what `predict` gives, [R, E], of which the first num_rows count, into logits of the head's own
        tokens, float32 [R, draft_vocab_size].
        """
        head = self.head
        with jax.named_scope("head"):
            return logits(head.lm_head, hidden, num_rows, head.pools, norm=head.norm)

    def tokens(self, guessed: jax.Array) -> jax.Array:
        """Turn tokens of the head into the same tokens of its target, both int32 [R]."""
        if self.head.token_map is None:
            return guessed
        return guessed + self.head.token_map.shift[...][guessed]


def _hiding_the_first(attention: AttentionOp) -> AttentionOp:
    """Return an attention in which no token attends to position 0, see `EagleHead`."""

    def attend(
        q: jax.Array,
        k_new: jax.Array,
        v_new: jax.Array | None,
        kv: jax.Array,
        meta: AttentionMeta,
        options: AttentionOptions,
    ) -> tuple[jax.Array, jax.Array]:
        assert v_new is not None, "the head keeps keys and values"

        def wider(x: jax.Array, number: jax.Array | float) -> jax.Array:
            more = jnp.zeros((*x.shape[:2], HIDING_CHANNELS), x.dtype).at[:, :, 0].set(number)
            return jnp.concatenate([x, more], axis=-1)

        is_hidden = (meta.positions == 0)[:, None]
        hiding = jnp.where(is_hidden, _HIDDEN_KEY, 0.0).astype(k_new.dtype)
        out, kv = attention(wider(q, 1.0), wider(k_new, hiding), wider(v_new, 0.0), kv, meta, options)
        return out[..., : q.shape[2]], kv

    return attend
