"""ModelRunner: turns a Plan into one dispatch of a compiled program. Owns everything that lives on the
device.

Host work per step is: pick the program, fill one fresh int32 buffer with numpy, call. The buffer is never
reused, because on CPU the runtime may read it in place after the call has returned.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from penstock.runtime.attention import allocate_kv, attention_op, kv_layer_shape, kv_storage_dtype
from penstock.runtime.buckets import Buckets, ProgramKey
from penstock.runtime.compilation import CompileCounter, Programs, compile_all
from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import KVSpec
from penstock.runtime.native import huge_pages
from penstock.runtime.packing import (
    ANY_LOGPROBS,
    ANY_SAMPLING,
    BANS,
    FEEDBACK,
    MAX_SAMPLES,
    NUM_STEPS,
    NUM_TOKENS,
    PARAM_FIELDS,
    SLOT,
    START,
    Layout,
    pack_params,
)
from penstock.runtime.plan import Plan, PlanRow, StepResult
from penstock.runtime.request import MAX_STOP_TOKEN_IDS, Request
from penstock.runtime.step import NO_TOKEN, KVCache, RowState, Weights, compile_step, make_step, read_logprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Shapes and limits of one runner; all resolved values."""

    buckets: Buckets
    max_num_seqs: int
    max_model_len: int
    page_size: int
    dtype: np.dtype[Any]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int = 20
    native: bool = True
    """Attention by the native CPU kernels where the machine and the model's shapes allow."""
    max_decode_steps: int = 1
    """Most steps of a decode program's loop; see `Plan.num_steps`."""
    show_progress: bool = True

    def __post_init__(self) -> None:
        if len(self.eos_token_ids) >= MAX_STOP_TOKEN_IDS:
            raise ConfigError(
                f"eos_token_ids: at most {MAX_STOP_TOKEN_IDS - 1}, not {len(self.eos_token_ids)}"
            )

    @property
    def pages_per_row(self) -> int:
        """Width of the page table."""
        return -(-self.max_model_len // self.page_size)

    @property
    def num_top(self) -> int:
        """Top log-probabilities the program computes."""
        return min(self.max_logprobs, self.vocab_size)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A dispatched step; `result` is on its way to the host."""

    plan: Plan
    result: jax.Array
    logprobs: tuple[int | None, ...]
    """How many each row wants; noted here because its slot may be another request's when the result is read.
    """


@dataclass(frozen=True, slots=True)
class _Slot:
    """Host mirror of the request that holds a slot."""

    request: Request
    stop_ids: NDArray[np.int32]


class ModelRunner:
    """Compiles and runs steps of one model on one device."""

    def __init__(
        self, graphdef: nnx.GraphDef[Any], weights: Any, kv_spec: KVSpec, config: RunnerConfig, mesh: Mesh
    ) -> None:
        """`weights` are the model's state on the mesh's devices; `graphdef` its static half (nnx.split)."""
        self.config = config
        self.mesh = mesh
        self.compiles_after_warmup = CompileCounter()
        self._graphdef = graphdef
        leaves, self._weights_tree = jax.tree.flatten(weights)
        self._weights: Weights = tuple(leaves)
        self._kv_spec = kv_spec
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._platform = next(iter(mesh.devices.flat)).platform
        self._kv: KVCache | None = None
        self._num_pages = 0
        self._programs: Programs = {}
        self._state = self._new_state()
        self._use_huge_pages(self._weights)
        slots = config.max_num_seqs
        self._slots: list[_Slot | None] = [None] * slots
        self._params = np.zeros((slots, PARAM_FIELDS), np.int32)
        self._tables = np.zeros((slots, config.pages_per_row), np.int32)

    # -- memory --

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache; 0 before `initialize_kv_cache`."""
        return self._num_pages

    @property
    def weights(self) -> Any:
        """The state that serves now."""
        return jax.tree.unflatten(self._weights_tree, self._weights)

    def initialize_kv_cache(self, num_pages: int) -> None:
        """Allocate the cache, zeroed. Programs are compiled for its shape, so this comes before `compile`."""
        if num_pages < 1:
            raise ConfigError(f"the KV cache needs at least one page, not {num_pages}")
        self.destroy_kv_cache()
        self._num_pages = num_pages
        shape = self._kv_shape(num_pages)
        self._kv = allocate_kv(self._kv_spec.num_layers, shape, self.config.dtype, self._sharding)
        self._use_huge_pages(self._kv)

    def destroy_kv_cache(self) -> None:
        """Free the cache's memory now; `initialize_kv_cache` brings it back (programs stay valid for the same
        size).
        """
        for layer in self._kv or ():
            layer.delete()
        self._kv = None

    def reset_state(self) -> None:
        """Forget all rows, as after start-up; no request may be running."""
        self._state = self._new_state()
        self._slots = [None] * self.config.max_num_seqs
        self._tables[:] = 0

    def _use_huge_pages(self, arrays: Sequence[jax.Array]) -> None:
        if self.config.native and self._platform == "cpu":
            huge_pages.advise(arrays)

    def peak_temp_bytes(self, num_pages: int = 64) -> int:
        """Scratch memory of the largest program, from XLA's own account; compiles that program for a small
        cache.
        """
        analysis = self._compile_one(self.config.buckets.keys()[0], num_pages).memory_analysis()
        return int(getattr(analysis, "temp_size_in_bytes", 0)) + int(
            getattr(analysis, "output_size_in_bytes", 0)
        )

    def _kv_shape(self, num_pages: int) -> tuple[int, ...]:
        spec = self._kv_spec
        return kv_layer_shape(num_pages, self.config.page_size, spec.num_kv_heads, spec.head_dim)

    def _new_state(self) -> RowState:
        return RowState(jax.device_put(np.zeros(self.config.max_num_seqs, np.int32), self._sharding))

    # -- programs --

    def compile(self) -> None:
        """Compile every program and run each once with padding only."""
        if self._kv is None:
            raise ConfigError("initialize_kv_cache comes before compile")
        self._programs = compile_all(
            self.config.buckets.keys(),
            lambda key: self._compile_one(key, self._num_pages),
            show_progress=self.config.show_progress,
        )
        for key in self._programs:
            self._call(key, self._blank(key))
        jax.block_until_ready(self._state)

    def _layout(self, key: ProgramKey) -> Layout:
        return Layout(key, self.config.pages_per_row)

    def _compile_one(self, key: ProgramKey, num_pages: int) -> jax.stages.Compiled:
        layout = self._layout(key)
        step = make_step(
            lambda leaves: nnx.merge(self._graphdef, jax.tree.unflatten(self._weights_tree, leaves)),
            layout,
            page_size=self.config.page_size,
            num_pages=num_pages,
            num_top=self.config.num_top,
            attention=attention_op(self._platform, native=self.config.native),
            max_steps=self.config.max_decode_steps if key.decode_only else 1,
        )
        layer = jax.ShapeDtypeStruct(
            self._kv_shape(num_pages), kv_storage_dtype(self.config.dtype), sharding=self._sharding
        )
        kv = (layer,) * self._kv_spec.num_layers
        return compile_step(step, self._weights, kv, self._state, layout.size, self._sharding)

    # -- steps --

    def execute(self, plan: Plan) -> StepResult:
        """Run one step and wait for its tokens."""
        return self.wait(self.execute_async(plan))

    def execute_async(self, plan: Plan) -> PendingStep:
        """Dispatch one step; its tokens stay on the device as the next step's input, and a copy starts for
        the host.
        """
        for slot, request in plan.new_requests:
            self._admit(slot, request)
        for write in plan.page_writes:
            self._tables[write.slot, write.index] = write.page
        key = self.config.buckets.select(plan.num_tokens, len(plan.rows), plan.decode_only)
        result = self._call(key, self._pack(plan, key))
        result.copy_to_host_async()
        return PendingStep(plan, result, tuple([self._wanted_logprobs(row) for row in plan.rows]))

    def wait(self, pending: PendingStep) -> StepResult:
        """Block until a dispatched step's result is on the host."""
        result = np.asarray(pending.result)
        plan, num_top = pending.plan, self.config.num_top
        by_row = result[: plan.num_steps, : len(plan.rows), 0].T.tolist()
        token_ids: list[Sequence[int]] = [
            [token for token in tokens if token != NO_TOKEN] if row.samples else ()
            for row, tokens in zip(plan.rows, by_row, strict=True)
        ]
        logprobs = [
            ()
            if k is None
            else tuple(read_logprobs(result[s, i], num_top, k) for s in range(len(token_ids[i])))
            for i, k in enumerate(pending.logprobs)
        ]
        return StepResult(token_ids, logprobs)

    def _wanted_logprobs(self, row: PlanRow) -> int | None:
        held = self._slots[row.slot]
        if held is None or held.request.logprobs is None or not row.samples:
            return None
        return min(held.request.logprobs, self.config.num_top)

    def _call(self, key: ProgramKey, packed: NDArray[np.int32]) -> jax.Array:
        if self._kv is None:
            raise ConfigError("the KV cache is not initialised")
        result, self._kv, self._state = self._programs[key](self._weights, self._kv, self._state, packed)
        return result  # type: ignore[no-any-return]  # Compiled.__call__ is untyped

    def _admit(self, slot: int, request: Request) -> None:
        self._params[slot] = pack_params(request.sampling)
        stop_ids = np.full(MAX_STOP_TOKEN_IDS, self.config.vocab_size, np.int32)
        ids = list(request.stopping.stop_token_ids)
        if not request.stopping.ignore_eos:
            ids += self.config.eos_token_ids
        stop_ids[: len(ids)] = ids
        self._slots[slot] = _Slot(request, stop_ids)

    def _blank(self, key: ProgramKey) -> NDArray[np.int32]:
        """A buffer of padding only: it computes, writes nowhere and samples nothing."""
        layout = self._layout(key)
        buffer = np.zeros(layout.size, np.int32)
        header, _, fields, stop_ids, _ = layout.views(buffer)
        header[NUM_STEPS] = 1
        fields[:, SLOT] = self.config.max_num_seqs
        stop_ids[:] = self.config.vocab_size
        return buffer

    def _pack(self, plan: Plan, key: ProgramKey) -> NDArray[np.int32]:
        buffer = self._blank(key)
        header, tokens, fields, stop_ids, tables = self._layout(key).views(buffer)
        header[NUM_STEPS] = plan.num_steps
        rows, count = plan.rows, len(plan.rows)
        slots = [row.slot for row in rows]
        fields[:count, SLOT] = slots
        fields[:count, START] = [row.start for row in rows]
        fields[:count, NUM_TOKENS] = [row.num_tokens for row in rows]
        fields[:count, MAX_SAMPLES] = [row.max_samples if row.samples else 0 for row in rows]
        fields[:count, BANS] = [row.bans for row in rows]
        fields[:count, -PARAM_FIELDS:] = self._params[slots]
        tables[:count] = self._tables[slots]
        at = 0
        for i, row in enumerate(rows):
            tokens[at : at + row.num_tokens] = FEEDBACK if row.token_ids is None else row.token_ids
            at += row.num_tokens
            held = self._slots[row.slot]
            assert held is not None, f"slot {row.slot} runs {row.request_id} but was never admitted"
            if row.samples:
                header[ANY_SAMPLING] |= not held.request.sampling.greedy
                header[ANY_LOGPROBS] |= held.request.logprobs is not None
            stop_ids[i] = held.stop_ids
        return buffer

    # -- weights and end --

    def replace_weights(self, weights: Any) -> None:
        """Swap in new weights between steps; same tree, shapes, dtypes and shardings, so nothing recompiles.

        Checked before anything changes: on ConfigError the old weights serve on.
        """
        new, tree = jax.tree.flatten(weights)
        if cast("object", tree) != cast("object", self._weights_tree):  # untyped in jax's stubs
            raise ConfigError("the new weights have another tree than the model's")
        for before, after in zip(self._weights, new, strict=True):
            if before.shape != after.shape or before.dtype != after.dtype:
                raise ConfigError(
                    f"a new weight is {after.dtype}{after.shape}, the model's {before.dtype}{before.shape}"
                )
        placed = [
            jax.device_put(after, before.sharding) for before, after in zip(self._weights, new, strict=True)
        ]
        jax.block_until_ready(placed)
        self._use_huge_pages(placed)
        self._weights = tuple(placed)

    def shutdown(self) -> None:
        """Free the device's memory that this runner holds; it cannot be used afterwards."""
        self.compiles_after_warmup.stop()
        self.destroy_kv_cache()
        self._programs = {}
        self._weights = ()


def single_device_mesh(device: jax.Device) -> Mesh:
    """A mesh of one device; sharding over several is a matter of this mesh and of the weights' partition
    specs.
    """
    return Mesh(np.array([device]), ("model",))
