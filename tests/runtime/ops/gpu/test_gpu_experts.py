"""The kernel for experts on GPUs, interpreted on a CPU and compared with numpy in float64; and which weights
it takes. Weights of experts that no row chose are NaN, or their scales are, where weights are int8.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from penstock.runtime.ops.experts import StackedExperts
from penstock.runtime.ops.gpu.experts import gpu_experts, grouped_product
from penstock.runtime.ops.gpu.forms import ON_B200, ON_HOPPER, ON_RTX_50, GpuForm
from penstock.runtime.ops.native.experts import NO_EXPERT

BF16 = jnp.dtype(jnp.bfloat16)
HIDDEN, INNER, EXPERTS, CHOSEN = 64, 128, 5, 2
needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX before 0.11 cannot interpret kernels for GPUs"
)


def interpreted(**how: Any) -> Any:
    interpreting: Any = plgpu
    return interpreting.force_gpu_interpret_mode(interpreting.InterpretGPUParams(**how))


def draw(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(BF16)


def draw_int8(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-127, 128, shape, np.int8)


def multiplied(
    sizes: list[int],
    rows: int,
    inputs: int,
    outputs: int,
    *,
    form: GpuForm,
    is_int8: bool = False,
    **how: Any,
) -> None:
    """Multiply so many rows of each group, and compare."""
    rng = np.random.default_rng(sum(sizes))
    x = draw(rng, rows, inputs, scale=0.02 if is_int8 else 1)
    weight = (draw_int8 if is_int8 else draw)(rng, len(sizes), outputs, inputs)
    group = np.repeat(np.arange(len(sizes)), sizes)
    expected = np.einsum("ni,noi->no", x[: len(group)].astype(np.float64), weight.astype(np.float64)[group])
    if not is_int8:
        weight[np.array(sizes) == 0] = np.nan
    x[len(group) :] = np.nan
    with interpreted(**how):
        given_sizes = jnp.asarray(sizes, jnp.int32)
        got = grouped_product(jnp.asarray(x), jnp.asarray(weight), given_sizes, form=form, interpreted=True)
    np.testing.assert_allclose(got[: len(group)], expected, rtol=1e-4, atol=1e-4)


@needs_interpreter
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("inputs", "outputs", "form", "is_int8"),
    [
        (64, 128, ON_HOPPER, False),
        (192, 64, ON_HOPPER, False),
        (384, 192, ON_HOPPER, False),
        (64, 64, ON_B200, False),
        (384, 128, ON_RTX_50, False),  # shared memory has room for two pieces
        (64, 192, ON_HOPPER, True),
        (384, 128, ON_HOPPER, True),
        (320, 128, ON_RTX_50, True),  # and for 64 outputs of a block
    ],
)
@settings(max_examples=4, deadline=None)
@given(sizes=st.lists(st.sampled_from([0, 1, 63, 64, 65]) | st.integers(0, 70), min_size=1, max_size=4))
def test_groups_of_any_size(
    inputs: int, outputs: int, form: GpuForm, is_int8: bool, sizes: list[int]
) -> None:
    """Fewer pieces of channels than shared memory has places for, and more; outputs of one block and of
    several.
    """
    multiplied(sizes, 300, inputs, outputs, form=form, is_int8=is_int8)


@needs_interpreter
@pytest.mark.sweep
@pytest.mark.parametrize("form", [ON_HOPPER, ON_B200], ids=["Hopper", "B200"])
@pytest.mark.parametrize("is_int8", [False, True], ids=["bfloat16", "int8"])
def test_no_warpgroup_reads_what_another_still_writes(form: GpuForm, is_int8: bool) -> None:
    races = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks").get_races
    multiplied([70, 0, 3], 80, 12 * 64, 64, form=form, is_int8=is_int8, detect_races=True)
    assert not races().races_found


@needs_interpreter
@pytest.mark.ci
@pytest.mark.parametrize(
    ("weigh_input", "form", "is_int8"),
    [(False, ON_HOPPER, False), (True, ON_B200, False), (False, ON_HOPPER, True)],
    ids=["Hopper", "B200", "int8"],
)
def test_rows_get_the_sum_of_their_experts(
    copied: list[int], weigh_input: bool, form: GpuForm, is_int8: bool
) -> None:
    """Of four rows one chose one expert only. The weights of three experts are read, once for each product,
    and nothing of the others.
    """
    rng = np.random.default_rng(7)
    x = draw(rng, 4, HIDDEN)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    biases = [draw(rng, *shape[:2]) for shape in shapes]
    scales = [rng.uniform(0.001, 0.01, shape[:2]).astype(np.float32) for shape in shapes]
    if is_int8:
        kept = [draw_int8(rng, *shape) for shape in shapes]
        gate_up, down = (
            one.astype(np.float64) * scale[:, :, None] for one, scale in zip(kept, scales, strict=True)
        )
    else:
        kept = [draw(rng, *shape, scale=scale) for shape, scale in zip(shapes, (0.2, 1), strict=True)]
        gate_up, down = (one.astype(np.float64) for one in kept)
    ids = np.array([[1, 4], [4, 2], [NO_EXPERT, 1], [2, 4]], np.int32)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    expected = np.zeros((4, HIDDEN))
    for row in range(4):
        for expert, share in zip(ids[row], weights[row].astype(np.float64), strict=True):
            if expert != NO_EXPERT:
                given_in = x[row].astype(np.float64) * (share if weigh_input else 1)
                both = gate_up[expert] @ given_in + biases[0][expert].astype(np.float64)
                gate, up = both[:INNER], both[INNER:]
                out = down[expert] @ (gate / (1 + np.exp(-gate)) * up)
                out += biases[1][expert].astype(np.float64)
                expected[row] += out * (1 if weigh_input else share)
    for each in scales if is_int8 else kept:
        each[[0, 3]] = np.nan
    stacks = [
        StackedExperts(jnp.asarray(weight), jnp.asarray(scale) if is_int8 else None, jnp.asarray(bias))
        for weight, scale, bias in zip(kept, scales, biases, strict=True)
    ]
    with interpreted():
        got = gpu_experts(
            jnp.asarray(x),
            jnp.asarray(ids),
            jnp.asarray(weights),
            *stacks,
            activation="silu",
            weigh_input=weigh_input,
            form=form,
            interpreted=True,
        )
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0.03, atol=0.2)
    of_weights = 3 * (2 * INNER * HIDDEN + HIDDEN * INNER) * (1 if is_int8 else 2)
    of_rows = 3 * 64 * (HIDDEN * 2 + INNER) * 2  # gate_up has two blocks of 128 outputs
    assert sum(copied) == of_weights + of_rows


@pytest.mark.parametrize(
    ("dtype", "hidden", "kind", "launches"),
    [
        ("bfloat16", 64, "bfloat16", 2),
        ("bfloat16", 64, "int8", 2),
        ("bfloat16", 96, "int8", 0),
        ("bfloat16", 96, "bfloat16", 0),
        ("float32", 64, "float32", 0),
    ],
)
def test_which_weights_the_kernel_takes(dtype: str, hidden: int, kind: str, launches: int) -> None:
    def stack(*shape: int) -> StackedExperts:
        scale = jax.ShapeDtypeStruct(shape[:2], jnp.float32) if kind == "int8" else None
        return StackedExperts(jax.ShapeDtypeStruct(shape, jnp.dtype(kind)), scale)  # type: ignore[arg-type]

    arguments = (
        jax.ShapeDtypeStruct((4, hidden), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((4, CHOSEN), jnp.int32),
        jax.ShapeDtypeStruct((4, CHOSEN), jnp.float32),
        stack(EXPERTS, 2 * INNER, hidden),
        stack(EXPERTS, hidden, INNER),
    )
    traced = jax.jit(gpu_experts, static_argnames="activation").trace(*arguments, activation="silu")
    text = str(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert text.count("@mosaic_gpu") == launches
