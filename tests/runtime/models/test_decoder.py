"""The decoder beyond what the goldens show: how it is computed, how it is divided into leaves, and what must
not change its results.
"""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.checkpoint import SHAPES, config_json
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models import params
from penstock.runtime.models.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig
from penstock.runtime.models.linear import LinearFormat, rows_by_blocks
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig
from penstock.runtime.ops.codes import CodeForm
from penstock.runtime.ops.native import library
from penstock.runtime.ops.sampler import RowState
from tests.support.models.configs import windows, with_attention, with_mlp
from tests.support.suite.drawing import few

_ATTENTION = AttentionConfig(
    num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, rope=RopeConfig(), qkv_bias=True
)
_MLP = MLPConfig(intermediate_size=24)
TINY = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=64,
    hidden_size=16,
    layers=(
        LayerConfig(attention=_ATTENTION, mlp=_MLP),
        LayerConfig(attention=dataclasses.replace(_ATTENTION, window=8), mlp=_MLP),
    ),
    max_position_embeddings=16,
    rms_norm_eps=1e-6,
    dtype="bfloat16",
    bos_token_id=0,
    eos_token_ids=(2,),
)
PROMPT = list(range(3, 43))
META: Any = SimpleNamespace(num_tokens=np.int32(3))  # the decoder reads only num_tokens of it
METAS = (META, META)  # the layers have two windows


def no_attention(q, k_new, v_new, kv, meta, options):
    return q, kv


def test_abstract_model_holds_no_arrays():
    graphdef, state = params.abstract_model(TINY)
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert isinstance(graphdef, nnx.GraphDef)
    assert jax.tree.leaves(params.abstract_model(TINY, "float32")[1])[0].dtype == jnp.float32


def test_a_large_model_is_described_without_memory():
    large = dataclasses.replace(TINY, vocab_size=1 << 20, hidden_size=1 << 16)
    large = with_attention(large, num_heads=1 << 13, num_kv_heads=8)
    assert sum(rule.num_bytes for rule in params.load_rules(large).rules) > 100e9


def test_leaves_and_state_share_one_order():
    shapes = params.leaf_shapes(TINY)
    state = params.random_state(TINY)
    leaves = params.state_to_leaves(state)
    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in shapes.values()]
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(state), strict=True))
    again = params.state_of(TINY, dict(zip(shapes, leaves, strict=True)))
    assert all(a is b for a, b in zip(params.state_to_leaves(again), leaves, strict=True))
    same: Any = jax.tree.structure(params.abstract_model(TINY)[1])
    assert jax.tree.structure(again) == same


def test_layers_keep_their_numeric_order():
    tensors = params.load_rules(dataclasses.replace(TINY, layers=TINY.layers * 6)).tensors
    layers = [int(tensor.name.split(".")[2]) for tensor in tensors if ".layers." in tensor.name]
    assert layers == sorted(layers)
    assert "model.layers.11.self_attn.q_proj.bias" in {tensor.name for tensor in tensors}


QWEN3_0_6B = parse_config(config_json(SHAPES["qwen3-0.6b"]))
FORMATS_OF_QWEN = ("plain", "packed", "int8", "packed_int8", "int4")


@pytest.mark.parametrize("name", few(FORMATS_OF_QWEN, ("packed_int8",), ci=FORMATS_OF_QWEN))
def test_qwen3_0_6b_passes_at_most_150_arrays_a_step(name):
    """The arrays are the weights, a cache for each layer, the state of rows and the step's buffer. Each costs
    the host time in every step.
    """
    num_weights = len(params.leaf_shapes(QWEN3_0_6B, "bfloat16", FORMATS[name]))
    # Fields with a default belong to state by slot, drafts and texts, of which there are none here.
    state = len(RowState._fields) - len(RowState._field_defaults)
    others = QWEN3_0_6B.num_layers + state + 1
    assert num_weights + others <= 150
    slim = parse_config(config_json(SHAPES["slim"]))  # bench.probes.host uses it instead
    assert len(params.leaf_shapes(slim, "bfloat16", FORMATS[name])) == num_weights


@pytest.mark.parametrize("tied", [True, False])
def test_only_an_untied_head_is_a_parameter(tied):
    config = dataclasses.replace(TINY, tie_word_embeddings=tied)
    names = {tensor.name for tensor in params.load_rules(config).tensors}
    assert ("lm_head.weight" in names) != tied


def test_auto_dtype_falls_back_to_float32():
    assert params.model_dtype(TINY, "auto") == jnp.bfloat16
    assert params.model_dtype(dataclasses.replace(TINY, dtype=None), "auto") == np.float32
    assert params.model_dtype(TINY, "float16") == np.float16


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", jax.lax.Precision.HIGHEST), ("bfloat16", jax.lax.Precision.DEFAULT)]
)
def test_every_product_accumulates_in_float32_from_the_checkpoints_layout(dtype, precision):
    """This would show TF32 on GPUs, and the slow path on the CPU."""
    leaves = params.state_to_leaves(params.random_state(TINY, dtype))
    tokens = jnp.zeros(4, jnp.int32)

    def run(leaves):
        model = params.bind(TINY, leaves)
        hidden, _ = model(tokens, tokens, (jnp.zeros(1),) * 2, METAS, attention=no_attention)
        return hidden, model.logits(hidden, jnp.int32(hidden.shape[0]))

    closed = jax.make_jaxpr(run)(leaves)
    hidden, logits = closed.out_avals
    assert (hidden.dtype, logits.dtype) == (dtype, "float32")
    products = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert len(products) == 2 * 4 + 1
    for eqn in products:
        assert eqn.params["dimension_numbers"] == (((1,), (1,)), ((), ()))
        assert eqn.params["preferred_element_type"] == jnp.float32
        assert eqn.params["precision"] in (precision, (precision, precision))
        assert {v.aval.dtype for v in eqn.invars} == {jnp.dtype(dtype)}
        assert eqn.invars[1] in closed.jaxpr.invars  # the weight itself, not a transposed copy


@pytest.mark.ci
def test_attention_gets_each_layers_window_and_scale():
    seen = []

    def attention(q, k_new, v_new, kv, meta, options):
        assert options[2:] == (None,) * len(options[2:])
        seen.append((q.shape, k_new.shape, v_new.shape, q.dtype, *options[:2], meta))
        return q, kv + 1

    model = params.bind(TINY, params.state_to_leaves(params.random_state(TINY)))
    tokens = jnp.zeros(3, jnp.int32)
    _, kv = model(tokens, tokens, (jnp.zeros(1), jnp.ones(1)), METAS, attention=attention)
    shapes = ((3, 4, 8), (3, 2, 8), (3, 2, 8), jnp.bfloat16, 8**-0.5)
    assert seen == [(*shapes, None, META), (*shapes, 8, META)]
    assert [float(cache[0]) for cache in kv] == [1.0, 2.0]


def test_another_number_of_caches_than_layers_is_refused():
    model = params.bind(TINY, params.state_to_leaves(params.random_state(TINY)))
    tokens = jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="has 2 caches, not 1"):
        model(tokens, tokens, (jnp.zeros(1),), METAS, attention=no_attention)


@pytest.mark.parametrize("rope", [RopeConfig(), RopeConfig("dynamic", factor=2.0, original_max_positions=16)])
def test_cutting_a_prompt_into_chunks_changes_nothing(make_sequence, rope):
    """This holds for dynamic NTK too, within and beyond the trained context."""
    config = with_attention(TINY, rope=rope)
    sequence = make_sequence(config, params.random_state(config, "float32", std=0.3))
    results = []
    for chunk in (1, 3, 8):
        sequence.reset()
        results.append(sequence.feed(PROMPT, chunk))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-5, atol=1e-5)
    assert np.ptp(results[0]) > 0.1  # the logits differ from each other


def test_dynamic_ntk_acts_only_beyond_the_trained_context(make_sequence):
    state = params.random_state(TINY, "float32", std=0.3)
    dynamic = with_attention(TINY, rope=RopeConfig("dynamic", factor=4.0, original_max_positions=16))
    plain, scaled = make_sequence(TINY, state), make_sequence(dynamic, state)
    np.testing.assert_array_equal(plain.feed(PROMPT[:16]), scaled.feed(PROMPT[:16]))
    assert not np.allclose(plain.feed(PROMPT[16:]), scaled.feed(PROMPT[16:]), atol=1e-3)


@pytest.mark.parametrize("window", [31, pytest.param(33, marks=pytest.mark.ci)])
def test_the_golden_pins_the_window_to_the_token(golden_root, make_sequence, window):
    """A token sees itself and the `window - 1` tokens before it. At a prompt of 90 tokens, a window that is
    off by one changes the logits.
    """
    directory = golden_root / "mistral_swa"
    config = load_config(directory)
    assert windows(config) == (32, 32)
    case = json.loads((directory / "expected.json").read_text())["cases"][2]
    ids, values = zip(*case["last_logits_top"], strict=True)
    off = with_attention(config, window=window)
    sequence = make_sequence(off, load_weights(directory, config, progress=False))
    logits = sequence.feed(case["prompt"])[list(ids)]
    assert np.abs(logits / np.array(values) - 1).max() > 1e-2


FORMATS = {
    "plain": LinearFormat(),
    "packed": LinearFormat(packed=True),
    "int8": LinearFormat(int8=True),
    "packed_int8": LinearFormat(packed=True, int8=True),
    "int4": LinearFormat(codes=CodeForm(bits=4, zeros=False)),
    "packed_int4": LinearFormat(packed=True, codes=CodeForm(bits=4, zeros=False)),
    "kept_table": LinearFormat(packed=True, kept=((("embed_tokens", "weight"), CodeForm(bits=8)),)),
}


def tolerance(chosen: LinearFormat) -> float:
    """How far logits may be from those of float32, in parts of the logits' range."""
    if chosen.codes is not None:
        return 0.25
    return 0.1 if chosen.int8 or chosen.kept else 0.05


@pytest.mark.ci
@pytest.mark.parametrize("linear", [name for name, chosen in FORMATS.items() if not chosen.kept])
@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "llama_linear_rope",
        "qwen2",
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("qwen3_5", "granite_hybrid")),
    ],
)
def test_bfloat16_and_int8_stay_close_to_pytorch(golden_root, make_sequence, name, linear):
    chosen = FORMATS[linear]
    if chosen.packed and not library.available():
        pytest.skip("no native library on this machine")
    directory = golden_root / name
    config = load_config(directory)
    case = json.loads((directory / "expected.json").read_text())["cases"][1]
    state = load_weights(directory, config, "bfloat16", linear=chosen, progress=False)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(state)}
    assert (jnp.dtype(jnp.int8) in dtypes) == (chosen.int8 or chosen.codes is not None)
    if name == "qwen3" and chosen.codes is None:  # no layer of the others can be packed
        assert any(leaf.ndim == 5 for leaf in jax.tree.leaves(state)) == chosen.packed
    sequence = make_sequence(config, state, "bfloat16", chosen)
    logits = sequence.feed(case["prompt"])
    assert logits.dtype == np.float32
    ids, values = zip(*case["last_logits_top"], strict=True)
    spread = logits.max() - logits.min()
    assert np.abs(logits[list(ids)] - values).max() < tolerance(chosen) * spread
    assert int(logits.argmax()) in ids[:2]


@pytest.mark.parametrize(
    "linear",
    few(
        ["packed", "int8", "packed_int8", "int4", "packed_int4", "kept_table"],
        ["packed_int8", "packed_int4"],
        ci=["packed", "int8", "int4", "kept_table"],
    ),
)
@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.ci), False])
def test_formats_agree_with_float32_if_every_layer_can_be_packed(make_sequence, linear, tied):
    """The goldens compare float32 with PyTorch, and this compares the other formats with float32."""
    chosen = FORMATS[linear]
    if chosen.packed and not library.available():
        pytest.skip("no native library on this machine")
    config = dataclasses.replace(TINY, hidden_size=64, vocab_size=256, tie_word_embeddings=tied)
    config = with_mlp(with_attention(config, head_dim=32, scale=32**-0.5), intermediate_size=192)
    weights = {
        "exact": params.random_state(config, "float32", std=0.1),
        "tried": params.random_state(config, "bfloat16", std=0.1, linear=chosen),
    }
    if chosen.kept:
        assert weights["tried"]["embed_tokens"]["weight"][...].dtype == jnp.uint8
    elif chosen.packed and chosen.codes is None:
        matrices = [leaf for leaf in jax.tree.leaves(weights["tried"]) if leaf.ndim > 1 and leaf.shape[0] > 2]
        assert all(leaf.ndim == 5 for leaf in matrices) == tied  # an untied embedding table is only looked up
    exact = make_sequence(config, weights["exact"], "float32").feed(PROMPT)
    tried = make_sequence(config, weights["tried"], "bfloat16", chosen).feed(PROMPT)
    assert np.abs(tried - exact).max() < tolerance(chosen) * np.ptp(exact)


def test_ids_outside_the_table_read_its_last_row():
    """Only padding can have such ids. If it got NaN, that would spread through the cache."""
    model = params.bind(TINY, params.state_to_leaves(params.random_state(TINY)))
    ids = jnp.array([0, 64, 1 << 30, -1], jnp.int32)
    rows = np.asarray(model.embed_tokens(ids, model.pools), np.float32)
    table = np.asarray(model.embed_tokens.weight[...], np.float32)
    np.testing.assert_array_equal(rows, table[[0, 63, 63, 63]])


def test_rows_of_a_table_are_found_in_their_blocks() -> None:
    """Also where another row of the block is no number; an id past the end reads the last row."""
    table = np.asarray(np.random.default_rng(5).standard_normal((256, 20)), jnp.bfloat16)
    table[129] = np.nan
    ids = np.array([0, 127, 128, 200, 255, 300], np.int32)
    found = rows_by_blocks(jnp.asarray(table), jnp.asarray(ids))
    np.testing.assert_array_equal(np.asarray(found), table[np.minimum(ids, 255)])
