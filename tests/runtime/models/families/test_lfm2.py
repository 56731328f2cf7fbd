"""What the config.json of LFM2 says, what is refused of it, and where its experts are."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models.config import ExpertsConfig, MLPConfig, RouterConfig
from penstock.runtime.models.configs.recurrent import ShortConvConfig
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig
from penstock.runtime.ops.cache_spec import SlotState
from tests.support.goldens import GOLDEN, check_last_logits
from tests.support.models.configs import attentions, published

LFM2, MIXTURE = published("LFM2-1.2B"), published("LFM2-8B-A1B")


def without(*names):
    return {name: value for name, value in LFM2.items() if name not in names}


def kinds(config):
    return [isinstance(layer.attention, ShortConvConfig) for layer in config.layers]


def inner(**changes):
    """Return the intermediate size, which is the same in all layers."""
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


def test_published_mixture():
    config = parse_config(MIXTURE)
    assert [layer for layer, is_conv in enumerate(kinds(config)) if not is_conv] == [2, 6, 10, 14, 18, 21]
    assert [layer.mlp for layer in config.layers[:2]] == [MLPConfig(intermediate_size=7168)] * 2
    assert {layer.mlp for layer in config.layers[2:]} == {
        ExpertsConfig(
            num_experts=32,
            per_token=4,
            intermediate_size=1792,
            router=RouterConfig(score="sigmoid", correction=True),
        )
    }
    assert config.tie_word_embeddings


def test_routers_of_the_mixture():
    changes = {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.5}
    mlp = parse_config({**MIXTURE, **changes, "num_dense_layers": 0}).layers[0].mlp
    assert isinstance(mlp, ExpertsConfig)
    assert mlp.router == RouterConfig(score="sigmoid", normalize=False, scale=2.5)
    with pytest.raises(ConfigError, match="num_experts_per_tok: 33 is more than the 32 experts"):
        parse_config({**MIXTURE, "num_experts_per_tok": 33})


def test_experts_in_the_place_of_the_mlp(tmp_path, make_sequence):
    """If all experts of a layer are the golden's MLP, each with its channels in an order of its own, the
    model answers as the golden.
    """
    golden, count = GOLDEN / "lfm2", 3
    data = json.loads((golden / "config.json").read_text())
    size = data["intermediate_size"]
    kept = {name: value for name, value in data.items() if not name.startswith("block_")}
    experts = {"num_experts": count, "num_experts_per_tok": 2, "moe_intermediate_size": size}
    kind = {"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "num_dense_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**kept, **experts, **kind}))
    rng, tensors = np.random.default_rng(4), load_file(golden / "model.safetensors")
    for layer in range(1, data["num_hidden_layers"]):
        name = f"model.layers.{layer}.feed_forward"
        gate, down, up = (tensors.pop(f"{name}.w{part}.weight") for part in (1, 2, 3))
        for expert in range(count):
            order = rng.permutation(size)
            tensors[f"{name}.experts.{expert}.w1.weight"] = gate[order]
            tensors[f"{name}.experts.{expert}.w2.weight"] = down[:, order]
            tensors[f"{name}.experts.{expert}.w3.weight"] = up[order]
        tensors[f"{name}.gate.weight"] = rng.standard_normal((count, data["hidden_size"]), np.float32)
        tensors[f"{name}.expert_bias"] = rng.standard_normal(count, np.float32)
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "model.safetensors")

    config = load_config(tmp_path)
    sequence = make_sequence(config, load_weights(tmp_path, config, progress=False))
    for case in json.loads((golden / "expected.json").read_text())["cases"]:
        sequence.reset()
        check_last_logits(sequence.feed(case["prompt"]), case)
