"""What recurrent layers compute, in float64 numpy, token after token; and steps of rows to compute it for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Step = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
"""(state of an entry, token of the step) -> (the token's output, the next state)."""


@dataclass(frozen=True)
class Row:
    """A row of a step. Entries are numbers of the state's arrays; None is past their end."""

    count: int
    read: int | None
    written: int | None
    cut: int = 0
    cut_to: int | None = None


def row_arrays(rows: Sequence[Row], num_entries: int) -> dict[str, np.ndarray]:
    """Make the fields of `penstock.runtime.ops.native.state.StateRows`, int32[R]."""

    def numbers(entries: Sequence[int | None]) -> np.ndarray:
        return np.array([num_entries if entry is None else entry for entry in entries], np.int32)

    return {
        "q_lens": np.array([row.count for row in rows], np.int32),
        "read": numbers([row.read for row in rows]),
        "written": numbers([row.written for row in rows]),
        "cut": np.array([row.cut for row in rows], np.int32),
        "cut_to": numbers([row.cut_to for row in rows]),
    }


def run_rows(rows: Sequence[Row], state: Any, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Compute the outputs of the rows' tokens, one after the other, and the state [S, ...] afterwards."""
    before = np.asarray(state).astype(np.float64)
    after, outputs, token = before.copy(), [], 0
    for row in rows:
        here = np.zeros_like(before[0]) if row.read is None else before[row.read]
        for number in range(1, row.count + 1):
            out, here = step(here, token)
            outputs.append(out)
            token += 1
            if number == row.cut and row.cut_to is not None:
                after[row.cut_to] = here
            if number == row.count and row.written is not None:
                after[row.written] = here
    return np.array(outputs), after


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result


def silu(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x * sigmoid(x)
    return result


def convolution(x: Any, weight: Any, bias: Any, *, activated: bool) -> Step:
    """x [T, C], weight [K, C], bias [C] or None; the state is [K - 1, C]."""
    x, weight = wide(x), wide(weight)

    def step(kept: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.concatenate([kept, x[token][None]])
        y = (inputs * weight).sum(axis=0) + (0 if bias is None else wide(bias))
        return silu(y) if activated else y, inputs[1:]

    return step


def delta_net(
    qkv: Any, z: Any, ba: Any, *, a_log: Any, dt_bias: Any, norm: Any, eps: float, key_heads: int
) -> Step:
    """qkv [T, 2 Hk Dk + Hv Dv], z [T, Hv Dv], ba [T, 2 Hv]; the state is [Hv, Dk, Dv]."""
    heads, size = len(a_log), np.asarray(z).shape[1] // len(a_log)
    dim = (np.asarray(qkv).shape[1] - heads * size) // (2 * key_heads)
    values = np.split(wide(qkv), [key_heads * dim, 2 * key_heads * dim], axis=1)

    def unit(x: np.ndarray) -> np.ndarray:
        x = np.repeat(x.reshape(-1, key_heads, dim), heads // key_heads, axis=1)
        result: np.ndarray = x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)
        return result

    q, k, v = unit(values[0]) / np.sqrt(dim), unit(values[1]), values[2].reshape(-1, heads, size)
    b, a = np.split(wide(ba), 2, axis=1)
    decay = np.exp(-np.exp(wide(a_log)) * np.logaddexp(0, a + wide(dt_bias)))
    gate = silu(wide(z))

    def step(state: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        state = state * decay[t][:, None, None]
        update = sigmoid(b[t])[:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + np.einsum("hk,hv->hkv", k[t], update)
        out = np.einsum("hkv,hk->hv", state, q[t])
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + eps) * wide(norm)
        return out.reshape(-1) * gate[t], state

    return step


def mamba2(
    xbc: Any,
    gate: Any,
    dt: Any,
    *,
    a_log: Any,
    dt_bias: Any,
    skip: Any,
    norm: Any,
    eps: float,
    groups: int,
    dt_limit: tuple[float, float],
) -> Step:
    """xbc [T, H P + 2 G N], gate [T, H P], dt [T, H]; the state is [H, N, P]."""
    heads, channels = len(a_log), np.asarray(gate).shape[1]
    dim = (np.asarray(xbc).shape[1] - channels) // (2 * groups)
    x, b, c = np.split(wide(xbc), [channels, channels + groups * dim], axis=1)
    x = x.reshape(-1, heads, channels // heads)
    b, c = (np.repeat(part.reshape(-1, groups, dim), heads // groups, axis=1) for part in (b, c))
    time = np.clip(np.logaddexp(0, wide(dt) + wide(dt_bias)), *dt_limit)
    decay = np.exp(-np.exp(wide(a_log)) * time)

    def step(state: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        added = np.einsum("hn,hp->hnp", b[t], time[t][:, None] * x[t])
        state = state * decay[t][:, None, None] + added
        y = np.einsum("hnp,hn->hp", state, c[t]) + wide(skip)[:, None] * x[t]
        gated = (y.reshape(-1) * silu(wide(gate)[t])).reshape(groups, -1)
        gated = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + eps)
        return gated.reshape(-1) * wide(norm), state

    return step
