"""Encoder: embeddings, layers that look both ways, and maybe a classifier, configured by `ModelConfig`.

It has the layers of a decoder (`decoder.DecoderLayer`), which are given attention that looks both ways and no
cache. What a model of this kind has besides is in `configs.encoder`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import AttentionConfig, ModelConfig
from penstock.runtime.models.decoder import DecoderLayer
from penstock.runtime.models.layers.classifier import Classifier, Projection, no_logits
from penstock.runtime.models.layers.distances import Distances
from penstock.runtime.models.layers.inputs import Angles, LayerInputs
from penstock.runtime.models.linear import PLAIN, Embedding, Linear, LinearFormat, project
from penstock.runtime.models.norms import LayerNorm, hidden_norm
from penstock.runtime.models.pools import PooledModel, PoolPlanners
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, paged_attention
from penstock.runtime.ops.both_ways import (
    attend_both_ways,
    attend_natively,
    can_attend_natively,
    pages_of_texts,
)
from penstock.runtime.ops.native.attention import native_paged_attention
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT, RecurrentOps


class Encoder(PooledModel):
    """It is built with zero weights: make it under `nnx.eval_shape` (`params.abstract_model`) and merge a
    state.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, linear: LinearFormat = PLAIN) -> None:
        encoder = config.encoder
        assert encoder is not None, "the config is a decoder's"
        self.config, self.encoder = config, encoder
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width = encoder.embedding_size or hidden
        planners = PoolPlanners.new()

        def table(name: str, size: int, width: int, *, pieces: int = 1) -> Embedding:
            return Embedding(size // pieces, width, dtype, planners, name=name, pieces=pieces)

        begin, positions = config.positions_from, config.max_position_embeddings
        self.embed_tokens = table("embed_tokens", config.vocab_size, width, pieces=config.vocab_pieces)
        self.embed_types = table("embed_types", encoder.token_types, width) if encoder.token_types else None
        self.embed_positions = None if begin is None else table("embed_positions", begin + positions, width)
        has_bias = config.norm == "layer"
        self.embedding_norm = (
            LayerNorm(width, eps, planners, bias=has_bias) if encoder.norm_embeddings else None
        )
        into = {"embedding_projection": hidden}
        self.embedding_projection = (
            None
            if encoder.embedding_size is None
            else Linear(width, into, dtype, planners, bias=True, linear=linear)
        )
        distances = encoder.distances
        first = config.layers[0].attention
        assert isinstance(first, AttentionConfig), "encoders have attention"
        has_biases = distances is not None and distances.kind == "bias"
        of_distance, pieces = (first.num_heads, first.pieces) if has_biases else (hidden, 1)
        self.distances = (
            None
            if distances is None
            else Linear(of_distance, {"distances": distances.size}, dtype, planners, sums=pieces)
        )
        has_norm = distances is not None and distances.norm
        self.distances_norm = LayerNorm(hidden, eps, planners) if has_norm else None
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype, linear, planners) for layer in range(config.num_layers)]
        )
        self.norm = hidden_norm(config, planners) if encoder.final_norm else None
        classes = config.classifier
        self.classifier = None if classes is None else Classifier(config, classes, dtype, planners)
        self.projections = nnx.List([Projection(each, dtype, planners) for each in encoder.projections])
        self.take_pools(planners, dtype)

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute all of it: XLA computes norms with a bias, and nothing is promised
        of an encoder's bits.
        """
        return False

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv: tuple[Any, ...],
        metas: tuple[AttentionMeta, ...],
        *,
        attention: AttentionOp = paged_attention,
        recurrent: RecurrentOps = XLA_RECURRENT,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Turn whole texts of a ragged batch into their hidden states before the final norm, if there is one.

        token_ids, positions: int32 [T]; a token of type t has the id t * vocab_size + id. metas: one, the row
        of each token. The cache is empty. Where the native kernels compute a decoder's `attention`, they
        compute this too, if nothing is added for distances; else XLA does.
        """
        encoder, pools = self.encoder, self.pools
        types, ids = jnp.divmod(token_ids, np.int32(self.config.vocab_size))
        x = self.embed_tokens(ids, pools)
        if self.embed_types is not None:
            x = x + self.embed_types(types, pools)
        if self.config.embedding_scale != 1.0:
            x = x * np.asarray(self.config.embedding_scale, x.dtype)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + np.int32(self.config.positions_from or 0), pools)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x, pools)
        if self.embedding_projection is not None:
            x = project(self.embedding_projection, x, metas[0].num_tokens, pools)
        pages = self._pages(x, metas[0]) if attention is native_paged_attention else None
        inputs = LayerInputs(
            angles=Angles(positions),
            metas=metas,
            attention=attend_both_ways if pages is None else attend_natively,
            recurrent=recurrent,
            pools=pools,
            shared_kv={},
            distances=self._distances(),
        )
        for layer in encoder.passes or range(self.config.num_layers):
            x, (pages,) = self.layers[layer](x, [pages], inputs)
        return x, kv

    def _pages(self, x: jax.Array, meta: AttentionMeta) -> jax.Array | None:
        """Make what the native kernels keep a layer's keys and values in; None where they cannot attend."""
        heads = self.config.layers[0].attention
        assert isinstance(heads, AttentionConfig), "encoders have attention"
        if self.distances is not None or not can_attend_natively(heads.num_heads, heads.head_dim, x.dtype):
            return None
        num_rows = meta.q_lens.shape[0]
        return pages_of_texts(x.shape[0], num_rows, heads.num_kv_heads, heads.head_dim, x.dtype)

    def _distances(self) -> Distances | None:
        config = self.encoder.distances
        if config is None or self.distances is None:
            return None
        vectors = self.distances.weight[...]
        norm = self.distances_norm
        return Distances(config, vectors if norm is None else norm(vectors, self.pools))

    def normalized(self, hidden: jax.Array) -> jax.Array:
        """Turn hidden [R, E] -> the same after the final norm, if there is one, float32 [R, E]."""
        wide = hidden.astype(jnp.float32)
        return wide if self.norm is None else self.norm(wide, self.pools)

    def logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        """Choose no token: [R, 1], see `no_logits`."""
        return no_logits(hidden)

    def classes(self, pooled: jax.Array) -> jax.Array:
        """See `CausalLM.classes`."""
        assert self.classifier is not None, "the model has no classifier"
        return self.classifier(pooled, self.pools)

    def projected(self, pooled: jax.Array) -> jax.Array:
        """Compute pooled hidden states float32 [R, E] -> what the layers behind the pooling make of them,
        float32 [R, `ModelConfig.embedding_size`].
        """
        x = pooled
        for projection in self.projections:
            x = projection(x, self.pools)
        return x
