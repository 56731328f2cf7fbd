"""A decode program of the engine, compiled for a GPU that is not there: `python -m
tests.support.gpu.compiled` prints what XLA made of it, and needs JAX's part for CUDA.

It is a process of its own, because JAX must be told before it starts that its part for CUDA finds no driver.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies

from bench.checkpoint import SHAPES, config_json
from penstock.runtime.execution.backend import GPU_OPTIONS
from penstock.runtime.execution.buckets import Buckets, ProgramKey
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.step_programs import StepShapes, make_window
from penstock.runtime.models.params import abstract_model
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.gpu.attention import gpu_paged_attention
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT
from penstock.runtime.ops.sampler import RowState, sample
from penstock.runtime.planning.chips import CHIPS

PAGES, PAGE, ROWS, STEPS, LAYERS = 40, 64, 4, 2, 2
KV_HEADS, DIM = 8, 128
CACHE = (PAGES, 2, KV_HEADS, PAGE, DIM)


def compiled() -> str:
    """Return the HLO of a window of decode steps of a model in bfloat16 with two layers of Qwen3-0.6B's
    heads.
    """
    device = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=CHIPS["h200"].target_config
    ).devices[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("model",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    sizes = {"num_layers": LAYERS, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}
    shape = dataclasses.replace(SHAPES["qwen3-0.6b"], num_words=1000, **sizes)
    assert (shape.num_kv_heads, shape.head_dim) == (KV_HEADS, DIM)
    graph, abstract = abstract_model(parse_config(config_json(shape)), "bfloat16")
    leaves, tree = jax.tree.flatten(abstract)
    runner = RunnerConfig(
        buckets=Buckets((16,), (ROWS,), (1, STEPS)),
        max_num_seqs=ROWS,
        max_model_len=8 * PAGE,
        page_size=PAGE,
        dtype=np.dtype(jnp.bfloat16),
        kv_dtype=np.dtype(jnp.bfloat16),
        vocab_size=shape.vocab_size,
        eos_token_ids=(1,),
        max_decode_steps=STEPS,
    )
    layout = runner.layout(ProgramKey(ROWS, ROWS, decode_only=True, window=True, num_steps=STEPS), 1)
    window = make_window(
        lambda leaves: nnx.merge(graph, jax.tree.unflatten(tree, leaves)),
        layout,
        StepShapes(PAGE, (PAGES,), 16, runner.num_top),
        gpu_paged_attention,
        XLA_RECURRENT,
        sample,
        STEPS,
    )
    by_slot = (ROWS, shape.vocab_size)
    state = RowState(array((ROWS,)), (array((ROWS, 8)),), array(by_slot), array(by_slot, np.float32), None)
    weights = tuple(array(leaf.shape, leaf.dtype) for leaf in leaves)
    kv = tuple(array(CACHE, jnp.bfloat16) for _ in range(LAYERS))
    packed, adapters, draft = array((layout.size,)), (), ()
    lowered = jax.jit(window, donate_argnums=(1, 2)).lower(weights, kv, state, packed, adapters, draft)
    return str(lowered.compile(dict(GPU_OPTIONS)).as_text())


if __name__ == "__main__":
    print(compiled())  # noqa: T201 # it is what this program is for
