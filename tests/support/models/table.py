"""A model with varied logits that a few lines of numpy can compute, as tests/support/models/witness.py does.

The logits after tokens t_1 ... t_n are table[t_n] + wave[(t_1 + ... + t_n) % VOCAB]. The sum comes from the
paged cache, as in `tests.support.models.toy`, so that a wrong page, position or length leads to another row
of `wave`. Both matrices are weights, so one engine can serve any tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from penstock.runtime.engine import Engine
from penstock.runtime.loading.served_model import ServedModel
from penstock.runtime.loop.interface import Observer
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, AttentionOptions
from penstock.runtime.ops.recurrent.operations import RecurrentOps
from tests.support.models.toy import EOS, VOCAB, plain_rules, toy_engine, toy_model

__all__ = ["EOS", "VOCAB", "Tables", "random_tables", "serve", "table_engine", "table_model"]

_DIM = 4
_NAMES = ("table", "wave")
Matrix = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Tables:
    """The two matrices, each float32[VOCAB, VOCAB]."""

    table: Matrix
    wave: Matrix

    @classmethod
    def constant(cls, logits: Sequence[float]) -> Tables:
        """Tables that give the same logits after any tokens: those given, and -50 for the tokens beyond."""
        row = np.full(VOCAB, -50.0, np.float32)
        row[: len(logits)] = logits
        return cls(np.tile(row, (VOCAB, 1)), np.zeros((VOCAB, VOCAB), np.float32))

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return the logits after these tokens, float64[VOCAB]."""
        rows = np.stack([self.table[tokens[-1]], self.wave[sum(tokens) % VOCAB]]).astype(np.float64)
        total: NDArray[np.float64] = rows.sum(axis=0)
        return total

    def tensors(self) -> dict[str, Matrix]:
        """Return the matrices as `Engine.update_weights` takes them."""
        return {name: getattr(self, name) for name in _NAMES}


def random_tables(seed: int = 7) -> Tables:
    """Tables whose logits lie between -6 and 6, so that penalties and biases of a few units change which is
    largest.
    """
    rng = np.random.default_rng(seed)
    table, wave = rng.uniform(-3, 3, (2, VOCAB, VOCAB)).astype(np.float32)
    return Tables(table, wave)


class TableLM(nnx.Module):
    """See the module docstring."""

    def __init__(self, tables: Tables) -> None:
        self.table = nnx.Param(jnp.asarray(tables.table))
        self.wave = nnx.Param(jnp.asarray(tables.wave))

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
        """Hidden [T, 2]: the sum of all tokens so far, and the newest token."""
        zeros = jnp.zeros((token_ids.shape[0], 1, _DIM), jnp.float32)
        newest = token_ids.astype(jnp.float32)
        mean, layer = attention(
            zeros, zeros, zeros.at[:, 0, 0].set(newest), kv[0], metas[0], AttentionOptions(1.0)
        )
        total = jnp.round(mean[:, 0, 0] * (positions + 1).astype(jnp.float32))
        return jnp.stack([total, newest], axis=1), (layer,)

    def normalized(self, hidden: jax.Array) -> jax.Array:
        return hidden.astype(jnp.float32)

    def logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        total, newest = hidden.astype(jnp.int32).T
        logits: jax.Array = self.table[...][newest] + self.wave[...][total % VOCAB]
        return logits


def table_model(
    tables: Tables, *, eos_token_ids: tuple[int, ...] = (EOS,), max_model_len: int = 128
) -> ServedModel:
    """Make a ServedModel of these tables, without a tokenizer."""
    graphdef, weights = nnx.split(TableLM(tables))
    return dataclasses.replace(
        toy_model(eos_token_ids=eos_token_ids, max_model_len=max_model_len),
        name="table",
        architecture="TableForCausalLM",
        graphdef=graphdef,
        weights=weights,
        rules=plain_rules(table=(VOCAB, VOCAB), wave=(VOCAB, VOCAB)),
    )


def table_engine(
    tables: Tables, *, max_model_len: int = 128, observer: Observer | None = None, **changes: Any
) -> Engine:
    """Start an engine of `toy_config`; the caller shuts it down."""
    return toy_engine(table_model(tables, max_model_len=max_model_len), observer=observer, **changes)


def serve(engine: Engine, tables: Tables) -> None:
    """Make the engine serve other tables from now on; no request may be running."""
    engine.update_weights(tables.tensors(), label="tables").result(60)
