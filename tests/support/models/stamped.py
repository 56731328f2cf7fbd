"""A toy whose KV tells which weights computed it, so that what comes of old KV under new weights can be
computed by hand.

next token = (7 * sum of scale * token over all tokens so far + 3 * how many + offset) mod vocabulary. Each
token is multiplied by the `scale` of the weights that wrote its KV; `offset` is of the weights that make the
token. The sum comes from the paged cache, as in `tests.support.models.toy`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from penstock.runtime.engine import Engine
from penstock.runtime.loading.served_model import ServedModel
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, AttentionOptions
from penstock.runtime.ops.recurrent.operations import RecurrentOps
from tests.support.models.toy import VOCAB, plain_rules, toy_engine, toy_model

_DIM = 4


@dataclass(frozen=True)
class Stamp:
    """The weights."""

    scale: int
    offset: int

    @property
    def label(self) -> str:
        """For the version that has these weights; see `stamp_of`."""
        return f"{self.scale},{self.offset}"

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """As a checkpoint has them."""
        return {
            "offset": np.full((1,), self.offset, np.float32),
            "scale": np.full((1,), self.scale, np.float32),
        }


START = Stamp(1, 1)


def stamp_of(label: str) -> Stamp:
    """Return the weights of a label that `Stamp.label` gave, or of the one that an engine starts with."""
    if label == "initial":
        return START
    scale, offset = map(int, label.split(","))
    return Stamp(scale, offset)


def next_token(tokens: Sequence[int], written: Sequence[Stamp], stamp: Stamp) -> int:
    """Return the greedy token after these, whose KV was written by those weights, one for each token."""
    total = sum(by.scale * token for token, by in zip(tokens, written, strict=True))
    return (7 * total + 3 * len(tokens) + stamp.offset) % VOCAB


def fresh_tokens(prompt: Sequence[int], num: int, stamp: Stamp) -> list[int]:
    """Return the tokens that weights generate by which all KV was written: of a fresh server, or after
    RECOMPUTE.
    """
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(next_token(tokens, [stamp] * len(tokens), stamp))
    return tokens[len(prompt) :]


def kept_tokens(prompt: Sequence[int], written: Sequence[Stamp], made_by: Sequence[Stamp]) -> list[int]:
    """Return the tokens of a request that went on with its old KV.

    `written` are the weights that wrote the KV of each token of the prompt but the last, and `made_by` those
    that made each output token. A token's KV is written in the step that makes the next token, so by the same
    weights.
    """
    tokens, by = list(prompt), list(written)
    for stamp in made_by:
        by.append(stamp)
        tokens.append(next_token(tokens, by, stamp))
    return tokens[len(prompt) :]


class StampedLM(nnx.Module):
    """See the module docstring."""

    def __init__(self) -> None:
        self.offset = nnx.Param(jnp.full((1,), START.offset, jnp.float32))
        self.scale = nnx.Param(jnp.full((1,), START.scale, jnp.float32))

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv: tuple[jax.Array, ...],
        metas: tuple[AttentionMeta, ...],
        *,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Hidden [T, 2]: the sum so far, and how many tokens."""
        zeros = jnp.zeros((token_ids.shape[0], 1, _DIM), jnp.float32)
        values = zeros.at[:, 0, 0].set(self.scale[...] * token_ids.astype(jnp.float32))
        mean, layer = attention(zeros, zeros, values, kv[0], metas[0], AttentionOptions(1.0))
        count = (positions + 1).astype(jnp.float32)
        return jnp.stack([jnp.round(mean[:, 0, 0] * count), count], axis=1), (layer,)

    def normalized(self, hidden: jax.Array) -> jax.Array:
        return hidden.astype(jnp.float32)

    def logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        following = (7 * hidden[:, 0] + 3 * hidden[:, 1] + self.offset[...]) % VOCAB
        return 10 * jax.nn.one_hot(following.astype(jnp.int32), VOCAB, dtype=jnp.float32)


def stamped_engine(*, max_model_len: int = 128, **changes: Any) -> Engine:
    """Start an engine on START; the caller shuts it down."""
    graphdef, weights = nnx.split(StampedLM())
    model: ServedModel = dataclasses.replace(
        toy_model(max_model_len=max_model_len),
        name="stamped",
        architecture="StampedForCausalLM",
        graphdef=graphdef,
        weights=weights,
        rules=plain_rules(offset=(1,), scale=(1,)),
    )
    return toy_engine(model, **changes)
