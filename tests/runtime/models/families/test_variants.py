"""What the config.json of Granite, Ministral 3, Phi, Seed-OSS and SmolLM says, and what is refused of it."""

import json

import numpy as np
import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import QueryScaling
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig, inverse_frequencies
from tests.support.goldens import GOLDEN
from tests.support.models.configs import attentions, one_layer, published, rope_of, windows

GRANITE, SEED = published("granite-3.1-2b-instruct"), published("Seed-OSS-36B-Instruct")
SMOLLM, PHI = published("SmolLM3-3B"), published("Phi-4-mini-instruct")
SCALING = PHI["rope_scaling"]
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
    null = one_layer(parse_config({**SEED, "head_dim": None}))
    assert null.attention.head_dim == SEED["hidden_size"] // SEED["num_attention_heads"]


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


def test_published_phi4_mini():
    config = parse_config(PHI)
    attention = one_layer(config).attention
    assert windows(config) == (262_144,) * 32
    assert (attention.head_dim, attention.rotary_dim, attention.qkv_bias) == (128, 96, False)
    rope = attention.rope
    assert (rope.kind, rope.original_max_positions, rope.partial_rotary_factor) == ("longrope", 4096, 0.75)
    # A context 32 times as long as one of 2**12 tokens: the root of 1 + 5 / 12.
    assert rope.attention_factor == pytest.approx(1.1902380714)
    assert (rope.short_factors, rope.long_factors) == ((1.0,) * 48, tuple(SCALING["long_factor"]))
    older = {**PHI, "rope_scaling": {**SCALING, "type": "su"}}
    share = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75, "rope_type": "longrope"}
    newer = {**without(PHI, "rope_scaling", "rope_theta", "partial_rotary_factor"), "dtype": "bfloat16"}
    newer["rope_parameters"] = {**without(SCALING, "type"), **share}
    assert parse_config(older) == parse_config(newer) == config


def test_what_phi_leaves_out():
    absent = parse_config(without(PHI, "rope_scaling", "partial_rotary_factor", "sliding_window"))
    assert (rope_of(absent), windows(absent)) == (RopeConfig(), (None,) * 32)
    named = {**SCALING, "attention_factor": 1.5}
    assert rope_of(parse_config({**PHI, "rope_scaling": named})).attention_factor == 1.5
    top = "original_max_position_embeddings"
    assert parse_config({**without(PHI, top), "rope_scaling": {**SCALING, top: 2048}}) == parse_config(PHI)
    short = parse_config({**PHI, "max_position_embeddings": 4096})
    assert rope_of(short).attention_factor == 1.0


def test_the_served_context_decides_on_phis_frequencies():
    """Those of the first pairs are plain ones divided by their factors, of which the second long one is
    1.118...
    """
    config = parse_config(PHI)
    second = 10_000.0 ** (-2 / 96)
    for max_len, factor in ((4096, 1.0), (4097, 1.118320672), (131_072, 1.118320672)):
        rope = rope_of(config.for_context(max_len))
        np.testing.assert_allclose(inverse_frequencies(rope, 96)[:2], [1.0, second / factor], rtol=1e-6)
    granite = parse_config(GRANITE)
    assert granite.for_context(10) == granite


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
@pytest.mark.parametrize("number", [47, 64])
def test_each_pair_of_phi_has_its_factors(name, number):
    with pytest.raises(ConfigError, match=f"{name}: must have 48 factors, not {number}"):
        parse_config({**PHI, "rope_scaling": {**SCALING, name: [1.0] * number}})


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
        (PHI, "rope_scaling.long_factor", {**SCALING, "long_factor": None}),
        (PHI, "rope_scaling.short_factor", {**SCALING, "short_factor": [1.0] * 47 + [0.0]}),
        (PHI, "rope_scaling.short_mscale", {**SCALING, "short_mscale": 1.1}),
        (PHI, "partial_rotary_factor", 0.01),
        (PHI, "partial_rotary_factor", 1.5),
        (PHI, "full_attn_mod", 2),
        (PHI, "lm_head_bias", True),
    ],
)
def test_refused_by_name(base, field, value):
    with pytest.raises(ConfigError) as caught:
        parse_config({**base, field.partition(".")[0]: value})
    assert str(caught.value).count(f"{field}: ") == 1, caught.value
