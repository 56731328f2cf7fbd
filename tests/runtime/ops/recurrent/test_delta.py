"""The gated delta rule on ragged batches, compared with its recurrence in float64, token by token."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.runtime.ops.attention import make_meta
from penstock.runtime.ops.recurrent.blocks import decays
from penstock.runtime.ops.recurrent.delta import BLOCK_TOKENS, gated_delta_net

HK, HV, DK, DV = 2, 4, 8, 16
ENTRIES = 12
EPS = 1e-6
WIDTH = 2 * HK * DK + HV * DV


class Row(NamedTuple):
    """A row of a step: its tokens, the entries of state that it reads and writes, and its cut."""

    length: int
    read: int = ENTRIES
    written: int = ENTRIES
    cut: int = 0
    cut_to: int = ENTRIES


class Inputs(NamedTuple):
    """The arguments of `gated_delta_net`."""

    qkv: Any
    z: Any
    ba: Any
    state: Any
    a_log: Any
    dt_bias: Any
    norm: Any


def drawn(num_tokens: int, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    return Inputs(
        normal(num_tokens, WIDTH),
        normal(num_tokens, HV * DV),
        2 * normal(num_tokens, 2 * HV),
        normal(ENTRIES, HV, DK, DV),
        np.log(rng.uniform(0.01, 16, HV)).astype(np.float32),
        normal(HV),
        1 + normal(DV) / 4,
    )


def by_hand(inputs: Inputs, rows: list[Row]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the outputs of all tokens, and the new state, in float64."""
    qkv, z, ba, old, a_log, dt_bias, norm = (np.asarray(x, np.float64) for x in inputs)
    outputs, state, at = np.zeros((len(qkv), HV, DV)), old.copy(), 0
    for row in rows:
        held = old[row.read].copy() if row.read < ENTRIES else np.zeros((HV, DK, DV))
        for index in range(row.length):
            for head in range(HV):
                key_head = head // (HV // HK)
                q, k = (
                    qkv[at, begin : begin + DK] / np.sqrt((qkv[at, begin : begin + DK] ** 2).sum() + 1e-6)
                    for begin in (key_head * DK, (HK + key_head) * DK)
                )
                v = qkv[at, 2 * HK * DK + head * DV :][:DV]
                beta = 1 / (1 + np.exp(-ba[at, head]))
                held[head] *= np.exp(
                    -np.exp(a_log[head]) * np.log1p(np.exp(ba[at, HV + head] + dt_bias[head]))
                )
                held[head] += np.outer(k, beta * (v - k @ held[head]))
                o = (q * DK**-0.5) @ held[head]
                gate = z[at, head * DV : (head + 1) * DV]
                outputs[at, head] = o / np.sqrt((o**2).mean() + EPS) * norm * gate / (1 + np.exp(-gate))
            at += 1
            if index + 1 == row.cut and row.cut_to < ENTRIES:
                state[row.cut_to] = held
        if row.written < ENTRIES and row.length:
            state[row.written] = held
    return outputs.reshape(len(qkv), -1), state


@partial(jax.jit, static_argnames=("decode_only", "has_cuts"))
def _run(inputs: Inputs, of_rows: NDArray[np.int32], *, decode_only: bool, has_cuts: bool) -> Any:
    lengths, read, written, cut, cut_to = of_rows
    meta = make_meta(
        starts=jnp.zeros_like(lengths),
        q_lens=lengths,
        page_table=jnp.zeros((lengths.shape[0], 64), jnp.int32),
        num_tokens=inputs.qkv.shape[0],
        decode_only=decode_only,
        page_size=8,
        num_pages=64,
        state_from=read,
        state_to=written,
        state_cut=cut if has_cuts else None,
        state_cut_to=cut_to if has_cuts else None,
    )
    qkv, z, ba, state, a_log, dt_bias, norm = inputs
    return gated_delta_net(
        qkv, z, ba, state, meta, a_log=a_log, dt_bias=dt_bias, norm=norm, eps=EPS, num_key_heads=HK
    )


def run(
    inputs: Inputs, rows: list[Row], *, decode_only: bool = False, has_cuts: bool = True
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return what the operation makes of these rows, of which those that are missing to four are padding."""
    padded = [*rows, *[Row(0)] * (4 - len(rows))]
    of_rows = np.array(padded, np.int32).T
    out, state = _run(inputs, of_rows, decode_only=decode_only, has_cuts=has_cuts)
    return np.array(out, np.float32), np.array(state)


def check(inputs: Inputs, rows: list[Row], **options: Any) -> None:
    out, state = run(inputs, rows, **options)
    expected, states = by_hand(inputs, rows)
    total = sum(row.length for row in rows)
    np.testing.assert_allclose(out[:total], expected[:total], rtol=1e-3, atol=2e-4)
    np.testing.assert_allclose(state, states, rtol=1e-4, atol=1e-5)
    written = {row.written for row in rows if row.length} | {row.cut_to for row in rows if row.cut}
    untouched = [entry for entry in range(ENTRIES) if entry not in written]
    assert state[untouched].tobytes() == inputs.state[untouched].tobytes()
    assert not out[total:].any()


def test_a_long_row_in_blocks_follows_the_recurrence() -> None:
    length = 2 * BLOCK_TOKENS + 3
    check(drawn(160), [Row(length, read=1, written=2)])
    check(drawn(160), [Row(length, written=2)])  # from zeros


@pytest.mark.sweep
def test_a_program_without_snapshots_follows_the_recurrence() -> None:
    rows = [Row(2 * BLOCK_TOKENS + 3, read=1, written=2), Row(1, 3, 4), Row(20, written=5)]
    check(drawn(160), rows, has_cuts=False)
    check(drawn(4), [Row(1, 0, 1), Row(1, written=2)], decode_only=True, has_cuts=False)


def test_rows_of_all_kinds_in_one_step_follow_the_recurrence() -> None:
    kept = BLOCK_TOKENS + 5
    rows = [
        Row(kept + 10, 0, 1, cut=kept, cut_to=9),
        Row(1, 2, 3, cut=1, cut_to=8),
        Row(30, written=4),
        Row(1, 5, 6),
    ]
    check(drawn(160), rows)


def test_rows_of_one_token_follow_the_recurrence() -> None:
    rows = [Row(1, 0, 1), Row(1, written=2), Row(1, 4, 3)]
    check(drawn(4), rows, decode_only=True)
    check(drawn(160), rows)
    check(drawn(4), [Row(1, 0, 1, cut=1, cut_to=7), Row(1, 2, 3)], decode_only=True)


@st.composite
def steps(draw: st.DrawFn) -> list[Row]:
    drawn_lengths = draw(st.lists(st.just(1) | st.integers(1, 150), min_size=1, max_size=4))
    lengths: list[int] = []
    for length in drawn_lengths:
        lengths.append(min(length, 160 - sum(lengths)))
    entries = draw(st.permutations(range(ENTRIES)))
    rows = []
    for number, length in enumerate(length for length in lengths if length):
        read, written, cut_to = (
            draw(st.sampled_from((entry, ENTRIES + kind)))
            for kind, entry in enumerate(entries[3 * number :][:3])
        )
        cut = draw(st.just(0) | st.integers(1, length) | st.just(length))
        rows.append(Row(length, read, written, cut, cut_to if cut else ENTRIES))
    return rows


@pytest.mark.sweep
@given(rows=steps(), seed=st.integers(0, 3))
@settings(max_examples=25)
def test_any_step_follows_the_recurrence(rows: list[Row], seed: int) -> None:
    check(drawn(160, seed), rows)


def test_a_row_has_the_same_answer_in_one_step_and_in_chunks() -> None:
    inputs = drawn(160)
    whole, _ = run(inputs, [Row(150, written=1)])
    done, state = [], inputs.state
    for begin, end in ((0, 1), (1, 70), (70, 71), (71, 150)):
        chunk = inputs._replace(state=state)
        chunk = chunk._replace(
            **{
                name: np.pad(getattr(inputs, name)[begin:end], ((0, 160 - (end - begin)), (0, 0)))
                for name in ("qkv", "z", "ba")
            }
        )
        out, state = run(chunk, [Row(end - begin, ENTRIES if begin == 0 else 1, 1)])
        done.append(out[: end - begin])
    np.testing.assert_allclose(np.concatenate(done), whole[:150], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("decode_only", [False, True])
def test_a_nan_stays_in_its_row(decode_only: bool) -> None:
    rows = [Row(1, 0, 1), Row(1, 2, 3), Row(1, 4, 5), Row(1, 6, 7)]
    if not decode_only:  # two rows in blocks, of which the second one begins with what the first one leaves
        rows[1:3] = [Row(66, 2, 3), Row(20, 4, 5)]
    inputs = drawn(4 if decode_only else 160)
    sound, sound_state = run(inputs, rows, decode_only=decode_only)
    for name, place in (
        ("qkv", (1, 5)),
        ("z", (1, 0)),
        ("ba", (1, 1)),
        ("ba", (1, HV)),
        ("state", (2, 0, 0, 0)),
    ):
        spoiled = getattr(inputs, name).copy()
        spoiled[place] = np.nan
        # Padding tokens hold what an earlier step left there.
        tainted = inputs.qkv.copy()
        tainted[sum(row.length for row in rows) :] = np.nan
        mixed = inputs._replace(qkv=tainted)._replace(**{name: spoiled})
        out, state = run(mixed, rows, decode_only=decode_only)
        own = slice(1, 1 + rows[1].length)
        assert np.isnan(out[own]).any(), name
        out[own], others = sound[own], [entry for entry in range(ENTRIES) if entry not in (2, 3)]
        assert out.tobytes() == sound.tobytes(), name
        assert state[others].tobytes() == sound_state[others].tobytes(), name


@pytest.mark.sweep
def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    inputs = drawn(160)
    narrow = inputs._replace(qkv=inputs.qkv.astype(jnp.bfloat16), z=inputs.z.astype(jnp.bfloat16))
    rows = [Row(100, 0, 1), Row(1, 2, 3)]
    wide = narrow._replace(qkv=narrow.qkv.astype(np.float32), z=narrow.z.astype(np.float32))
    (out, state), (exact, exact_state) = run(narrow, rows), run(wide, rows)
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(state, exact_state)


def test_a_small_decay_behind_large_ones_keeps_its_digits() -> None:
    """Differences of sums from the block's beginning would lose them."""
    logarithms = np.array([[-20.0] * 40 + [-1e-3] * 4], np.float32)
    left = np.asarray(decays(jnp.asarray(logarithms)))[0]
    np.testing.assert_allclose(left[43, 40], np.exp(-3e-3), rtol=1e-6)
    np.testing.assert_allclose(left[1, 0], np.exp(-20.0), rtol=1e-5)
    assert left[0, 1] == 0
    assert left[5, 5] == 1


def test_a_step_without_entries_of_state_is_refused() -> None:
    meta: Any = make_meta(
        starts=jnp.zeros(4, jnp.int32),
        q_lens=jnp.ones(4, jnp.int32),
        page_table=jnp.zeros((4, 1), jnp.int32),
        num_tokens=4,
        decode_only=True,
        page_size=8,
        num_pages=1,
    )

    def without(inputs: Inputs) -> Any:
        options = {"a_log": inputs.a_log, "dt_bias": inputs.dt_bias, "norm": inputs.norm}
        return gated_delta_net(*inputs[:4], meta, **options, eps=EPS, num_key_heads=HK)

    with pytest.raises(ValueError, match="state_from"):
        jax.eval_shape(without, drawn(4))
