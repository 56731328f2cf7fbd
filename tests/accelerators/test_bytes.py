"""What whole steps move in a TPU's large memory, by their compiled HLO: `make test-accelerators`.

What a step must move are the weights, once, and the keys and values in use. The kernels for attention copy
pages themselves, which the tests of `ops/tpu` count in their interpreter; here these bytes are added.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from penstock.runtime.config import EngineConfig
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
    ("tokens", "read", "in_use"), [(ROWS, ROWS * CONTEXT, ROWS * CONTEXT), (CHUNK, READ_OF_CHUNK, CHUNK)]
)
def test_a_step_moves_little_more_than_it_must(tokens: int, read: int, in_use: int) -> None:
    """A decode step of 16 rows of 1,024 tokens each, and a prompt of 512 tokens, of four layers of Qwen3-4B
    with its whole vocabulary, on a v5e. read: positions that the kernels copy; in_use: those that the step
    attends to.
    """
    prepare()
    config = parse_config(published("Qwen3-4B"))
    config = dataclasses.replace(config, layers=config.layers[:4])
    backend = absent_backend(read_machine("tpu-v5e"), OPTIONS)
    builder = absent_programs(config, OPTIONS, backend, kv_bytes=2 << 30)
    key = next(
        key
        for key in builder.config.buckets.keys()  # noqa: SIM118 # no mapping
        if key.tokens == tokens and (key.window if tokens == ROWS else not key.decode_only)
    )
    program = builder.window(key) if key.window else builder.forward(key)
    caches = {",".join(map(str, each.shape)) for each in jax.tree.leaves(builder.kv)}
    moved = moved_bytes(program.as_text() or "", caches)
    of_token = builder.cache.page_bytes(1, jnp.dtype(jnp.bfloat16))
    must = sum(leaf.size * leaf.dtype.itemsize for leaf in builder.weights) + of_token * in_use
    assert must < moved + of_token * read < MOST * must
