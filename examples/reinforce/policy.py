"""The trainer's own copy of the model: float32 weights under the names of the checkpoint's tensors.

Its forward is the one that trained the demo model (tools/demo_model/model.py). It is plain JAX, and shares no
code with the server.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.reinforce.learner import LogProbs
from tools.demo_model.model import ModelConfig, Params, forward


def as_served(params: Params, dtype: str) -> Params:
    """Return the weights as the server has them: rounded to bfloat16 if that is its `dtype`, but in float32.

    The trainer computes with these, so that its policy is the one that the server samples from. The gradient
    passes the rounding unchanged (but for its own rounding), and changes the unrounded weights: most changes
    of one step are too small to be seen in bfloat16, and must add up.
    """
    if dtype != "bf16":
        return params
    # XLA may leave out a conversion to bfloat16 and back; it keeps reduce_precision.
    return {name: jax.lax.reduce_precision(value, 8, 7) for name, value in params.items()}


def to_push(params: Params, dtype: str) -> Params:
    """Return the tensors to send to a server that serves `dtype`, without bits that it could not keep."""
    return {name: value.astype(jnp.bfloat16) for name, value in params.items()} if dtype == "bf16" else params


def logprobs_of(config: ModelConfig, dtype: str) -> LogProbs:
    """Make the function that computes log-probabilities, with weights as a server of this `dtype` has them.

    That of a row's first token is 0, because nothing comes before it. Rows are padded behind their last
    token, where causal attention does not look.
    """

    def logprobs(params: Params, tokens: jax.Array) -> jax.Array:
        logits = forward(as_served(params, dtype), tokens[:, :-1], jnp.zeros_like(tokens[:, :-1]), config)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        found = chosen - jax.nn.logsumexp(logits, axis=-1)
        return jnp.pad(found, ((0, 0), (1, 0)))

    return logprobs
