"""What is read of the config.json of an EAGLE-3 head."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.configs.eagle import EagleConfig
from penstock.runtime.models.families import eagle
from penstock.runtime.models.registry import parse_config

PUBLISHED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
"""A head for Llama 3.1 8B, as its makers published it."""
IDS = "eagle_aux_hidden_state_layer_ids"


def read(**changes: Any) -> EagleConfig:
    found = parse_config({**PUBLISHED, **changes}, heads=True).eagle
    assert found is not None
    return found


def test_a_published_head() -> None:
    """Of a model with 32 layers it reads what layers 2, 16 and 29 read, as in vLLM and SGLang."""
    assert read() == EagleConfig(target_hidden_size=4096, draft_vocab_size=32000, maps_tokens=True)
    assert read().taps_of(32) == (2, 16, 29)


def test_what_tensors_say() -> None:
    config = parse_config(PUBLISHED, heads=True)
    tensors = ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "d2t"]
    plain = eagle.for_tensors(config, tensors)
    assert (plain.names.decoder, plain.eagle) == ("", config.eagle)
    other = eagle.for_tensors(
        parse_config({**PUBLISHED, "draft_vocab_size": None}, heads=True),
        ["model.fc.weight", "model.layers.0.hidden_norm.weight", "model.embed_tokens.weight"],
    )
    assert other.names.decoder == "model."
    assert other.eagle == EagleConfig(
        target_hidden_size=4096, draft_vocab_size=128256, layer="layers.0", has_embeddings=True
    )


@pytest.mark.parametrize(
    ("fields", "taps"),
    [
        ({IDS: [1, 17, 32]}, (1, 17, 32)),
        ({"eagle_config": {IDS: [1, 17, 32], "use_aux_hidden_state": True}}, (2, 18, 33)),
        ({"eagle_config": {IDS: [], "use_last_layernorm": True}}, ()),
        ({"eagle_config": {IDS: [1, 17, 32]}, IDS: [2, 18, 33]}, (2, 18, 33)),
    ],
)
def test_layers_are_named_by_what_they_read_or_by_what_they_give(
    fields: dict[str, Any], taps: tuple[int, ...]
) -> None:
    assert read(**fields).taps == taps


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: must be 1, not 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: True is not supported"),
        ({"norm_before_fc": True}, "norm_before_fc: True is not supported"),
        ({"fc_norm": True}, "fc_norm: True is not supported"),
        ({"draft_vocab_size": 200_000}, "draft_vocab_size: 200000 is more than vocab_size 128256"),
        ({IDS: [1, 2]}, f"{IDS}: must list 3 layers in rising order"),
        ({IDS: [2, 1, 3]}, f"{IDS}: must list 3 layers in rising order"),
        ({IDS: [-1, 1, 3]}, f"{IDS}: must list 3 layers in rising order"),
        ({IDS: "2,16,29"}, f"{IDS}: must list 3 layers in rising order"),
        ({IDS: [1, 2, 3], "eagle_config": {IDS: [1, 2, 3]}}, f"{IDS}: contradicts eagle_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state: False"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm: True"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step: 4"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(**fields)


def test_a_head_is_no_model() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLMEagle3 is an EAGLE head"):
        parse_config(PUBLISHED)
