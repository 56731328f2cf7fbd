"""ModelRunner: turns a Plan into calls of compiled programs.

The host's work in each step is to pick the program, fill one new int32 buffer with numpy, and call the
program. The buffer is never reused, because on CPU the runtime may read it in place after the call has
returned.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jax.profiler import TraceAnnotation
from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.compilation import CompileCounter
from penstock.runtime.execution.device import hidden_rows, prompt_logprobs
from penstock.runtime.execution.device.device_state import DeviceState
from penstock.runtime.execution.device.dispatched_steps import AwaitingChoice, AwaitingTokens, PendingStep
from penstock.runtime.execution.device.program_calls import ProgramCalls
from penstock.runtime.execution.media.sections import needs_sections
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.slots import Slots
from penstock.runtime.grammar.masks.fill import MaskFiller, mask_threads
from penstock.runtime.grammar.masks.step_masks import StepMasks
from penstock.runtime.loop.interface import StepShape
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.scheduling.plan import Plan, StepResult


class _Packed(NamedTuple):
    """What a step sends to the device, and what it will want to know later."""

    key: ProgramKey
    buffer: NDArray[np.int32]
    constraints: Mapping[int, TokenConstraint]
    """Row to constraint."""
    targets: Mapping[int, tuple[int, ...]]
    """See `prompt_logprobs.prompt_targets`."""
    parts: hidden_rows.Parts
    """See `hidden_rows.wanted`."""
    logprobs: Sequence[int | None]
    """See `AwaitingTokens`."""
    packed_ns: int
    """See `DispatchedStep`."""


class ModelRunner:
    """Compiles and runs steps of one model: the loop's `Runner` on a device of JAX's."""

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
        self.compiles_after_warmup = CompileCounter()
        self.device = DeviceState(graphdef, weights, cache, config, backend)
        """What the runner keeps on the device."""
        self._slots = Slots(config, len(cache.windows))
        filler = MaskFiller(mask_threads(config.threads))
        self._step_masks = StepMasks(filler.fill_all, in_parallel=filler.is_parallel)
        self._calls: ProgramCalls | None = None

    # -- life --

    def initialize_kv_cache(self, num_pages: Sequence[int]) -> None:
        """Allocates the cache, filled with zeros, with so many pages in each group of layers. Programs are
        compiled for its shape, so this comes before `compile`.
        """
        self.device.allocate_cache(num_pages)

    def compile(self) -> None:
        """Compiles every program, and runs each once on padding only."""
        if not self.device.num_pages:
            raise ConfigError("initialize_kv_cache comes before compile")
        programs = self.device.builder(self.device.num_pages).compile_all()
        self._calls = ProgramCalls(programs, self.device, self.config)
        self._calls.warm_up(self._slots)

    def start(self) -> None:
        """Counts the compilations of the calling thread, the engine's, from now on."""
        self.compiles_after_warmup.start()

    def shutdown(self) -> None:
        """Frees the device's memory that this runner holds. It cannot be used afterwards."""
        self.compiles_after_warmup.stop()
        self._step_masks.close()
        if self._calls is not None:
            self._calls.free()
            self._calls = None
        self.device.free()

    @property
    def calls(self) -> ProgramCalls:
        """The compiled programs. ConfigError where nothing is compiled."""
        if self._calls is None:
            raise ConfigError("nothing is compiled")
        return self._calls

    # -- memory --

    def free_kv_cache(self) -> int:
        """See `Runner`."""
        return self.device.free_cache()

    def restore_kv_cache(self) -> None:
        """See `Runner`."""
        self.device.restore_cache()

    def offload_weights(self) -> int:
        """See `Runner`."""
        return self.device.offload_weights()

    def restore_weights(self) -> None:
        """See `Runner`."""
        self.device.restore_weights()

    # -- steps --

    def execute(self, plan: Plan) -> StepResult:
        """Runs one step and waits for its tokens."""
        return self.wait(self.choose(self.execute_async(plan)))

    def execute_async(self, plan: Plan) -> PendingStep:
        """Dispatches one step. Its tokens stay on the device as the input of the next step, and a copy for
        the host is started. If rows have constraints, only the model runs until `choose`.
        """
        num_compiled = self.compiles_after_warmup.count
        with TraceAnnotation("pack", step=plan.step_id):
            packed = self._pack(plan)
        with TraceAnnotation("dispatch", step=plan.step_id):
            step = self._dispatch(plan, packed)
        if self.compiles_after_warmup.count == num_compiled:
            return step
        return dataclasses.replace(step, shape=step.shape._replace(compiled=True))

    def _pack(self, plan: Plan) -> _Packed:
        """Prepares all that the step sends to the device."""
        slots = self._slots
        self._prepare_slots(plan)
        constraints = slots.constraints(plan)
        targets = prompt_logprobs.prompt_targets(plan, slots)
        parts = hidden_rows.wanted(plan, slots)
        # A window program samples by itself and returns no hidden states, so a step that needs some cannot
        # use it.
        window = plan.decode_only and not (constraints or targets or parts)
        if window and self.config.vision is not None:
            window = not needs_sections(plan, slots.request)
        key = self.config.buckets.select(
            plan.num_tokens, len(plan.rows), window=window, num_steps=plan.num_steps
        )
        buffer, logprobs = slots.pack(plan, key, constraints), slots.logprobs(plan)
        return _Packed(key, buffer, constraints, targets, parts, logprobs, time.monotonic_ns())

    def _dispatch(self, plan: Plan, step: _Packed) -> PendingStep:
        """Calls the step's programs, and waits for none of them."""
        calls, slots, key = self.calls, self._slots, step.key
        shape = StepShape(key.tokens, key.rows)
        if key.window:
            return AwaitingTokens(
                plan=plan,
                packed_ns=step.packed_ns,
                shape=shape,
                chosen=calls.window(key, step.buffer),
                logprobs=step.logprobs,
            ).sent()
        logits, hidden = calls.forward(key, step.buffer)
        packed = step.buffer[: slots.layout(key).rows_size]
        most = self.config.buckets.token_buckets[-1]
        prompt = prompt_logprobs.compute(
            plan,
            slots,
            step.targets,
            most_tokens=most,
            num_top=self.config.num_top,
            program=lambda buffer: calls.prompt_logprobs(hidden, buffer),
        )
        summed = hidden_rows.compute(
            step.parts, most_tokens=most, program=lambda buffer: calls.hidden_sums(hidden, buffer)
        )
        if step.constraints:
            return AwaitingChoice(
                plan=plan,
                packed_ns=step.packed_ns,
                shape=shape,
                key=key,
                logits=logits,
                packed=packed,
                constraints=step.constraints,
                logprobs=step.logprobs,
                prompt=prompt,
                hidden=summed,
            )
        return AwaitingTokens(
            plan=plan,
            packed_ns=step.packed_ns,
            shape=shape,
            chosen=calls.choose(logits, packed, None),
            logprobs=step.logprobs,
            prompt=prompt,
            hidden=summed,
        ).sent()

    def choose(self, step: PendingStep) -> AwaitingTokens:
        """Chooses the tokens of a step that waits for it; any other step is returned as it is. To be called
        after the constraints have accepted the tokens of all earlier steps, and before the next step is
        dispatched.

        `skipped` of the result are rows whose masks were not ready in time. They make no token, and the next
        step that has them computes the same position again.
        """
        if isinstance(step, AwaitingTokens):
            return step
        plan, packed, calls = step.plan, step.packed, self.calls
        others = plan.apart or len(plan.rows) > len(step.constraints)
        mask = calls.all_allowed(step.logits.shape[0])
        filled = self._step_masks.fill(step.constraints, mask, others=others)
        if filled.skipped:
            packed = self._slots.silenced(packed, step.key, filled.skipped)
        return AwaitingTokens(
            plan=plan,
            packed_ns=step.packed_ns,
            shape=step.shape,
            chosen=calls.choose(step.logits, packed, filled.masks),
            logprobs=step.logprobs,
            prompt=step.prompt,
            hidden=step.hidden,
            errors=filled.errors,
            skipped=filled.skipped,
            late=filled.late,
        ).sent()

    def wait(self, step: PendingStep) -> StepResult:
        """Blocks until a dispatched step's result is on the host."""
        if isinstance(step, AwaitingChoice):
            raise RuntimeError("choose comes before wait")
        return step.read(self.config.num_top)

    def _prepare_slots(self, plan: Plan) -> None:
        """Takes in what the plan says about slots and pages, and sends to the device what the buffer of the
        step has no room for.
        """
        calls, slots = self.calls, self._slots
        for slot, request in plan.new_requests:
            feature_slot = plan.feature_slots.get(slot)
            slots.admit(slot, request, feature_slot or 0)
            if feature_slot is not None:
                calls.write_features(feature_slot, request, plan.generated_before.get(slot, ()))
        if plan.page_writes:
            calls.write_tables(slots.table_rows(slots.write_pages(plan)))
        if plan.page_copies:
            calls.copy_pages(plan.page_copies)
        if plan.encodes:
            calls.encode(plan.encodes)
