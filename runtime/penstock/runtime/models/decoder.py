"""CausalLM: the pre-norm decoder shared by the Llama family, configured by `ModelConfig`.

Attribute names follow the checkpoint's tensor names, so a state path is a tensor name with dots for steps.
The layers are unrolled with one array per weight and layer: stacked weights under `lax.scan` are ten times
slower on CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.attention import AttentionMeta, paged_attention
from penstock.runtime.models import rope
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.layers import (
    MLP,
    Attention,
    AttentionOp,
    Embedding,
    Linear,
    RMSNorm,
    matmul_transposed,
)


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        attention: AttentionOp,
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, E] -> ([T, E], this layer's new cache)."""
        attended, kv = self.self_attn(self.input_layernorm(x), cos, sin, kv, meta, attention)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class CausalLM(nnx.Module):
    """Embedding, layers, final norm and head; parameters and activations in `dtype`.

    Built with zero weights: make it under `nnx.eval_shape` (`params.abstract_model`) and merge a state.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List([DecoderLayer(config, layer, dtype) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, dtype)
        )

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv: tuple[jax.Array, ...],
        meta: AttentionMeta,
        *,
        attention: AttentionOp = paged_attention,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Run a ragged batch of tokens through the decoder.

        token_ids, positions: int32 [T]; kv: one cache per layer; meta: which row and page a token belongs to.
        Returns the hidden states after the final norm [T, E] in the model's dtype, and the new caches.
        """
        cos, sin = rope.cos_sin(self.config.rope, self.config.head_dim, positions)
        x = self.embed_tokens(token_ids)
        caches: list[jax.Array] = []
        for layer, cache in zip(self.layers, kv, strict=True):
            x, cache = layer(x, cos, sin, cache, meta, attention)
            caches.append(cache)
        return self.norm(x), tuple(caches)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, E] -> logits float32 [R, V]; pass only the rows to sample, the head is wide."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return matmul_transposed(hidden, head.weight[...])
