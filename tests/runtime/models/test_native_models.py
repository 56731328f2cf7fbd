"""Models with what each family has of its own run on the native kernels alone in bfloat16, agree there with
XLA in float32, and give a token the same bits whatever stands beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models import params
from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MLPAndExpertsConfig,
    MLPConfig,
    ModelConfig,
    PerLayerConfig,
    QueryScaling,
    RouterConfig,
)
from penstock.runtime.models.configs.recurrent import (
    DeltaNetConfig,
    MambaConfig,
    RecurrentConfig,
    ShortConvConfig,
)
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.rope import RopeConfig
from penstock.runtime.ops.cache_spec import LatentKV, PagedKV, SlotState
from penstock.runtime.ops.codes import FORMS
from penstock.runtime.ops.native import library
from penstock.runtime.ops.recurrent.native import NATIVE_RECURRENT
from tests.support.goldens import GOLDEN, NAMES
from tests.support.suite.drawing import few

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")

PACKED = LinearFormat(packed=True)
PROMPT = list(range(3, 33))

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5, rope=RopeConfig())
GATED_MLP = MLPConfig(intermediate_size=128)
LAYER = LayerConfig(attention=ATTENTION, mlp=GATED_MLP)
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=64,
    layers=(LAYER, LAYER),
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
)


def changed(
    *,
    attention: dict[str, Any] | None = None,
    mlp: dict[str, Any] | ExpertsConfig | None = None,
    layer: dict[str, Any] | None = None,
    **model: Any,
) -> ModelConfig:
    """LLAMA with these fields changed, in all layers."""
    ours = dataclasses.replace(
        LAYER,
        attention=dataclasses.replace(ATTENTION, **attention or {}),
        mlp=mlp if isinstance(mlp, ExpertsConfig) else dataclasses.replace(GATED_MLP, **mlp or {}),
        **layer or {},
    )
    return dataclasses.replace(LLAMA, layers=(ours, ours), **model)


def with_second_layers_attention(config: ModelConfig, **fields: Any) -> ModelConfig:
    first, second = config.layers
    attention = dataclasses.replace(second.attention, **fields)
    return dataclasses.replace(config, layers=(first, dataclasses.replace(second, attention=attention)))


def with_parallel_second_layer(config: ModelConfig) -> ModelConfig:
    first, second = config.layers
    mlp = dataclasses.replace(GATED_MLP, plain="gelu")
    second = dataclasses.replace(second, mlp=mlp, norms="parallel_shared")
    return dataclasses.replace(config, layers=(first, second))


def with_shared_keys(config: ModelConfig) -> ModelConfig:
    first, second = config.layers
    return dataclasses.replace(config, layers=(first, dataclasses.replace(second, shares_kv_of=0)))


def with_recurrent_layer(config: ModelConfig, recurrent: RecurrentConfig) -> ModelConfig:
    first, second = config.layers
    return dataclasses.replace(config, layers=(dataclasses.replace(first, attention=recurrent), second))


MIXER = MambaConfig(
    num_heads=16, head_dim=16, state_dim=32, num_groups=2, num_taps=4, step_limit=(0.001, 2.0)
)


def with_mixer_beside_attention(config: ModelConfig, mixer: MambaConfig) -> ModelConfig:
    """In the second layer, and the first one has no MLP."""
    first, second = config.layers
    mixer = dataclasses.replace(mixer, multipliers=(0.5, 1.5, 0.75, 1.25, 0.5))
    beside = dataclasses.replace(second, beside=mixer, beside_multiplier=0.5, mlp_multiplier=0.75)
    return dataclasses.replace(config, layers=(dataclasses.replace(first, mlp=None), beside))


RECURRENT: dict[str, RecurrentConfig] = {
    "short convolution": ShortConvConfig(channels=64, num_taps=3, bias=True),
    "delta net": DeltaNetConfig(num_key_heads=8, num_value_heads=16, key_dim=32, value_dim=16, num_taps=4),
    "mamba": MIXER,
}

MODELS = {
    "llama": LLAMA,
    "gemma": with_second_layers_attention(
        changed(
            attention={"qk_norm": "head", "softcap": 20.0, "window": 9},
            mlp={"activation": "gelu_tanh"},
            layer={"norms": "sandwich"},
            norm_offset=1.0,
            embedding_scale=8.0,
            logits_softcap=3.0,
            tie_word_embeddings=True,
        ),
        rope=RopeConfig(theta=1e6),
        window=None,
    ),
    "olmo": changed(attention={"qk_norm": "all"}, layer={"norms": "post"}),
    "granite": changed(
        attention={"scale": 0.1}, layer={"residual_multiplier": 0.22}, embedding_scale=12.0, logits_scale=0.25
    ),
    "llama4": with_second_layers_attention(
        changed(attention={"qk_norm": "l2_after", "chunk": 16}),
        rope=None,
        chunk=None,
        qk_norm="none",
        query_scaling=QueryScaling(strength=0.1, length=8.0, shift=1),
    ),
    "partial rotation": changed(
        attention={
            "head_dim": 64,
            "rope": RopeConfig(partial_rotary_factor=0.5),
            "qk_norm": "all",
            "qkv_bias": True,
            "o_bias": True,
            "sinks": True,
        },
        mlp={"bias": True},
    ),
    "gemma4": with_shared_keys(
        changed(
            attention={"qk_norm": "head", "v_norm": True, "values_are_keys": True, "scale": 1.0},
            mlp={"activation": "gelu_tanh"},
            layer={"norms": "sandwich", "has_scalar": True},
            per_layer=PerLayerConfig(size=64, vocab_size=256, activation="gelu_tanh"),
            embedding_scale=8.0,
        )
    ),
    "layer norms": with_parallel_second_layer(
        changed(
            attention={"rope": None, "alibi": 8.0, "clip": 0.5, "qkv_bias": True, "o_bias": True},
            mlp={"plain": "gelu_tanh", "bias": True},
            norm="layer",
            embed_norm=True,
            positions_from=2,
            head_bias=True,
        )
    ),
    "gated attention": changed(
        attention={"output_gate": True, "qk_norm": "head", "qkv_bias": True}, norm_offset=1.0
    ),
    "experts": changed(
        mlp=ExpertsConfig(
            num_experts=6,
            per_token=2,
            intermediate_size=64,
            router=RouterConfig(score="sparsemixer", jitter=0.1),
            shared_size=128,
            shared_gate=True,
        ),
        attention={"qk_norm": "head_after", "alibi": 8.0},
        norm_offset=1.0,
    ),
    "experts in groups": changed(
        mlp=ExpertsConfig(
            num_experts=8,
            per_token=3,
            intermediate_size=64,
            router=RouterConfig(score="sigmoid", correction=True, num_groups=4, top_groups=2, scale=2.5),
            shared_size=64,
        ),
        layer={"norms": "sandwich"},
    ),
    "gpt-oss": changed(
        attention={"sinks": True, "qkv_bias": True, "window": 9},
        mlp=ExpertsConfig(
            num_experts=8,
            per_token=2,
            intermediate_size=64,
            router=RouterConfig(bias=True),
            activation="gpt_oss",
            limit=7.0,
            bias=True,
        ),
    ),
    **{name: with_recurrent_layer(LLAMA, recurrent) for name, recurrent in RECURRENT.items()},
    "mamba": with_mixer_beside_attention(with_recurrent_layer(LLAMA, MIXER), MIXER),
}

ALWAYS = ("gpt-oss", "gemma4", "short convolution")
"""What `make test` computes."""
CI = ("experts in groups", "gated attention", "delta net", "mamba")
"""What CI computes, too: one for each kind of layer. It draws some of the others."""


def state(config: ModelConfig, dtype: str, linear: LinearFormat) -> params.ModelState:
    """Random weights, the same in all formats, with norms and biases that differ from channel to channel."""
    drawn = params.random_state(config, dtype, std=0.1, linear=linear)
    leaves = dict(zip(params.leaf_shapes(config, dtype, linear), params.state_to_leaves(drawn), strict=True))
    vectors = leaves["vectors",]
    noise = np.random.default_rng(5).standard_normal(vectors.shape).astype(np.float32)
    mean = np.float32(1 - config.norm_offset)
    leaves["vectors",] = jnp.asarray(mean + np.float32(0.2) * noise, jnp.bfloat16).astype(vectors.dtype)
    return params.state_of(config, leaves, dtype, linear)


def is_native(config: ModelConfig, linear: LinearFormat) -> bool:
    shapes = params.leaf_shapes(config, "bfloat16", linear)

    def native(leaves: Any) -> jax.Array:
        return jnp.zeros(1 + params.bind(config, leaves, "bfloat16", linear).is_native)

    return bool(jax.eval_shape(native, tuple(shapes.values())).shape == (2,))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="bf16"),
        pytest.param({"int8": True}, id="int8", marks=pytest.mark.ci),
        pytest.param({"codes": FORMS[0]}, id="int4", marks=pytest.mark.ci),
    ],
)
def test_every_model_is_native(name: str, options: dict[str, Any]) -> None:
    assert is_native(MODELS[name], LinearFormat(packed=True, **options))


def larger_mlp(mlp: Any) -> Any:
    if mlp is None:
        return None
    if isinstance(mlp, MLPAndExpertsConfig):
        return dataclasses.replace(mlp, mlp=larger_mlp(mlp.mlp), experts=larger_mlp(mlp.experts))
    if isinstance(mlp, MLPConfig):
        return dataclasses.replace(mlp, intermediate_size=128)
    shared = None if mlp.shared_size is None else 128
    return dataclasses.replace(mlp, intermediate_size=128, shared_size=shared)


def in_larger_sizes(layer: LayerConfig) -> LayerConfig:
    """Return the layer with sizes that can be packed."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, ShortConvConfig):
        attention = dataclasses.replace(attention, channels=128)
    elif isinstance(attention, MambaConfig):
        attention = dataclasses.replace(attention, num_heads=16, state_dim=64)
    elif isinstance(attention, DeltaNetConfig):
        attention = dataclasses.replace(attention, num_key_heads=8, num_value_heads=16)
    elif isinstance(attention, LatentConfig):
        rank = None if attention.query_rank is None else 64
        sizes: dict[str, Any] = {"latent_dim": 64, "rope_dim": 32, "nope_dim": 64, "value_dim": 64}
        attention = dataclasses.replace(attention, query_rank=rank, **sizes)
    else:
        turned = attention.rope
        if turned is not None and turned.kind == "default" and turned.partial_rotary_factor < 1:
            turned = dataclasses.replace(turned, partial_rotary_factor=0.5)
        attention = dataclasses.replace(attention, head_dim=128, rope=turned)
    beside = layer.beside and dataclasses.replace(layer.beside, num_heads=16, state_dim=64)
    return dataclasses.replace(layer, attention=attention, beside=beside, mlp=larger_mlp(mlp))


LEFT_TO_XLA = ("apertus", "cohere", "falcon_h1", "stablelm_parallel")


@pytest.mark.parametrize("name", few(NAMES, ("qwen3", "deepseek_v3", "qwen3_5"), ci=NAMES))
def test_every_family_is_native_in_sizes_that_can_be_packed(name: str) -> None:
    """The goldens are too small for the kernels, but say what their families compute. Layer norms of heads,
    xIELU, and Falcon-H1's factor of gates are left to XLA.
    """
    config = load_config(GOLDEN / name)
    per_layer = config.per_layer
    larger = dataclasses.replace(
        config,
        hidden_size=128,
        vocab_size=256,
        layers=tuple(in_larger_sizes(layer) for layer in config.layers),
        per_layer=None if per_layer is None else dataclasses.replace(per_layer, size=64),
    )
    assert is_native(larger, PACKED) == (name not in LEFT_TO_XLA)


@pytest.mark.ci
@pytest.mark.parametrize("name", few(MODELS, ALWAYS, CI))
def test_bfloat16_on_the_kernels_agrees_with_float32_on_xla(make_sequence: Any, name: str) -> None:
    config = MODELS[name]
    exact = make_sequence(config, state(config, "float32", LinearFormat()), "float32").feed(PROMPT)
    tried = make_sequence(config, state(config, "bfloat16", PACKED), "bfloat16", PACKED).feed(PROMPT)
    assert np.ptp(exact) > 0.5  # the logits differ from each other
    assert np.abs(tried - exact).max() < 0.05 * np.ptp(exact)


def empty(layer: PagedKV | LatentKV | SlotState) -> Any:
    """Make a layer's cache with one entry of state, or one that the tests' attention does not read."""
    if isinstance(layer, SlotState):
        return tuple(jnp.zeros((1, *value.shape), value.dtype) for value in layer.values)
    return jnp.zeros(1)


@pytest.mark.parametrize("name", few(MODELS, ALWAYS, CI))
def test_a_token_has_the_same_bits_alone_and_beside_others(name: str) -> None:
    """Attention, which has tests of its own, is left out: each token gets its own queries, key and value
    back. In recurrent layers each token is a row, which goes on from zeros.
    """
    config = MODELS[name]
    leaves = params.state_to_leaves(state(config, "bfloat16", PACKED))

    def own(q: jax.Array, k: jax.Array, v: jax.Array, kv: Any, meta: Any, options: Any) -> Any:
        return q.at[:, 0].set(k[:, 0]).at[:, 1].set(v[:, 0]), kv

    attention: Any = own

    def logits(tokens: jax.Array, positions: jax.Array, num_tokens: jax.Array) -> jax.Array:
        model = params.bind(config, leaves, "bfloat16", PACKED)
        past = jnp.ones(len(tokens), jnp.int32)
        meta: Any = SimpleNamespace(
            num_tokens=num_tokens,
            q_lens=(jnp.arange(len(tokens)) < num_tokens).astype(jnp.int32),
            state_from=past,
            state_to=past,
            state_cut=None,
            state_cut_to=None,
        )
        metas = (meta,) * (max(config.cache.group_of) + 1)
        kv = tuple(map(empty, config.cache.layers))
        hidden, _ = model(tokens, positions, kv, metas, attention=attention, recurrent=NATIVE_RECURRENT)
        return model.logits(hidden, num_tokens)

    run: Callable[..., jax.Array] = jax.jit(logits)
    rng = np.random.default_rng(6)
    tokens, positions = rng.integers(0, 256, 37), rng.integers(0, 100, 37)

    def some(rows: np.ndarray, padded: int) -> np.ndarray:
        filled = np.resize(rows, padded)
        given = (jnp.asarray(values[filled], jnp.int32) for values in (tokens, positions))
        return np.asarray(run(*given, jnp.int32(len(rows))))[: len(rows)].view(np.uint32)

    alone = np.concatenate([some(np.array([row]), 1) for row in range(37)])
    for count, padded in ((37, 48), (16, 16), (5, 16)):
        rows = rng.permutation(37)[:count]
        np.testing.assert_array_equal(some(rows, padded), alone[rows], err_msg=f"{count} rows")


@pytest.mark.ci
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_model_gives_the_same_bits_in_any_chunks(make_sequence: Any, name: str) -> None:
    """Chunks of a prompt, its last ones as decode steps, and some other prompt's state before it."""
    first, _ = MODELS[name].layers
    config = dataclasses.replace(MODELS[name], layers=(first, first))
    sequence = make_sequence(config, state(config, "bfloat16", PACKED), "bfloat16", PACKED)
    expected, states = sequence.feed(PROMPT), sequence.kv
    for chunk in (1, 3, 7):
        sequence.length = 0
        np.testing.assert_array_equal(sequence.feed(PROMPT, chunk), expected, err_msg=f"chunks of {chunk}")
        jax.tree.map(np.testing.assert_array_equal, sequence.kv, states)
