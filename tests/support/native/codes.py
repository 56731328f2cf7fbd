"""Weights as codes of 4 bits, for tests of the kernels."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from penstock.runtime.ops.codes import CodeForm, dequantised, pack_codes, quantise


def code_leaf(weight: np.ndarray) -> np.ndarray:
    """The bytes of a weight [N, K] in floats."""
    leaf = np.empty(CodeForm(bits=4, zeros=False).shape(*weight.shape), np.uint8)
    pack_codes(leaf, *quantise(weight), None)
    return leaf


def stands_for(weight: np.ndarray) -> np.ndarray:
    """What is left of a weight [N, K] in its bytes, float64."""
    kept = dequantised(jnp.asarray(code_leaf(weight)), weight.shape[1], jnp.float32)
    return np.asarray(kept).astype(np.float64)
