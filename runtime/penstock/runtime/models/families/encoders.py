"""Encoders: ALBERT, BERT, DeBERTa v2 and v3, DistilBERT, ELECTRA, ModernBERT, MPNet, Nomic BERT, RoBERTa and
XLM-RoBERTa, and their classifiers.

A row of `_KINDS` says what differs. Checkpoints name one layer's parameters in as many ways as there are
families; `names` has these by the parts of our paths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from penstock.runtime.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    Norms,
    PlainActivation,
)
from penstock.runtime.models.configs.encoder import (
    Activation,
    ClassifierConfig,
    DistanceConfig,
    EncoderConfig,
)
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.encoder import Encoder
from penstock.runtime.models.families.classes import read_classes
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.reading import (
    Sizes,
    read_layer_types,
    read_model,
    read_rope,
    read_ropes,
    read_sizes,
)
from penstock.runtime.models.hf_fields import MOST_LAYERS, Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt
from penstock.runtime.requests.request import Pooling

_PLAIN: Mapping[str, PlainActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Names of activations in config.json to ours."""
_LAYER = {
    "layers": "encoder.layer",
    "self_attn": "attention",
    "q_proj": "self.query",
    "k_proj": "self.key",
    "v_proj": "self.value",
    "o_proj": "output.dense",
    "attention_out_norm": "attention.output.LayerNorm",
    "mlp": "",
    "up_proj": "intermediate.dense",
    "down_proj": "output.dense",
    "mlp_out_norm": "output.LayerNorm",
}
_BERT_NAMES = {
    **_LAYER,
    "embed_tokens": "embeddings.word_embeddings",
    "embed_types": "embeddings.token_type_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "embedding_projection": "embeddings_project",
}
"""What BERT calls our parts of paths; "" is a part that it has not."""
_POOLED = {"dense": "model.pooler.dense", "out": "classifier"}
_OWN_HEAD = {"dense": "classifier.dense", "out": "classifier.out_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one family of encoders does otherwise than BERT.

    fields: what its config.json calls fields. names, table: of its tensors. padded: learned positions begin
    behind the id of padding. types: it has a table of token types, unless config.json says 0. head: what its
    classifiers are called, and the activation of their first layer. activation_field, usual_activation: what
    config.json calls the activation of MLPs, and its default. eps: the default of layer_norm_eps.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    table: str = "embeddings.word_embeddings.weight"
    padded: bool = False
    types: bool = True
    head: Mapping[str, str] = field(default_factory=lambda: _POOLED)
    activation: Activation | None = "tanh"
    activation_field: str = "hidden_act"
    usual_activation: str = "gelu"
    eps: float = 1e-12
    ignored: tuple[str, ...] = ()


_DISTILBERT_NAMES = {
    **_BERT_NAMES,
    "layers": "transformer.layer",
    "q_proj": "q_lin",
    "k_proj": "k_lin",
    "v_proj": "v_lin",
    "o_proj": "out_lin",
    "attention_out_norm": "sa_layer_norm",
    "mlp": "ffn",
    "up_proj": "lin1",
    "down_proj": "lin2",
    "mlp_out_norm": "output_layer_norm",
}
_MPNET_NAMES = {
    **_BERT_NAMES,
    "self_attn": "attention.attn",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "attention_out_norm": "attention.LayerNorm",
    "distances": "encoder.relative_attention_bias",
}
_ALBERT_NAMES = {
    **_BERT_NAMES,
    "layers": "encoder.albert_layer_groups",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "dense",
    "attention_out_norm": "attention.LayerNorm",
    "up_proj": "ffn",
    "down_proj": "ffn_output",
    "mlp_out_norm": "full_layer_layer_norm",
    "embedding_projection": "encoder.embedding_hidden_mapping_in",
}
_DEBERTA_NAMES = {
    **_BERT_NAMES,
    "q_proj": "self.query_proj",
    "k_proj": "self.key_proj",
    "v_proj": "self.value_proj",
    "distances": "encoder.rel_embeddings",
    "distances_norm": "encoder.LayerNorm",
}
_NOMIC_NAMES = {
    **_BERT_NAMES,
    "layers": "encoder.layers",
    "self_attn": "attn",
    "o_proj": "out_proj",
    "attention_out_norm": "norm1",
    "mlp": "mlp",
    "gate_proj": "fc12",
    "up_proj": "fc11",
    "down_proj": "fc2",
    "mlp_out_norm": "norm2",
    "embedding_norm": "emb_ln",
}
_MODERN_NAMES = {
    "embed_tokens": "embeddings.tok_embeddings",
    "embedding_norm": "embeddings.norm",
    "self_attn": "attn",
    "o_proj": "Wo",
    "attention_norm": "attn_norm",
    "down_proj": "Wo",
    "norm": "final_norm",
}
_BERT = Kind(model_type="bert", names=_BERT_NAMES)
_ROBERTA = replace(_BERT, model_type="roberta", padded=True, head=_OWN_HEAD)
_XLM_ROBERTA = replace(_ROBERTA, model_type="xlm-roberta")
_ELECTRA = replace(
    _BERT,
    model_type="electra",
    head=_OWN_HEAD,
    activation="gelu",
    ignored=("summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"),
)
_DISTILBERT = Kind(
    model_type="distilbert",
    fields={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
    },
    names=_DISTILBERT_NAMES,
    types=False,
    head={"dense": "pre_classifier", "out": "classifier"},
    activation="relu",
    activation_field="activation",
    # The positions are stored, also where they are sines.
    ignored=("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"),
)
_MPNET = Kind(model_type="mpnet", names=_MPNET_NAMES, padded=True, types=False, head=_OWN_HEAD)
_ALBERT = Kind(
    model_type="albert",
    names=_ALBERT_NAMES,
    head={"dense": "model.pooler", "out": "classifier"},
    usual_activation="gelu_new",
    ignored=(
        "down_scale_factor",
        "gap_size",
        "net_structure_type",
        "num_memory_blocks",
    ),
)
_DEBERTA = Kind(
    model_type="deberta-v2",
    names=_DEBERTA_NAMES,
    head={"dense": "pooler.dense", "out": "classifier"},
    eps=1e-7,
    ignored=("legacy", "pooler_dropout", "z_steps"),
)


def _parse_bert(architecture: str, fields: Fields, kind: Kind) -> ModelConfig:
    """Parse BERT and its like, all with learned positions and layer norms of sums."""
    fields.only("model_type", kind.model_type)
    fields.call(kind.fields)
    for name, value in (("is_decoder", False), ("add_cross_attention", False)):
        fields.only(name, value)
    fields.only("position_embedding_type", "absolute")
    sizes = read_sizes(fields, kv_heads=0)
    pad = fields.integer("pad_token_id", 1, minimum=0)
    begin: int | None = pad + 1 if kind.padded else 0
    sizes = replace(sizes, max_positions=sizes.max_positions - (begin or 0))
    scale, distances = sizes.head_dim**-0.5, None
    if kind is _MPNET:
        distances = _read_buckets(fields, sizes)
    if kind is _DEBERTA:
        distances, scale = _read_disentangled(fields, sizes)
        fields.only("embedding_size", sizes.hidden_size)
        begin = 0 if fields.boolean("position_biased_input", True) else None
    embedding = fields.optional_integer("embedding_size")
    layer = LayerConfig(
        attention=AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=scale,
            qkv_bias=True,
            o_bias=True,
        ),
        mlp=MLPConfig(
            intermediate_size=fields.integer("intermediate_size"),
            plain=_read_activation(fields, kind),
            bias=True,
        ),
        norms="of_sums",
    )
    num_modules, group_size, passes = sizes.num_layers, 1, tuple[int, ...]()
    if kind is _ALBERT:
        embedding = embedding or 128
        num_modules, group_size, passes = _read_groups(fields, sizes.num_layers)
    types = fields.integer("type_vocab_size", 2 if kind is not _DEBERTA else 0, minimum=0)
    encoder = EncoderConfig(
        token_types=types if kind.types else 0,
        embedding_size=embedding if kind is _ALBERT or embedding != sizes.hidden_size else None,
        distances=distances,
        passes=passes,
        group_size=group_size,
    )
    return _model(architecture, fields, sizes, [layer] * num_modules, kind, encoder, begin)


_NOMIC_FIELDS = {
    "hidden_act": "activation_function",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "max_trained_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "rope_theta": "rotary_emb_base",
}
"""What the files of Nomic's own code call fields, in which transformers 5 has no part."""


def _parse_nomic(architecture: str, fields: Fields, kind: Kind) -> ModelConfig:
    fields.only("model_type", kind.model_type)
    fields.call(_NOMIC_FIELDS)
    fields.only("hidden_act", "silu", "swiglu")
    fields.only("rotary_emb_fraction", 1.0)
    fields.only("scale_attn_weights", True)
    sizes = read_sizes(fields, kv_heads=0)
    layer = LayerConfig(
        attention=AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            rope=read_rope(fields, sizes.max_positions, theta=1000.0),
        ),
        mlp=MLPConfig(intermediate_size=fields.integer("intermediate_size")),
        norms="of_sums",
    )
    encoder = EncoderConfig(token_types=fields.integer("type_vocab_size", 2, minimum=0))
    return _model(architecture, fields, sizes, [layer] * sizes.num_layers, kind, encoder, None)


def _parse_modern(architecture: str, fields: Fields, kind: Kind) -> ModelConfig:
    fields.only("model_type", kind.model_type)
    fields.only("norm_bias", False)
    fields.only("hidden_activation", "gelu")
    fields.only("classifier_activation", "gelu")
    bias, mlp_bias = fields.boolean("attention_bias", False), fields.boolean("mlp_bias", False)
    sizes = read_sizes(fields, kv_heads=0)
    full, local = "full_attention", "sliding_attention"
    interval = fields.integer("global_attn_every_n_layers", 3)
    usual = [local if layer % interval else full for layer in range(sizes.num_layers)]
    types = read_layer_types(fields, usual, (full, local))
    bases = {full: ("global_rope_theta", 160_000.0), local: ("local_rope_theta", 10_000.0)}
    ropes = read_ropes(fields, sizes.max_positions, bases)
    window = fields.integer("local_attention", 128) // 2 + 1

    def layer(number: int) -> LayerConfig:
        norms: Norms = "pre" if number else "pre_mlp"  # the norm of embeddings is before the first
        return LayerConfig(
            attention=AttentionConfig(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                scale=sizes.head_dim**-0.5,
                rope=ropes[types[number]],
                window=None if types[number] == full else window,
                qkv_bias=bias,
                o_bias=bias,
            ),
            mlp=MLPConfig(
                intermediate_size=fields.integer("intermediate_size"), activation="gelu", bias=mlp_bias
            ),
            norms=norms,
        )

    pooling = fields.raw("classifier_pooling") or "cls"
    fields.only("classifier_pooling", "cls", "mean")
    dense_bias = fields.boolean("classifier_bias", False)
    return _model(
        architecture,
        fields,
        sizes,
        [layer(number) for number in range(sizes.num_layers)],
        kind,
        EncoderConfig(final_norm=True),
        None,
        pooling=Pooling.MEAN if pooling == "mean" else Pooling.FIRST_TOKEN,
        dense_bias=dense_bias,
        eps_name="norm_eps",
    )


def _model(
    architecture: str,
    fields: Fields,
    sizes: Sizes,
    layers: list[LayerConfig],
    kind: Kind,
    encoder: EncoderConfig,
    positions_from: int | None,
    *,
    pooling: Pooling = Pooling.FIRST_TOKEN,
    dense_bias: bool = True,
    eps_name: str = "layer_norm_eps",
) -> ModelConfig:
    """Return the model, with its classifier if the architecture names one."""
    classifier = None
    if architecture.endswith("ForSequenceClassification"):
        activation = kind.activation
        if kind is _DEBERTA:
            named = fields.raw("pooler_hidden_act") or "gelu"
            fields.only("pooler_hidden_act", "gelu", "tanh", "relu")
            activation = "tanh" if named == "tanh" else "relu" if named == "relu" else "gelu"
        classifier = ClassifierConfig(
            classes=read_classes(fields, pooling),
            activation=activation,
            dense_bias=dense_bias,
            norm=kind is _MODERN,
        )
    if kind is _DEBERTA:
        fields.only("pooler_hidden_size", sizes.hidden_size)
        fields.ignore(("pooler_hidden_act",))
    return read_model(
        architecture,
        fields,
        sizes,
        layers,
        eps=kind.eps,
        eps_name=eps_name,
        tied=True,
        norm="layer_without_bias" if kind is _MODERN else "layer",
        positions_from=positions_from,
        encoder=encoder,
        classifier=classifier,
        names=TensorNames(decoder="model.", table=kind.table),
    )


def _read_activation(fields: Fields, kind: Kind) -> PlainActivation:
    named = fields.raw(kind.activation_field) or kind.usual_activation
    fields.only(kind.activation_field, *_PLAIN)
    return _PLAIN.get(str(named), "gelu")


def _read_groups(fields: Fields, num_layers: int) -> tuple[int, int, tuple[int, ...]]:
    """Tell how many modules ALBERT has, how many of them in a group, and the module of each of its layers."""
    groups = fields.integer("num_hidden_groups", 1, most=MOST_LAYERS)
    inner = fields.integer("inner_group_num", 1, most=MOST_LAYERS)
    order = [int(layer / (num_layers / groups)) for layer in range(num_layers)]
    return groups * inner, inner, tuple(group * inner + i for group in order for i in range(inner))


def _read_buckets(fields: Fields, sizes: Sizes) -> DistanceConfig:
    """Read MPNet's biases, in buckets as T5's (Raffel et al. 2019, arXiv 1910.10683). All distances from
    `farthest` on have the same entry, and the outermost one stands for those beyond.
    """
    size = fields.integer("relative_attention_num_buckets", 32, minimum=4)
    half, farthest = size // 2, 128
    exact = half // 2
    if exact >= farthest:
        fields.problem("relative_attention_num_buckets", f"must be below {4 * farthest}, not {size}")
        exact = 1
    most = min(sizes.max_positions - 1, farthest)
    away = np.arange(-most, most + 1)
    far = np.maximum(np.abs(away), 1).astype(np.float32)
    steps = (
        np.log(far / np.float32(exact)) / np.float32(math.log(farthest / exact)) * np.float32(half - exact)
    )
    large = np.minimum(exact + steps.astype(np.int64), half - 1)
    entries = np.where(away < 0, half, 0) + np.where(np.abs(away) < exact, np.abs(away), large)
    return DistanceConfig(size=size, entries=tuple(entries.tolist()), kind="bias")


_MOST_DISTANCES = 1 << 20
"""Most positions of a text between which distances are told apart."""


def _read_disentangled(fields: Fields, sizes: Sizes) -> tuple[DistanceConfig | None, float]:
    """Read DeBERTa's distances, and the scale of its scores."""
    if not fields.boolean("relative_attention", False):
        fields.ignore(("max_relative_positions", "position_buckets", "norm_rel_ebd", "pos_att_type"))
        return None, sizes.head_dim**-0.5
    fields.only("share_att_key", True)
    if "share_att_key" not in fields:
        fields.problem("share_att_key", "must be true: distances have no products of their own")
    fields.only("norm_rel_ebd", "layer_norm", "none")
    fields.only("conv_kernel_size", 0)
    positions = sizes.max_positions
    if positions > _MOST_DISTANCES:
        fields.problem("max_position_embeddings", f"must be at most {_MOST_DISTANCES}, not {positions}")
        positions = 1
    # Files have -1 where they mean none.
    farthest = fields.optional_integer("max_relative_positions", -1, _MOST_DISTANCES) or -1
    farthest = farthest if farthest > 0 else positions
    buckets = fields.optional_integer("position_buckets", -1, _MOST_DISTANCES) or -1
    num_buckets = max(buckets, 0)
    if num_buckets == 1 or (num_buckets and farthest - 1 <= num_buckets // 2):
        fields.problem("position_buckets", f"must be at least 2, and below {2 * farthest - 2}, not {buckets}")
        num_buckets = 0
    span = num_buckets or farthest
    named = fields.raw("pos_att_type") or []
    kinds = named.split("|") if isinstance(named, str) else list(named) if isinstance(named, list) else []
    away = np.arange(1 - positions, positions)
    if num_buckets:
        middle = span // 2
        far = np.where(np.abs(away) < middle, middle - 1, np.abs(away)).astype(np.float32)
        log = np.log(np.float32((farthest - 1) / middle))
        steps = np.ceil(np.log(far / np.float32(middle)) / log * np.float32(middle - 1)) + middle
        away = np.where(far <= middle, away, steps * np.sign(away)).astype(np.int64)
    config = DistanceConfig(
        size=2 * span,
        entries=tuple(np.clip(away + span, 0, 2 * span - 1).tolist()),
        kind="disentangled",
        by_queries="c2p" in kinds,
        by_keys="p2c" in kinds,
        norm=fields.raw("norm_rel_ebd") == "layer_norm",
    )
    parts = 1 + config.by_queries + config.by_keys
    return config, (sizes.head_dim * parts) ** -0.5


_MODERN = Kind(
    model_type="modernbert",
    names=_MODERN_NAMES,
    table="embeddings.tok_embeddings.weight",
    head={"dense": "head.dense", "norm": "head.norm", "out": "classifier"},
    activation="gelu",
    eps=1e-5,
    ignored=(
        "cls_token_id",
        "decoder_bias",
        "deterministic_flash_attn",
        "initializer_cutoff_factor",
        "layer_norm_eps",  # norm_eps counts
        "mlp_dropout",
        "position_embedding_type",
        "reference_compile",
        "repad_logits_with_grad",
        "sparse_pred_ignore_index",
        "sparse_prediction",
    ),
)
_NOMIC = Kind(
    model_type="nomic_bert",
    names=_NOMIC_NAMES,
    # Longer texts than it was trained on would need another rotation.
    ignored=(
        "auto_map",
        "dense_seq_output",
        "fused_bias_fc",
        "fused_dropout_add_ln",
        "n_positions",
        "pad_vocab_size_multiple",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "use_flash_attn",
        "use_xentropy",
    ),
)


def _stored(config: ModelConfig, kind: Kind) -> StoredAt:
    """Tell where a checkpoint of the kind has each parameter."""

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        parts = list(path)
        if parts[0] == "classifier":
            return Stored((Source(f"{kind.head[str(parts[1])]}.{parts[2]}", shape),))
        if parts[0] == "layers" and kind is _ALBERT:
            assert config.encoder is not None, "the family is of encoders"
            group, layer = divmod(int(parts[1]), config.encoder.group_size)
            parts[1:2] = [group, "albert_layers", layer]
        names = kind.names
        fused = {_MODERN.model_type: "attn.Wqkv", _NOMIC.model_type: "attn.Wqkv"}.get(kind.model_type)
        if fused and parts[-2] in ("q_proj", "k_proj", "v_proj"):
            begin = ("q_proj", "k_proj", "v_proj").index(str(parts[-2])) * shape[0]
            name = f"model.{names.get('layers', 'layers')}.{parts[1]}.{fused}.{parts[-1]}"
            return Stored((Source(name, (3 * shape[0], *shape[1:]), begin=begin),))
        if kind is _MODERN and parts[-2] in ("gate_proj", "up_proj"):
            begin = shape[0] if parts[-2] == "up_proj" else 0
            name = f"model.layers.{parts[1]}.mlp.Wi.{parts[-1]}"
            return Stored((Source(name, (2 * shape[0], *shape[1:]), begin=begin),))
        name = ".".join(names.get(str(part), str(part)) for part in parts)
        return Stored((Source(f"model.{name}".replace("..", "."), shape),))

    return stored


_IGNORED = (
    "classifier_dropout_prob",
    "directionality",
    "output_past",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
)
"""What conversions and Sentence Transformers have left in config.json; models look at none of it."""
_HARMLESS = (
    r"(^|\.)pooler\.",
    r"(^|\.)embeddings\.(position_ids|token_type_ids)$",
    r"^(cls|lm_head|predictions|head|decoder|discriminator_predictions|vocab_\w+|sop_classifier)\.",
    r"^lm_head\.",
)
"""Heads that predict masked tokens, and the pooler of a model without a classifier."""


Parse: TypeAlias = Callable[[str, Fields, Kind], ModelConfig]


def _families(kind: Kind, stem: str, *further: str, parse: Parse = _parse_bert) -> dict[str, ModelFamily]:
    """Return the architectures of a kind: the model itself, what it was trained as, and its classifier."""
    family = ModelFamily(
        parse=lambda architecture, fields: parse(architecture, fields, kind),
        ignored=(*_IGNORED, *kind.ignored),
        stored=functools.partial(_stored, kind=kind),
        harmless=_HARMLESS,
        copies=lambda config: {},
        build=Encoder,
    )
    names = (f"{stem}Model", f"{stem}ForMaskedLM", f"{stem}ForSequenceClassification", *further)
    return dict.fromkeys(names, family)


FAMILIES: Mapping[str, ModelFamily] = {
    **_families(_ALBERT, "Albert", "AlbertForPreTraining"),
    **_families(_BERT, "Bert", "BertForPreTraining"),
    **_families(_DEBERTA, "DebertaV2"),
    **_families(_DISTILBERT, "DistilBert"),
    **_families(_ELECTRA, "Electra", "ElectraForPreTraining"),
    **_families(_MODERN, "ModernBert", parse=_parse_modern),
    **_families(_MPNET, "MPNet"),
    **_families(_NOMIC, "NomicBert", parse=_parse_nomic),
    **_families(_ROBERTA, "Roberta"),
    **_families(_XLM_ROBERTA, "XLMRoberta"),
}
