"""ModelRunner: turns a Plan into calls of compiled programs. It owns everything that lives on the device.

The host's work in each step is to pick the program, fill one new int32 buffer with numpy, and call the
program. The buffer is never reused, because on CPU the runtime may read it in place after the call has
returned.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError, NonFiniteLogits
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.compilation import CompileCounter, compile_all
from penstock.runtime.execution.program_set import ProgramBuilder, Programs
from penstock.runtime.execution.request_programs import pack_admission, pack_page_copies
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.slots import Slots
from penstock.runtime.execution.step_programs import Chosen, KVCache, Weights, read_logprobs
from penstock.runtime.grammar.masks.fill import MaskFiller, mask_threads
from penstock.runtime.grammar.masks.turns import MaskTurns
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.ops.device_arrays import zeros, zeros_like
from penstock.runtime.ops.sampler import RowState
from penstock.runtime.ops.sampling_codes import NON_FINITE
from penstock.runtime.requests.constraint import TokenConstraint, mask_words
from penstock.runtime.requests.request import Request, TokenLogprobs
from penstock.runtime.requests.token_bias import bias_row
from penstock.runtime.scheduling.plan import Plan, StepResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Unchosen:
    """Logits whose tokens are not chosen yet, and what choosing them takes."""

    logits: jax.Array
    packed: NDArray[np.int32]
    key: ProgramKey
    constraints: Mapping[int, TokenConstraint]
    """Row to constraint."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A dispatched step. A copy of what the host will read of `result` is on its way."""

    plan: Plan
    result: Chosen | None
    """The chosen tokens on the device; None while `unchosen` is set."""
    logprobs: Sequence[int | None]
    """For each row, how many log-probabilities of likeliest tokens it wants; None: not even the sampled
    token's. This is noted here because the slot may belong to another request when the result is read."""
    unchosen: _Unchosen | None = None
    """Set until `ModelRunner.choose` is called."""
    prompt_logprobs: jax.Array | None = None
    """Log-probabilities of prompt tokens, on the device."""
    prompt_rows: Mapping[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    """Row to its part of `prompt_logprobs`."""
    errors: Mapping[int, Exception] = dataclasses.field(default_factory=dict)
    """Row to error, for rows for which no token can be chosen."""
    skipped: frozenset[int] = frozenset()
    """Rows whose token is put off, see `ModelRunner.choose`."""
    late: frozenset[int] = frozenset()
    """The skipped rows whose own mask takes long."""

    @property
    def awaits_choice(self) -> bool:
        """See `DispatchedStep`."""
        return self.unchosen is not None

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row wants log-probabilities; if not, they stay on the device."""
        return any(wanted is not None for wanted in self.logprobs)


class ModelRunner:
    """Compiles and runs steps of one model on one device."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        weights: Any,
        cache: CacheSpec,
        config: RunnerConfig,
        backend: Backend,
    ) -> None:
        """`weights`: the model's state on the backend's devices. `graphdef`: its static half (see
        nnx.split).
        """
        self.config = config
        self._backend = backend
        self.compiles_after_warmup = CompileCounter()
        self._graphdef = graphdef
        leaves, self._weights_tree = jax.tree.flatten(weights)
        self._weights: Weights = tuple(leaves)
        self._cache = cache
        self._sharding = NamedSharding(backend.mesh, PartitionSpec())
        self._kv: KVCache | None = None
        self._num_pages = 0
        self._programs: Programs | None = None
        self._state = self._new_state()
        backend.use_huge_pages(self._weights)
        self._slots = Slots(config)
        filler = MaskFiller(mask_threads(config.threads))
        self._turns = MaskTurns(filler.fill_all, in_parallel=filler.is_parallel)
        words = mask_words(config.vocab_size)
        self._no_masks = {
            rows: jax.device_put(np.zeros((rows, words), np.int32), self._sharding)
            for rows in config.buckets.row_buckets
        }

    # -- memory --

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache; 0 before `initialize_kv_cache`."""
        return self._num_pages

    @property
    def weights(self) -> Any:
        """The model's state that serves now."""
        return jax.tree.unflatten(self._weights_tree, self._weights)

    def initialize_kv_cache(self, num_pages: int) -> None:
        """Allocates the cache, filled with zeros. Programs are compiled for its shape, so this comes before
        `compile`.
        """
        if num_pages < 1:
            raise ConfigError(f"the KV cache needs at least one page, not {num_pages}")
        self.destroy_kv_cache()
        self._num_pages = num_pages
        self._kv = zeros_like(self._kv_shapes(num_pages), self._sharding)
        self._backend.use_huge_pages(jax.tree.leaves(self._kv))

    @property
    def attends_batch_invariantly(self) -> bool:
        """See `Backend.attends_batch_invariantly`; for queries of the model against its cache."""
        config = self.config
        return all(
            self._backend.attends_batch_invariantly(
                jax.ShapeDtypeStruct((1, 1, layer.head_dim), config.dtype),
                layer.arrays(1, config.page_size, config.max_num_seqs, config.dtype),
            )
            for layer in self._cache.paged
        )

    def destroy_kv_cache(self) -> None:
        """Frees the cache's memory now; `initialize_kv_cache` allocates it again. Programs stay valid for the
        same size.
        """
        for array in jax.tree.leaves(self._kv):
            array.delete()
        self._kv = None

    def peak_temp_bytes(self, num_pages: int = 64) -> int:
        """The memory that the most demanding program needs besides its arguments, in bytes, as XLA reports
        it. This compiles the largest program of each kind, for a small cache.
        """
        builder = self._builder(num_pages)
        window = next(key for key in self.config.buckets.keys() if key.window)  # noqa: SIM118 # no mapping
        largest = builder.largest
        jobs = {
            "forward": lambda: builder.forward(largest),
            "window": lambda: builder.window(window),
            "choice": lambda: builder.choice(largest.rows),
        }
        made = compile_all(jobs, threads=self.config.threads, show_progress=self.config.show_progress)
        return max(map(_bytes_beside_arguments, made.values()))

    def _kv_shapes(self, num_pages: int) -> KVCache:
        config = self.config
        return self._cache.arrays(num_pages, config.page_size, config.max_num_seqs, config.dtype)

    def _new_state(self) -> RowState:
        slots, vocab = self.config.max_num_seqs, self.config.vocab_size
        ints, floats = np.dtype(np.int32), np.dtype(np.float32)
        held = None
        if self._cache.has_state:
            (held,) = zeros((slots,), ints, self._sharding)
        state = RowState(
            *zeros((slots,), ints, self._sharding),
            *zeros((slots, self.config.pages_per_row), ints, self._sharding),
            *zeros((self.config.num_feature_slots, vocab), ints, self._sharding),
            *zeros((self.config.num_feature_slots, vocab), floats, self._sharding),
        )
        return state._replace(held=held)

    # -- programs --

    def compile(self) -> None:
        """Compiles every program, and runs each once on padding only."""
        if self._kv is None:
            raise ConfigError("initialize_kv_cache comes before compile")
        self._programs = programs = self._builder(self._num_pages).compile_all()
        for key in programs.steps:
            packed = self._slots.blank(key)
            if key.window:
                self._run_window(key, packed)
            else:
                logits, hidden = self._run_forward(key, packed)
                packed = packed[: self._slots.layout(key).rows_size]
                no_mask = self._no_masks[key.rows]
                self._choose(logits, packed, no_mask)
                # JAX finds its fast path for each kind of argument, and the masks of constraints are on the
                # host.
                self._choose(logits, packed, np.full(no_mask.shape, -1, np.int32))
                programs.prompt_logprobs(self._weights, hidden, self._prompt_buffer([], []))
        nobody = Request("warm-up", (0,))
        self._write_features(self.config.num_feature_slots, nobody, ())
        self._copy_pages(())
        self._write_tables([0])
        jax.block_until_ready((self._state, self._kv))

    def _builder(self, num_pages: int) -> ProgramBuilder:
        kv = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._sharding),
            self._kv_shapes(num_pages),
        )
        return ProgramBuilder(
            config=self.config,
            rebuild=lambda leaves: nnx.merge(self._graphdef, jax.tree.unflatten(self._weights_tree, leaves)),
            weights=self._weights,
            state=self._state,
            cache=self._cache,
            num_pages=num_pages,
            kv=kv,
            backend=self._backend,
            sharding=self._sharding,
        )

    @property
    def _ready(self) -> tuple[Programs, KVCache]:
        if self._kv is None or self._programs is None:
            raise ConfigError("the KV cache is not initialised, or nothing is compiled")
        return self._programs, self._kv

    def _run_forward(self, key: ProgramKey, packed: NDArray[np.int32]) -> tuple[jax.Array, jax.Array]:
        """Runs a forward program. Returns logits and hidden states."""
        programs, kv = self._ready
        forward = programs.steps[key](self._weights, kv, self._state, packed)
        logits, hidden, self._kv, self._state = forward
        return logits, hidden

    def _choose(self, logits: jax.Array, packed: NDArray[np.int32], mask: Any) -> Chosen:
        programs, _ = self._ready
        chosen, self._state = programs.choices[logits.shape[0]](self._state, logits, packed, mask)
        return cast("Chosen", chosen)

    def _run_window(self, key: ProgramKey, packed: NDArray[np.int32]) -> Chosen:
        programs, kv = self._ready
        chosen, self._kv, self._state = programs.steps[key](self._weights, kv, self._state, packed)
        return cast("Chosen", chosen)

    def _write_features(self, feature_slot: int, request: Request, made: tuple[int, ...]) -> None:
        programs, _ = self._ready
        packed = pack_admission(feature_slot, request, made, self.config.max_model_len)
        bias = request.bias_row
        if bias is None:
            bias = bias_row(request.sampling, self.config.vocab_size)
        self._state = programs.admission(self._state, packed, bias)

    def _write_tables(self, slots: Sequence[int]) -> None:
        programs, _ = self._ready
        for packed in self._slots.table_rows(slots):
            self._state = programs.table_rows(self._state, packed)

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        programs, kv = self._ready
        self._kv = programs.copy_pages(
            kv, pack_page_copies(copies, self.config.max_num_seqs, self._num_pages)
        )

    # -- steps --

    def start(self) -> None:
        """Counts the compilations of the calling thread, the engine's, from now on."""
        self.compiles_after_warmup.start()

    def execute(self, plan: Plan) -> StepResult:
        """Runs one step and waits for its tokens."""
        return self.wait(self.choose(self.execute_async(plan)))

    def execute_async(self, plan: Plan) -> PendingStep:
        """Dispatches one step. Its tokens stay on the device as the input of the next step, and a copy for
        the host is started. If rows have constraints, only the model runs until `choose`.
        """
        for slot, request in plan.new_requests:
            feature_slot = plan.feature_slots.get(slot)
            self._slots.admit(slot, request, feature_slot or 0)
            if feature_slot is not None:
                self._write_features(feature_slot, request, plan.made.get(slot, ()))
        if plan.page_writes:
            self._write_tables(self._slots.write_pages(plan))
        if plan.page_copies:
            self._copy_pages(plan.page_copies)
        constraints = self._slots.constraints(plan)
        targets = self._prompt_targets(plan)
        # A window program samples by itself and returns no hidden states, so a step that needs
        # log-probabilities of a prompt cannot use it.
        window = plan.decode_only and not constraints and not targets
        key = self.config.buckets.select(
            plan.num_tokens, len(plan.rows), window=window, num_steps=plan.num_steps
        )
        packed = self._slots.pack(plan, key, constraints)
        logprobs = self._slots.logprobs(plan)
        if key.window:
            return _sent(PendingStep(plan, self._run_window(key, packed), logprobs))
        logits, hidden = self._run_forward(key, packed)
        packed = packed[: self._slots.layout(key).rows_size]
        rows, prompt = self._prompt_logprobs(plan, hidden, targets)
        if constraints:
            return PendingStep(
                plan, None, logprobs, _Unchosen(logits, packed, key, constraints), prompt, rows
            )
        result = self._choose(logits, packed, self._no_masks[key.rows])
        return _sent(PendingStep(plan, result, logprobs, None, prompt, rows))

    def choose(self, pending: PendingStep) -> PendingStep:
        """Chooses the tokens of a step that waits for it; any other step is returned as it is. To be called
        after the constraints have accepted the tokens of all earlier steps, and before the next step is
        dispatched.

        `skipped` of the result are rows whose masks were not ready in time. They make no token, and the next
        step that has them computes the same position again.
        """
        unchosen = pending.unchosen
        if unchosen is None:
            return pending
        mask = np.full(self._no_masks[unchosen.logits.shape[0]].shape, -1, np.int32)
        plan, packed = pending.plan, unchosen.packed
        others = plan.apart or len(plan.rows) > len(unchosen.constraints)
        filled = self._turns.fill(unchosen.constraints, mask, others=others)
        if filled.skipped:
            packed = self._slots.silenced(packed, unchosen.key, filled.skipped)
        result = self._choose(unchosen.logits, packed, filled.masks)
        return _sent(
            dataclasses.replace(
                pending,
                result=result,
                unchosen=None,
                errors=filled.errors,
                skipped=filled.skipped,
                late=filled.late,
            )
        )

    def wait(self, pending: PendingStep) -> StepResult:
        """Blocks until a dispatched step's result is on the host."""
        assert pending.result is not None, "choose comes before wait"
        plan, num_top = pending.plan, self.config.num_top
        tokens = np.asarray(pending.result.tokens)[: plan.num_steps, : len(plan.rows)].T
        token_ids: list[Sequence[int]] = tokens.tolist()
        errors = dict(pending.errors)
        for i, row in enumerate(plan.rows):
            if not row.samples:
                token_ids[i] = ()
        for i in pending.skipped.union(errors):
            token_ids[i] = ()  # they were chosen without a mask
        if tokens.min() < 0:
            for i, made in enumerate(token_ids):
                if NON_FINITE in made:
                    errors.setdefault(i, NonFiniteLogits())
                token_ids[i] = [token for token in made if token >= 0]
        logprobs: list[Sequence[TokenLogprobs]] = [()] * len(plan.rows)
        if pending.wants_logprobs:
            values = np.asarray(pending.result.logprobs)
            for i, k in enumerate(pending.logprobs):
                if k is not None:
                    logprobs[i] = [read_logprobs(values[s, i], num_top, k) for s in range(len(token_ids[i]))]
        return StepResult(token_ids, logprobs, errors, self._read_prompt(pending))

    # -- log-probabilities of prompts --

    def _prompt_buffer(self, before: Sequence[int], targets: Sequence[int]) -> NDArray[np.int32]:
        """The second argument of `make_prompt_logprobs`'s program."""
        most = self.config.buckets.token_buckets[-1]
        buffer = np.zeros(1 + 2 * most, np.int32)
        buffer[0] = len(before)
        buffer[1 : 1 + len(before)] = before
        buffer[1 + most : 1 + most + len(targets)] = targets
        return buffer

    def _prompt_targets(self, plan: Plan) -> dict[int, tuple[int, ...]]:
        """Row to the prompt tokens that come after this step's tokens, for rows whose log-probabilities are
        wanted.
        """
        targets: dict[int, tuple[int, ...]] = {}
        for i, row in enumerate(plan.rows):
            if row.token_ids is None:
                continue
            request = self._slots.request(row)
            if request.prompt_logprobs is not None:
                tokens = request.prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1]
                if tokens:
                    targets[i] = tokens
        return targets

    def _prompt_logprobs(
        self, plan: Plan, hidden: jax.Array, wanted: Mapping[int, tuple[int, ...]]
    ) -> tuple[dict[int, tuple[int, int, int]], jax.Array | None]:
        """Calls the program for the rows in `wanted`. Returns each row's part of the result, and the result
        (None without rows).
        """
        rows: dict[int, tuple[int, int, int]] = {}
        before: list[int] = []
        targets: list[int] = []
        at = 0
        for i, row in enumerate(plan.rows):
            if i in wanted:
                most = self._slots.request(row).prompt_logprobs or 0
                rows[i] = (len(before), len(wanted[i]), min(most, self.config.num_top))
                before += range(at, at + len(wanted[i]))
                targets += wanted[i]
            at += row.num_tokens
        if not rows:
            return rows, None
        programs, _ = self._ready
        result = programs.prompt_logprobs(self._weights, hidden, self._prompt_buffer(before, targets))
        result.copy_to_host_async()
        return rows, result

    def _read_prompt(self, pending: PendingStep) -> dict[int, tuple[TokenLogprobs, ...]]:
        if pending.prompt_logprobs is None:
            return {}
        values = np.asarray(pending.prompt_logprobs)
        return {
            row: tuple(read_logprobs(values[i], self.config.num_top, k) for i in range(first, first + count))
            for row, (first, count, k) in pending.prompt_rows.items()
        }

    # -- weights and end --

    def replace_weights(self, weights: Any) -> None:
        """Swaps in new weights between steps. They have the same tree, shapes and dtypes, so nothing is
        compiled again. If they are placed as the old ones are, only references are exchanged.

        This is checked before anything changes: on ConfigError the old weights serve on.
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
            after
            if isinstance(after, jax.Array) and after.sharding == before.sharding
            else jax.device_put(after, before.sharding)
            for before, after in zip(self._weights, new, strict=True)
        ]
        self._weights = tuple(placed)

    def shutdown(self) -> None:
        """Frees the device's memory that this runner holds. It cannot be used afterwards."""
        self.compiles_after_warmup.stop()
        self._turns.close()
        self.destroy_kv_cache()
        for array in jax.tree.leaves((self._state, self._no_masks)):
            array.delete()
        self._programs = None
        self._weights = ()


def _bytes_beside_arguments(program: jax.stages.Compiled) -> int:
    """Bytes of scratch memory and of results that do not lie in a donated argument."""
    analysis = program.memory_analysis()
    kinds = (("temp", 1), ("output", 1), ("alias", -1))
    return sum(sign * int(getattr(analysis, f"{kind}_size_in_bytes", 0)) for kind, sign in kinds)


def _sent(pending: PendingStep) -> PendingStep:
    """Starts to copy to the host what it will read of a step. Returns the same step."""
    assert pending.result is not None
    pending.result.tokens.copy_to_host_async()
    if pending.wants_logprobs:
        pending.result.logprobs.copy_to_host_async()
    return pending
