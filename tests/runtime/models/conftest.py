"""Golden checkpoints, and a test double of paged attention that needs neither pages nor the engine.

The double keeps one sequence in one contiguous cache for each layer, float32 [slots, 2, kv heads, head_dim],
or [slots, 1, 1, head_dim] where values are channels of the keys; a slot is one position here. Its `meta`
holds the positions, int32 [T]. Padding tokens are written to the last slot, which no real token uses.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.models import params
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.ops.cache_spec import PagedKV

SLOTS = 128
CHUNK = 8
GOLDEN = Path(__file__).parents[2] / "golden"


class Meta(NamedTuple):
    """The part of `AttentionMeta` that the model and the double read."""

    positions: jax.Array
    num_tokens: jax.Array


def contiguous_attention(
    q,
    k_new,
    v_new,
    kv,
    meta,
    *,
    scale,
    sliding_window=None,
    softcap=None,
    sinks=None,
    chunk=None,
    value_dim=None,
):
    assert (v_new is None) == (value_dim is not None)
    groups = q.shape[1] // k_new.shape[1]
    new = jnp.stack([k_new] if v_new is None else [k_new, v_new], axis=1)
    kv = kv.at[meta.positions].set(new.astype(jnp.float32))
    keys, values = (jnp.repeat(kv[:, i], groups, axis=1) for i in (0, -1))
    values = values[..., :value_dim]
    distance = meta.positions[:, None] - jnp.arange(SLOTS, dtype=jnp.int32)[None, :]
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    if chunk is not None:
        visible &= meta.positions[:, None] // chunk == jnp.arange(SLOTS)[None, :] // chunk
    scores = jnp.einsum("thd,shd->hts", q.astype(jnp.float32), keys, precision="highest") * np.float32(scale)
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    scores = jnp.where(visible[None], scores, -jnp.inf)
    extra = 0 if sinks is None else 1
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, sink], axis=2)
    weights = jax.nn.softmax(scores, axis=-1)[:, :, : scores.shape[2] - extra]
    return jnp.einsum("hts,shd->thd", weights, values, precision="highest").astype(q.dtype), kv


class Sequence:
    """Feeds one sequence through a model in chunks of at most CHUNK tokens, by one compiled program."""

    def __init__(
        self,
        config: ModelConfig,
        state: params.ModelState,
        dtype: str | None = None,
        linear: LinearFormat = PLAIN,
    ) -> None:
        self.leaves = params.state_to_leaves(state)
        shapes = [
            (SLOTS, 2, layer.num_kv_heads, layer.head_dim)
            if isinstance(layer, PagedKV)
            else (SLOTS, 1, 1, layer.head_dim)
            for layer in config.cache.paged
        ]
        self._empty = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)

        def step(leaves, token_ids, positions, kv):
            model = params.bind(config, leaves, dtype, linear)
            meta: Any = Meta(positions, jnp.int32(CHUNK))
            metas = (meta,) * (max(config.cache.group_of) + 1)
            hidden, kv = model(token_ids, positions, kv, metas, attention=contiguous_attention)
            return model.logits(hidden, meta.num_tokens), kv

        self._step = jax.jit(step)
        self.reset()

    def reset(self) -> None:
        self.kv, self.length = self._empty, 0

    def feed(self, tokens, chunk: int = CHUNK) -> np.ndarray:
        """Appends tokens. Returns the logits after the last one, float32 [V]."""
        for begin in range(0, len(tokens), chunk):
            part = tokens[begin : begin + chunk]
            token_ids = np.zeros(CHUNK, np.int32)
            positions = np.full(CHUNK, SLOTS - 1, np.int32)
            token_ids[: len(part)] = part
            positions[: len(part)] = np.arange(self.length, self.length + len(part))
            logits, self.kv = self._step(self.leaves, token_ids, positions, self.kv)
            self.length += len(part)
            last = np.array(logits[len(part) - 1])
        return last


@pytest.fixture(scope="session")
def golden_root() -> Path:
    """The folder of golden checkpoints."""
    return GOLDEN


@pytest.fixture(scope="session")
def make_sequence():
    """A function (config, state) -> Sequence."""
    return Sequence
