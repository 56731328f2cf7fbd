"""Latent attention, which is computed with the heads' matrices absorbed, compared with a witness in which
each head has keys and values of its own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.runtime import Engine
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.tensor_checks import is_harmless
from penstock.runtime.models import params
from penstock.runtime.models.config import ExpertsConfig, LatentConfig, MLPConfig, ModelConfig, RouterConfig
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.attention import make_meta
from penstock.runtime.ops.cache_spec import LatentKV
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.attention import native_paged_attention
from tests.support.goldens import CONFIG, GOLDEN
from tests.support.models import deepseek
from tests.support.native.kernels import kernel_params, running

SMALL: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "first_k_dense_replace": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rope_interleave": True,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
PUBLISHED: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**YARN, "original_max_position_embeddings": 4096},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""The config.json of DeepSeek V3, without its quantization_config."""
PACKABLE: Mapping[str, Any] = {
    **SMALL,
    "hidden_size": 64,
    "intermediate_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""Sizes that the native kernels can cut into tiles."""


def random_tensors(config: ModelConfig, seed: int) -> dict[str, NDArray[Any]]:
    """Make a checkpoint's tensors; norms and biases are random too, so that none can be left out unseen."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in params.load_rules(config, "float32").tensors:
        spread = 0.3 if len(tensor.shape) > 1 else 0.2
        values = generator.standard_normal(tensor.shape) * spread
        is_norm = len(tensor.shape) == 1 and not tensor.name.endswith(".bias")
        tensors[tensor.name] = (values + is_norm).astype(np.float32)
    return tensors


def state_from(
    config: ModelConfig, tensors: Mapping[str, NDArray[Any]], dtype: str, linear: LinearFormat = PLAIN
) -> params.ModelState:
    leaves = {
        path: np.zeros(leaf.shape, leaf.dtype)
        for path, leaf in params.leaf_shapes(config, dtype, linear).items()
    }
    for rule in params.load_rules(config, dtype, linear).rules:
        half = rule.num_rows // 2 // rule.unit * rule.unit  # as loading does, piece by piece
        for begin, end in ((0, half), (half, rule.num_rows)):
            if begin < end:
                rule.fill(leaves, tensors, begin, end)
    return params.state_of(config, {path: jnp.asarray(leaf) for path, leaf in leaves.items()}, dtype, linear)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
        {"rope_scaling": YARN, "attention_bias": True},
    ],
)
def test_the_absorbed_form_computes_what_the_paper_says(
    changes: dict[str, Any], make_sequence: Callable[..., Any]
) -> None:
    """In chunks of different sizes, so that latents of earlier chunks are read from the cache."""
    data = {**SMALL, **changes}
    config = parse_config(data)
    tensors = random_tensors(config, seed=len(changes))
    tokens = np.random.default_rng(1).integers(0, 64, 40).tolist()
    expected = deepseek.logits(data, tensors, tokens)
    sequence = make_sequence(config, state_from(config, tensors, "float32"))
    end = 0
    for size in (1, 8, 3, 1, 7, 20):
        given = sequence.feed(tokens[end : end + size])
        end += size
        np.testing.assert_allclose(given, expected[end - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
@pytest.mark.parametrize(
    ("changes", "int8"),
    [
        pytest.param({}, False, marks=pytest.mark.ci),
        pytest.param({"q_lora_rank": None}, False, marks=pytest.mark.ci),
        ({"q_lora_rank": None}, True),
    ],
)
def test_the_native_kernels_compute_the_same(
    changes: dict[str, Any], int8: bool, make_sequence: Callable[..., Any]
) -> None:
    """As the witness; as XLA, where both have weights of int8."""
    data, packed = {**PACKABLE, **changes}, LinearFormat(packed=True, int8=int8)
    config = parse_config(data)
    rounded = {
        name: np.asarray(jnp.asarray(tensor, jnp.bfloat16))
        for name, tensor in random_tensors(config, seed=3).items()
    }
    tokens = np.random.default_rng(2).integers(0, 64, 20).tolist()

    def last(linear: LinearFormat) -> Any:
        state = state_from(config, rounded, "bfloat16", linear)
        leaves = params.state_to_leaves(state)
        assert params.bind(config, leaves, "bfloat16", linear).is_native is linear.packed
        sequence = make_sequence(config, state, "bfloat16", linear)
        sequence.feed(tokens[:7])
        return sequence.feed(tokens[7:])

    expected = last(LinearFormat(int8=True)) if int8 else deepseek.logits(data, rounded, tokens)[-1]
    given = last(packed)
    np.testing.assert_allclose(given, expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
@pytest.mark.parametrize(
    "kernel",
    kernel_params(
        "avx2", "avx512", "avx512_bf16_pairs", "amx", "avx512_emulated", "avx512_bf16_pairs_emulated"
    ),
)
def test_a_token_has_the_same_bits_in_any_chunk_and_beside_any_row(kernel: str) -> None:
    """With all native kernels, those of attention too."""
    packed, page, pages, tokens = LinearFormat(packed=True), 16, 12, 64
    config = parse_config(PACKABLE)
    leaves = params.state_to_leaves(state_from(config, random_tensors(config, seed=4), "bfloat16", packed))

    @jax.jit
    def step(leaves: Any, ids: Any, starts: Any, q_lens: Any, table: Any, kv: Any) -> Any:
        meta = make_meta(
            starts=starts,
            q_lens=q_lens,
            page_table=table,
            num_tokens=tokens,
            decode_only=False,
            page_size=page,
            num_pages=pages,
        )
        model = params.bind(config, leaves, "bfloat16", packed)
        hidden, kv = model(ids, meta.positions, kv, (meta,), attention=native_paged_attention)
        return model.logits(hidden, meta.num_tokens), kv

    def feed(kv: Any, rows: list[tuple[int, list[int]]]) -> tuple[NDArray[np.float32], Any]:
        """Logits after all tokens; a row has pages of its own, by its place in `rows`."""
        ids, (starts, q_lens) = np.zeros(tokens, np.int32), np.zeros((2, 3), np.int32)
        given = [token for _, row in rows for token in row]
        ids[: len(given)] = given
        for place, (start, row) in enumerate(rows):
            starts[place], q_lens[place] = start, len(row)
        table = np.arange(pages, dtype=np.int32).reshape(3, -1)
        logits, kv = step(leaves, ids, starts, q_lens, table, kv)
        return np.asarray(logits), kv

    def empty() -> Any:
        arrays = config.cache.arrays((pages,), page, 1, np.dtype(np.uint16))  # bfloat16, as stored on a CPU
        return tuple(jnp.zeros(array.shape, array.dtype) for array in arrays)

    ours, other = (np.random.default_rng(seed).integers(0, 64, 21).tolist() for seed in (5, 6))
    with running(kernel):
        alone, _ = feed(empty(), [(0, ours)])
        together, kv = feed(empty(), [(0, ours[:20]), (0, other), (0, other[:3])])
        np.testing.assert_array_equal(together[:20], alone[:20])
        decoded, _ = feed(kv, [(20, ours[20:]), (21, other[:9])])
        np.testing.assert_array_equal(decoded[0], alone[20])
        first, kv = feed(empty(), [(0, ours[:7])])
        rest, _ = feed(kv, [(7, ours[7:])])
        np.testing.assert_array_equal(np.concatenate([first[:7], rest[:14]]), alone[:21])


def test_the_published_config_is_read() -> None:
    config = parse_config(PUBLISHED)
    attention = config.layers[60].attention
    assert isinstance(attention, LatentConfig)
    assert config.cache.layers == (LatentKV(512, 64),) * 61
    assert config.cache.page_bytes(1, np.dtype(jnp.bfloat16)) == 70_272
    assert attention.scale == pytest.approx(0.1352, abs=1e-4)  # 192 ** -0.5 times 1.3689 squared
    assert (attention.query_rank, attention.nope_dim, attention.value_dim) == (1536, 128, 128)
    assert attention.rope.attention_factor == 1.0
    experts = ExpertsConfig(
        num_experts=256,
        per_token=8,
        intermediate_size=2048,
        shared_size=2048,
        router=RouterConfig(score="sigmoid", scale=2.5, correction=True, num_groups=8, top_groups=4),
    )
    mlps = [layer.mlp for layer in config.layers]
    assert mlps == [MLPConfig(intermediate_size=18432)] * 3 + [experts] * 58


def test_both_forms_of_the_rotation_are_read() -> None:
    old = {**SMALL, "rope_scaling": YARN}
    new = copy.deepcopy(dict(SMALL))
    theta = new.pop("rope_theta")
    new["rope_parameters"] = {**YARN, "rope_type": "yarn", "rope_theta": theta}
    del new["rope_parameters"]["type"]
    assert parse_config(old) == parse_config(new)
    assert parse_config({**SMALL, "q_lora_rank": None}).layers[0] != parse_config(SMALL).layers[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .*fp8"),
        ({"num_key_value_heads": 1}, "num_key_value_heads: 1 is not supported"),
        ({"head_dim": 16}, "head_dim: 16 is not supported; supported: 8"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: must be even"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
        ({"first_k_dense_replace": 1, "n_group": 3}, "n_group: 3 groups"),
        ({"first_k_dense_replace": 1, "topk_group": 9}, "topk_group: 9 of 8 groups do not have 8 experts"),
        ({"index_topk": 2048}, "index_topk: 2048 is not supported"),
    ],
)
def test_what_would_change_the_computation_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**SMALL, **changes})


def test_layers_that_predict_further_tokens_are_not_read() -> None:
    rules = params.load_rules(parse_config(SMALL))
    assert is_harmless(rules, "model.layers.2.eh_proj.weight")
    assert not is_harmless(rules, "model.layers.1.eh_proj.weight")


def test_an_engine_has_as_many_pages_as_its_bytes_hold() -> None:
    """The golden's 3 layers keep 32 + 16 numbers of 4 bytes of a token, and a page holds 8 tokens."""
    config = dataclasses.replace(CONFIG, kv_cache_bytes=100 * 8 * (3 * (32 + 16) * 4))
    engine = Engine.from_pretrained(str(GOLDEN / "deepseek_v3"), config)
    try:
        assert engine.info.num_pages == 100
        assert engine.config.kv_cache_bytes == 100 * 8 * 576
    finally:
        engine.shutdown()
