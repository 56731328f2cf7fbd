"""Mamba-2 on ragged batches, compared with its recurrence in float64, token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.runtime.ops.recurrent.ssd import BLOCK_TOKENS, mamba2
from tests.support.recurrent.rows import Row, Step, rows_of

HEADS, HEAD_DIM, STATE_DIM, GROUPS = 4, 6, 5, 2
INNER, KEYS = HEADS * HEAD_DIM, GROUPS * STATE_DIM
TOKENS, ROWS, ENTRIES = 160, 4, 13
EPS, LIMIT = 1e-5, (0.05, 3.0)


class Inputs(NamedTuple):
    """The arguments of `mamba2`."""

    xbc: Any
    gate: Any
    dt: Any
    state: Any
    a_log: Any
    dt_bias: Any
    skip: Any
    norm: Any


def drawn(step: Step) -> Inputs:
    rng = np.random.default_rng(step.seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    return Inputs(
        normal(step.tokens, INNER + 2 * KEYS),
        normal(step.tokens, INNER),
        3 * normal(step.tokens, HEADS),
        normal(step.entries, HEADS, STATE_DIM, HEAD_DIM),
        np.log(rng.uniform(0.01, 16, HEADS)).astype(np.float32),
        normal(HEADS),
        normal(HEADS),
        1 + normal(INNER) / 4,
    )


def step_of(*rows: Row, decode: bool = False, seed: int = 0) -> Step:
    return Step(rows, ROWS if decode else TOKENS, ROWS, ENTRIES, decode=decode, seed=seed)


@functools.cache
def compiled() -> Callable[..., Any]:
    def call(inputs: Inputs, meta: Any) -> Any:
        options = {name: getattr(inputs, name) for name in ("a_log", "dt_bias", "skip", "norm")}
        return mamba2(*inputs[:4], meta, **options, eps=EPS, num_groups=GROUPS, dt_limit=LIMIT)

    return jax.jit(call)


def run(inputs: Inputs, step: Step) -> tuple[NDArray[Any], NDArray[np.float32]]:
    out, state = compiled()(inputs, step.meta)
    return np.array(out), np.array(state)


def by_hand(inputs: Inputs, step: Step) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the outputs of all tokens, and the new state, in float64."""
    xbc, gate, dt, old, a_log, dt_bias, skip, norm = (np.asarray(x, np.float64) for x in inputs)
    outputs, new = np.zeros((len(xbc), INNER)), old.copy()
    for row, span, read, written, kept in zip(
        step.rows, step.spans, step.reads, step.writes, step.keeps, strict=True
    ):
        state = np.zeros(old.shape[1:]) if read is None else old[read].copy()
        for done, at in enumerate(range(span.start, span.stop), 1):
            time = np.clip(np.log1p(np.exp(dt[at] + dt_bias)), *LIMIT)
            y = np.zeros((HEADS, HEAD_DIM))
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                x = xbc[at, head * HEAD_DIM :][:HEAD_DIM]
                b = xbc[at, INNER + group * STATE_DIM :][:STATE_DIM]
                c = xbc[at, INNER + KEYS + group * STATE_DIM :][:STATE_DIM]
                state[head] *= np.exp(-np.exp(a_log[head]) * time[head])
                state[head] += np.outer(b, time[head] * x)
                y[head] = c @ state[head] + skip[head] * x
            gated = (y.reshape(-1) * gate[at] / (1 + np.exp(-gate[at]))).reshape(GROUPS, -1)
            gated /= np.sqrt((gated**2).mean(axis=1, keepdims=True) + EPS)
            outputs[at] = gated.reshape(-1) * norm
            if done == row.cut:
                new[kept] = state
        new[written] = state
    return outputs, new


def check(step: Step) -> None:
    inputs = drawn(step)
    out, state = run(inputs, step)
    expected, states = by_hand(inputs, step)
    total = step.spans[-1].stop
    np.testing.assert_allclose(out[:total], expected[:total], rtol=1e-3, atol=2e-4)
    np.testing.assert_allclose(state, states, rtol=1e-4, atol=2e-5)
    written = {*step.writes, *(entry for entry, row in zip(step.keeps, step.rows, strict=True) if row.cut)}
    untouched = [entry for entry in range(ENTRIES) if entry not in written]
    assert state[untouched].tobytes() == inputs.state[untouched].tobytes()


def test_a_long_row_in_blocks_follows_the_recurrence() -> None:
    check(step_of(Row(2 * BLOCK_TOKENS + 3)))
    check(step_of(Row(2 * BLOCK_TOKENS + 3, fresh=True)))


def test_rows_of_one_token_follow_the_recurrence() -> None:
    rows = (Row(1), Row(1, fresh=True), Row(1, cut=1))
    check(step_of(*rows, decode=True))
    check(step_of(*rows))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(rows_of(1) | rows_of(90), min_size=1, max_size=ROWS).filter(
        lambda rows: sum(row.new for row in rows) <= TOKENS
    ),
    st.integers(0, 3),
)
def test_any_step_follows_the_recurrence(rows: list[Row], seed: int) -> None:
    check(step_of(*rows, seed=seed))


@pytest.mark.parametrize("decode", [False, True])
def test_a_nan_stays_in_its_row(decode: bool) -> None:
    step = step_of(Row(1), Row(1 if decode else 66, cut=1), Row(1), decode=decode)
    inputs = drawn(step)
    sound, sound_state = run(inputs, step)
    tainted = inputs.xbc.copy()
    tainted[step.spans[-1].stop :] = np.nan  # what an earlier step left in padding tokens
    own, real = step.spans[1], slice(step.spans[-1].stop)
    entries = {step.reads[1], step.writes[1], step.keeps[1]}
    others = [entry for entry in range(ENTRIES) if entry not in entries]
    for name, place in (
        ("xbc", (1, 0)),
        ("xbc", (1, INNER)),
        ("gate", (1, 0)),
        ("dt", (1, 1)),
        ("state", (step.reads[1], 0, 0, 0)),
    ):
        mixed = inputs._replace(xbc=tainted.copy())
        spoiled = getattr(mixed, name).copy()
        spoiled[place] = np.nan
        out, state = run(mixed._replace(**{name: spoiled}), step)
        assert np.isnan(out[own]).any(), name
        out[own] = sound[own]
        assert out[real].tobytes() == sound[real].tobytes(), name
        assert state[others].tobytes() == sound_state[others].tobytes(), name


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    step = step_of(Row(100), Row(1))
    inputs = drawn(step)
    narrow = inputs._replace(xbc=inputs.xbc.astype(jnp.bfloat16), gate=inputs.gate.astype(jnp.bfloat16))
    wide = narrow._replace(xbc=narrow.xbc.astype(np.float32), gate=narrow.gate.astype(np.float32))
    (out, state), (exact, exact_state) = run(narrow, step), run(wide, step)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), exact.astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(state, exact_state)
