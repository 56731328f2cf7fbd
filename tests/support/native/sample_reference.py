"""The result of `penstock.runtime.ops.native.sample` in numpy and float64, written from its definition.

Rounding to float32 may change which token is drawn, so a token is not compared with a single expected one: it
must be among those that the filters keep, and lie where the uniforms point, both with a small slack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.sampling import FLOATS, INTS

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CHUNK = 512
IN_PROMPT = 1 << 30
NUM_TOP = 7
"""For how many of the likeliest tokens the tests ask."""
SLACK = 1e-4
"""The tolerance for log-weights and for probabilities."""


@dataclass(frozen=True)
class Row:
    """The inputs of one row; None if a feature is off."""

    logits: NDArray[np.float32]
    uniforms: tuple[float, float] = (0.5, 0.5)
    history: NDArray[np.int32] | None = None
    bias: NDArray[np.float32] | None = None
    allowed: Bools | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    banned: bool = False
    num_logprobs: int = -1


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    """Make a row with a random combination of features, with ties, impossible tokens, and filters that cut
    everything or nothing.
    """

    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    def maybe() -> bool:
        return bool(rng.integers(2))

    x = rng.standard_normal(vocab) * one(0.01, 1.0, 3.0, 10.0)
    if maybe():
        x = np.round(x * 4) / 4
    if maybe():
        x[rng.random(vocab) < one(0.1, 0.9)] = -np.inf
        x[rng.integers(vocab)] = 1.0
    history = np.where(rng.random(vocab) < 0.1, rng.integers(0, 4, vocab), 0)
    history |= np.where(rng.random(vocab) < 0.1, IN_PROMPT, 0)
    bias = np.where(rng.random(vocab) < 0.2, np.round(rng.standard_normal(vocab) * 8) / 4, 0.0)
    bias[rng.random(vocab) < one(0.0, 0.3, 1.0)] = -np.inf
    allowed = rng.random(vocab) < one(0.02, 0.5, 1.0)
    allowed[np.argmax(x)] = True  # so that a possible token is left, whatever else is forbidden
    u = rng.random(2, np.float32)
    return Row(
        logits=x.astype(np.float32),
        uniforms=(float(u[0]), float(u[1])),
        history=history.astype(np.int32) if maybe() else None,
        bias=bias.astype(np.float32) if maybe() else None,
        allowed=allowed if maybe() else None,
        temperature=one(0.0, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0),
        top_k=int(one(0, 0, 1, 2, 10, 400, 3000, vocab, 2**31 - 1)),
        top_p=one(1.0, 1.0, 0.05, 0.5, 0.9, 0.99, 0.9999999),
        min_p=one(0.0, 0.0, 0.01, 0.3, 1.0),
        presence_penalty=one(0.0, 0.5, -1.0),
        frequency_penalty=one(0.0, 0.25, -0.5),
        repetition_penalty=one(1.0, 1.25, 0.8, 2.0),
        stop_ids=tuple(rng.integers(0, vocab + 3, int(rng.integers(0, 33))).tolist()),
        banned=maybe(),
        num_logprobs=int(one(-1, 0, 1, 5, NUM_TOP, 20)),
    )


def pack_mask(allowed: Bools) -> NDArray[np.int32]:
    """bool[V] -> int32[ceil(V / 32)], the lowest bit first."""
    bits = np.pad(allowed, (0, -len(allowed) % 32))
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def arrays(
    rows: list[Row], *, order: NDArray[np.int64], padding: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """Make the arguments of `sample` for these rows and `padding` more. Row r has slot order[r]. Whatever
    must not be read is NaN or a meaningless number.
    """
    vocab, total = len(rows[0].logits), len(rows) + padding
    num_slots = int(order.max()) + 1
    logits = np.full((total, vocab), np.nan, np.float32)
    history = np.full((num_slots, vocab), IN_PROMPT + 999, np.int32)
    bias = np.full((num_slots, vocab), np.nan, np.float32)
    mask = np.zeros((total, (vocab + 31) // 32), np.int32)
    uniforms = np.zeros((total, 2), np.float32)
    stop_ids = np.full((total, 32), vocab, np.int32)
    single = {name: np.zeros(total, np.int32) for name in ("features", "banned", "num_logprobs")}
    ints = np.zeros((total, len(INTS)), np.int32)
    floats = np.zeros((total, len(FLOATS)), np.float32)
    slots = np.full(total, num_slots, np.int32)
    for r, row in enumerate(rows):
        logits[r], uniforms[r], slots[r] = row.logits, row.uniforms, order[r]
        stop_ids[r, : len(row.stop_ids)] = row.stop_ids
        if row.history is not None:
            history[order[r]] = row.history
            single["features"][r] |= 1
        if row.bias is not None:
            bias[order[r]] = row.bias
            single["features"][r] |= 2
        if row.allowed is not None:
            mask[r] = pack_mask(row.allowed)
            single["features"][r] |= 4
        single["banned"][r], single["num_logprobs"][r] = row.banned, row.num_logprobs
        ints[r] = [getattr(row, name) for name in INTS]
        floats[r] = [getattr(row, name) for name in FLOATS]
    named = {"slots": slots, "stop_ids": stop_ids, "ints": ints, "floats": floats, **single}
    return [logits, history, bias, mask, uniforms], named


def edited(row: Row) -> Floats:
    """Return the logits after penalties, mask, bias and bans: float64[V], -inf where a token is forbidden."""
    x = row.logits.astype(np.float64)
    vocab = len(x)
    if row.history is not None:
        seen, count = row.history != 0, row.history & (IN_PROMPT - 1)
        repetition = np.float64(np.float32(row.repetition_penalty))
        x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
        x = (
            x
            - np.float64(np.float32(row.frequency_penalty)) * count
            - np.float64(np.float32(row.presence_penalty)) * (count > 0)
        )
    masked: Floats = x if row.allowed is None else np.where(row.allowed, x, -np.inf)
    out: Floats = masked if row.bias is None else masked + row.bias.astype(np.float64)
    if row.banned:
        out = out.copy()
        out[[i for i in row.stop_ids if i < vocab]] = -np.inf
    return out if out.max() > -np.inf else masked


def kept(scaled: Floats, row: Row, slack: float) -> Bools:
    """Return the tokens that the filters keep if thresholds are off by `slack`; a token exactly at a
    threshold stays.
    """
    vocab = len(scaled)
    below = max(slack, 0.0)
    keep: Bools = scaled > -np.inf
    if 0 < row.top_k < vocab:
        keep &= scaled >= np.sort(scaled)[::-1][row.top_k - 1] - below
    if row.top_p < 1.0:
        weights = np.where(keep, np.exp(scaled), 0.0)
        order = np.argsort(-np.where(keep, scaled, -np.inf), kind="stable")
        share = np.cumsum(weights[order]) / weights.sum()
        need = min(float(np.float32(row.top_p)) + slack, share[-1])
        last = order[int(np.argmax(share >= need))]
        keep &= scaled >= scaled[last] - below
    if row.min_p > 0.0:
        keep &= (scaled >= np.log(np.float64(np.float32(row.min_p))) - slack) | (scaled == 0.0)
    return keep


def _points_at(most: Floats, least: Floats, drawn: int, uniform: float) -> bool:
    """Say whether inverse CDF sampling with `uniform` can give `drawn`, if the masses lie between `least` and
    `most`.
    """
    below, total = most[:drawn].sum(), most.sum()
    slack = SLACK + 2 * (total - least.sum()) / total
    return bool(below / total - slack <= uniform <= (below + most[drawn]) / total + slack)


def check_token(row: Row, token: int) -> bool:
    """Assert that the row may give this token. Returns whether rounding could have changed nothing."""
    x = edited(row)
    top = x.max()
    exact = row.history is None and row.bias is None
    if row.temperature == 0.0:
        if exact:
            assert token == int(np.argmax(x))
        assert x[token] >= top - 1e-5 * (1.0 + abs(top))
        return exact
    scaled = (x - top) / np.float64(np.float32(row.temperature))
    most, least = kept(scaled, row, SLACK), kept(scaled, row, -SLACK)
    assert most[token], f"token {token} should have been cut"
    padded = []
    for keep in (most, least):
        weights = np.where(keep, np.exp(scaled), 0.0)
        padded.append(np.pad(weights, (0, -len(weights) % CHUNK)).reshape(-1, CHUNK))
    chunk, inside = divmod(token, CHUNK)
    assert padded[0][chunk, inside] > 0.0
    sums = [weights.sum(axis=1) for weights in padded]
    assert _points_at(sums[0], sums[1], chunk, row.uniforms[0]), (
        f"the draw does not point at the chunk of token {token}"
    )
    within = [weights[chunk] for weights in padded]
    assert _points_at(within[0], within[1], inside, row.uniforms[1]), (
        f"the draw does not point at token {token} in its chunk"
    )
    return bool((most == least).all())


def check_logprobs(row: Row, token: int, logprob: float, top_ids: Any, top_logprobs: Any) -> None:
    """Assert that a row's log-probabilities are those of its raw logits."""
    num_top, vocab = len(top_ids), len(row.logits)
    x = row.logits.astype(np.float64)
    expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
    wanted = min(row.num_logprobs, vocab, num_top)
    if row.num_logprobs < 0:
        wanted = 0
        assert logprob == 0.0
    else:
        np.testing.assert_allclose(logprob, expected[token], rtol=1e-6, atol=1e-5)
    ids = np.lexsort((np.arange(vocab), -x))[:wanted]
    np.testing.assert_array_equal(top_ids, np.pad(ids, (0, num_top - wanted)))
    np.testing.assert_allclose(
        top_logprobs, np.pad(expected[ids], (0, num_top - wanted)), rtol=1e-6, atol=1e-5
    )
