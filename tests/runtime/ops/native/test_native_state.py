"""The native operations of recurrent layers: compared with numpy in float64, on every instruction set of this
machine. The bits of a row must depend on its own tokens alone, however they are cut into steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.native import library, state
from penstock.runtime.ops.native.state import StateRows
from tests.support.native import recurrent as exact
from tests.support.native.kernels import kernel_params, running
from tests.support.native.recurrent import Row

BF16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
ENTRIES = 12

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@pytest.fixture(params=kernel_params("avx2", "avx512", "avx512_emulated"), autouse=True, scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


@dataclass(frozen=True)
class Case:
    """An operation with parameters, for inputs of several tokens."""

    inputs: tuple[np.ndarray, ...]
    """Arrays [T, ...]."""
    run: Callable[..., tuple[jax.Array, jax.Array]]
    """(*inputs, state, rows) -> (output [T, ...], state), compiled."""
    state_shape: tuple[int, ...]
    step: Callable[..., exact.Step]
    """The witness for inputs."""

    def of(self, tokens: Any) -> tuple[np.ndarray, ...]:
        """Return the inputs of some of the tokens."""
        return tuple(array[tokens] for array in self.inputs)


def draw(rng: np.random.Generator, dtype: np.dtype, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def convolution(
    dtype: np.dtype, tokens: int, *, channels: int = 80, taps: int = 4, bias: bool = False, silu: bool = True
) -> Case:
    rng = np.random.default_rng(channels + taps)
    weight = draw(rng, dtype, taps, channels)
    added = draw(rng, dtype, channels) if bias else None

    @jax.jit
    def run(x: jax.Array, state_in: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        given = None if added is None else jnp.asarray(added)
        return state.convolve(x, jnp.asarray(weight), given, state_in, rows, silu=silu)

    def step(x: np.ndarray) -> exact.Step:
        return exact.convolution(x, weight, added, activated=silu)

    return Case((draw(rng, dtype, tokens, channels),), run, (taps - 1, channels), step)


def delta(
    dtype: np.dtype, tokens: int, *, heads: int = 4, key_heads: int = 2, dim: int = 32, size: int = 48
) -> Case:
    rng = np.random.default_rng(heads * dim + size)
    parameters = {
        "a_log": np.log(rng.uniform(0.01, 16, heads)).astype(np.float32),
        "dt_bias": draw(rng, FLOAT32, heads),
        "norm": draw(rng, FLOAT32, size),
    }

    @jax.jit
    def run(qkv: Any, z: Any, ba: Any, state_in: Any, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        given = {name: jnp.asarray(value) for name, value in parameters.items()}
        return state.gated_delta_net(qkv, z, ba, state_in, rows, **given, eps=1e-6, num_key_heads=key_heads)

    def step(qkv: Any, z: Any, ba: Any) -> exact.Step:
        return exact.delta_net(qkv, z, ba, **parameters, eps=1e-6, key_heads=key_heads)

    inputs = (
        draw(rng, dtype, tokens, 2 * key_heads * dim + heads * size),
        draw(rng, dtype, tokens, heads * size),
        draw(rng, FLOAT32, tokens, 2 * heads) * np.float32(3),
    )
    return Case(inputs, run, (heads, dim, size), step)


def mamba(
    dtype: np.dtype, tokens: int, *, heads: int = 6, groups: int = 2, dim: int = 32, size: int = 16
) -> Case:
    rng = np.random.default_rng(heads * dim + size)
    parameters = {
        "a_log": np.log(rng.uniform(0.5, 16, heads)).astype(np.float32),
        "dt_bias": draw(rng, FLOAT32, heads),
        "skip": draw(rng, FLOAT32, heads),
        "norm": draw(rng, FLOAT32, heads * size),
    }
    limit = (0.02, 1.5)

    @jax.jit
    def run(xbc: Any, gate: Any, dt: Any, state_in: Any, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        given = {name: jnp.asarray(value) for name, value in parameters.items()}
        return state.mamba2(
            xbc, gate, dt, state_in, rows, **given, eps=1e-5, num_groups=groups, dt_limit=limit
        )

    def step(xbc: Any, gate: Any, dt: Any) -> exact.Step:
        return exact.mamba2(xbc, gate, dt, **parameters, eps=1e-5, groups=groups, dt_limit=limit)

    inputs = (
        draw(rng, dtype, tokens, heads * size + 2 * groups * dim),
        draw(rng, dtype, tokens, heads * size),
        draw(rng, FLOAT32, tokens, heads) * np.float32(3),
    )
    return Case(inputs, run, (heads, dim, size), step)


OPERATIONS: dict[str, Callable[[np.dtype, int], Case]] = {
    "convolution": convolution,
    "delta rule": delta,
    "mamba2": mamba,
}


def run(
    case: Case, inputs: Sequence[np.ndarray], state_in: np.ndarray, rows: Sequence[Row]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the outputs of the rows' tokens, and the state afterwards, from a copy of `state_in`."""
    arrays = {name: jnp.asarray(value) for name, value in exact.row_arrays(rows, ENTRIES).items()}
    out, after = case.run(
        *(jnp.asarray(array) for array in inputs), jnp.asarray(state_in.copy()), StateRows(**arrays)
    )
    return np.asarray(out), np.asarray(after)


def some_state(case: Case, seed: int = 0) -> np.ndarray:
    return draw(np.random.default_rng(seed), FLOAT32, ENTRIES, *case.state_shape)


# A fresh row, a decode, a padding row, a row longer than one block of the kernels whose state is kept on the
# way, one that keeps it at its end, and one that begins where another did and writes nowhere.
ROWS = (
    Row(2, None, 0),
    Row(1, 3, 4),
    Row(0, 5, 6),
    Row(43, 7, 8, cut=32, cut_to=9),
    Row(3, None, 1, cut=3, cut_to=10),
    Row(2, 3, None),
)
TOKENS = sum(row.count for row in ROWS)


@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: convolution(dtype, TOKENS + 5, bias=True),
        lambda dtype: convolution(dtype, TOKENS + 5, channels=2064, taps=3, silu=False),
        lambda dtype: convolution(dtype, TOKENS + 5, channels=16, taps=2),
        lambda dtype: delta(dtype, TOKENS + 5),
        lambda dtype: delta(dtype, TOKENS + 5, heads=2, key_heads=2, dim=16, size=16),
        lambda dtype: delta(dtype, TOKENS + 5, heads=3, key_heads=1, dim=128, size=128),
        lambda dtype: mamba(dtype, TOKENS + 5),
        lambda dtype: mamba(dtype, TOKENS + 5, heads=4, groups=1, dim=128, size=80),
    ],
)
def test_against_float64(make: Callable[[np.dtype], Case], dtype: np.dtype) -> None:
    case = make(dtype)
    before = some_state(case)
    inputs = case.of(slice(None))
    for array in inputs:
        array[TOKENS:] = np.nan  # padding may hold anything
    out, after = run(case, inputs, before, ROWS)
    expected, expected_state = exact.run_rows(ROWS, before, case.step(*case.of(slice(TOKENS))))
    scale = np.abs(expected).max()
    # One rounding of the output; float32 sums before it, whose terms may cancel.
    relative = 2.0**-8 * 1.001 if dtype == BF16 else 1e-5
    np.testing.assert_allclose(exact.wide(out[:TOKENS]), expected, rtol=relative, atol=3e-5 * scale)
    assert not np.asarray(out[TOKENS:]).any()
    np.testing.assert_allclose(after, expected_state, rtol=1e-5, atol=1e-5)
    real = [row for row in ROWS if row.count]
    named = {row.written for row in real} | {row.cut_to for row in real}
    kept = [entry for entry in range(ENTRIES) if entry not in named]
    np.testing.assert_array_equal(after[kept].view(np.uint32), before[kept].view(np.uint32))


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16 if array.dtype == BF16 else np.uint32)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_the_same_bits_in_any_chunks_beside_any_rows(name: str) -> None:
    """A sequence of 70 tokens, alone in one step, against steps in which it is cut and has neighbours.
    Float32 shows differences that bfloat16 would round away.
    """
    most, length = 96, 70
    case = OPERATIONS[name](FLOAT32, most)
    before = some_state(case, 1)
    order = np.arange(most)
    sequence, others = order[:length], order[length:]

    def with_others(chunk: np.ndarray, rows: Sequence[Row], at: int) -> tuple[np.ndarray, np.ndarray]:
        """Make a step of these rows, of which the one at `at` is the chunk; the rest have tokens of
        others.
        """
        tokens: list[int] = []
        first, own = 0, 0
        for number, row in enumerate(rows):
            if number == at:
                own = len(tokens)
                tokens.extend(chunk)
            else:
                tokens.extend(others[first : first + row.count])
                first += row.count
        padded = np.resize(np.array(tokens), most)
        out, after = run(case, case.of(padded), held, rows)
        return out[own : own + len(chunk)], after

    held = before
    whole, after = with_others(sequence, [Row(length, None, 0, 48, 2), *[Row(0, None, None)] * 2], 0)
    expected, kept, last = bits(whole), bits(after[2]), bits(after[0])
    library.limit_threads(1)
    try:
        alone, after = with_others(sequence, [Row(length, None, 0, 48, 2), *[Row(0, None, None)] * 2], 0)
    finally:
        library.limit_threads(64)
    np.testing.assert_array_equal(bits(alone), expected)
    np.testing.assert_array_equal(bits(after[0]), last)

    rng = np.random.default_rng(2)
    for sizes in ([1] * 6 + [63, 1], [32, 16, 22], [33, 1, 14, 2, 20], [47, 1, 22]):
        held, at, read = before, 0, None
        for size in sizes:
            place, written = int(rng.integers(3)), (1 if read == 0 else 0)
            rows = [Row(int(rng.integers(1, 4)), 5, 6), Row(1, None, 8)]
            rows.insert(place, Row(size, read, written))
            out, held = with_others(sequence[at : at + size], rows, place)
            np.testing.assert_array_equal(bits(out), expected[at : at + size], err_msg=f"{sizes} at {at}")
            at, read = at + size, written
            if at == 48:
                np.testing.assert_array_equal(bits(held[written]), kept, err_msg=f"{sizes}")
        assert read is not None
        np.testing.assert_array_equal(bits(held[read]), last)


@pytest.mark.parametrize("name", OPERATIONS)
def test_nan_stays_in_its_row_and_stale_entries_are_not_read(name: str) -> None:
    rows = (Row(3, 3, 4), Row(40, None, 5, cut=32, cut_to=6), Row(2, 7, 8))
    case = OPERATIONS[name](BF16, 45)
    before = some_state(case, 3)
    clean = run(case, case.inputs, before, rows)
    inputs = [array.copy() for array in case.inputs]
    for array in inputs:
        array[1] = np.nan  # of the first row
    poisoned = before.copy()
    poisoned[[0, 1, 2, 4, 5, 6, 8, 9, 10, 11]] = np.nan
    out, after = run(case, inputs, poisoned, rows)
    assert np.isnan(exact.wide(out[1:3])).any()
    np.testing.assert_array_equal(bits(out[3:]), bits(clean[0][3:]))
    np.testing.assert_array_equal(bits(out[:1]), bits(clean[0][:1]))
    np.testing.assert_array_equal(bits(after[[5, 6, 8]]), bits(clean[1][[5, 6, 8]]))
    assert np.isnan(after[4]).any()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_step_again_from_the_same_entry_gives_the_same(name: str) -> None:
    """As a window repeats the last step of a row that has ended."""
    case = OPERATIONS[name](BF16, 4)
    before = some_state(case, 4)
    once = run(case, case.inputs, before, [Row(4, 2, 3)])
    again = run(case, case.inputs, once[1], [Row(4, 2, 3)])
    np.testing.assert_array_equal(bits(again[0]), bits(once[0]))
    np.testing.assert_array_equal(bits(again[1]), bits(once[1]))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_may_write_the_entry_that_it_reads(name: str) -> None:
    case = OPERATIONS[name](BF16, 70)
    before = some_state(case, 5)
    for count in (1, 2, 70):
        apart = run(case, case.inputs, before, [Row(count, 2, 3)])
        same = run(case, case.inputs, before, [Row(count, 2, 2)])
        np.testing.assert_array_equal(bits(same[0]), bits(apart[0]))
        np.testing.assert_array_equal(bits(same[1][2]), bits(apart[1][3]))


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_that_do_not_fit_fail_the_program(name: str) -> None:
    case = OPERATIONS[name](BF16, 4)
    row = Row(4, None, 3)
    for wrong, message in (
        (replace(row, count=5), "5 tokens"),
        (replace(row, count=-1), "-1 tokens"),
        (replace(row, cut=5, cut_to=2), "kept after 5"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            run(case, case.inputs, some_state(case), [wrong])


def test_which_sizes_the_kernels_take() -> None:
    assert state.can_convolve(BF16, 48, 4)
    assert state.can_convolve(FLOAT32, 48, 8)
    assert not state.can_convolve(BF16, 40, 4)
    assert not state.can_convolve(np.dtype(np.float16), 48, 4)
    assert not state.can_convolve(BF16, 48, 1)
    assert not state.can_convolve(BF16, 48, 9)
    assert state.can_recur(BF16, 16, 80)
    assert not state.can_recur(BF16, 24, 64)
    assert not state.can_recur(BF16, 64, 40)
    assert not state.can_recur(np.dtype(np.float16), 64, 64)
