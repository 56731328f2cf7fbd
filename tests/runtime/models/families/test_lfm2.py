"""What the config.json of LFM2 says, and what is refused of it."""

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import MLPConfig
from penstock.runtime.models.configs.recurrent import ShortConvConfig
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig
from penstock.runtime.ops.cache_spec import SlotState
from tests.support.models.configs import attentions, published

LFM2 = published("LFM2-1.2B")


def without(*names):
    return {name: value for name, value in LFM2.items() if name not in names}


def kinds(config):
    return [isinstance(layer.attention, ShortConvConfig) for layer in config.layers]


def inner(**changes):
    """The intermediate size, which is the same in all layers."""
    (mlp,) = {layer.mlp for layer in parse_config({**LFM2, **changes}).layers}
    assert isinstance(mlp, MLPConfig)
    return mlp.intermediate_size


def test_published():
    config = parse_config(LFM2)
    assert [layer for layer, is_conv in enumerate(kinds(config)) if not is_conv] == [2, 5, 8, 10, 12, 14]
    assert config.layers[0].attention == ShortConvConfig(channels=2048, num_taps=3)
    attention = attentions(config)[0]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 8, 64)
    assert (attention.qk_norm, attention.rope) == ("head", RopeConfig(theta=1e6))
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, True)
    kept = config.cache.layers[0]
    assert isinstance(kept, SlotState)
    assert [value.shape for value in kept.values] == [(2, 2048)]


def test_sizes_of_the_mlp():
    """The published models' tensors are 8192, 4608 (350M) and 6912 (700M) wide."""
    assert [inner(block_ff_dim=size) for size in (12288, 6656, 10240)] == [8192, 4608, 6912]
    assert inner(block_auto_adjust_ff_dim=False) == 12288
    assert inner(block_ffn_dim_multiplier=0.5) == 4096
    assert inner(block_ffn_dim_multiplier=None, block_ff_dim=100) == 66
    assert inner(block_ff_dim=None, intermediate_size=100, block_multiple_of=10) == 70


def test_which_layers_attend():
    names = ["conv", "full_attention"] * 8
    assert kinds(parse_config({**LFM2, "layer_types": names})) == [True, False] * 8
    assert kinds(parse_config(without("full_attn_idxs"))) == [False] * 16
    with pytest.raises(ConfigError, match="layer_types: sliding_attention is not supported"):
        parse_config({**LFM2, "layer_types": ["sliding_attention"] * 16})
    with pytest.raises(ConfigError, match="full_attn_idxs: must list numbers of the 16 layers"):
        parse_config({**LFM2, "full_attn_idxs": [16]})


def test_other_fields():
    assert not parse_config({**LFM2, "tie_embedding": False}).tie_word_embeddings
    biased = parse_config({**LFM2, "conv_bias": True}).layers[0].attention
    assert biased == ShortConvConfig(channels=2048, num_taps=3, bias=True)
    with pytest.raises(ConfigError, match="conv_L_cache: must be an integer of at least 2"):
        parse_config({**LFM2, "conv_L_cache": 1})
    with pytest.raises(ConfigError, match="tie_embedding: contradicts tie_word_embeddings"):
        parse_config({**LFM2, "tie_embedding": False, "tie_word_embeddings": True})
