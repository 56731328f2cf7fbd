"""CausalLM: the pre-norm decoder of the Llama family, configured by `ModelConfig`.

Attribute names follow the checkpoint's names of tensors, except for layers that are fused, which name their
parts (`linear.Linear`). The layers are unrolled, with one array for the weight of each product, because
stacked weights under `lax.scan` are ten times slower on CPU. All small parameters share one or two arrays
(`pools`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.models import rope
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.layers import MLP, Attention, LayerInputs
from penstock.runtime.models.linear import PLAIN, Embedding, Linear, LinearFormat, RMSNorm, logits
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, paged_attention


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, planners)
        self.self_attn = Attention(config, layer, dtype, linear, planners)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, planners)
        self.mlp = MLP(config, dtype, linear, planners)

    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array,
        inputs: LayerInputs,
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, E] -> ([T, E], this layer's new cache)."""
        with jax.named_scope("attention"):
            x, kv = self.self_attn(x, self.input_layernorm, kv, inputs)
        with jax.named_scope("mlp"):
            return self.mlp(x, self.post_attention_layernorm, inputs), kv


class CausalLM(nnx.Module):
    """Embedding, layers, final norm and head, with parameters and activations in `dtype`.

    It is built with zero weights: make it under `nnx.eval_shape` (`params.abstract_model`) and merge a state.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, linear: LinearFormat = PLAIN) -> None:
        self.config = config
        tied = config.tie_word_embeddings
        hidden, vocab = config.hidden_size, config.vocab_size
        planners = PoolPlanners.new()
        # Formats speed up products, and a table that is only looked up has none.
        self.embed_tokens = Embedding(vocab, hidden, dtype, planners, linear if tied else PLAIN)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype, linear, planners) for layer in range(config.num_layers)]
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, planners)
        self.lm_head = None if tied else Linear(hidden, {"lm_head": vocab}, dtype, planners, linear=linear)
        self.vectors = nnx.Param(jnp.zeros((planners.vectors.size,), dtype))
        num_scales = planners.scales.size
        self.scales = nnx.Param(jnp.zeros((2, num_scales), jnp.float32)) if num_scales else None
        self.padding = planners.vectors.padding + planners.scales.padding

    @property
    def pools(self) -> Pools:
        """The small parameters of all layers."""
        return Pools(self.vectors[...], None if self.scales is None else self.scales[...])

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute the head's product and all of the layers except attention. XLA then
        only looks up embeddings and makes angles. A model that needs more of it is native only if that is one
        rounded operation for each element between two kernels, such as a product with a constant. XLA may
        fuse two operations, or add over channels in another order, where the program has another shape.
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return head.packed and all(layer.self_attn.is_native and layer.mlp.is_native for layer in self.layers)

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv: tuple[jax.Array, ...],
        meta: AttentionMeta,
        *,
        attention: AttentionOp = paged_attention,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs a ragged batch of tokens through the decoder.

        token_ids, positions: int32 [T]. kv: one cache per layer. meta: the row and page of each token.
        Returns the hidden states before the final norm [T, E] in the model's dtype, and the new caches.
        """
        cos, sin = rope.cos_sin(self.config.rope, self.config.head_dim, positions)
        inputs = LayerInputs(cos=cos, sin=sin, meta=meta, attention=attention, pools=self.pools)
        x = self.embed_tokens(token_ids, inputs.pools)
        caches: list[jax.Array] = []
        for layer, cache in zip(self.layers, kv, strict=True):
            x, cache = layer(x, cache, inputs)
            caches.append(cache)
        return x, tuple(caches)

    def logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        """hidden [R, E], of which the first num_rows count -> logits float32 [R, V], by the final norm and
        the head.

        Pass only the rows that sample, because the head is wide.
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        with jax.named_scope("head"):
            return logits(head, hidden, num_rows, self.pools, norm=self.norm)
