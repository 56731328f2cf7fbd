"""How many operations and bytes a workload needs at least, counted from the model's config. Pure.

Counted: products with the weights, attention's two products, reading each weight once a pass, reading the
keys and values that a token attends to. Left out as small: norms, RoPE, sampling, writing KV. A wave is taken
in two phases, as if by an engine with a perfect prefix cache: one pass over every prompt token that no
earlier prompt has computed, then one pass per decode step over the requests that still run.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from bench.workloads import Job
from penstock.runtime.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Work:
    """Of one pass over the model, or of many in a row."""

    operations: float
    """Floating-point, a multiply-add as two."""
    bytes_read: float

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes_read + other.bytes_read)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine can do."""

    operations_per_s: float
    bytes_per_s: float

    def seconds(self, work: Work) -> float:
        """The least time of one pass: computing and reading overlap fully."""
        return max(work.operations / self.operations_per_s, work.bytes_read / self.bytes_per_s)


Span = tuple[int, int]
"""Positions [start, end) of one request that a pass computes."""


def layer_weights(config: ModelConfig) -> int:
    """Number of weights in all layers' products, without embedding and head."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * keys)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def head_weights(config: ModelConfig) -> int:
    """Number of weights in the product that gives logits."""
    return config.vocab_size * config.hidden_size


def one_pass(
    config: ModelConfig, spans: Sequence[Span], *, weight_bytes: float = 2, kv_bytes: float = 2
) -> Work:
    """Work of one pass that computes these spans and samples one token for each.

    weight_bytes, kv_bytes: size of one value. A position p attends to p + 1 positions: 4 operations for each,
    head and dimension (a multiply-add for the score and one for the sum of values).
    """
    tokens = sum(end - start for start, end in spans)
    attended = sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in spans)
    layers, head = layer_weights(config), head_weights(config)
    products = 2 * (layers * tokens + head * len(spans))
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * attended
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bytes
    read = (layers + head) * weight_bytes + kv * sum(end for _, end in spans)
    return Work(float(products + attention), float(read))


def prefill_spans(jobs: Sequence[Job], known: Sequence[tuple[int, ...]] = ()) -> list[Span]:
    """What is left to compute of each prompt when every shared beginning is computed once.

    known: prompts computed before. The last token of a prompt is always computed: its logits are needed.
    """
    seen = sorted(known)
    spans: list[Span] = []
    for job in jobs:
        prompt = job.token_ids
        at = bisect.bisect_left(seen, prompt)  # the longest common beginning is with a neighbour
        shared = max((_common(prompt, other) for other in seen[max(0, at - 1) : at + 1]), default=0)
        spans.append((min(shared, len(prompt) - 1), len(prompt)))
        seen.insert(at, prompt)
    return spans


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def decode_spans(jobs: Sequence[Job]) -> list[list[Span]]:
    """The spans of each decode step, all requests in step: step t computes the t-th generated token."""
    longest = max(job.max_tokens for job in jobs)
    return [
        [(len(job.token_ids) + step - 1, len(job.token_ids) + step) for job in jobs if job.max_tokens > step]
        for step in range(1, longest)
    ]
