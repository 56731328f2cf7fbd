"""RoPE, compared with formulas written a second time, scalar by scalar, from the papers and their authors'
code.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.models.rope import (
    RopeConfig,
    cos_sin,
    inverse_frequencies,
    rotate,
    yarn_attention_factor,
)

DIM = 32
PAIRS = range(DIM // 2)


def plain(theta=10_000.0, dim=DIM):
    return [math.exp(-2 * i / dim * math.log(theta)) for i in range(dim // 2)]


def test_default_is_the_papers_theta_i():
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(), DIM), plain(), rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(), 4), [1.0, 0.01], rtol=1e-6)


def test_linear_divides_positions():
    rope = RopeConfig("linear", factor=2.0)
    far, _ = cos_sin(rope, DIM, jnp.array([10], jnp.int32))
    near, _ = cos_sin(RopeConfig(), DIM, jnp.array([5], jnp.int32))
    np.testing.assert_allclose(far, near, rtol=1e-6)


def test_llama3_by_wavelength():
    rope = RopeConfig("llama3", 500_000.0, 8.0, 128, low_freq_factor=1.0, high_freq_factor=4.0)
    expected, kinds = [], set()
    for frequency in plain(500_000.0):
        wavelength = 2 * math.pi / frequency
        if wavelength < 128 / 4.0:
            expected.append(frequency)
            kinds.add("kept")
        elif wavelength > 128 / 1.0:
            expected.append(frequency / 8.0)
            kinds.add("divided")
        else:
            smooth = (128 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
            kinds.add("blended")
    assert kinds == {"kept", "divided", "blended"}
    np.testing.assert_allclose(inverse_frequencies(rope, DIM), expected, rtol=1e-6)


def test_llama3_with_nothing_between_its_bounds():
    """A pair is divided if its wavelength is more than the original context."""
    rope = RopeConfig("llama3", 500_000.0, 16.0, 128, low_freq_factor=1.0, high_freq_factor=1.0)
    whole = plain(500_000.0)
    expected = [f if 2 * math.pi / f < 128 else f / 16.0 for f in whole]
    assert 0 < sum(a == b for a, b in zip(expected, whole, strict=True)) < len(expected)
    np.testing.assert_allclose(inverse_frequencies(rope, DIM), expected, rtol=1e-6)


def pair_turning(rotations, theta, length, dim):
    """Return the fractional index of the pair that turns `rotations` times over `length`, found by bisection
    instead of the closed form that the code uses.
    """
    low, high = -1000.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        turns = length * theta ** (-2 * middle / dim) / (2 * math.pi)
        low, high = (middle, high) if turns > rotations else (low, middle)
    return low


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("beta_fast", "beta_slow"), [(32.0, 1.0), (8.0, 2.0)])
# In the last two cases the ramp is cut off, at the first pair and at the last channel.
@pytest.mark.parametrize(("theta", "length"), [(1e4, 256), (1e4, 4096), (1e4, 40), (2.0, 300)])
def test_yarn_ramp(truncate, beta_fast, beta_slow, theta, length):
    rope = RopeConfig("yarn", theta, 4.0, length, beta_fast=beta_fast, beta_slow=beta_slow, truncate=truncate)
    first = pair_turning(beta_fast, theta, length, DIM)
    last = pair_turning(beta_slow, theta, length, DIM)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, DIM - 1)
    expected = []
    for i, frequency in enumerate(plain(theta)):
        ramp = min(max((i - first) / (last - first), 0.0), 1.0)
        expected.append(frequency * (1 - ramp) + frequency / 4.0 * ramp)
    np.testing.assert_allclose(inverse_frequencies(rope, DIM), expected, rtol=1e-5)
    if (theta, length) == (1e4, 4096):
        assert expected[0] == plain()[0]  # the fastest pair extrapolates
        assert expected[-1] == plain()[-1] / 4.0  # the slowest is interpolated


def test_yarn_with_an_empty_ramp_is_a_step():
    rope = RopeConfig("yarn", 10_000.0, 4.0, 256, beta_fast=2.0, beta_slow=2.0, truncate=False)
    ratio = inverse_frequencies(rope, DIM) / np.array(plain())
    edge = pair_turning(2.0, 10_000.0, 256, DIM)
    np.testing.assert_allclose(ratio, [1.0 if i < edge else 0.25 for i in PAIRS], rtol=1e-5)


def test_yarn_attention_factor():
    assert yarn_attention_factor(4.0) == pytest.approx(1.1386294361)  # 0.1 ln 4 + 1
    assert yarn_attention_factor(1.0) == 1.0
    assert yarn_attention_factor(40.0, 0.707, 1.0) == pytest.approx(1.26080 / 1.36889, rel=1e-4)
    assert yarn_attention_factor(40.0, 1.0, 1.0) == 1.0  # DeepSeek-V3's setting
    # mscale without mscale_all_dim does not count.
    assert yarn_attention_factor(4.0, 0.5, None) == yarn_attention_factor(4.0)


def test_attention_factor_scales_cos_and_sin():
    positions = jnp.arange(5, dtype=jnp.int32)
    one = cos_sin(RopeConfig(), DIM, positions)
    two = cos_sin(RopeConfig(attention_factor=1.5), DIM, positions)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(np.asarray(a) * 1.5, b, rtol=1e-6)


def test_dynamic_is_the_ntk_base_of_each_positions_own_context():
    limit, factor = 64, 2.0
    rope = RopeConfig("dynamic", 10_000.0, factor, limit)
    positions = [0, 1, 62, 63, 64, 65, 127, 500]
    cos, sin = (np.asarray(x) for x in cos_sin(rope, DIM, jnp.array(positions, jnp.int32)))
    for row, position in enumerate(positions):
        length = max(position + 1, limit)
        base = 10_000.0 * (factor * length / limit - (factor - 1)) ** (DIM / (DIM - 2))
        angles = [position * base ** (-2 * i / DIM) for i in PAIRS]
        np.testing.assert_allclose(cos[row], np.cos(angles), atol=2e-4)
        np.testing.assert_allclose(sin[row], np.sin(angles), atol=2e-4)
    unscaled, _ = cos_sin(RopeConfig(), DIM, jnp.array(positions, jnp.int32))
    np.testing.assert_array_equal(cos[:4], unscaled[:4])  # the same bits within the trained context
    assert not np.allclose(cos[4:], unscaled[4:], atol=1e-2)


def test_rotation_is_complex_multiplication_of_half_split_pairs():
    x = np.random.default_rng(0).standard_normal((3, 2, DIM)).astype(np.float32)
    positions = np.array([0, 7, 1000], np.int32)
    cos, sin = cos_sin(RopeConfig(), DIM, jnp.asarray(positions))
    turned = np.asarray(rotate(jnp.asarray(x), cos, sin))
    numbers = x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]
    angles = positions[:, None] * np.array(plain())
    expected = numbers * np.exp(1j * angles)[:, None, :]
    np.testing.assert_allclose(turned[..., : DIM // 2], expected.real, atol=2e-4)
    np.testing.assert_allclose(turned[..., DIM // 2 :], expected.imag, atol=2e-4)


def test_rotation_is_computed_in_float32_whatever_the_dtype():
    x = jnp.full((1, 1, DIM), 1.0, jnp.bfloat16)
    cos, sin = cos_sin(RopeConfig(), DIM, jnp.array([300], jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    turned = rotate(x, cos, sin)
    assert turned.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))
