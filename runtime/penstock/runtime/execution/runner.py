"""ModelRunner: turns a Plan into calls of compiled programs.

The host's work in each step is to pick the program, fill one new int32 buffer with numpy, and call the
program. The buffer is never reused, because on CPU the runtime may read it in place after the call has
returned.

`ProgramCalls` makes the calls, each with the parts of the device's state that the program needs. A step that
was dispatched is an `AwaitingChoice` as long as its tokens are not chosen, and then an `AwaitingTokens`,
which waits for them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError, NonFiniteLogits
from penstock.runtime.execution import hidden_rows, prompt_logprobs
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.compilation import CompileCounter
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.execution.hidden_rows import HiddenRows, sums_buffer
from penstock.runtime.execution.images import EncodeCall, encode_call, needs_sections
from penstock.runtime.execution.program_set import Programs, adapter_shape
from penstock.runtime.execution.prompt_logprobs import PromptLogprobs, prompt_buffer
from penstock.runtime.execution.proposed_rows import Further, asking_the_draft, pack_checks, spread
from penstock.runtime.execution.request_programs import pack_admission, pack_page_copies
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.slots import Slots
from penstock.runtime.execution.step_programs import Chosen
from penstock.runtime.grammar.masks.fill import MaskFiller, mask_threads
from penstock.runtime.grammar.masks.mask_thread import Ahead
from penstock.runtime.grammar.masks.step_masks import Filled, StepMasks
from penstock.runtime.loop.interface import StepShape
from penstock.runtime.ops.device_arrays import put_equal
from penstock.runtime.ops.sampler import read_logprobs
from penstock.runtime.ops.sampling_codes import NON_FINITE
from penstock.runtime.requests.constraint import TokenConstraint, mask_words
from penstock.runtime.requests.request import Request, TokenLogprobs
from penstock.runtime.requests.token_bias import bias_row
from penstock.runtime.scheduling.plan import Encode, PageCopy, Plan, StepResult

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingChoice:
    """A step whose model runs, and whose tokens are not chosen yet. `ModelRunner.choose` chooses them."""

    plan: Plan
    packed_ns: int
    """See `DispatchedStep`."""
    shape: StepShape
    """See `DispatchedStep`."""
    key: ProgramKey
    logits: jax.Array
    packed: NDArray[np.int32]
    """The first part of the step's buffer, which the choice needs."""
    constraints: Mapping[int, TokenConstraint]
    """Row to constraint."""
    logprobs: Sequence[int | None]
    """See `AwaitingTokens`."""
    prompt: PromptLogprobs | None
    hidden: HiddenRows | None
    further: Further
    """See `AwaitingTokens`."""
    checks: Ints | None
    """What is to be checked of proposed tokens; None where none are."""

    @property
    def awaits_choice(self) -> bool:
        """See `DispatchedStep`."""
        return True

    @property
    def is_done(self) -> bool:
        """See `DispatchedStep`."""
        return False

    @property
    def skipped(self) -> frozenset[int]:
        """See `DispatchedStep`. Before the choice no row is skipped."""
        return frozenset()

    @property
    def late(self) -> frozenset[int]:
        """See `DispatchedStep`."""
        return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingTokens:
    """A step whose tokens are chosen on the device. A copy for the host is on its way."""

    plan: Plan
    packed_ns: int
    """See `DispatchedStep`."""
    shape: StepShape
    """See `DispatchedStep`."""
    chosen: Chosen
    logprobs: Sequence[int | None]
    """For each row, how many log-probabilities of likeliest tokens it wants; None: not even the sampled
    token's. This is noted here because the slot may belong to another request when the result is read."""
    prompt: PromptLogprobs | None = None
    """Log-probabilities of prompt tokens; None where no row wants any."""
    hidden: HiddenRows | None = None
    """Hidden states; None where no row wants any."""
    errors: Mapping[int, Exception] = field(default_factory=dict)
    """Row to error, for rows for which no token can be chosen."""
    skipped: frozenset[int] = frozenset()
    """See `DispatchedStep`."""
    late: frozenset[int] = frozenset()
    """See `DispatchedStep`."""
    further: Further = field(default_factory=dict)
    """The rows that the device has for proposed tokens."""

    @property
    def awaits_choice(self) -> bool:
        """See `DispatchedStep`."""
        return False

    @property
    def is_done(self) -> bool:
        """See `DispatchedStep`."""
        ready: bool = cast(Any, self.chosen.tokens).is_ready()  # JAX's types do not tell of it
        return ready

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row wants log-probabilities; if not, they stay on the device."""
        return any(wanted is not None for wanted in self.logprobs)

    def sent(self) -> AwaitingTokens:
        """Start to copy to the host what it will read of this step. Returns the step."""
        self.chosen.tokens.copy_to_host_async()
        if self.wants_logprobs:
            self.chosen.logprobs.copy_to_host_async()
        if self.chosen.guessed is not None:
            self.chosen.guessed.copy_to_host_async()
        return self

    def read(self, num_top: int) -> StepResult:
        """Block until the result is on the host. `num_top`: how many likeliest tokens the programs report."""
        plan = self.plan
        num_rows = len(plan.rows) + sum(map(len, self.further.values()))
        tokens = np.asarray(self.chosen.tokens)[: plan.num_steps, :num_rows].T
        token_ids: list[Sequence[int]] = tokens.tolist()
        for i, further in self.further.items():
            # Those that do not count are negative.
            token_ids[i] = [tokens.item(row, 0) for row in (i, *further)]
        del token_ids[len(plan.rows) :]
        errors = dict(self.errors)
        for i, row in enumerate(plan.rows):
            if not row.samples:
                token_ids[i] = ()
        for i in self.skipped.union(errors):
            token_ids[i] = ()  # they were chosen without a mask
        if tokens.min() < 0:
            for i, made in enumerate(token_ids):
                if NON_FINITE in made:
                    errors.setdefault(i, NonFiniteLogits())
                token_ids[i] = [token for token in made if token >= 0]
        logprobs: list[Sequence[TokenLogprobs]] = [()] * len(plan.rows)
        if self.wants_logprobs:
            values = np.asarray(self.chosen.logprobs)
            for i, k in enumerate(self.logprobs):
                if k is not None:
                    num_made = len(token_ids[i])
                    of_row = values[0, [i, *self.further[i]]] if i in self.further else values[:, i]
                    logprobs[i] = [read_logprobs(each, num_top, k) for each in of_row[:num_made]]
        guessed: list[Sequence[int]] = []
        if self.chosen.guessed is not None:
            guessed = np.asarray(self.chosen.guessed)[: plan.num_steps, :num_rows].T.tolist()
            guessed = [of_row[: len(made)] for of_row, made in zip(guessed, token_ids, strict=True)]
        prompt = {} if self.prompt is None else self.prompt.read(num_top)
        hidden = {} if self.hidden is None else self.hidden.read()
        for i, values in hidden.items():
            if not np.isfinite(values).all():
                errors.setdefault(i, NonFiniteLogits())
        return StepResult(
            token_ids, logprobs, errors=errors, prompt_logprobs=prompt, hidden=hidden, guessed=guessed
        )


PendingStep = AwaitingChoice | AwaitingTokens


def _without_mask(filled: Filled, ahead: Mapping[int, Ahead]) -> list[int]:
    """Find the rows of proposed tokens that make no token: their masks allow nothing, because they were not
    made, or they belong to rows that make none themselves.
    """
    return [
        row
        for i, (places, _) in ahead.items()
        for row in places
        if i in filled.skipped or not filled.masks[row].any()
    ]


class ProgramCalls:
    """Calls the programs of one runner. The device runs the calls in order, and no method waits for one,
    except `warm_up`.
    """

    def __init__(self, programs: Programs, device: DeviceState, config: RunnerConfig) -> None:
        self.programs = programs
        self._device = device
        self._config = config
        words = mask_words(config.vocab_size)
        self._no_masks = {
            rows: put_equal(np.zeros((rows, words), np.int32), device.sharding)
            for rows in config.buckets.decode_rows
        }

    def forward(
        self, key: ProgramKey, packed: Ints, *, has_proposed: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Run the model. Returns logits float32[R, V] and hidden states, see `Forward`. has_proposed: whether
        there are rows of proposed tokens.
        """
        device = self._device
        others = (device.pool, device.adapters, device.draft_leaves)
        joined = self.programs.joined
        program = joined[key.rows] if joined and has_proposed else self.programs.steps[key]
        forward = program(device.leaves, device.kv, device.rows, packed, *others)
        device.kv, device.rows, logits, hidden = forward
        return logits, hidden

    def window(self, key: ProgramKey, packed: Ints) -> Chosen:
        """Run a window of decode steps."""
        device = self._device
        device.kv, device.rows, chosen = self.programs.steps[key](
            device.leaves, device.kv, device.rows, packed, device.adapters, device.draft_leaves
        )
        return cast("Chosen", chosen)

    def text_window(self, rows: int, packed: Ints) -> Chosen:
        """Run a window of decode steps for so many rows, which guesses by the text."""
        device = self._device
        device.kv, device.rows, chosen = self.programs.text_windows[rows](
            device.leaves, device.kv, device.rows, packed, device.adapters, device.text
        )
        return cast("Chosen", chosen)

    def guess(self, rows: int, packed: Ints) -> None:
        """Have the draft or the heads guess tokens, see `make_guesses`."""
        device = self._device
        program = self.programs.guesses[rows]
        arguments = (device.leaves, device.kv, device.rows, packed, device.draft_leaves)
        device.kv, device.rows = program(*arguments)

    def choose(
        self, logits: jax.Array, packed: Ints, mask: Ints | None, checks: Ints | None = None
    ) -> Chosen:
        """Choose tokens. `packed` is the first part of the step's buffer, `mask` int32[R, words] has a bit
        for each token that is allowed; None: the rows have no masks. `checks`: what `pack_checks` makes; None
        where no tokens are proposed.
        """
        device, rows = self._device, logits.shape[0]
        masks: Any = self._no_masks[rows] if mask is None else mask
        if checks is None:
            device.rows, chosen = self.programs.choices[rows](device.rows, logits, packed, masks)
        else:
            program = self.programs.checked_choices[rows]
            device.rows, chosen = program(device.rows, logits, packed, masks, checks)
        return cast("Chosen", chosen)

    def prompt_logprobs(self, hidden: jax.Array, packed: Ints) -> jax.Array:
        """Compute log-probabilities of tokens of the prompts, see `make_prompt_logprobs`."""
        result: jax.Array = self.programs.prompt_logprobs(self._device.leaves, hidden, packed)
        return result

    def hidden_sums(self, hidden: jax.Array, packed: Ints) -> jax.Array:
        """Return hidden states added up, see `make_hidden_sums`."""
        result: jax.Array = self.programs.hidden_sums(self._device.leaves, hidden, packed)
        return result

    def write_features(self, feature_slot: int, request: Request, made: tuple[int, ...]) -> None:
        """Fill a feature slot for a request that has generated the tokens `made` so far."""
        packed = pack_admission(feature_slot, request, made, self._config.max_model_len)
        bias = request.bias_row
        if bias is None:
            bias = bias_row(request.sampling, self._config.vocab_size)
        self.admit(packed, bias)

    def admit(self, packed: Ints, bias: NDArray[np.float32]) -> None:
        """Fill a feature slot, see `make_admission`."""
        self._device.rows = self.programs.admission(self._device.rows, packed, bias)

    def write_tables(self, buffers: Iterable[Ints]) -> None:
        """Write whole page tables, from the buffers of `Slots.table_rows`."""
        for packed in buffers:
            self.write_table_rows(packed)

    def write_table_rows(self, packed: Ints) -> None:
        """Write page tables, see `make_table_rows`."""
        self._device.rows = self.programs.table_rows(self._device.rows, packed)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages within the cache."""
        self.copy_pairs(pack_page_copies(copies, self._config.max_num_seqs, self._device.num_pages))

    def copy_pairs(self, pairs: Ints) -> None:
        """Copy pages within the cache, see `make_page_copies`."""
        self._device.kv = self.programs.copy_pages(self._device.kv, pairs)

    def encode(self, encodes: Sequence[Encode]) -> None:
        """Encode images into the pool."""
        config, vision = self._config, self._config.vision
        assert vision is not None, "a plan encodes images for a model that reads none"
        for encode in encodes:
            self.encode_one(encode_call(vision, config.encode_buckets, config.pool_rows, encode))

    def encode_one(self, call: EncodeCall) -> None:
        """Encode one image into the pool, see `make_encode`."""
        device = self._device
        program = self.programs.encodes[call.bucket]
        device.pool = program(device.leaves, device.pool, call.inputs, call.packed)

    def write_adapter(self, slot: int, values: NDArray[Any], digest: str = "") -> None:
        """Write an adapter to its slot, see `make_adapter_write`. digest: that of the values, by which other
        processes know that they have the same ones; empty: they do not look.
        """
        write = self.programs.write_adapter
        assert write is not None, "a plan writes an adapter for an engine without adapters"
        (pool,) = self._device.adapters
        self._device.adapters = write((pool,), np.int32(slot), put_equal(values, pool.sharding))

    def warm_up(self, slots: Slots) -> None:
        """Run every program once on padding only, and wait for it. The first call with arguments of one
        kind is slow, because JAX finds its fast path for each kind. Of the programs that encode images only
        the smallest runs, because a large one takes seconds whatever it encodes.
        """
        for key in self.programs.steps:
            packed = slots.blank(key)
            if key.window:
                self.window(key, packed)
                if key.rows in self.programs.text_windows:
                    self.text_window(key.rows, packed)
            else:
                if key.decode_only and key.rows in self.programs.joined:
                    self.forward(key, packed, has_proposed=True)
                logits, hidden = self.forward(key, packed)
                packed = packed[: slots.layout(key).rows_size]
                mask = self.all_allowed(key.rows)  # constraints' masks are on the host
                if key.rows in self.programs.choices:
                    self.choose(logits, packed, None)
                    self.choose(logits, packed, mask)
                if self._config.checks_proposals:
                    checks = pack_checks((), {}, key.rows)
                    self.choose(logits, packed, None, checks)
                    self.choose(logits, packed, mask, checks)
                if key.rows in self.programs.guesses:
                    self.guess(key.rows, packed)
                most = self._config.buckets.token_buckets[-1]
                self.prompt_logprobs(hidden, prompt_buffer([], [], most))
                self.hidden_sums(hidden, sums_buffer({}, frozenset(), most, 0))
        self.write_features(self._config.num_feature_slots, Request("warm-up", (0,)), ())
        if (
            self._device.kv
        ):  # an encoder has none, and a program without arrays, once read again, is for one device
            self.copy_pages(())
        self.write_tables(slots.table_rows([0]))
        for pool in self._device.adapters:
            self.write_adapter(0, np.zeros(adapter_shape(pool), pool.dtype))
        if self._config.vision is not None:
            config = self._config
            self.encode_one(encode_call(self._config.vision, config.encode_buckets, config.pool_rows, None))
        device = self._device
        jax.block_until_ready((device.rows, device.kv, device.pool, device.adapters))

    def all_allowed(self, rows: int) -> Ints:
        """Make a mask on the host, int32[R, words], to be narrowed."""
        return np.full((rows, mask_words(self._config.vocab_size)), -1, np.int32)

    def free(self) -> None:
        """Free the memory on the device that the calls hold."""
        for array in self._no_masks.values():
            array.delete()


class _Packed(NamedTuple):
    """What a step sends to the device, and what it will want to know later."""

    spread: Plan
    """The plan with a row for each proposed token, see `proposed_rows`."""
    further: Further
    """See `AwaitingTokens`."""
    checks: Ints | None
    """See `AwaitingChoice`."""
    key: ProgramKey
    buffer: NDArray[np.int32]
    guesses: tuple[int, Ints] | None
    """The arguments of `ProgramCalls.guess`; None where the draft guesses nothing."""
    constraints: Mapping[int, TokenConstraint]
    """Row to constraint."""
    targets: Mapping[int, tuple[int, ...]]
    """See `prompt_logprobs.prompt_targets`."""
    parts: hidden_rows.Parts
    """See `hidden_rows.wanted`."""
    classified: frozenset[int]
    """The rows of these whose classes are wanted."""
    logprobs: Sequence[int | None]
    """See `AwaitingTokens`."""
    packed_ns: int
    """See `DispatchedStep`."""


class ModelRunner:
    """Compiles and runs steps of one model: the loop's `Runner` on a device of JAX's."""

    def __init__(self, device: DeviceState, config: RunnerConfig) -> None:
        """`device`: what the runner keeps on the device, which `shutdown` frees."""
        self.config = config
        self.compiles_after_warmup = CompileCounter()
        self.device = device
        self._slots = Slots(config, device.num_groups)
        filler = MaskFiller(mask_threads(config.threads))
        self._step_masks = StepMasks(filler.fill_all, in_parallel=filler.is_parallel)
        self._calls: ProgramCalls | None = None

    # -- life --

    def initialize_kv_cache(self, num_pages: Sequence[int]) -> None:
        """Allocate the cache, filled with zeros, with so many pages in each group of layers. Programs are
        compiled for its shape, so this comes before `compile`.
        """
        self.device.allocate_cache(num_pages)

    def compile(self) -> None:
        """Compile every program, and run each once on padding only."""
        self._calls = self.make_calls(self.compiled())
        self._calls.warm_up(self._slots)

    def compiled(self) -> Programs:
        """Compile every program."""
        if not self.device.num_pages:
            raise ConfigError("initialize_kv_cache comes before compile")
        return self.device.builder(self.device.num_pages).compile_all()

    def make_calls(self, programs: Programs) -> ProgramCalls:
        """Make what calls the programs."""
        return ProgramCalls(programs, self.device, self.config)

    def start(self) -> None:
        """Count the compilations of the calling thread, the engine's, from now on."""
        self.compiles_after_warmup.start()

    def shutdown(self) -> None:
        """Free the device's memory that this runner holds. It cannot be used afterwards."""
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
        """Run one step and wait for its tokens."""
        return self.wait(self.choose(self.execute_async(plan)))

    def execute_async(self, plan: Plan) -> PendingStep:
        """Dispatch one step. Its tokens stay on the device as the input of the next step, and a copy for the
        host is started. If rows have constraints, only the model runs until `choose`.
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
        """Prepare all that the step sends to the device."""
        slots = self._slots
        self._prepare_slots(plan)
        constraints, logprobs = slots.constraints(plan), slots.logprobs(plan)
        whole, further = spread(plan)
        targets = prompt_logprobs.prompt_targets(whole, slots)
        parts = hidden_rows.wanted(whole, slots)
        # A window program samples by itself and returns no hidden states, so a step that needs some cannot
        # use it.
        can_window = whole.decode_only and self.config.buckets.has_windows
        window = can_window and not (constraints or targets or parts or further)
        if window and self.config.vision is not None:
            window = not needs_sections(whole, slots.request)
        key = self.config.buckets.select(
            whole.num_tokens, len(whole.rows), window=window, num_steps=plan.num_steps
        )
        checks = pack_checks(plan.rows, further, key.rows) if further else None
        masked = [*constraints, *(row for i in constraints if i in further for row in further[i])]
        buffer = slots.pack(whole, key, masked)
        guesses = None
        if (asking := asking_the_draft(plan)) is not None:
            of_rows = self.config.buckets.select(asking.num_tokens, len(asking.rows))
            packed = slots.pack(asking, of_rows, ())[: slots.layout(of_rows).rows_size]
            guesses = of_rows.rows, packed
        classified = hidden_rows.classified(whole, slots) if self.config.num_classes else frozenset[int]()
        now_ns = time.monotonic_ns()
        return _Packed(
            spread=whole,
            further=further,
            checks=checks,
            key=key,
            buffer=buffer,
            guesses=guesses,
            constraints=constraints,
            targets=targets,
            parts=parts,
            classified=classified,
            logprobs=logprobs,
            packed_ns=now_ns,
        )

    def _dispatch(self, plan: Plan, step: _Packed) -> PendingStep:
        """Call the step's programs, and wait for none of them."""
        calls, slots, key = self.calls, self._slots, step.key
        shape = StepShape(key.tokens, key.rows)
        if key.window:
            if plan.reads_text and key.rows in calls.programs.text_windows:
                chosen = calls.text_window(key.rows, step.buffer)
            else:
                chosen = calls.window(key, step.buffer)
            return AwaitingTokens(
                plan=plan,
                packed_ns=step.packed_ns,
                shape=shape,
                chosen=chosen,
                logprobs=step.logprobs,
            ).sent()
        if step.guesses is not None:
            calls.guess(*step.guesses)
        logits, hidden = calls.forward(key, step.buffer, has_proposed=bool(step.further))
        packed = step.buffer[: slots.layout(key).rows_size]
        most = self.config.buckets.token_buckets[-1]
        prompt = prompt_logprobs.compute(
            step.spread,
            slots,
            step.targets,
            most_tokens=most,
            num_top=self.config.num_top,
            program=lambda buffer: calls.prompt_logprobs(hidden, buffer),
        )
        summed = hidden_rows.compute(
            step.parts,
            maxima=hidden_rows.with_maxima(step.spread, slots) if step.parts else frozenset(),
            most_tokens=most,
            most_rows=self.config.max_num_seqs,
            num_classes=self.config.num_classes,
            classified=step.classified,
            program=lambda buffer: calls.hidden_sums(hidden, buffer),
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
                further=step.further,
                checks=step.checks,
            )
        return AwaitingTokens(
            plan=plan,
            packed_ns=step.packed_ns,
            shape=shape,
            chosen=calls.choose(logits, packed, None, step.checks),
            logprobs=step.logprobs,
            prompt=prompt,
            hidden=summed,
            further=step.further,
        ).sent()

    def choose(self, step: PendingStep) -> AwaitingTokens:
        """Choose the tokens of a step that waits for it; return any other step as it is. To be called after
        the constraints have accepted the tokens of all earlier steps, and before the next step is dispatched.

        `skipped` of the result are rows whose masks were not ready in time. They make no token, and the next
        step that has them computes the same position again.
        """
        if isinstance(step, AwaitingTokens):
            return step
        plan, packed, calls = step.plan, step.packed, self.calls
        others = plan.apart or len(plan.rows) > len(step.constraints)
        mask = calls.all_allowed(step.logits.shape[0])
        ahead = {
            i: Ahead(places, plan.rows[i].proposed)
            for i, places in step.further.items()
            if i in step.constraints
        }
        for places, _ in ahead.values():
            mask[places.start : places.stop] = 0
        filled = self._step_masks.fill(step.constraints, mask, others=others, ahead=ahead)
        silent = [*filled.skipped, *_without_mask(filled, ahead)]
        if silent:
            packed = self._slots.silenced(packed, step.key, silent)
        return AwaitingTokens(
            plan=plan,
            packed_ns=step.packed_ns,
            shape=step.shape,
            chosen=calls.choose(step.logits, packed, filled.masks, step.checks),
            logprobs=step.logprobs,
            prompt=step.prompt,
            hidden=step.hidden,
            further=step.further,
            errors=filled.errors,
            skipped=filled.skipped,
            late=filled.late,
        ).sent()

    def wait(self, step: PendingStep) -> StepResult:
        """Block until a dispatched step's result is on the host."""
        if isinstance(step, AwaitingChoice):
            raise RuntimeError("choose comes before wait")
        return step.read(self.config.num_top)

    def _prepare_slots(self, plan: Plan) -> None:
        """Take in what the plan says about slots and pages, and send to the device what the buffer of the
        step has no room for.
        """
        calls, slots = self.calls, self._slots
        for slot, request in plan.new_requests:
            feature_slot = plan.feature_slots.get(slot)
            slots.admit(slot, request, feature_slot or 0, plan.adapter_slots.get(slot, 0))
            if feature_slot is not None:
                calls.write_features(feature_slot, request, plan.generated_before.get(slot, ()))
        for adapter_slot, weights in plan.adapter_loads:
            calls.write_adapter(adapter_slot, weights.values.whole(), weights.digest)
        if plan.page_writes:
            calls.write_tables(slots.table_rows(slots.write_pages(plan)))
        if plan.page_copies:
            calls.copy_pages(plan.page_copies)
        if plan.encodes:
            calls.encode(plan.encodes)
