"""ModelConfig: what a model computes, layer by layer, as frozen values.

The families (`families`) make it of a config.json; the modules (`decoder`, `layers`) are built from it. Each
value that may differ from layer to layer is a value of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.runtime.models.configs.eagle import HIDING_CHANNELS, EagleConfig
from penstock.runtime.models.configs.encoder import ClassifierConfig, EncoderConfig
from penstock.runtime.models.configs.recurrent import MambaConfig, RecurrentConfig
from penstock.runtime.models.configs.tensor_names import USUAL, TensorNames
from penstock.runtime.models.configs.vision import VisionConfig
from penstock.runtime.models.rope import RopeConfig
from penstock.runtime.ops.cache_spec import CacheSpec, LatentKV, PagedKV, SlotState
from penstock.runtime.ops.native.activations import Activation as ExpertActivation
from penstock.runtime.ops.native.experts import Score

DTYPES = ("float32", "bfloat16", "float16")

QKNorm = Literal["none", "head", "all", "head_after", "l2_after", "layer"]
"""How queries and keys are normalised: not at all; by a norm over each head; by one norm over the channels of
all heads (OLMo 2); by a norm over each head after the rotation (Hunyuan); the same without weights (Llama 4);
by a layer norm over each head with weights of its own (Cohere)."""
Activation = Literal["silu", "gelu_tanh"]
"""The activation of a gated MLP: SiLU, or GELU in its form with a tanh."""
PlainActivation = Literal["gelu", "gelu_tanh", "relu", "relu2", "xielu"]
"""The activation of an MLP without a gate. `relu2` is the square of ReLU; `xielu` has two learned numbers
(Huang and Schlag 2024, arXiv 2411.13010)."""
Norms = Literal["pre", "post", "sandwich", "parallel", "parallel_shared", "pre_mlp", "of_sums"]
"""Where the norms of a layer are: before attention and MLP, after them, or both. `parallel`: before both, and
the MLP reads what attention reads, and not what attention has added to. `parallel_shared`: so, and by the
same norm. `pre_mlp`: before the MLP alone. `of_sums`: what attention, and the MLP, have added to is
normalised."""
NormKind = Literal["rms", "layer", "layer_without_bias", "layer_alone"]
"""What the norms of hidden states are: root mean square norms, or layer norms with weight and bias, with a
weight, or with neither."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries grow with their position, so that attention stays sharp in long contexts: the query at position
    p is multiplied by 1 + strength * ln(1 + floor((p + shift) / length)).
    """

    strength: float
    length: float
    shift: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention of one layer.

    rope: None if nothing is rotated. scale: multiplies the scores. window: how many latest tokens, itself
    included, a token attends to; chunk: it attends to tokens of its own chunk of positions only; None: all.
    softcap: scores s become softcap * tanh(s / softcap). sinks: each head has one more score without a value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm = "none"
    clip: float | None = None
    """Queries, keys and values are bounded to this on both sides before they are rotated."""
    v_norm: bool = False
    """Whether values are divided by the root mean square of each head."""
    alibi: float | None = None
    """ALiBi: scores fall with the distance between query and key, by a slope of each head, of which 2 to
    minus this power is the least. None: they do not."""
    values_are_keys: bool = False
    """Whether the projection of the keys gives the values too, before keys are normalised and rotated."""
    query_scaling: QueryScaling | None = None
    output_gate: bool = False
    """Whether each channel of what attention gives is multiplied by the sigmoid of a product of its own
    (Qwen3-Next)."""
    pieces: int = 1
    """Into how many pieces the heads are cut (`cutting`). The numbers of heads are those of one piece."""
    kv_pieces: int = 1
    """The same for the heads of keys and values. If there are fewer pieces than devices, several devices have
    the same one."""

    @property
    def rotary_dim(self) -> int:
        """How many channels of a head are rotated; 0 without rope."""
        return 0 if self.rope is None else self.rope.rotary_dim(self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The latent attention of one layer.

    latent_dim: channels of which keys and values of all heads are made. rope_dim: rotated channels, of which
    all heads share the key. nope_dim, value_dim: channels of a head's key that are not rotated, and of its
    value. query_rank: channels of which the queries of all heads are made; None: they are made of the hidden
    state. scale: multiplies the scores. bias: of the products that read and write hidden states, but for
    those of queries without query_rank. norm_eps: of the norms of what keys and queries are made of.
    interleaved: a checkpoint has the two channels of each rotated pair side by side.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    rope: RopeConfig
    interleaved: bool = True
    query_rank: int | None = None
    bias: bool = False
    norm_eps: float = 1e-6
    pieces: int = 1
    """Into how many pieces the heads are cut (`cutting`). The number of heads is that of one piece."""
    cache_pieces: int = 1
    """Over how many devices the pages of the cache are dealt (`cutting`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """A gated MLP: down(activation(gate_multiplier * gate(x)) * up(x)). plain: if given, the MLP has no gate,
    and is down(plain(up(x))).
    """

    intermediate_size: int
    activation: Activation | Literal["gelu"] = "silu"
    plain: PlainActivation | None = None
    bias: bool = False
    gate_multiplier: float = 1.0
    pieces: int = 1
    """Into how many pieces the inner channels are cut (`cutting`). The size is that of one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Which experts a token goes to, and with which weights: see `ops.native.experts.route`.

    bias: the product that gives the experts' logits has one. correction: each expert has a number that is
    added to its score for the choice only. expert_scale: each has one that its weight is multiplied by.
    """

    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    jitter: float = 0.0
    bias: bool = False
    correction: bool = False
    expert_scale: bool = False
    num_groups: int = 1
    top_groups: int = 1
    in_group: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts, each of them a gated MLP, of which every token has its own `per_token`.

    intermediate_size: that of each expert. limit: that of the activation "gpt_oss". weigh_input: the weight
    multiplies what goes into the expert and not what comes out. shared_size: the intermediate size of the
    expert that all tokens have besides; None: there is none. shared_gate: what it gives is multiplied by the
    sigmoid of a number that a product makes of the token. stored_as: how the checkpoint has their weights.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    router: RouterConfig = RouterConfig()
    activation: ExpertActivation = "silu"
    limit: float = 0.0
    bias: bool = False
    weigh_input: bool = False
    shared_size: int | None = None
    shared_gate: bool = False
    stored_as: Literal["floats", "mxfp4"] = "floats"
    pieces: int = 1
    """Into how many pieces the inner channels of each expert are cut (`cutting`). intermediate_size is that
    of one piece."""
    expert_pieces: int = 1
    """Into how many pieces the experts are dealt, where they stay whole: one of `pieces` and this is 1.
    num_experts is the number of all."""
    shared_pieces: int = 1
    """The same as `pieces` for the shared expert."""

    @property
    def is_cut(self) -> bool:
        """Whether what devices compute of the layer must be added up."""
        return max(self.pieces, self.expert_pieces, self.shared_pieces) > 1

    @property
    def active_size(self) -> int:
        """The intermediate sizes of all experts that a token has, together."""
        return self.per_token * self.intermediate_size + (self.shared_size or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPAndExpertsConfig:
    """An MLP and a mixture of experts side by side, each between norms of its own; the sum is what the layer
    adds (Gemma 4).
    """

    mlp: MLPConfig
    experts: ExpertsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer: attention (or what stands in its place) and MLP (or experts; None: neither), each with its
    norms, added to the residual stream.

    beside: a mixer that reads what attention reads, and is added beside it (Falcon-H1). residual_multiplier:
    what attention and MLP give is multiplied by it before it is added; mlp_multiplier: what the MLP gives, if
    by another; beside_multiplier: what `beside` gives. has_scalar: the layer's result is multiplied by a
    number of the checkpoint. shares_kv_of: the earlier layer to whose keys and values this one attends; None:
    its own.
    """

    attention: AttentionConfig | LatentConfig | RecurrentConfig
    mlp: MLPConfig | ExpertsConfig | MLPAndExpertsConfig | None
    beside: MambaConfig | None = None
    norms: Norms = "pre"
    residual_multiplier: float = 1.0
    mlp_multiplier: float | None = None
    beside_multiplier: float = 1.0
    has_scalar: bool = False
    shares_kv_of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerConfig:
    """Embeddings of their own for each layer (Gemma 3n and 4): from a second table, and from the token's
    embedding.
    """

    size: int
    vocab_size: int
    activation: Activation
    pad_token_id: int = 0
    padded_tokens: tuple[int, ...] = ()
    """Tokens that stand for images and sounds, which have the embeddings of `pad_token_id`."""
    pieces: int = 1
    """Into how many pieces the tokens of the table are cut (`cutting`). The size is that of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder, or an encoder.

    encoder: what only encoders have; None: the model is a decoder. classifier: what makes classes, in the
    place of a head; None: there is none. norm: what the norms of hidden states are. rms_norm_eps: in the
    roots of all norms. norm_offset: added to the weights of all norms (Gemma's are stored as differences from
    one). embed_norm: embeddings are normalised. positions_from: the entry that the first position has in a
    table of learned positions; None: there is no such table. head_bias: of the head. embedding_scale:
    embeddings are multiplied by it. logits_scale, logits_softcap: logits are multiplied by the first, and
    then l becomes softcap * tanh(l / softcap). vision: what reads images; None: the model reads none.
    predictor: the layer that a checkpoint has behind those of the decoder, which predicts the token after the
    next one (multi-token prediction); None: it has none. predicts: whether the model has that layer. eagle:
    what makes it an EAGLE head, which has one layer; None: it is a model of its own. names: of the
    checkpoint's tensors. dtype: that of the checkpoint, as config.json names it; None if it does not.
    devices: over how many devices the model is cut (`cutting`); sizes of layers are those of one
    device then. whole: the model before it was cut; None: it is not. vocab_pieces: into how many pieces the
    tokens of embeddings and head are cut.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    norm: NormKind = "rms"
    norm_offset: float = 0.0
    embed_norm: bool = False
    positions_from: int | None = None
    head_bias: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    per_layer: PerLayerConfig | None = None
    encoder: EncoderConfig | None = None
    classifier: ClassifierConfig | None = None
    vision: VisionConfig | None = None
    predictor: LayerConfig | None = None
    predicts: bool = False
    eagle: EagleConfig | None = None
    names: TensorNames = USUAL
    tie_word_embeddings: bool = False
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    devices: int = 1
    whole: ModelConfig | None = None
    vocab_pieces: int = 1

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def generates(self) -> bool:
        """Whether the model has logits of a next token."""
        return self.encoder is None and self.classifier is None

    def for_context(self, max_len: int) -> ModelConfig:
        """Return the model as a server computes it whose sequences have at most `max_len` tokens: LongRoPE
        has other frequencies in contexts beyond the one that the model was first trained on.
        """
        predictor = None if self.predictor is None else _for_context(self.predictor, max_len)
        layers = tuple(_for_context(layer, max_len) for layer in self.layers)
        return replace(self, layers=layers, predictor=predictor)

    @property
    def embedding_size(self) -> int:
        """How many numbers an embedding has: those of a hidden state, or what projections make of them."""
        projections = () if self.encoder is None else self.encoder.projections
        return projections[-1].out_size if projections else self.hidden_size

    @property
    def cache(self) -> CacheSpec:
        """What the model's cache holds: nothing for an encoder, which reads each text in one step; for an
        EAGLE head what `EagleHead` says.
        """
        if self.encoder is not None:
            return CacheSpec(())
        if self.eagle is not None:
            kept = _kept(self.layers[0].attention)
            assert isinstance(kept, PagedKV), "the layer of an EAGLE head attends"
            wider = replace(kept, head_dim=kept.head_dim + HIDING_CHANNELS)
            return CacheSpec((LatentKV(self.hidden_size, 0), wider))
        owners = [layer for layer in self.layers if layer.shares_kv_of is None]
        parts = (part for layer in owners for part in (layer.attention, layer.beside) if part is not None)
        return CacheSpec(tuple(map(_kept, parts)))

    @property
    def predictor_cache(self) -> CacheSpec:
        """What the cache holds for `predictor`, behind the entries of the layers: the hidden state of each
        position, which the layer reads with the token behind it, and what its attention keeps. A hidden state
        is kept as a key without values.
        """
        if self.predictor is None:
            return CacheSpec(())
        return CacheSpec((LatentKV(self.hidden_size, 0), _kept(self.predictor.attention)))

    @property
    def cache_entries(self) -> tuple[int, ...]:
        """For each layer its entry in the cache. Layers that share keys and values share an entry. What
        stands beside attention has the entry behind it.
        """
        entries: list[int] = []
        num_owned = 0
        for layer in self.layers:
            owner = layer.shares_kv_of
            entries.append(num_owned if owner is None else entries[owner])
            num_owned += 0 if owner is not None else 1 if layer.beside is None else 2
        return tuple(entries)


def _for_context(layer: LayerConfig, max_len: int) -> LayerConfig:
    """See `ModelConfig.for_context`."""
    attention = layer.attention
    if isinstance(attention, RecurrentConfig) or attention.rope is None:
        return layer
    return replace(layer, attention=replace(attention, rope=attention.rope.for_context(max_len)))


def _kept(
    attention: AttentionConfig | LatentConfig | RecurrentConfig,
) -> PagedKV | LatentKV | SlotState:
    """Return what attention keeps of each token. Chunks count as windows, which are never shorter."""
    if isinstance(attention, RecurrentConfig):
        return attention.kept
    if isinstance(attention, LatentConfig):
        return LatentKV(attention.latent_dim, attention.rope_dim, attention.cache_pieces)
    bounds: Sequence[int | None] = (attention.window, attention.chunk)
    window = min((bound for bound in bounds if bound is not None), default=None)
    group = attention.num_heads // attention.num_kv_heads
    return PagedKV(attention.num_kv_heads, attention.head_dim, window, group=group)
