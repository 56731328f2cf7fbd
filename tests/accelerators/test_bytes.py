"""What whole steps move in a TPU's large memory, by their compiled HLO: `make test-accelerators`.

What a step must move are the weights, once, and the keys and values in use; of experts those that its tokens
draw on average. The kernels copy pages and experts' weights themselves, which the tests of `ops/tpu` count in
their interpreter; here these bytes are added.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.models.config import ExpertsConfig
from penstock.runtime.models.registry import parse_config
from penstock.runtime.planning.absent import absent_backend, absent_programs, lacking, prepare
from penstock.runtime.planning.chips import CHIPS, read_machine
from tests.accelerators.hlo_bytes import moved_bytes
from tests.support.models.configs import published

pytestmark = [
    pytest.mark.users_xla,
    pytest.mark.sweep,
    pytest.mark.skipif(lacking(CHIPS["tpu-v5e"]) is not None, reason="no libtpu: make test-accelerators"),
]
ROWS, CONTEXT, CHUNK = 16, 1024, 512
OPTIONS = EngineConfig(
    dtype="bfloat16",
    max_num_seqs=ROWS,
    max_num_batched_tokens=CHUNK,
    max_model_len=2 * CONTEXT,
    max_decode_steps=1,
    compilation_cache=None,
)
READ_OF_CHUNK = 128 + 256 + 384 + 512
"""Positions whose keys and values the blocks of 128 tokens of a new prompt of CHUNK tokens read."""
MOST = 1.15
"""Times what a step must move."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "quantization"), [("Qwen3-4B", "none"), ("Qwen3-4B", "int8"), ("Qwen3-30B-A3B", "none")]
)
@pytest.mark.parametrize(
    ("tokens", "read", "in_use"), [(ROWS, ROWS * CONTEXT, ROWS * CONTEXT), (CHUNK, READ_OF_CHUNK, CHUNK)]
)
def test_a_step_moves_little_more_than_it_must(
    model: str,
    quantization: str,
    tokens: int,
    read: int,
    in_use: int,
    record_property: Callable[[str, object], None],
) -> None:
    """A decode step of 16 rows of 1,024 tokens each, and a prompt of 512 tokens, of four layers of the model
    with its whole vocabulary, on a v5e. read: positions that the kernels copy; in_use: those that the step
    attends to. In int8 the weights are half of the bytes, so that what a step writes beside them counts more.
    """
    prepare()
    options = dataclasses.replace(OPTIONS, quantization=quantization)
    config = parse_config(published(model))
    config = dataclasses.replace(config, layers=config.layers[:4])
    backend = absent_backend(read_machine("tpu-v5e"), options)
    builder = absent_programs(config, options, backend, kv_bytes=2 << 30)
    key = next(
        key
        for key in builder.config.buckets.keys()  # noqa: SIM118 # no mapping
        if key.tokens == tokens and (key.window if tokens == ROWS else not key.decode_only)
    )
    program = builder.window(key) if key.window else builder.forward(key)
    mixture = config.layers[0].mlp
    stacked = [leaf for leaf in builder.weights if leaf.ndim == 3]
    assert bool(stacked) == isinstance(mixture, ExpertsConfig)
    drawn = 0
    if isinstance(mixture, ExpertsConfig):
        share = 1 - (1 - mixture.per_token / mixture.num_experts) ** tokens
        drawn = round(share * sum(map(num_bytes, stacked)))
    shapes = [each.shape for each in jax.tree.leaves(builder.kv)]
    shapes += [(math.prod(shape[:-1]), shape[-1]) for shape in shapes]  # KV rows are written to a list
    shapes += [each.shape for each in stacked]
    moved = moved_bytes(program.as_text() or "", {",".join(map(str, shape)) for shape in shapes}) + drawn
    of_token = builder.cache.page_bytes(1, jnp.dtype(jnp.bfloat16))
    others = sum(map(num_bytes, builder.weights)) - sum(map(num_bytes, stacked))
    if not config.tie_word_embeddings:  # of a table that is not the head, the step looks up some rows
        others -= (config.vocab_size - tokens) * config.hidden_size * 2
    must = others + drawn + of_token * in_use
    record_property("bytes moved and needed", f"{moved + of_token * read} {must}")
    assert must < moved + of_token * read < MOST * must


def num_bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    return int(leaf.size * leaf.dtype.itemsize)
