"""What the config.json of Granite, Ministral 3, Seed-OSS and SmolLM 3 says, and what of it is refused."""

import json

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import QueryScaling
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig
from tests.support.goldens import GOLDEN
from tests.support.models.configs import attentions, one_layer, published, rope_of, windows

GRANITE, SEED = published("granite-3.1-2b-instruct"), published("Seed-OSS-36B-Instruct")
SMOLLM = published("SmolLM3-3B")
# The published Ministral 3 models see images, too. This is the golden's.
MINISTRAL = json.loads((GOLDEN / "ministral3" / "config.json").read_text())
YARN = MINISTRAL["rope_parameters"]


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def test_published_granite():
    config = parse_config(GRANITE)
    layer = one_layer(config)
    assert (layer.residual_multiplier, layer.attention.scale) == (0.22, 1 / 64)
    assert (config.embedding_scale, config.logits_scale) == (12.0, 1 / 8)
    assert (layer.norms, config.tie_word_embeddings, config.rms_norm_eps) == ("pre", True, 1e-5)
    assert rope_of(config) == RopeConfig(theta=5e6)


def test_granite_without_its_multipliers():
    names = [name for name in GRANITE if "multiplier" in name or "scaling" in name]
    config = parse_config(without(GRANITE, *names, "tie_word_embeddings", "num_key_value_heads"))
    assert (config.embedding_scale, config.logits_scale, config.tie_word_embeddings) == (1.0, 1.0, False)
    layer = one_layer(config)
    assert (layer.residual_multiplier, layer.attention.scale, layer.attention.num_kv_heads) == (1.0, 1.0, 32)


def test_published_seed_oss():
    layer = one_layer(parse_config(SEED))
    attention = layer.attention
    assert (attention.qkv_bias, attention.o_bias, layer.mlp.bias) == (True, False, False)
    assert (attention.num_heads, attention.head_dim, attention.rope) == (80, 128, RopeConfig(theta=1e7))


def test_biases_of_seed_oss():
    attention = one_layer(
        parse_config({**SEED, "attention_bias": False, "attention_out_bias": True})
    ).attention
    assert (attention.qkv_bias, attention.o_bias) == (False, True)
    absent = one_layer(parse_config(without(SEED, "attention_bias", "attention_out_bias", "head_dim")))
    assert absent == one_layer(parse_config(SEED))


def test_published_smollm3():
    config = parse_config(SMOLLM)
    rope = RopeConfig(theta=5e6)
    assert [attention.rope for attention in attentions(config)] == [rope, rope, rope, None] * 9
    assert windows(config) == (None,) * 36
    assert config.tie_word_embeddings
    absent = without(SMOLLM, "no_rope_layers", "layer_types", "no_rope_layer_interval", "tie_word_embeddings")
    assert parse_config(absent) == config


def test_smollm3_of_other_sizes():
    sizes = {**without(SMOLLM, "no_rope_layers", "layer_types", "rope_theta"), "num_hidden_layers": 3}
    config = parse_config({**sizes, "no_rope_layer_interval": 2})
    rope = RopeConfig(theta=2e6)
    assert [attention.rope for attention in attentions(config)] == [rope, None, rope]
    slides = parse_config(
        {**sizes, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 64}
    )
    assert windows(slides) == (None, 64, None)
    listed = parse_config({**sizes, "no_rope_layers": [0, 1, 1, 0]})  # it may be longer
    assert [attention.rope for attention in attentions(listed)] == [None, rope, rope]


def test_ministral3():
    config = parse_config(MINISTRAL)
    attention = one_layer(config).attention
    assert attention.query_scaling == QueryScaling(0.1, 128.0)
    assert attention.rope == RopeConfig("yarn", factor=4.0, original_max_positions=128, attention_factor=1.0)
    assert windows(parse_config({**MINISTRAL, "sliding_window": 64})) == (64, 64)
    older = {**without(MINISTRAL, "rope_parameters"), "rope_scaling": YARN, "rope_theta": 10_000.0}
    assert parse_config(older) == config
    named = {**MINISTRAL, "rope_parameters": {**YARN, "type": "yarn", "max_position_embeddings": 1024}}
    assert parse_config(named) == config
    unscaled = parse_config({**MINISTRAL, "rope_parameters": without(YARN, "llama_4_scaling_beta")})
    assert one_layer(unscaled).attention.query_scaling is None
    assert one_layer(parse_config(without(MINISTRAL, "head_dim"))).attention.head_dim == 128


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (GRANITE, "residual_multiplier", 0),
        (GRANITE, "logits_scaling", "8"),
        (GRANITE, "attention_out_bias", True),
        (GRANITE, "position_embedding_type", "nope"),
        (SEED, "attention_out_bias", 1),
        (SEED, "residual_multiplier", 0.5),
        (SMOLLM, "no_rope_layers", [1, 0]),
        (SMOLLM, "no_rope_layers", [1, 1, 1, 2] * 9),
        (SMOLLM, "no_rope_layer_interval", 0),
        (SMOLLM, "layer_types", ["sliding_attention"] * 36),
        (MINISTRAL, "rope_parameters", None),
        (MINISTRAL, "rope_parameters.llama_4_scaling_beta", {**YARN, "llama_4_scaling_beta": "0.1"}),
        (
            MINISTRAL,
            "rope_parameters.original_max_position_embeddings",
            {"rope_type": "default", "llama_4_scaling_beta": 0.1},
        ),
        (MINISTRAL, "rope_parameters.alpha", {**YARN, "alpha": 2.0}),
        (MINISTRAL, "attention_bias", True),
    ],
)
def test_refused_by_name(base, field, value):
    with pytest.raises(ConfigError) as caught:
        parse_config({**base, field.partition(".")[0]: value})
    assert str(caught.value).count(f"{field}: ") == 1, caught.value
