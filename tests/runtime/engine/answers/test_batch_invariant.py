"""An engine promises that a token's logits depend on its own request alone (`batch_invariant`) if the whole
model is computed by native kernels.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

from penstock.runtime import Engine, EngineConfig
from penstock.runtime.config import DEFAULT_PROPOSED_TOKENS, DEFAULT_TARGET_ITL_S
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.hub import DEMO_DIRECTORY
from penstock.runtime.models.configs.recurrent import DeltaNetConfig, MambaConfig, ShortConvConfig
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.params import abstract_model
from penstock.runtime.ops.native import library
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.configs import with_attention, with_mlp
from tests.support.models.toy import toy_engine

pytestmark = pytest.mark.users_xla

PACKED = LinearFormat(packed=True, int8=False)


@pytest.mark.parametrize(
    ("options", "promised"),
    [
        ({}, True),
        pytest.param({"quantization": "int8"}, True, marks=pytest.mark.ci),
        pytest.param({"dtype": "float32"}, False, marks=pytest.mark.ci),
        ({"native": "off"}, False),
        # Native attention takes no pages of 8.
        pytest.param({"page_size": 8}, False, marks=pytest.mark.ci),
    ],
)
def test_the_demo_model(options, promised):
    config = EngineConfig(
        max_num_seqs=4,
        max_model_len=64,
        speculation="auto",
        compilation_cache=TEST_CACHE,
        show_progress=False,
        **options,
    )
    engine = Engine.from_pretrained("demo", config)
    try:
        holds = promised and library.available()
        assert engine.info.batch_invariant is holds
        # Only then may steps be sized by their measured speed, because the size changes no bit.
        assert engine.config.target_itl_s == (DEFAULT_TARGET_ITL_S if holds else 0.0)
        # And tokens be proposed by default, which makes steps larger.
        assert engine.config.speculation == ("lookup" if holds else "off")
        assert engine.config.max_proposed_tokens == (DEFAULT_PROPOSED_TOKENS if holds else None)
    finally:
        engine.shutdown()


@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
def test_required_kernels_must_do_all_of_the_model():
    config = EngineConfig(native="require", max_num_seqs=4, max_model_len=64, show_progress=False)
    Engine.from_pretrained("demo", config).shutdown()
    with pytest.raises(ConfigError, match=r"^native: .*cannot compute all of this model"):
        Engine.from_pretrained("demo", dataclasses.replace(config, page_size=8))


def test_a_model_of_an_unknown_class_promises_nothing():
    engine = toy_engine(start=False)
    assert engine.info.batch_invariant is False
    engine.shutdown()


def with_delta_net(config, **changes):
    """Return the model with a gated delta net in the place of its first layer's attention."""
    net = DeltaNetConfig(num_key_heads=8, num_value_heads=16, key_dim=32, value_dim=32, num_taps=4)
    return with_first_layer(config, dataclasses.replace(net, **changes))


def with_mamba(config, **changes):
    """Return the model with Mamba-2 in the place of its first layer's attention."""
    mamba = MambaConfig(num_heads=16, head_dim=32, state_dim=32, num_groups=1, num_taps=4)
    return with_first_layer(config, dataclasses.replace(mamba, **changes))


def with_first_layer(config, recurrent):
    first = dataclasses.replace(config.layers[0], attention=recurrent)
    return dataclasses.replace(config, layers=(first, *config.layers[1:]))


@pytest.mark.parametrize(
    ("changed", "native"),
    [
        (lambda config: config, True),
        (lambda config: dataclasses.replace(config, tie_word_embeddings=False), True),
        # the head's outputs are not a multiple of 16
        (lambda config: dataclasses.replace(config, vocab_size=2040), False),
        # the last product's inputs are not a multiple of 64
        (lambda config: with_mlp(config, intermediate_size=736), False),
        (lambda config: with_attention(config, head_dim=48), False),  # XLA rotates heads of 48
        (lambda config: with_attention(config, output_gate=True), True),
        (lambda config: with_attention(config, qk_norm="head_after", alibi=8.0), True),
        (lambda config: dataclasses.replace(config, embed_norm=True, norm="layer"), True),
        (lambda config: with_attention(config, qk_norm="layer"), False),
        (lambda config: with_mlp(config, plain="gelu"), True),
        (lambda config: with_mlp(config, plain="xielu"), False),
        (lambda config: with_delta_net(config), True),
        # the numbers of 8 heads are not a multiple of 16, and neither are keys of 24 channels
        (lambda config: with_delta_net(config, num_value_heads=8), False),
        (lambda config: with_delta_net(config, key_dim=24), False),
        (lambda config: with_mamba(config), True),
        (lambda config: with_mamba(config, num_heads=8, head_dim=64), False),
        (lambda config: with_mamba(config, state_dim=24), False),
        (lambda config: with_mamba(config, num_taps=9), False),  # the kernel takes up to 8
        (lambda config: with_first_layer(config, ShortConvConfig(channels=64, num_taps=3)), True),
        (lambda config: with_first_layer(config, ShortConvConfig(channels=72, num_taps=3)), False),
    ],
)
def test_every_part_of_a_model_must_be_native(changed, native):
    config = changed(load_config(DEMO_DIRECTORY))
    for linear in (PACKED, PLAIN):
        graphdef, shapes = abstract_model(config, jnp.bfloat16, linear)
        assert nnx.merge(graphdef, shapes).is_native is (native and linear.packed)
