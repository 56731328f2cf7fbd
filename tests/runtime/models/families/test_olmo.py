"""What OLMo's config.json says, in its older and newer forms, and what of it is refused."""

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig
from tests.support.models.configs import attentions, one_layer, published, windows

OLMO2, OLMO3 = published("OLMo-2-1124-7B"), published("Olmo-3-7B-Instruct")
YARN = RopeConfig("yarn", 500_000.0, 8.0, 8192, attention_factor=1.2079441541679836)


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def test_published_olmo2():
    config = parse_config(OLMO2)
    layer = one_layer(config)
    attention = layer.attention
    assert (layer.norms, attention.qk_norm, attention.qkv_bias, attention.o_bias) == (
        "post",
        "all",
        False,
        False,
    )
    assert (attention.rope, attention.num_kv_heads) == (RopeConfig(theta=500_000.0), 32)
    assert windows(config) == (None,) * 32
    assert (config.norm_offset, config.tie_word_embeddings, config.rms_norm_eps) == (0.0, False, 1e-6)


def test_published_olmo3():
    """Only the layers with full attention are scaled."""
    config = parse_config(OLMO3)
    assert windows(config) == (4096, 4096, 4096, None) * 8
    plain = RopeConfig(theta=500_000.0)
    ropes = [attention.rope for attention in attentions(config)]
    assert ropes == [plain, plain, plain, YARN] * 8
    assert {layer.norms for layer in config.layers} == {"post"}
    assert {attention.qk_norm for attention in attentions(config)} == {"all"}


def test_the_newer_form_of_olmo3_is_the_same_model():
    full = {**OLMO3["rope_scaling"], "rope_theta": 500_000.0}
    ropes = {"full_attention": full, "sliding_attention": {"rope_theta": 500_000.0, "rope_type": "default"}}
    older = without(OLMO3, "rope_theta", "rope_scaling")
    assert parse_config({**older, "rope_parameters": ropes}) == parse_config(OLMO3)


def test_what_the_files_leave_out():
    absent = without(OLMO2, "rms_norm_eps", "rope_theta", "num_key_value_heads", "attention_bias")
    config = parse_config({**absent, "num_attention_heads": 16})
    assert (config.rms_norm_eps, one_layer(config).attention.rope) == (1e-5, RopeConfig())
    assert one_layer(config).attention.num_kv_heads == 16
    assert parse_config(without(OLMO3, "layer_types", "sliding_window", "rope_theta")) == parse_config(OLMO3)
    assert windows(parse_config({**without(OLMO3, "layer_types"), "num_hidden_layers": 3})) == (4096,) * 3


def test_longrope_of_some_layers_needs_a_factor_for_each_pair():
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0], "long_factor": [1.0] * 64}
    with pytest.raises(ConfigError, match=r"short_factor: must have 64 factors, not 1$"):
        parse_config({**OLMO3, "rope_scaling": {**longrope, **factors}})


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (OLMO2, "clip_qkv", 8.0),
        (OLMO2, "sliding_window", 4096),
        (OLMO2, "model_type", "olmo3"),
        (OLMO3, "sliding_window", None),
        (OLMO3, "layer_types", ["chunked_attention"] * 32),
        (OLMO3, "rope_parameters.rope_type", {"rope_type": "default"}),
        (OLMO3, "rope_local_base_freq", 10_000),
    ],
)
def test_refused_by_name(base, field, value):
    with pytest.raises(ConfigError) as caught:
        parse_config({**base, field.partition(".")[0]: value})
    assert str(caught.value).count(f"{field}: ") == 1, caught.value
