"""What Gemma 4's config.json says, in its two forms, and what of it is refused."""

import json

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models import params
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig, inverse_frequencies
from penstock.runtime.ops.cache_spec import PagedKV
from tests.support.goldens import GOLDEN
from tests.support.models.configs import attentions, windows

CONFIG = json.loads((GOLDEN / "gemma4" / "config.json").read_text())


def parse(**changes):
    return parse_config({**CONFIG, **changes})


def test_heads_and_shared_layers():
    config = parse()
    assert windows(config) == (32, None) * 3
    ours = attentions(config)
    assert [a.head_dim for a in ours] == [16, 32] * 3
    assert [layer.shares_kv_of for layer in config.layers] == [None, None, None, None, 2, 3]
    assert config.cache_entries == (0, 1, 2, 3, 2, 3)
    assert config.cache.layers == (PagedKV(2, 16, 32), PagedKV(2, 32, None)) * 2
    assert {a.scale for a in ours} == {1.0}


def test_layers_that_share_read_no_projection_of_keys():
    tensors = {tensor.name for tensor in params.load_rules(parse()).tensors}
    for layer, has_keys in enumerate([True] * 4 + [False] * 2):
        for name in ("k_proj", "v_proj", "k_norm"):
            assert (f"model.layers.{layer}.self_attn.{name}.weight" in tensors) is has_keys
        assert f"model.layers.{layer}.layer_scalar" in tensors


def test_older_files_name_the_sizes_of_all_full_layers():
    older = {name: value for name, value in CONFIG.items() if name != "per_layer_config"}
    assert parse_config({**older, "global_head_dim": 32}) == parse()
    heads = [a.head_dim for a in attentions(parse_config(older))]
    assert heads == [16, 512] * 3  # transformers' default
    fewer = {**older, "global_head_dim": 32, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
    assert [a.num_kv_heads for a in attentions(parse_config(fewer))] == [2] * 6
    same = parse_config({**fewer, "attention_k_eq_v": True})
    assert [a.num_kv_heads for a in attentions(same)] == [2, 1] * 3
    assert [a.values_are_keys for a in attentions(same)] == [False, True] * 3


def test_what_the_files_leave_out():
    absent = {"rope_parameters", "layer_types", "sliding_window", "hidden_size_per_layer_input"}
    absent |= {"num_kv_shared_layers"}
    config = parse_config({name: value for name, value in CONFIG.items() if name not in absent})
    assert windows(config) == (512,) * 5 + (None,)
    full = RopeConfig("proportional", theta=1e6, partial_rotary_factor=0.25)
    assert attentions(config)[5].rope == full
    assert attentions(config)[0].rope == RopeConfig(theta=1e4)
    assert config.per_layer is not None
    assert config.per_layer.size == 256
    assert parse(hidden_size_per_layer_input=0).per_layer is None


def test_the_last_layer_has_full_attention():
    kinds = ["full_attention"] + ["sliding_attention"] * 5
    assert windows(parse(layer_types=kinds, num_kv_shared_layers=0)) == (None, 32, 32, 32, 32, None)


def test_wide_mlps_are_those_of_layers_that_share():
    inner = [layer.mlp.intermediate_size for layer in parse(use_double_wide_mlp=True).layers]
    assert inner == [112] * 4 + [224] * 2


def test_proportional_rope_turns_the_first_pairs_of_the_whole_head():
    turns = inverse_frequencies(RopeConfig("proportional", theta=16.0, partial_rotary_factor=0.5), 8)
    assert turns.tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0])  # 16 ** (-2 / 8) is a half


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_bidirectional_attention", "all"),
        ("hidden_activation", "silu"),
        ("num_kv_shared_layers", 5),
        ("num_kv_shared_layers", 7),
        ("per_layer_config.1.window", {"1": {"window": 8}}),
        ("per_layer_config.7", {"7": {"head_dim": 32}}),
        ("per_layer_config", {str(layer): {"head_dim": 32} for layer in (1, 3)}),
    ],
)
def test_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        parse(**{field.partition(".")[0]: value})


def test_no_token_has_more_experts_than_there_are():
    config = json.loads((GOLDEN / "gemma4_moe" / "config.json").read_text())
    with pytest.raises(ConfigError, match="top_k_experts: 5 is more than the 4 experts"):
        parse_config({**config, "top_k_experts": 5})
