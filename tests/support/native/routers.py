"""Routers of transformers' models, and a witness of what they choose, in numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st


def sigmoid(x: np.ndarray) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> Any:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def top(values: np.ndarray, count: int) -> np.ndarray:
    """Return the largest, of equals the first."""
    return np.argsort(-values, kind="stable")[:count]


# Few different values, so that ties are common; they are far enough apart to have one order in float32.
values = st.sampled_from([-3.0, -1.5, -0.5, 0.0, 0.25, 1.0, 2.5, 4.0])


@st.composite
def routers(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    experts = groups * draw(st.integers(1, 6))
    top_groups = draw(st.integers(1, groups))
    per_token = draw(st.integers(1, experts // groups * top_groups))
    rows = draw(st.integers(1, 5))
    row = st.lists(values, min_size=experts, max_size=experts)
    corrections = st.lists(st.sampled_from([-0.7, -0.1, 0.0, 0.3]), min_size=experts, max_size=experts)
    return {
        "logits": np.array(draw(st.lists(row, min_size=rows, max_size=rows)), np.float32),
        "per_token": per_token,
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "normalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "correction": draw(st.none() | corrections),
        "expert_scale": draw(st.none() | corrections),
        "num_groups": groups,
        "top_groups": top_groups,
        "in_group": draw(st.sampled_from([1, 2])),
    }


def is_decided(logits: np.ndarray, router: dict[str, Any]) -> bool:
    """Say whether one row's choice is the same in float32: what differs by rounding alone may come out in
    either order.
    """
    keys, sums = _keys(logits, router)
    return all((np.diff(np.unique(compared)) > 1e-5).all() for compared in (keys, sums))


def _scores(logits: np.ndarray, router: dict[str, Any]) -> Any:
    exact = logits.astype(np.float64)
    return softmax(exact) if router["score"] == "softmax" else sigmoid(exact)


def _keys(logits: np.ndarray, router: dict[str, Any]) -> tuple[Any, Any]:
    """Return what experts are chosen by, and what groups are chosen by."""
    scores = _scores(logits, router)
    keys = scores + np.array(router["correction"] or [0] * len(scores), np.float32)
    return keys, np.sort(keys.reshape(router["num_groups"], -1), axis=1)[:, -router.get("in_group", 2) :].sum(
        axis=1
    )


def witness(logits: np.ndarray, router: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """One row in float64, step by step as transformers' DeepseekV3TopkRouter, or as DeepseekV2's where one
    score of a group counts; others are parts of it.
    """
    scores = _scores(logits, router)
    keys, sums = _keys(logits, router)
    allowed = np.zeros((router["num_groups"], len(keys) // router["num_groups"]), bool)
    allowed[top(sums, router["top_groups"])] = True
    ids = top(np.where(allowed.reshape(-1), keys, -np.inf), router["per_token"])
    weights = scores[ids]
    if router["normalize"]:
        weights = weights / (weights.sum() + 1e-20)
    weights = weights * router["scale"]
    if router["expert_scale"]:
        weights = weights * np.array(router["expert_scale"], np.float32)[ids]
    return ids, weights


def mixed(logits: np.ndarray, jitter: float) -> tuple[list[int], list[float]]:
    """Two choices of one row in float64, step by step as transformers' sparsemixer."""
    scores, ids, weights = logits.astype(np.float64), [], []
    left = scores.copy()
    for _ in range(2):
        best = int(left.argmax())
        far = (left[best] - scores) / np.maximum(np.abs(scores), left[best]) > 2 * jitter
        ids.append(best)
        weights.append(float(softmax(np.where(far, -np.inf, left))[best]))
        left[best] = -np.inf
    return ids, weights
