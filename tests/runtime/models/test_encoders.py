"""Encoders and classifiers, compared with PyTorch's in float32 and eager mode.

tests/golden/encoders holds tiny random checkpoints, and what transformers 5.23 computed of three texts each:
the hidden states of the last layer, pooled in four ways and divided by their length, and the numbers of
classes.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models.config import MLPConfig
from penstock.runtime.models.cutting import cut
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.params import load_rules
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.attention import native_paged_attention
from tests.support.goldens import GOLDEN
from tests.support.models.configs import published
from tests.support.models.reading import check_reading
from tests.support.suite.drawing import few

needs_kernels = pytest.mark.skipif(not library.available(), reason="no native library on this machine")
NAMES = sorted(folder.parent.name for folder in (GOLDEN / "encoders").glob("*/config.json"))


@pytest.mark.parametrize("name", few(NAMES, ("bert",), ci=("deberta_v3_classifier", "modernbert_reranker")))
def test_states_poolings_and_classes(name: str) -> None:
    directory = GOLDEN / "encoders" / name
    config = load_config(directory)
    check_reading(directory, config, load_weights(directory, config, progress=False))


@pytest.mark.ci
def test_an_encoder_with_native_attention() -> None:
    """This one's heads are as wide as the kernels need, and some of its layers have a window."""
    directory = GOLDEN / "encoders" / "gemma3_embedder"
    config = load_config(directory)
    weights = load_weights(directory, config, progress=False)
    program = check_reading(directory, config, weights, attention=native_paged_attention)
    assert program.count("penstock_attention") > config.num_layers  # and a plan for each window


ENCODERS = tuple(name for name in NAMES if load_config(GOLDEN / "encoders" / name).encoder is not None)


@needs_kernels
@pytest.mark.parametrize("name", few(ENCODERS, ("bert",), ci=("albert", "modernbert_reranker")))
def test_the_kernel_of_layers_in_float32(name: str) -> None:
    """It computes all linear layers of all encoders, because each size is a multiple of 16."""
    directory, linear = GOLDEN / "encoders" / name, LinearFormat(float32=True)
    config = load_config(directory)
    assert config.encoder is not None
    weights = load_weights(directory, config, linear=linear, progress=False)
    program = check_reading(directory, config, weights, linear=linear)
    assert program.count('"penstock_float32"') >= 4 * len(config.encoder.passes or config.layers)


def test_what_is_not_computed_is_refused_by_name() -> None:
    data = json.loads((GOLDEN / "encoders" / "deberta_v3" / "config.json").read_text())
    with pytest.raises(ConfigError, match="conv_kernel_size"):
        parse_config(data | {"conv_kernel_size": 3})
    with pytest.raises(ConfigError, match="share_att_key"):
        parse_config(data | {"share_att_key": False})
    bert = json.loads((GOLDEN / "encoders" / "bert" / "config.json").read_text())
    with pytest.raises(ConfigError, match="position_embedding_type"):
        parse_config(bert | {"position_embedding_type": "relative_key"})
    with pytest.raises(ConfigError, match=r"num_attention_heads are 4; .* sizes that would work: 1, 2, 4"):
        cut(parse_config(bert), 3)
    gemma = json.loads((GOLDEN / "encoders" / "gemma3_embedder" / "config.json").read_text())
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        parse_config(gemma | {"use_bidirectional_attention": False})


@pytest.mark.parametrize(
    ("name", "num_parameters", "unread"),
    [
        ("all-MiniLM-L6-v2", 22_713_216, 384 * 384 + 384),
        ("mpnet-base", 109_486_464, 768 * 768 + 768),
        ("bge-reranker-base", 278_044_417, 0),
    ],
)
def test_published_encoders_have_as_many_parameters(name: str, num_parameters: int, unread: int) -> None:
    """As their repositories tell, of mpnet-base that of all-mpnet-base-v2, and without the numbers of
    positions that they count too. The layer of BERT and MPNet that pools is not read.
    """
    tensors = load_rules(parse_config(published(name))).tensors
    assert sum(math.prod(tensor.shape) for tensor in tensors) + unread == num_parameters


def test_what_a_missing_activation_is() -> None:
    """ALBERT's is GELU by its tanh; that of the others is exact."""
    for name, usual in (("albert", "gelu_tanh"), ("bert", "gelu")):
        data = json.loads((GOLDEN / "encoders" / name / "config.json").read_text())
        del data["hidden_act"]
        mlp = parse_config(data).layers[0].mlp
        assert isinstance(mlp, MLPConfig)
        assert mlp.plain == usual


def test_buckets_of_distances() -> None:
    """MPNet's table is as long as distances differ, whatever the context. DeBERTa's buckets are also used
    where there are as many as distances. Numbers of which no table can be made are refused, and so are
    classes without names.
    """
    mpnet, deberta = (
        json.loads((GOLDEN / "encoders" / name / "config.json").read_text())
        for name in ("mpnet", "deberta_v3")
    )
    encoder = parse_config({**mpnet, "max_position_embeddings": 1 << 32}).encoder
    assert encoder is not None
    assert encoder.distances is not None
    assert len(encoder.distances.entries) == 2 * 128 + 1
    fields = {"position_buckets": 16, "max_relative_positions": 16, "max_position_embeddings": 16}
    encoder = parse_config({**deberta, **fields}).encoder
    assert encoder is not None
    assert encoder.distances is not None
    # By hand: the middle is 8; 9 is 8 + ceil(log(9/8) / log(15/8) * 7), and so on.
    assert encoder.distances.entries[16:] == (17, 18, 19, 20, 21, 22, 23, 24, 26, 27, 28, 29, 30, 31, 31)
    bert = json.loads((GOLDEN / "encoders" / "bert_classifier" / "config.json").read_text())
    for data, changed in (
        (mpnet, {"relative_attention_num_buckets": 1}),
        (deberta, {"position_buckets": 1}),
        (deberta, {"position_buckets": 16, "max_relative_positions": 9}),
        (deberta, {"max_position_embeddings": 1 << 32}),
        (bert, {"id2label": {"0": None, "1": "x", "2": "y"}}),
        (bert, {"id2label": {}, "num_labels": 1 << 32}),
    ):
        with pytest.raises(ConfigError, match="|".join(changed)):
            parse_config({**data, **changed})


def test_roberta_has_fewer_positions_than_entries() -> None:
    roberta = load_config(GOLDEN / "encoders" / "roberta")
    assert (roberta.max_position_embeddings, roberta.positions_from) == (510, 2)


def test_albert_shares_modules_by_group() -> None:
    data = json.loads((GOLDEN / "encoders" / "albert" / "config.json").read_text())
    config = parse_config(data | {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2})
    assert config.encoder is not None
    assert config.encoder.passes == (0, 1, 0, 1, 2, 3, 2, 3)
    assert config.num_layers == 4
    for groups, inner, last in ((2, 1, "1.albert_layers.0"), (1, 2, "0.albert_layers.1")):
        config = parse_config(data | {"num_hidden_groups": groups, "inner_group_num": inner})
        names = {tensor.name for tensor in load_rules(config).tensors}
        assert f"model.encoder.albert_layer_groups.{last}.ffn.weight" in names


PUBLISHED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bert_reranker", {"sbert_ce_default_activation_function": "Identity", "problem_type": None}),
    ("bert_reranker", {"problem_type": "single_label_classification", "gradient_checkpointing": False}),
    ("bert", {"directionality": "bidi", "pooler_fc_size": 768, "position_embedding_type": "absolute"}),
    ("xlm_roberta_reranker", {"output_past": True, "sentence_transformers": {"version": "5"}}),
    (
        "modernbert",
        {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "reference_compile": True},
    ),
    (
        "modernbert",
        {
            "rope_parameters": None,
            "layer_types": None,
            "global_rope_theta": 160_000.0,
            "local_rope_theta": 10_000.0,
        },
    ),
    ("deberta_v3", {"pos_att_type": "p2c|c2p", "legacy": None}),
    ("distilbert", {"tie_weights_": True, "finetuning_task": "sst-2", "output_past": True}),
)
"""What files of published models have that the goldens' have not, and which says the same."""


@pytest.mark.parametrize(("name", "fields"), PUBLISHED)
def test_what_published_files_have_besides(name: str, fields: dict[str, Any]) -> None:
    data = json.loads((GOLDEN / "encoders" / name / "config.json").read_text())
    assert parse_config(data | fields) == parse_config(data)


def test_nomics_own_names_of_fields() -> None:
    data = json.loads((GOLDEN / "encoders" / "nomic_bert" / "config.json").read_text())
    own = {
        **{
            name: data[name]
            for name in ("architectures", "model_type", "type_vocab_size", "vocab_size", "dtype")
        },
        "n_embd": 48,
        "n_head": 4,
        "n_inner": 112,
        "n_layer": 2,
        "n_positions": 2048,
        "max_trained_positions": 512,
        "layer_norm_epsilon": 1e-12,
        "activation_function": "swiglu",
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "use_rms_norm": False,
        "scale_attn_weights": True,
        "fused_bias_fc": True,
        "use_flash_attn": True,
        "pad_vocab_size_multiple": 64,
        "causal": False,
    }
    assert parse_config(own) == parse_config(data)
    for field in ("prenorm", "qkv_proj_bias", "use_rms_norm", "rotary_emb_interleaved", "causal"):
        with pytest.raises(ConfigError, match=field):
            parse_config(own | {field: True})
