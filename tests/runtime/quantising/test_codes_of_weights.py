"""How codes are chosen for a weight, beside references in float64 that are written from the definitions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.models.quantised import Codes
from penstock.runtime.quantising.gptq import gptq
from penstock.runtime.quantising.grids import grid_of, rounded
from penstock.runtime.quantising.options import Scheme
from penstock.runtime.quantising.output import packed
from tests.support.goldens import QUANTISED

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INT4, INT8 = Scheme(4, 32, True, BFLOAT16), Scheme(8, 32, False, BFLOAT16)
Floats = NDArray[np.float32]


def weight_and_inputs(seed: int, *, num_in: int = 64) -> tuple[Floats, NDArray[np.float64]]:
    """Make a weight [24, K], and inputs [400, K] of very different sizes that depend on each other."""
    draw = np.random.default_rng(seed)
    mixed = draw.standard_normal((400, num_in)) @ draw.standard_normal((num_in, num_in))
    inputs = mixed * np.exp(draw.standard_normal(num_in))
    return draw.standard_normal((24, num_in)).astype(np.float32), inputs


def output_error(weight: Floats, codes: Codes, inputs: NDArray[np.float64]) -> float:
    """Return the squared error of what the product gives for these inputs."""
    left = codes.dequantised().astype(np.float64) - weight
    return float(np.square(inputs @ left.T).sum())


def optimal_brain_quantiser(
    weight: Floats, gram: NDArray[np.float64], scales: Floats, zeros: Floats, scheme: Scheme
) -> NDArray[np.int8]:
    """Return the codes [N, K] by the paper's equations 2 and 3: when input q is rounded, the weights of the
    inputs F that are left become w - (w_q - round(w_q)) / (H_F^-1)_qq (H_F^-1)_:q, where H_F is the matrix of
    these inputs alone, inverted anew for each. Inputs with the largest squares come first.
    """
    size = len(gram)
    damped = gram + 0.01 * np.mean(np.diag(gram)) * np.eye(size)
    left = list(np.argsort(-np.diag(gram), kind="stable"))
    now, codes = weight.astype(np.float64), np.zeros(weight.shape, np.int8)
    while left:
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        column, group = left[0], left[0] // scheme.group
        number = np.rint(now[:, column] / scales[:, group]) + zeros[:, group]
        codes[:, column] = np.clip(number, scheme.lowest, scheme.highest)
        value = (codes[:, column] - zeros[:, group]) * scales[:, group]
        now[:, left] -= np.outer((now[:, column] - value) / inverse[0, 0], inverse[:, 0])
        left.pop(0)
    return codes


@pytest.mark.parametrize("scheme", [INT4, INT8], ids=["int4", "int8"])
def test_gptq_takes_the_codes_of_the_papers_equations(scheme: Scheme) -> None:
    """Where the reference in float64 lies almost between two codes, float32 may take the other one."""
    weight, inputs = weight_and_inputs(1, num_in=160)  # more columns than are corrected at once
    gram = inputs.T @ inputs
    grid = grid_of(weight, scheme, np.diag(gram).astype(np.float32))
    expected = optimal_brain_quantiser(weight, gram, grid.scales, grid.zeros, scheme)
    codes = gptq(weight, gram, scheme)
    np.testing.assert_array_equal(codes.scales, grid.scales)
    assert (codes.codes != expected).mean() < 0.005


@pytest.mark.parametrize("scheme", [INT4, INT8], ids=["int4", "int8"])
def test_gptq_loses_less_than_half_of_what_rounding_loses(scheme: Scheme) -> None:
    weight, inputs = weight_and_inputs(2)
    plain = rounded(weight, grid_of(weight, scheme), scheme)
    chosen = gptq(weight, inputs.T @ inputs, scheme)
    assert output_error(weight, chosen, inputs) < 0.5 * output_error(weight, plain, inputs)


def test_gptq_takes_inputs_that_are_always_zero() -> None:
    weight, inputs = weight_and_inputs(3)
    inputs[:, [0, 40]] = 0
    codes = gptq(weight, inputs.T @ inputs, INT4)
    assert np.isfinite(codes.dequantised()).all()
    nothing = gptq(weight, np.zeros((64, 64)), INT4)
    plain = rounded(weight, grid_of(weight, INT4), INT4)
    np.testing.assert_array_equal(nothing.codes, plain.codes)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    scheme=st.sampled_from([INT4, INT8, Scheme(4, 64, True, np.dtype(np.float16))]),
    shift=st.floats(-3, 3),
    size=st.floats(-8, 8),
)
def test_rounding_is_within_half_a_step_of_every_weight(
    seed: int, scheme: Scheme, shift: float, size: float
) -> None:
    """A step is the scale. The ends of a range may be further off by what a scale in 8 bits of precision, and
    a zero that is a whole number, leave out: 127 / 256 of a step, and half of one.
    """
    draw = np.random.default_rng(seed)
    weight = ((draw.standard_normal((16, 128)) + shift) * np.exp(size)).astype(np.float32)
    weight[0] = 0
    codes = rounded(weight, grid_of(weight, scheme), scheme)
    assert codes.codes.min() >= -(1 << (scheme.bits - 1))
    assert codes.codes.max() < 1 << (scheme.bits - 1)
    assert (codes.scales > 0).all()
    step = np.repeat(codes.scales, scheme.group, axis=1)
    assert (np.abs(codes.dequantised() - weight) <= 1.01 * step).all()
    inner = np.abs(codes.codes.astype(int)) < scheme.highest
    assert (np.abs(codes.dequantised() - weight)[inner] <= 0.501 * step[inner]).all()
    np.testing.assert_array_equal(codes.scales, codes.scales.astype(scheme.scale_dtype).astype(np.float32))
    np.testing.assert_array_equal(codes.dequantised()[0], 0)


def test_a_searched_grid_loses_less_where_it_matters() -> None:
    weight, inputs = weight_and_inputs(4)
    weight[:, ::7] *= 4
    importance = np.square(inputs).mean(axis=0).astype(np.float32)
    importance[::7] = 0

    def lost(codes: Codes) -> float:
        return float((np.square(codes.dequantised() - weight) * importance).sum())

    plain = rounded(weight, grid_of(weight, INT4), INT4)
    assert lost(rounded(weight, grid_of(weight, INT4, importance), INT4)) < 0.8 * lost(plain)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("ct_w4a16_asym_g64", Scheme(4, 64, True, BFLOAT16)), ("ct_w4a16_actorder_g32", None)],
)
def test_tensors_are_packed_as_the_package_compressed_tensors_reads_them(
    name: str, scheme: Scheme | None
) -> None:
    """That package has read the goldens to the values of their expected.json. Their codes are taken apart
    here by the format's description, bit by bit.
    """
    tensors = find_tensors(QUANTISED / name)
    layer = "model.layers.1.self_attn.k_proj."
    theirs = {n.removeprefix(layer): np.asarray(e.map()) for n, e in tensors.items() if n.startswith(layer)}
    num_out, num_in = theirs["weight_shape"].tolist()
    words = theirs["weight_packed"].view(np.uint32)
    bits = [(words >> np.uint32(4 * place)) & np.uint32(15) for place in range(8)]
    numbers = (np.stack(bits, axis=2).reshape(num_out, num_in).astype(np.int16) - 8).astype(np.int8)
    zeros = None
    if scheme is None:
        scheme = Scheme(4, 32, False, theirs["weight_scale"].dtype)
    else:
        of_zeros = theirs["weight_zero_point"].view(np.uint32)
        bits = [(of_zeros >> np.uint32(4 * place)) & np.uint32(15) for place in range(8)]
        zeros = np.stack(bits, axis=1).reshape(num_out, -1).astype(np.float32) - 8
    scales = theirs["weight_scale"].astype(np.float32)
    ours = packed(Codes(numbers, 4, scales, zeros, scheme.group), scheme)
    for ending, values in ours.items():
        assert values.dtype == theirs[ending].dtype
        np.testing.assert_array_equal(values, theirs[ending])
