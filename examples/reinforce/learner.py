"""The gradient step: the loss of PPO, with the mean reward of a question's samples as its baseline (GRPO)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.reinforce.rollouts import Sample

CLIP = 0.2
"""A token whose probability changed by more than this share since it was sampled is not pushed further."""
WIDTH_STEP = 32
"""Rows are padded to a multiple of this, so that few programs are compiled."""

Params: TypeAlias = Any
"""A tree of arrays. The learner does not look into it."""
State: TypeAlias = Any
"""What the optimizer keeps."""


class Batch(NamedTuple):
    """Samples as arrays, one row each: the prompt, the generated tokens, padding."""

    tokens: Any
    """int32 [B, T]"""
    generated: Any
    """bool [B, T]: whether the server generated the token."""
    served: Any
    """float32 [B, T]: the server's log-probability of each generated token; 0 elsewhere."""
    advantages: Any
    """float32 [B]: how much better the sample is than its group's mean."""


class Figures(NamedTuple):
    """What a gradient step measured, before it changed the weights. Log-probabilities are in nats."""

    mean_difference: Any
    max_difference: Any
    """Between the trainer's and the server's log-probabilities of the generated tokens, without sign."""


LogProbs: TypeAlias = Callable[[Params, Any], jax.Array]
"""(weights, token ids [B, T]) -> log-probability of each token, given those before it, float32 [B, T]."""
Update: TypeAlias = Callable[[Params, State, Batch], tuple[Params, State, Figures]]


def batch_of(groups: Sequence[Sequence[Sample]]) -> Batch:
    """Put the samples into arrays. Each group holds the samples of one question.

    A group whose samples all have the same reward teaches nothing: its advantages are 0.
    """
    rows = [sample for group in groups for sample in group]
    longest = max(len(row.prompt) + len(row.tokens) for row in rows)
    shape = (len(rows), -(-longest // WIDTH_STEP) * WIDTH_STEP)
    tokens, generated = np.zeros(shape, np.int32), np.zeros(shape, bool)
    served = np.zeros(shape, np.float32)
    for number, row in enumerate(rows):
        begin, end = len(row.prompt), len(row.prompt) + len(row.tokens)
        tokens[number, :end] = row.prompt + row.tokens
        generated[number, begin:end] = True
        served[number, begin:end] = row.logprobs
    means = [np.mean([sample.reward for sample in group]) for group in groups]
    advantages = [sample.reward - mean for group, mean in zip(groups, means, strict=True) for sample in group]
    return Batch(tokens, generated, served, np.array(advantages, np.float32))


def loss_of(params: Params, batch: Batch, logprobs: LogProbs) -> tuple[jax.Array, Figures]:
    """PPO's clipped loss. The importance ratio is the trainer's probability of a token over the server's, so
    that it also corrects for the rounding in which the two differ.
    """
    count = jnp.sum(batch.generated, dtype=jnp.float32)
    difference = jnp.where(batch.generated, logprobs(params, batch.tokens) - batch.served, 0.0)
    ratio = jnp.exp(difference)
    advantages = batch.advantages[:, None]
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    loss = -jnp.where(batch.generated, gain, 0.0).sum() / count
    distance = jnp.abs(difference)
    return loss, Figures(distance.sum() / count, distance.max())


def make_update(logprobs: LogProbs, optimizer: optax.GradientTransformation) -> Update:
    """Compile a function that makes one gradient step."""

    def update(params: Params, state: State, batch: Batch) -> tuple[Params, State, Figures]:
        gradients, figures = jax.grad(loss_of, has_aux=True)(params, batch, logprobs)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, figures

    return jax.jit(update)
