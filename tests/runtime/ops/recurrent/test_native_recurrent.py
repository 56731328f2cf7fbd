"""The native operations as layers call them: they agree with XLA's, which take over sizes they lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.ops.attention import AttentionMeta
from penstock.runtime.ops.native import library
from penstock.runtime.ops.recurrent.native import NATIVE_RECURRENT
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT, RecurrentOps
from tests.support.recurrent.rows import Row, Step

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def convolution(channels: int, step: Step) -> Callable[[RecurrentOps, AttentionMeta], Any]:
    x, weight, state = normal(step.tokens, channels), normal(4, channels), normal(step.entries, 3, channels)
    bias = normal(channels)
    return lambda ops, meta: ops.conv(x, weight, bias, state, meta, "silu")


def delta(dim: int, step: Step) -> Callable[[RecurrentOps, AttentionMeta], Any]:
    heads, key_heads, tokens = 4, 2, step.tokens
    mixed = normal(tokens, (2 * key_heads + heads) * dim)
    z, ba = normal(tokens, heads * dim), normal(tokens, 2 * heads)
    parameters: dict[str, Any] = {
        "a_log": normal(heads),
        "dt_bias": normal(heads + 1)[1:],
        "norm": normal(dim),
    }
    state = normal(step.entries, heads, dim, dim)
    return lambda ops, meta: ops.delta(mixed, z, ba, state, meta, **parameters, eps=1e-6, num_key_heads=2)


def ssd(size: int, step: Step) -> Callable[[RecurrentOps, AttentionMeta], Any]:
    heads, groups, dim, tokens = 4, 2, 32, step.tokens
    mixed, gate = normal(tokens, heads * size + 2 * groups * dim), normal(tokens, heads * size)
    dt, state = normal(tokens, heads), normal(step.entries, heads, dim, size)
    parameters: dict[str, Any] = {
        "a_log": normal(heads),
        "dt_bias": normal(heads + 1)[1:],
        "skip": normal(heads + 2)[2:],
        "norm": normal(heads * size),
        "dt_limit": (0.01, 2.0),
    }
    return lambda ops, meta: ops.ssd(mixed, gate, dt, state, meta, **parameters, eps=1e-5, num_groups=groups)


PREFILL = Step(
    (Row(3), Row(1, fresh=True), Row(9, fresh=True, cut=4), Row(70, cut=64), Row(1)),
    tokens=90,
    num_rows=6,
    entries=20,
    decode=False,
    seed=1,
)


@pytest.mark.ci
@pytest.mark.parametrize(("make", "size"), [(convolution, 48), (delta, 16), (ssd, 16)])
def test_native_operations_agree_with_xla(make: Any, size: int) -> None:
    run = jax.jit(make(size, PREFILL), static_argnums=0)
    y, state = run(NATIVE_RECURRENT, PREFILL.meta)
    expected, expected_state = run(XLA_RECURRENT, PREFILL.meta)
    real = PREFILL.spans[-1].stop
    np.testing.assert_allclose(y[:real], expected[:real], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(state, expected_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [False, True])
def test_steps_know_of_cuts_or_do_not(cuts: bool) -> None:
    step = Step((Row(2, cut=1), Row(1)), 4, 4, 20, decode=False, seed=2, cuts=cuts)
    _, state = jax.jit(delta(16, step), static_argnums=0)(NATIVE_RECURRENT, step.meta)
    kept, fresh = step.keeps[0], normal(20, 4, 16, 16)
    assert bool((state[kept] == fresh[kept]).all()) != cuts


@pytest.mark.parametrize(
    ("make", "size", "is_native"),
    [
        (convolution, 48, True),
        (convolution, 40, False),
        (delta, 16, True),
        (delta, 24, False),
        (ssd, 48, True),
        (ssd, 24, False),
    ],
)
def test_sizes_that_the_kernels_lack_are_computed_by_xla(make: Any, size: int, is_native: bool) -> None:
    program = jax.make_jaxpr(make(size, PREFILL), static_argnums=0)(NATIVE_RECURRENT, PREFILL.meta)
    assert ("penstock_" in str(program)) == is_native
