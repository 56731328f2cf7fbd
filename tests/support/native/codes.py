"""Weights as codes, for tests of the kernels."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from penstock.runtime.models.quantised import NestedCodes, OffsetCodes, PlaceCodes
from penstock.runtime.ops.codes import GROUP, CodeForm, dequantised, pack_codes, pack_floats, quantise


def code_leaf(weight: np.ndarray) -> np.ndarray:
    """Return the bytes of a weight [N, K] in floats."""
    leaf = np.empty(CodeForm(bits=4, zeros=False).shape(*weight.shape), np.uint8)
    pack_codes(leaf, *quantise(weight), None)
    return leaf


def stands_for(weight: np.ndarray) -> np.ndarray:
    """Return what is left of a weight [N, K] in its bytes, float64."""
    kept = dequantised(jnp.asarray(code_leaf(weight)), weight.shape[1], jnp.float32)
    return np.asarray(kept).astype(np.float64)


def nested(rng: np.random.Generator, form: CodeForm, num_out: int, num_in: int) -> NestedCodes:
    """Make random nested integers, which use the whole range of each of their parts."""
    assert form.group is not None
    least, most = (0, 15) if form.bits == 4 else (-32, 31)
    of_groups = num_out, num_in // form.group
    return NestedCodes(
        codes=rng.integers(least, most + 1, (num_out, num_in)).astype(np.int8),
        bits=form.bits,
        scales=rng.integers(-128, 128, of_groups).astype(np.int8),
        minima=rng.integers(-128, 128, of_groups).astype(np.int8),
        factors=np.exp2(rng.uniform(-16, -9, (num_out, num_in // 64, 2))).astype(np.float16),
    )


def with_minima(rng: np.random.Generator, form: CodeForm, num_out: int, num_in: int) -> OffsetCodes:
    """Make random integers with a scale and an offset for each 32 inputs, as float16 has them."""
    of_groups = num_out, num_in // GROUP
    scales, offsets = (rng.uniform(-0.5, 0.5, of_groups).astype(np.float16) for _ in range(2))
    codes = rng.integers(0, 1 << form.bits, (num_out, num_in)).astype(np.uint8)
    return OffsetCodes(codes, form.bits, scales.astype(np.float32), offsets.astype(np.float32), GROUP)


def places(rng: np.random.Generator, num_out: int, num_in: int) -> PlaceCodes:
    """Make random places in the table, with scales of any size."""
    return PlaceCodes(
        codes=rng.integers(0, 16, (num_out, num_in)).astype(np.uint8),
        scales=rng.integers(-32, 32, (num_out, num_in // GROUP)).astype(np.int8),
        factors=np.exp2(rng.uniform(-16, -9, (num_out, num_in // 64))).astype(np.float16),
    )


def small_floats(
    rng: np.random.Generator, form: CodeForm, num_out: int, num_in: int
) -> tuple[np.ndarray, np.ndarray]:
    """Make the bytes of random small floats, and what ml_dtypes makes of them, float32 [num_out, num_in]."""
    group = form.group or num_in
    if form.bits == 4:
        codes = rng.integers(0, 16, (num_out, num_in)).astype(np.uint8)
        powers = rng.integers(110, 135, (num_out, num_in // group)).astype(np.uint8)
        floats, scales = codes.view(ml_dtypes.float4_e2m1fn), powers.view(ml_dtypes.float8_e8m0fnu)
    else:
        codes = rng.integers(0, 0x7F, (num_out, num_in)).astype(np.uint8)
        codes |= rng.integers(0, 2, codes.shape).astype(np.uint8) << 7
        floats, scales = (
            codes.view(ml_dtypes.float8_e4m3fn),
            rng.uniform(1e-4, 0.1, (num_out, num_in // group)),
        )
    of_groups = scales.astype(np.float32)
    leaf = np.empty(form.shape(num_out, num_in), np.uint8)
    pack_floats(leaf, codes, of_groups)
    return leaf, floats.astype(np.float32) * np.repeat(of_groups, group, axis=1)
