"""Counts the operations and bytes that a workload needs at least, from the model's config. Pure functions.

It counts products with the weights, attention's two products, reading each weight once a pass, and reading
the keys and values that a token attends to. It leaves out small things: norms, RoPE, sampling, writing KV,
and what recurrent layers do besides their products. A wave has two phases, as in an engine with a perfect
prefix cache: one pass over every prompt token that no earlier prompt has computed, then one pass for each
decode step over the requests that still run.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from bench.workloads import Job
from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MLPAndExpertsConfig,
    MLPConfig,
    ModelConfig,
)
from penstock.runtime.models.configs.recurrent import RecurrentConfig
from penstock.runtime.ops.kv_rows import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one or more passes over the model."""

    operations: float
    """Floating-point operations; a multiply-add counts as two."""
    bytes_read: float

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes_read + other.bytes_read)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine can do."""

    operations_per_s: float
    bytes_per_s: float

    def seconds(self, work: Work) -> float:
        """Return the least time of one pass, if computing and reading overlap fully."""
        return max(work.operations / self.operations_per_s, work.bytes_read / self.bytes_per_s)


Span = tuple[int, int]
"""Positions [start, end) of one request that a pass computes."""


def layer_weights(config: ModelConfig) -> int:
    """Count the weights in all layers' products, without embedding and head."""
    return sum(_weights_of(layer, config.hidden_size) for layer in config.layers)


def _weights_of(layer: LayerConfig, hidden_size: int) -> int:
    """Count the weights in one layer's products, of experts those that one token needs."""
    beside = 0 if layer.beside is None else layer.beside.num_weights(hidden_size)
    mlp = 0 if layer.mlp is None else _mlp_weights(layer.mlp, hidden_size)
    return _attention_weights(layer.attention, hidden_size) + beside + mlp


def _mlp_weights(mlp: MLPConfig | ExpertsConfig | MLPAndExpertsConfig, hidden_size: int) -> int:
    if isinstance(mlp, MLPAndExpertsConfig):
        return _mlp_weights(mlp.mlp, hidden_size) + _mlp_weights(mlp.experts, hidden_size)
    if isinstance(mlp, ExpertsConfig):
        return hidden_size * (3 * mlp.active_size + mlp.num_experts)
    return 3 * hidden_size * mlp.intermediate_size


def _attention_weights(ours: AttentionConfig | LatentConfig | RecurrentConfig, hidden_size: int) -> int:
    if isinstance(ours, RecurrentConfig):
        return ours.num_weights(hidden_size)
    if isinstance(ours, AttentionConfig):
        heads_with_weights = (3 if ours.output_gate else 2) * ours.num_heads + 2 * ours.num_kv_heads
        return hidden_size * heads_with_weights * ours.head_dim
    kept, query = ours.latent_dim + ours.rope_dim, ours.num_heads * (ours.nope_dim + ours.rope_dim)
    rank = ours.query_rank
    queries = hidden_size * query if rank is None else (hidden_size + query) * rank
    heads = ours.num_heads * ours.latent_dim * (ours.nope_dim + ours.value_dim)
    return queries + heads + hidden_size * (kept + ours.num_heads * ours.value_dim)


def _pair_products(ours: AttentionConfig | LatentConfig | RecurrentConfig) -> int:
    """Count the multiply-adds of attention for each pair of a token and a position that it attends to."""
    if isinstance(ours, RecurrentConfig):
        return 0
    if isinstance(ours, AttentionConfig):
        return 2 * ours.num_heads * ours.head_dim
    return ours.num_heads * (2 * ours.latent_dim + ours.rope_dim)


def _kept_bytes(ours: AttentionConfig | LatentConfig | RecurrentConfig, *, is_int8: bool) -> int:
    """Count the bytes of each position in the cache, whose KV rows hold a key or a value of one head."""
    if isinstance(ours, RecurrentConfig):
        return 0
    if isinstance(ours, AttentionConfig):
        rows, row = 2 * ours.num_kv_heads, ours.head_dim
    else:
        rows, row = 1, ours.latent_dim + ours.rope_dim
    return rows * (row + SCALE_BYTES if is_int8 else 2 * row)


def head_weights(config: ModelConfig) -> int:
    """Count the weights in the product that gives logits."""
    return config.vocab_size * config.hidden_size


def one_pass(
    config: ModelConfig, spans: Sequence[Span], *, weight_bytes: float = 2, kv_is_int8: bool = False
) -> Work:
    """Return the work of one pass that computes these spans and samples one token for each.

    `weight_bytes` is the size of one weight. The cache holds numbers of two bytes, or of one with a scale
    for each KV row. A position p attends to p + 1 positions: 4 operations for each position, head and
    dimension (a multiply-add for the score, and one for the sum of values); with latent attention the
    dimensions are those of the latent.
    """
    tokens = sum(end - start for start, end in spans)
    attended = sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in spans)
    layers, head = layer_weights(config), head_weights(config)
    products = 2 * (layers * tokens + head * len(spans))
    heads = [layer.attention for layer in config.layers]
    pairs = 2 * sum(map(_pair_products, heads)) * attended
    kv = sum(_kept_bytes(attention, is_int8=kv_is_int8) for attention in heads)
    read = (layers + head) * weight_bytes + kv * sum(end for _, end in spans)
    return Work(float(products + pairs), float(read))


def prefill_spans(jobs: Sequence[Job], known: Sequence[tuple[int, ...]] = ()) -> list[Span]:
    """Return what is left to compute of each prompt if every shared beginning is computed once.

    `known` are prompts computed before. The last token of a prompt is always computed, because its logits are
    needed.
    """
    seen = sorted(known)
    spans: list[Span] = []
    for job in jobs:
        prompt = job.token_ids
        at = bisect.bisect_left(seen, prompt)  # a neighbour in this order has the longest common beginning
        shared = max((_common(prompt, other) for other in seen[max(0, at - 1) : at + 1]), default=0)
        spans.append((min(shared, len(prompt) - 1), len(prompt)))
        seen.insert(at, prompt)
    return spans


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def decode_spans(jobs: Sequence[Job]) -> list[list[Span]]:
    """Return the spans of each decode step if all requests decode together: step t computes the t-th
    generated token.
    """
    longest = max(job.max_tokens for job in jobs)
    return [
        [(len(job.token_ids) + step - 1, len(job.token_ids) + step) for job in jobs if job.max_tokens > step]
        for step in range(1, longest)
    ]
