"""CausalLM: a decoder of attention, or recurrent, and MLP layers, configured by `ModelConfig`.

The layers are unrolled, with one array for the weight of each product, because stacked weights under
`lax.scan` are ten times slower on CPU. All small parameters share a few arrays (`pools`). Layers that are
fused name their parts (`linear.Linear`); a family says what a checkpoint calls each parameter (`registry`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.adapted import place_adapters
from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    MLPAndExpertsConfig,
    MLPConfig,
    ModelConfig,
)
from penstock.runtime.models.configs.recurrent import DeltaNetConfig, MambaConfig
from penstock.runtime.models.layers.attention import Attention
from penstock.runtime.models.layers.classifier import Classifier, no_logits
from penstock.runtime.models.layers.delta_net import DeltaNet
from penstock.runtime.models.layers.experts import Experts
from penstock.runtime.models.layers.images import MediaInputs
from penstock.runtime.models.layers.inputs import Angles, LayerInputs, Passed, Residual
from penstock.runtime.models.layers.latent import LatentAttention
from penstock.runtime.models.layers.mamba import Mamba
from penstock.runtime.models.layers.mlp import MLP
from penstock.runtime.models.layers.mlp_and_experts import MLPAndExperts
from penstock.runtime.models.layers.per_layer import PerLayerAddition, PerLayerInputs
from penstock.runtime.models.layers.short_conv import ShortConv
from penstock.runtime.models.linear import (
    PLAIN,
    Embedding,
    Linear,
    LinearFormat,
    logits,
    normalised,
    project,
)
from penstock.runtime.models.load_rules import Span
from penstock.runtime.models.norms import Norm, Vector, hidden_norm
from penstock.runtime.models.pools import PooledModel, PoolPlanners
from penstock.runtime.models.stages import Stage
from penstock.runtime.models.vision.encoders import tower_of
from penstock.runtime.ops.adapters import AdapterRows
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, paged_attention
from penstock.runtime.ops.native.norm import can_normalize
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT, RecurrentOps


class DecoderLayer(nnx.Module):
    """x + attention(x), then x + mlp(x), with norms before them, after them, or both; or both at once."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        ours = config.layers[layer]

        def norm(*, wanted: bool) -> Norm | None:
            return hidden_norm(config, planners) if wanted else None

        self.is_parallel = ours.norms in ("parallel", "parallel_shared")
        before = ours.norms in ("pre", "sandwich", "pre_mlp") or self.is_parallel
        after = ours.norms in ("post", "sandwich", "of_sums")
        self.norms_sums = ours.norms == "of_sums"
        self.attention_norm = norm(wanted=before and ours.norms != "pre_mlp")
        self.self_attn = _attention(config, layer, dtype, linear, planners)
        self.attention_out_norm = norm(wanted=after)
        has_mlp = ours.mlp is not None
        self.mlp_norm = norm(wanted=before and has_mlp and ours.norms != "parallel_shared")
        self.beside = None if ours.beside is None else Mamba(config, ours.beside, dtype, linear, planners)
        self.mlp = None if ours.mlp is None else _mlp(config, ours.mlp, dtype, linear, planners)
        self.mlp_out_norm = norm(wanted=after and has_mlp)
        self.multiplier, self.beside_multiplier = ours.residual_multiplier, ours.beside_multiplier
        self.mlp_multiplier = self.multiplier if ours.mlp_multiplier is None else ours.mlp_multiplier
        self.joins_natively = linear.packed and can_normalize(config.hidden_size)
        per_layer = config.per_layer
        self.per_layer = (
            None if per_layer is None else PerLayerAddition(config, per_layer, dtype, linear, planners)
        )
        self.layer_scalar = Vector("layer_scalar", 1, planners) if ours.has_scalar else None

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute the layer, except `attention` and `recurrent` themselves."""
        parts = (self.self_attn, self.beside, self.mlp)
        parts_are = all(part is None or part.is_native for part in parts)
        added_natively = self.per_layer is None or self.per_layer.is_native
        return self.joins_natively and parts_are and added_natively

    def __call__(
        self,
        x: jax.Array,
        kv: list[Any],
        inputs: LayerInputs,
        of_layer: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Any]]:
        """Compute x [T, E] -> ([T, E], this layer's new cache): entries for attention and for what is beside
        it. `of_layer`: the tokens' embeddings for this layer, if the model has such, [T, size].
        """
        with jax.named_scope("attention"):
            joined = self._joined(self.attention_out_norm, self.multiplier)
            joined_x, kept = self.self_attn(x, self.attention_norm, joined, kv[0], inputs)
            new_kv = [kept]
            if self.beside is not None:
                joined = Residual(None, self.beside_multiplier, self.joins_natively, onto=joined_x)
                joined_x, state = self.beside(x, self.attention_norm, joined, kv[1], inputs)
                new_kv.append(state)
        with jax.named_scope("mlp"):
            joined = self._joined(self.mlp_out_norm, self.mlp_multiplier)
            if self.mlp is None:
                x = joined_x
            elif self.is_parallel:
                assert isinstance(self.mlp, MLP)
                x = joined_x + self.mlp.alone(x, self.mlp_norm or self.attention_norm, inputs)
            else:
                x = self.mlp(joined_x, self.mlp_norm, joined, inputs)
        if self.per_layer is not None and of_layer is not None:
            x = self.per_layer(x, of_layer, inputs)
        return x if self.layer_scalar is None else x * self.layer_scalar(inputs.pools)[None], new_kv

    def _joined(self, norm: Norm | None, multiplier: float) -> Residual:
        """Tell how a part joins the residual stream. `norm` is that of the part or of the sum."""
        of_part, of_sum = (None, norm) if self.norms_sums else (norm, None)
        return Residual(of_part, multiplier, self.joins_natively, sum_norm=of_sum)


def _attention(
    config: ModelConfig, layer: int, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
) -> Attention | LatentAttention | ShortConv | DeltaNet | Mamba:
    """Make the module of a layer's attention, or of what stands in its place."""
    ours = config.layers[layer].attention
    group = 0 if config.encoder is not None else config.cache.group_of[config.cache_entries[layer]]
    if isinstance(ours, AttentionConfig):
        return Attention(config, ours, layer, group, dtype, linear, planners)
    if isinstance(ours, LatentConfig):
        return LatentAttention(config, ours, group, dtype, linear, planners)
    if isinstance(ours, DeltaNetConfig):
        return DeltaNet(config, ours, dtype, linear, planners)
    if isinstance(ours, MambaConfig):
        return Mamba(config, ours, dtype, linear, planners)
    return ShortConv(config, ours, dtype, linear, planners)


def _mlp(
    config: ModelConfig,
    mlp: MLPConfig | ExpertsConfig | MLPAndExpertsConfig,
    dtype: jnp.dtype,
    linear: LinearFormat,
    planners: PoolPlanners,
) -> MLP | Experts | MLPAndExperts:
    """Make the module of an MLP, or of what stands in its place."""
    if isinstance(mlp, ExpertsConfig):
        return Experts(config, mlp, dtype, linear, planners)
    if isinstance(mlp, MLPAndExpertsConfig):
        return MLPAndExperts(config, mlp, dtype, linear, planners)
    return MLP(config, mlp, dtype, linear, planners)


class Predictor(nnx.Module):
    """Predicts the token after the next one (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, 2.2): a
    layer of the decoder's kind, which reads a token together with the hidden state that came before it.
    """

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        assert config.predictor is not None, "the checkpoint has no such layer"
        hidden = config.hidden_size
        self.enorm, self.hnorm = hidden_norm(config, planners), hidden_norm(config, planners)
        self.eh_proj = Linear(2 * hidden, {"eh_proj": hidden}, dtype, planners, linear=linear)
        alone = replace(config, layers=(config.predictor,))
        self.block = DecoderLayer(alone, 0, dtype, linear, planners)
        self.norm = hidden_norm(config, planners)

    def __call__(
        self, embedded: jax.Array, before: jax.Array, kv: list[Any], inputs: LayerInputs
    ) -> tuple[jax.Array, list[Any]]:
        """Compute embeddings of tokens and the hidden states before them, both [T, E], the latter behind the
        model's last norm -> hidden states behind the norm of this layer [T, E], and the cache of its
        attention.
        """
        pools = inputs.pools
        both = jnp.concatenate([self.enorm(embedded, pools), self.hnorm(before, pools)], axis=-1)
        x, kv = self.block(project(self.eh_proj, both, inputs.num_tokens, pools), kv, inputs)
        return self.norm(x, pools), kv


class CausalLM(PooledModel):
    """Embedding, layers, final norm and head, with parameters and activations in `dtype`.

    It is built with zero weights: make it under `nnx.eval_shape` (`params.abstract_model`) and merge a state.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, linear: LinearFormat = PLAIN) -> None:
        self.config = config
        tied = config.tie_word_embeddings
        hidden, vocab = config.hidden_size, config.vocab_size
        planners = PoolPlanners.new()
        # Formats speed up products, and a table that is only looked up has none.
        pieces = config.vocab_pieces
        self.embed_tokens = Embedding(
            vocab // pieces,
            hidden,
            dtype,
            planners,
            linear if tied else PLAIN,
            pieces=pieces,
            may_keep=True,
        )
        self.embed_norm = hidden_norm(config, planners) if config.embed_norm else None
        self.normalises_natively = linear.packed and can_normalize(hidden)
        of_layers = config.per_layer
        self.per_layer = (
            None if of_layers is None else PerLayerInputs(config, of_layers, dtype, linear, planners)
        )
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype, linear, planners) for layer in range(config.num_layers)]
        )
        self.norm = hidden_norm(config, planners)
        begin = config.positions_from
        self.embed_positions = (
            None
            if begin is None
            else Embedding(
                begin + config.max_position_embeddings, hidden, dtype, planners, name="embed_positions"
            )
        )
        of_head = {"lm_head": vocab // pieces}
        cuts = {"lm_head": (Span(pieces, vocab // pieces),)}
        self.lm_head = (
            None
            if tied or config.classifier is not None
            else Linear(
                hidden,
                of_head,
                dtype,
                planners,
                bias=config.head_bias,
                linear=linear.of_table(),
                cuts=cuts,
            )
        )
        classes = config.classifier
        self.classifier = None if classes is None else Classifier(config, classes, dtype, planners)
        self.predictor = Predictor(config, dtype, linear, planners) if config.predicts else None
        vision = config.vision
        self.visual = None if vision is None else tower_of(vision, dtype, linear, planners)
        self.take_pools(planners, dtype)
        self.adapter_sizes = place_adapters(self.layers)
        """How much room an adapter takes."""

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute the head's product and all of the layers except `attention` and
        `recurrent`. XLA then only looks up embeddings and makes angles. A model that needs more of it is
        native only if that is one rounded operation for each element between two kernels, such as a product
        with a constant. XLA may fuse two operations, or add over channels in another order, where the program
        has another shape.
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        begins_natively = self.per_layer is None or self.per_layer.is_native
        begins_natively = begins_natively and (self.embed_norm is None or self.normalises_natively)
        return head.packed and begins_natively and all(layer.is_native for layer in self.layers)

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv: tuple[Any, ...],
        metas: tuple[AttentionMeta, ...],
        *,
        attention: AttentionOp = paged_attention,
        recurrent: RecurrentOps = XLA_RECURRENT,
        media: MediaInputs | None = None,
        adapters: AdapterRows | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run a ragged batch of tokens through the decoder.

        token_ids, positions: int32 [T]. kv: one cache for each layer that has its own. metas: the row and
        page of each token, one for each group of the cache's layers. media: where rows of the batch may have
        images; None: no row has. adapters: those of the tokens; None: no token has one. taps: layers whose
        inputs are wanted, too; their number stands for what the last layer gives. Returns the hidden states
        before the final norm in the model's dtype, [T, E] or, with those of N taps beside them,
        [T, (1 + N) * E]; and the new caches.
        """
        if media is not None and media.reach is not None:
            metas = tuple(meta._replace(reach=media.reach) for meta in metas)
        inputs = LayerInputs(
            angles=Angles(positions, None if media is None else media.positions),
            metas=metas,
            attention=attention,
            recurrent=recurrent,
            pools=self.pools._replace(adapters=adapters),
            shared_kv={},
        )
        passed = self._embedded(token_ids, positions, media, inputs)
        read: list[jax.Array] = []
        (x, _), kv = self._through(self.layers, 0, passed, kv, inputs, media, read)
        read.append(x)
        return jnp.concatenate([x, *(read[tap] for tap in taps)], axis=-1) if taps else x, kv

    def stage(
        self,
        stage: Stage,
        given: jax.Array | Passed,
        positions: jax.Array,
        kv: tuple[Any, ...],
        metas: tuple[AttentionMeta, ...],
        *,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[Passed, tuple[Any, ...]]:
        """Run the layers of one stage. given: the tokens int32 [T] for the first stage, and for another what
        the stage before has returned. The model needs the leaves of the stage alone. The other arguments and
        the caches are those of `__call__`; what other stages keep is ().
        """
        inputs = LayerInputs(
            angles=Angles(positions),
            metas=metas,
            attention=attention,
            recurrent=recurrent,
            pools=self.pools,
            shared_kv={},
        )
        passed = given if isinstance(given, Passed) else self._embedded(given, positions, None, inputs)
        layers = list(self.layers)[stage.begin : stage.end]
        return self._through(layers, stage.begin, passed, kv, inputs, None)

    def _embedded(
        self, token_ids: jax.Array, positions: jax.Array, media: MediaInputs | None, inputs: LayerInputs
    ) -> Passed:
        """Return what the first layer is given."""
        x = self.embed_tokens(token_ids, inputs.pools)
        if self.config.embedding_scale != 1.0:
            x = x * np.asarray(self.config.embedding_scale, x.dtype)
        x = x if media is None else media.replace(x)
        if self.embed_norm is not None:
            natively = self.normalises_natively
            x = normalised(x, self.embed_norm, inputs.num_tokens, inputs.pools, natively=natively)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + np.int32(self.config.positions_from or 0), inputs.pools)
        return Passed(x, None if self.per_layer is None else self.per_layer(token_ids, x, inputs))

    def _through(
        self,
        layers: Iterable[DecoderLayer],
        first: int,
        passed: Passed,
        kv: tuple[Any, ...],
        inputs: LayerInputs,
        media: MediaInputs | None,
        read: list[jax.Array] | None = None,
    ) -> tuple[Passed, tuple[Any, ...]]:
        """Run these layers, the first of which has the number `first`. read: gets what each of them is
        given.
        """
        x, of_layers = passed
        caches = list(kv)
        entries = self.config.cache_entries
        count = len(self.config.cache.layers)
        if len(caches) != count:
            raise ValueError(f"the model has {count} caches, not {len(caches)}")
        for i, layer in enumerate(layers, first):
            if read is not None:
                read.append(x)
            of_layer = None if of_layers is None else of_layers[:, i]
            mine = slice(entries[i], entries[i] + (1 if layer.beside is None else 2))
            x, caches[mine] = layer(x, caches[mine], inputs, of_layer)
            x = x if media is None else media.add(x, i)
        return Passed(x, of_layers), tuple(caches)

    def encode(self, inputs: Any, num_patches: jax.Array) -> tuple[jax.Array, ...]:
        """Compute the embeddings of images, for a model that reads them: see `Tower`."""
        if self.visual is None:
            raise ValueError(f"{self.config.architecture} reads no images")
        with jax.named_scope("vision"):
            return self.visual(inputs, num_patches, self.pools)

    def normalized(self, hidden: jax.Array) -> jax.Array:
        """Turn hidden [R, E] -> the same after the final norm, float32 [R, E], not rounded to the model's
        dtype.
        """
        return self.norm(hidden.astype(jnp.float32), self.pools)

    def logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        """Turn hidden [R, E], of which the first num_rows count -> logits float32 [R, V], by the final norm
        and the head.

        Pass only the rows that sample, because the head is wide.
        """
        config = self.config
        if self.classifier is not None:
            return no_logits(hidden)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        with jax.named_scope("head"):
            return logits(
                head,
                hidden,
                num_rows,
                self.pools,
                norm=self.norm,
                scale=config.logits_scale,
                softcap=config.logits_softcap,
            )

    def kept(self, hidden: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """Turn hidden [T, E] into what `predict` reads of them with the next tokens, [T, E]."""
        return self.normalized(hidden).astype(hidden.dtype)

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
        """Turn tokens int32 [T] and what is `kept` of the positions before them, [T, E] -> what predicts the
        tokens behind theirs, [T, E], and the new cache of the predictor's attention.
        """
        assert self.predictor is not None, "the model predicts no further tokens"
        inputs = LayerInputs(
            angles=Angles(meta.positions),
            metas=(meta,),
            attention=attention,
            recurrent=recurrent,
            pools=self.pools,
            shared_kv={},
        )
        x = self.embed_tokens(token_ids, inputs.pools)
        hidden, entries = self.predictor(x, before, list(kv), inputs)
        return hidden, tuple(entries)

    def predicted_logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        """Turn what `predict` gives, [R, E], of which the first num_rows count, into logits
        float32 [R, V].
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        with jax.named_scope("head"):
            return logits(head, hidden, num_rows, self.pools, norm=None, scale=self.config.logits_scale)

    def tokens(self, guessed: jax.Array) -> jax.Array:
        """Turn places in `predicted_logits`, int32 [R], into tokens, which they are."""
        return guessed

    def classes(self, pooled: jax.Array) -> jax.Array:
        """Turn pooled hidden states [R, E] -> a number for each class, float32 [R, classes]; for a model with
        a classifier.
        """
        assert self.classifier is not None, "the model has no classifier"
        return self.classifier(pooled, self.pools)
