"""A model whose every token can be computed by hand, and which reads its whole context through the real paged
cache.

The next token is (7 * sum of all tokens so far + 3 * their number + offset) mod vocabulary. The sum comes
from `paged_attention` with queries of zero, so that every position weighs the same, and with the token ids as
values. So a wrong page, position or length makes a wrong token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from penstock.runtime.execution.backend import Backend, choose_backend, mesh_of
from penstock.runtime.execution.buckets import Buckets
from penstock.runtime.execution.compilation import use_compilation_cache
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.loading.served_model import ServedModel
from penstock.runtime.loop.interface import Observer
from penstock.runtime.models.load_rules import LoadRule, LoadRules, Source, Target
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, AttentionOptions
from penstock.runtime.ops.cache_spec import CacheSpec, PagedKV
from penstock.runtime.ops.recurrent.operations import RecurrentOps
from penstock.runtime.requests.sampling import GenerationDefaults
from tests.support.models.compilation_cache import TEST_CACHE

VOCAB = 61
EOS = 60
OFFSET = 1
_DIM = 4


def toy_tokens(prompt: Sequence[int], num: int, offset: int = OFFSET) -> list[int]:
    """Return the next `num` greedy tokens after `prompt`, by the formula, ignoring EOS."""
    tokens = list(prompt)
    for _ in range(num):
        tokens.append((7 * sum(tokens) + 3 * len(tokens) + offset) % VOCAB)
    return tokens[len(prompt) :]


class ToyLM(nnx.Module):
    """See the module docstring; the only weight is the offset."""

    def __init__(self) -> None:
        self.offset = nnx.Param(jnp.full((1,), OFFSET, jnp.float32))

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
        zeros = jnp.zeros((token_ids.shape[0], 1, _DIM), jnp.float32)
        values = zeros.at[:, 0, 0].set(token_ids.astype(jnp.float32))
        mean, layer = attention(zeros, zeros, values, kv[0], metas[0], AttentionOptions(1.0))
        count = (positions + 1).astype(jnp.float32)
        total = jnp.round(mean[:, 0, 0] * count)
        return jnp.stack([total, count], axis=1), (layer,)

    def normalized(self, hidden: jax.Array) -> jax.Array:
        return hidden.astype(jnp.float32)

    def logits(self, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        following = (7 * hidden[:, 0] + 3 * hidden[:, 1] + self.offset[...]) % VOCAB
        return 10 * jax.nn.one_hot(following.astype(jnp.int32), VOCAB, dtype=jnp.float32)


def plain_rules(**shapes: tuple[int, ...]) -> LoadRules:
    """Each tensor is a leaf of its own, of the same name, in float32."""
    float32 = np.dtype(np.float32)
    return LoadRules(
        rules=tuple(
            LoadRule(
                sources=(Source(name, shape),), targets=(Target((name,)),), num_rows=shape[0], dtype=float32
            )
            for name, shape in shapes.items()
        )
    )


def toy_model(
    *, eos_token_ids: tuple[int, ...] = (EOS,), max_model_len: int = 128, text: Any = None
) -> ServedModel:
    """Return the toy model as a ServedModel, with this tokenizer or none."""
    graphdef, weights = nnx.split(ToyLM())
    mesh = mesh_of(jax.devices()[:1])
    weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))  # as a checkpoint's
    return ServedModel(
        name="toy",
        architecture="ToyForCausalLM",
        graphdef=graphdef,
        weights=weights,
        cache=CacheSpec((PagedKV(num_kv_heads=1, head_dim=_DIM),)),
        dtype=np.dtype(np.float32),
        vocab_size=VOCAB,
        hidden_size=2,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        defaults=GenerationDefaults(),
        text=text,
        rules=plain_rules(offset=(1,)),
    )


def toy_backend(config: EngineConfig | None = None) -> Backend:
    """Return the backend of the device that holds the toy models."""
    return choose_backend(config or EngineConfig(), jax.devices()[0])


@contextlib.contextmanager
def toy_runner(model: ServedModel, buckets: Buckets, *, num_snapshots: int = 0) -> Iterator[ModelRunner]:
    """Yield a compiled runner of a small model, without an engine: 4 slots, and 64 pages of 4 tokens."""
    use_compilation_cache(TEST_CACHE)
    config = RunnerConfig(
        buckets=buckets,
        max_num_seqs=4,
        max_model_len=64,
        page_size=4,
        dtype=np.dtype(np.float32),
        kv_dtype=np.dtype(np.float32),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        num_snapshots=num_snapshots,
        max_decode_steps=4,
        show_progress=False,
    )
    device = DeviceState(model.graphdef, model.weights, model.cache, config, toy_backend())
    runner = ModelRunner(device, config)
    runner.initialize_kv_cache((64,))
    runner.compile()
    yield runner
    runner.shutdown()


def toy_config(**changes: Any) -> EngineConfig:
    """Options of a small engine: it has few programs, so it is ready within seconds."""
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "page_size": 4,
        "compilation_cache": TEST_CACHE,
        "show_progress": False,
    }
    return EngineConfig(**(options | changes))


def toy_engine(
    model: ServedModel | None = None,
    *,
    start: bool = True,
    backend: Backend | None = None,
    observer: Observer | None = None,
    **changes: Any,
) -> Engine:
    """Make an engine of the toy model; the caller shuts it down."""
    engine = Engine(model or toy_model(), toy_config(**changes), backend=backend, observer=observer)
    if start:
        engine.start()
    return engine
