"""Codes of 4 bits lie in memory as a checkpoint has them, and stand for the same values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.loading.quantised.checkpoint import find_weights, format_for
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.params import leaf_shapes
from penstock.runtime.ops.codes import CodeForm, dequantised
from tests.support.goldens import QUANTISED

LEAF = ("layers", 1, "mlp", "gate_up_proj", "weight")
PARTS = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
INT4 = LinearFormat(codes=CodeForm(bits=4, zeros=False))


@pytest.mark.parametrize(
    ("name", "zeros", "is_kept"),
    [
        ("awq_g64", True, True),
        ("gptq_v1_asym_g32", True, True),
        ("gptq_mislabelled_v2_g128", False, True),
        ("ct_w4a16_asym_g64", True, True),
        ("gptq_desc_act_g32", False, False),
        ("ct_mxfp4a16", False, False),
    ],
)
def test_a_leaf_stands_for_the_values_of_the_files(name: str, zeros: bool, is_kept: bool) -> None:
    tensors = find_weights(QUANTISED / name)
    linear = format_for(INT4, tensors.values())
    assert linear.codes == CodeForm(bits=4, zeros=zeros)
    config = load_config(QUANTISED / name)
    state = load_weights(QUANTISED / name, config, "float32", linear=linear, progress=False)
    leaf = dict(zip(leaf_shapes(config, "float32", linear), jax.tree.leaves(state), strict=True))[LEAF]
    got = np.asarray(dequantised(leaf, 128, jnp.dtype(jnp.float32)))
    there = np.concatenate([tensors[part][0:256] for part in PARTS])
    if is_kept:
        np.testing.assert_array_equal(got, there)
    else:  # these are quantised anew: the values are near, and not the same
        error = np.abs(got - there).mean() / np.abs(there).mean()
        assert 0 < error < 0.1
