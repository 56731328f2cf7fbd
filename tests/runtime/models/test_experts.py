"""Layers of experts in the formats of weights that the goldens do not have."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from bench.measures.cost import layer_weights
from penstock.runtime.models import params
from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RouterConfig,
)
from penstock.runtime.models.layers.experts import Experts
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.rope import RopeConfig
from penstock.runtime.ops.codes import CodeForm
from penstock.runtime.ops.gpu.experts import gpu_experts
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.experts import NO_EXPERT
from penstock.runtime.ops.tpu.experts import tpu_experts
from tests.support.suite.drawing import few

EXPERTS = ExpertsConfig(num_experts=12, per_token=4, intermediate_size=64)
KINDS = {
    "softmax": EXPERTS,
    "not normalised": dataclasses.replace(EXPERTS, router=RouterConfig(normalize=False, scale=2.0)),
    "groups": dataclasses.replace(
        EXPERTS,
        router=RouterConfig(score="sigmoid", correction=True, num_groups=4, top_groups=3, scale=1.5),
        shared_size=128,
    ),
    "expert scale": dataclasses.replace(
        EXPERTS, num_experts=16, router=RouterConfig(expert_scale=True), activation="gelu_tanh"
    ),
    "gpt_oss": dataclasses.replace(
        EXPERTS, router=RouterConfig(bias=True), activation="gpt_oss", limit=7.0, bias=True
    ),
    "weighed input": dataclasses.replace(
        EXPERTS,
        per_token=1,
        router=RouterConfig(score="sigmoid", normalize=False),
        weigh_input=True,
        shared_size=64,
    ),
    "shared with a gate": dataclasses.replace(EXPERTS, shared_size=192, shared_gate=True),
}
PROMPT = list(range(3, 33))


def model(mlp: MLPConfig | ExpertsConfig) -> ModelConfig:
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5, rope=RopeConfig())
    return ModelConfig(
        architecture="Qwen2MoeForCausalLM",
        vocab_size=256,
        hidden_size=128,
        layers=(LayerConfig(attention=attention, mlp=mlp),),
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        dtype="bfloat16",
    )


def random_weights(config: ModelConfig, dtype: str, linear: LinearFormat) -> params.ModelState:
    """Make weights that are the same in every format. Norms, biases and corrections are random too."""
    state = params.random_state(config, dtype, std=0.1, linear=linear)
    leaves = dict(zip(params.leaf_shapes(config, dtype, linear), params.state_to_leaves(state), strict=True))
    for seed, pool in enumerate([("vectors",), ("floats",)]):
        if pool in leaves:
            noise = np.random.default_rng(seed).standard_normal(leaves[pool].shape) * 0.1
            leaves[pool] = jnp.asarray(np.asarray(leaves[pool], np.float32) + noise, leaves[pool].dtype)
    return params.state_of(config, leaves, dtype, linear)


FORMATS = [*((kind, False) for kind in KINDS), ("gpt_oss", True), ("shared with a gate", True)]


@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
@pytest.mark.parametrize(
    ("kind", "int8"),
    few(FORMATS, [("shared with a gate", True)], ci=FORMATS),
)
def test_native_experts_agree_with_float32(make_sequence: Any, kind: str, int8: bool) -> None:
    config, packed = model(KINDS[kind]), LinearFormat(packed=True, int8=int8)
    exact = make_sequence(config, random_weights(config, "float32", PLAIN), "float32").feed(PROMPT)
    state = random_weights(config, "bfloat16", packed)
    tried = make_sequence(config, state, "bfloat16", packed).feed(PROMPT)
    assert np.abs(tried - exact).max() < (0.15 if int8 else 0.06) * np.ptp(exact)
    assert all(layer.mlp.is_native for layer in bound(config, packed).layers)


@pytest.mark.ci
@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
def test_experts_that_cannot_be_packed_follow_a_native_router(make_sequence: Any) -> None:
    config = model(dataclasses.replace(EXPERTS, intermediate_size=48, shared_size=64, shared_gate=True))
    packed = LinearFormat(packed=True)
    mlp = bound(config, packed).layers[0].mlp
    assert (mlp.router.packed, mlp.experts.packed, mlp.shared_expert.packed) == (True, False, True)
    exact = make_sequence(config, random_weights(config, "float32", PLAIN), "float32").feed(PROMPT)
    tried = make_sequence(config, random_weights(config, "bfloat16", packed), "bfloat16", packed).feed(PROMPT)
    assert np.abs(tried - exact).max() < 0.06 * np.ptp(exact)


def bound(config: ModelConfig, linear: LinearFormat) -> Any:
    return nnx.merge(*params.abstract_model(config, "bfloat16", linear))


@pytest.mark.parametrize(
    ("tried", "tolerance"),
    [
        pytest.param(LinearFormat(int8=True), 0.15, id="int8"),
        pytest.param(LinearFormat(codes=CodeForm(bits=4, zeros=False)), 0.4, id="int4", marks=pytest.mark.ci),
    ],
)
def test_integers_in_xla_agree_with_float32(
    make_sequence: Any, tried: LinearFormat, tolerance: float
) -> None:
    config = model(KINDS["shared with a gate"])
    exact = make_sequence(config, random_weights(config, "float32", PLAIN), "float32").feed(PROMPT)
    got = make_sequence(config, random_weights(config, "bfloat16", tried), "bfloat16", tried).feed(PROMPT)
    assert np.abs(got - exact).max() < tolerance * np.ptp(exact)
    assert np.corrcoef(got.ravel(), exact.ravel())[0, 1] > 0.95


def test_padding_chooses_no_expert() -> None:
    """A platform's operation would read the weights of its experts for nothing."""
    given: list[Any] = []

    def noted(x: Any, ids: Any, *others: Any, **options: Any) -> Any:
        given.append(ids)
        return x

    config, linear = model(EXPERTS), LinearFormat(experts=noted)
    graph, _ = params.abstract_model(config, "bfloat16", linear)
    mlp = nnx.merge(graph, random_weights(config, "bfloat16", linear)).layers[0].mlp
    assert isinstance(mlp, Experts)
    inputs: Any = SimpleNamespace(pools=SimpleNamespace(adapters=None), num_tokens=jnp.int32(2))
    ids = jnp.asarray([[3, 1], [0, 2], [4, 5]], jnp.int32)
    mlp.experts(jnp.zeros((3, 128), jnp.bfloat16), ids, jnp.ones((3, 2), jnp.float32), inputs)
    assert given[0].tolist() == [[3, 1], [0, 2], [NO_EXPERT, NO_EXPERT]]


@pytest.mark.sweep
@pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX before 0.11 cannot interpret kernels for GPUs"
)
@pytest.mark.parametrize("kind", ["softmax", "groups", "gpt_oss", "weighed input"])
def test_experts_of_the_kernel_for_gpus_agree_with_float32(make_sequence: Any, kind: str) -> None:
    config, grouped = model(KINDS[kind]), LinearFormat(experts=gpu_experts)
    exact = make_sequence(config, random_weights(config, "float32", PLAIN), "float32").feed(PROMPT)
    interpreting: Any = plgpu
    with interpreting.force_gpu_interpret_mode(interpreting.InterpretGPUParams()):
        state = random_weights(config, "bfloat16", grouped)
        tried = make_sequence(config, state, "bfloat16", grouped).feed(PROMPT)
    assert np.abs(tried - exact).max() < 0.06 * np.ptp(exact)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["softmax", "groups", "gpt_oss", "weighed input"])
def test_experts_of_the_kernel_for_tpus_agree_with_float32(make_sequence: Any, kind: str) -> None:
    interpreted = partial(tpu_experts, interpret=pltpu.InterpretParams())
    config, grouped = model(KINDS[kind]), LinearFormat(experts=interpreted)
    exact = make_sequence(config, random_weights(config, "float32", PLAIN), "float32").feed(PROMPT)
    state = random_weights(config, "bfloat16", grouped)
    tried = make_sequence(config, state, "bfloat16", grouped).feed(PROMPT)
    assert np.abs(tried - exact).max() < 0.06 * np.ptp(exact)


@pytest.mark.parametrize(
    ("changes", "native"),
    [
        ({}, True),
        ({"num_experts": 61}, True),  # the router's last block is filled up
        ({"intermediate_size": 96}, False),  # the last product's inputs are not a multiple of 64
        ({"shared_size": 64}, True),
        ({"shared_size": 80}, False),
    ],
)
def test_every_part_of_the_experts_must_be_native(changes: dict[str, Any], native: bool) -> None:
    config = model(dataclasses.replace(EXPERTS, **changes))
    assert bound(config, LinearFormat(packed=True)).is_native is native
    assert not bound(config, PLAIN).is_native


def test_each_expert_has_its_own_tensors() -> None:
    config = model(KINDS["shared with a gate"])
    shapes = {tensor.name: tensor.shape for tensor in params.load_rules(config, "bfloat16").tensors}
    above = "model.layers.0.mlp"
    assert shapes[f"{above}.experts.11.gate_proj.weight"] == (64, 128)
    assert shapes[f"{above}.experts.0.down_proj.weight"] == (128, 64)
    assert shapes[f"{above}.shared_expert.up_proj.weight"] == (192, 128)
    assert shapes[f"{above}.shared_expert_gate.weight"] == (1, 128)
    assert shapes[f"{above}.gate.weight"] == (12, 128)


def test_the_cost_counts_the_experts_that_a_token_has() -> None:
    attention = 128 * 2 * (4 + 2) * 32
    mine, shared, router = 4 * 3 * 128 * 64, 3 * 128 * 192, 12 * 128
    assert layer_weights(model(KINDS["shared with a gate"])) == attention + mine + shared + router
