"""Whole texts through a model that reads, an encoder or a classifier, compared with PyTorch's results in
tests/golden/encoders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from penstock.runtime.execution.on_mesh import CUT, WHOLE, on_mesh
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.params import ModelState, bind, state_to_leaves
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, make_meta, paged_attention

ROWS, TOKENS, PAGES = 4, 128, 64
TOLERANCE = 1e-5


def meta_of(lengths: jax.Array) -> AttentionMeta:
    """Of texts of these lengths, int32 [ROWS], which lie one behind the other."""
    return make_meta(
        starts=jnp.zeros(ROWS, jnp.int32),
        q_lens=lengths,
        page_table=jnp.arange(PAGES, dtype=jnp.int32).reshape(ROWS, -1),
        num_tokens=TOKENS,
        decode_only=False,
        page_size=8,
        num_pages=PAGES,
    )


def typed(case: dict[str, Any], config: ModelConfig) -> list[int]:
    """Return the ids of a case, with the types that the model knows."""
    types = case["type_ids"] if config.encoder and config.encoder.token_types > 1 else None
    return [i + t * config.vocab_size for i, t in zip(case["ids"], types or [0] * 999, strict=False)]


def unit(x: np.ndarray) -> Any:
    return x / np.linalg.norm(x)


def check_reading(
    directory: Path,
    config: ModelConfig,
    state: ModelState,
    mesh: Mesh | None = None,
    attention: AttentionOp = paged_attention,
    linear: LinearFormat = PLAIN,
) -> str:
    """Check that the states and classes of a golden's texts, together and alone, are PyTorch's. mesh: the
    devices over which the model is cut; None: it is not. attention: what a decoder would attend with. linear:
    the format of the state's weights. Returns the program that makes the states, as XLA's text.
    """
    leaves = state_to_leaves(state)
    cases = json.loads((directory / "expected.json").read_text())["cases"]
    arrays = config.cache.arrays((PAGES,), 8, ROWS, np.dtype(np.float32))

    def hidden_of(leaves: Any, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        cache = tuple(jnp.zeros(array.shape, array.dtype) for array in arrays)
        meta, model = meta_of(lengths), bind(config, leaves, linear=linear)
        return model.normalized(model(ids, meta.positions, cache, (meta,), attention=attention)[0])

    def classes_of(leaves: Any, pooled: jax.Array) -> jax.Array:
        return bind(config, leaves, linear=linear).classes(pooled)

    if mesh is None:
        read, classify = jax.jit(hidden_of), jax.jit(classes_of)
    else:
        read = jax.jit(on_mesh(hidden_of, mesh, (CUT, WHOLE, WHOLE), WHOLE))
        classify = jax.jit(on_mesh(classes_of, mesh, (CUT, WHOLE), WHOLE))

    def given(texts: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        flat = [token for text in texts for token in text]
        lengths = [len(text) for text in texts] + [0] * (ROWS - len(texts))
        return leaves, np.array(flat + [0] * (TOKENS - len(flat)), np.int32), np.array(lengths, np.int32)

    def states(texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        ends = np.cumsum([len(text) for text in texts])
        return np.split(np.asarray(read(*given(texts)))[: ends[-1]], ends[:-1])

    texts = [typed(case, config) for case in cases]
    packed, alone = states(texts), [states([text])[0] for text in texts]
    for case, *both in zip(cases, packed, alone, strict=True):
        for found in both:
            pooled = {"mean": found.mean(0), "cls": found[0], "last": found[-1], "max": found.max(0)}
            for kind, expected in pooled.items():
                np.testing.assert_allclose(unit(expected), case[kind], atol=TOLERANCE)
            if case["logits"] is not None:
                assert config.classifier is not None
                pooling = config.classifier.classes.pooling.value
                chosen = {"mean": "mean", "first_token": "cls", "last_token": "last"}[pooling]
                logits = classify(leaves, pooled[chosen][None])[0]
                np.testing.assert_allclose(logits, case["logits"], atol=TOLERANCE)
    return str(read.lower(*given(texts)).compile().as_text())
