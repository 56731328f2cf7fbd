"""The set of compiled programs of one runner: which ones there are, for which shapes, and how they are
compiled.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.execution import compiled_set, program_store
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.compilation import compile_all, compile_lowered, lower_program
from penstock.runtime.execution.draft_model import DraftModel
from penstock.runtime.execution.images import Pool, input_shapes, make_encode
from penstock.runtime.execution.on_mesh import CUT, JOINED, WHOLE, on_mesh, specs_of
from penstock.runtime.execution.proposed_rows import CHECKS
from penstock.runtime.execution.request_programs import (
    TABLE_ROWS,
    admission_size,
    make_adapter_write,
    make_admission,
    make_hidden_sums,
    make_page_copies,
    make_prompt_logprobs,
    make_table_rows,
)
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.step_buffer import Layout
from penstock.runtime.execution.step_programs import (
    AdapterPool,
    Forward,
    KVCache,
    OfStage,
    Rebuild,
    RebuildFollower,
    StagedModel,
    StepShapes,
    Weights,
    make_checked_choice,
    make_choice,
    make_forward,
    make_guesses,
    make_stage,
    make_text_window,
    make_window,
)
from penstock.runtime.execution.text_guesses import TextTables
from penstock.runtime.models.layers.inputs import Passed
from penstock.runtime.models.stages import Stage
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.ops.sampler import RowState
from penstock.runtime.requests.constraint import mask_words

_FORWARD = Forward(kv=JOINED, state=WHOLE, logits=WHOLE, hidden=WHOLE)  # type: ignore[arg-type]  # a prefix
_OF_STAGE = OfStage(kv=JOINED, state=WHOLE, passed=WHOLE)  # type: ignore[arg-type]  # a prefix


log = logging.getLogger(__name__)

Job = ProgramKey | int | str
"""The name of a program in its set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """All programs that a runner calls; see `step_programs` and `request_programs`."""

    steps: Mapping[ProgramKey, jax.stages.Compiled]
    """Key to window or forward."""
    choices: Mapping[int, jax.stages.Compiled]
    """Number of rows to choice."""
    checked_choices: Mapping[int, jax.stages.Compiled]
    """Number of rows to choice of a step with proposed tokens; none where no tokens are proposed."""
    joined: Mapping[int, jax.stages.Compiled]
    """Number of rows to forward of a step with proposed tokens, for a model with state by slot; none for
    others, and where no tokens are proposed."""
    guesses: Mapping[int, jax.stages.Compiled]
    """Number of rows to what guesses tokens for them; none where nothing guesses on the device."""
    text_windows: Mapping[int, jax.stages.Compiled]
    """Number of rows to window that guesses by a text; none where no window does."""
    prompt_logprobs: jax.stages.Compiled
    hidden_sums: jax.stages.Compiled
    admission: jax.stages.Compiled
    copy_pages: jax.stages.Compiled
    table_rows: jax.stages.Compiled
    encodes: Mapping[int, jax.stages.Compiled]
    """Number of patches to the program that encodes images; none for a model that reads none."""
    write_adapter: jax.stages.Compiled | None
    """Writes an adapter to its slot; None where there are no adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrograms:
    """The programs of a stage of a model that is not its last one; see `Programs`."""

    steps: Mapping[ProgramKey, jax.stages.Compiled]
    copy_pages: jax.stages.Compiled
    table_rows: jax.stages.Compiled


@dataclass(frozen=True, slots=True)
class ProgramBuilder:
    """Everything that programs are compiled for. `kv` holds the shapes of the cache with `num_pages` pages in
    each group of layers; `weights` and `state` may be arrays or shapes.
    """

    config: RunnerConfig
    graphdef: nnx.GraphDef[Any]
    """The model's structure, of which `rebuild` makes the model."""
    rebuild: Rebuild
    weights: Weights
    state: RowState
    cache: CacheSpec
    num_pages: tuple[int, ...]
    kv: KVCache
    backend: Backend
    sharding: jax.sharding.Sharding
    pool: Pool = ()
    adapters: AdapterPool = ()
    draft: DraftModel | None = None
    """What guesses tokens; None: nobody guesses on the device."""
    draft_weights: Weights = ()
    """() also where the model's own heads guess."""
    rebuild_follower: RebuildFollower | None = None
    text: TextTables | None = None
    """The text by which windows guess; None: there is none."""
    stage: Stage | None = None
    """The stage of the model whose programs these are; None: its layers are not cut into stages."""
    first: ProgramBuilder | None = None
    """Of a further stage: what makes the programs of the first one, which passes what all others pass."""
    files: program_store.ProgramFiles | None = None
    """Where a program is looked for before XLA compiles it; None: in JAX's own cache alone."""

    @property
    def largest(self) -> ProgramKey:
        """The key of the forward with the most tokens."""
        return max(
            (key for key in self.config.buckets.keys() if not key.decode_only),  # noqa: SIM118 # no mapping
            key=lambda key: key.tokens,
        )

    def compile_all(self) -> Programs:
        """Load the programs that an earlier start has kept, and compile the others in parallel, with a
        progress bar; those that take longest come first.
        """
        keys, row_buckets = self.config.buckets.keys(), self.config.buckets.row_buckets
        patches = self.config.encode_buckets
        made = self._made(ProgramBuilder.jobs)
        return Programs(
            steps={key: made[key] for key in keys},
            choices={rows: made[rows] for rows in row_buckets},
            checked_choices={rows: made[f"check {rows}"] for rows in self._checked_rows},
            joined={rows: made[f"join {rows}"] for rows in self._joined_rows},
            guesses={rows: made[f"guess {rows}"] for rows in self._guessed_rows},
            text_windows={rows: made[f"text window {rows}"] for rows in self._text_rows},
            prompt_logprobs=made["prompt_logprobs"],
            hidden_sums=made["hidden_sums"],
            admission=made["admission"],
            copy_pages=made["copy_pages"],
            table_rows=made["table_rows"],
            encodes={size: made[f"encode {size}"] for size in patches},
            write_adapter=made.get("write_adapter"),
        )

    def compile_stage(self) -> StagePrograms:
        """Do what `compile_all` does, for a stage that is not the last one."""
        keys = self.config.buckets.keys()
        made = self._made(ProgramBuilder.stage_jobs)
        return StagePrograms(
            steps={key: made[key] for key in keys},
            copy_pages=made["copy_pages"],
            table_rows=made["table_rows"],
        )

    def jobs(self) -> dict[Job, Callable[[], jax.stages.Compiled]]:
        """Return what compiles each program: by its key, by its number of rows for a choice, or by its
        name.
        """
        keys, row_buckets = self.config.buckets.keys(), self.config.buckets.row_buckets
        hidden = _once(self._hidden)  # asked for only where a program is not kept
        return {
            **{key: partial(self.window if key.window else self.forward, key) for key in keys},
            **{rows: partial(self.choice, rows) for rows in row_buckets},
            **{f"check {rows}": partial(self.checked_choice, rows) for rows in self._checked_rows},
            **{f"join {rows}": partial(self.joined, rows) for rows in self._joined_rows},
            **{f"guess {rows}": partial(self.guesses, rows) for rows in self._guessed_rows},
            **{f"text window {rows}": partial(self.text_window, rows) for rows in self._text_rows},
            **{f"encode {size}": partial(self.encode, size) for size in self.config.encode_buckets},
            "prompt_logprobs": partial(self.prompt_logprobs, hidden),
            "hidden_sums": partial(self.hidden_sums, hidden),
            "admission": self.admission,
            "copy_pages": self.copy_pages,
            "table_rows": self.table_rows,
            **({"write_adapter": self.write_adapter} if self.adapters else {}),
        }

    def stage_jobs(self) -> dict[Job, Callable[[], jax.stages.Compiled]]:
        """Do what `jobs` does, for a stage that is not the last one."""
        return {
            **{key: partial(self.forward, key) for key in self.config.buckets.keys()},  # noqa: SIM118
            "copy_pages": self.copy_pages,
            "table_rows": self.table_rows,
        }

    def write(self, folder: Path) -> int:
        """Compile all programs, and write them into the folder for another machine (`compiled_set`). Returns
        their bytes. ConfigError if they cannot be written.
        """
        config, facts = self.config, self.facts()
        compiled_set.begin(folder)
        made = compile_all(self.jobs(), threads=config.threads, show_progress=config.show_progress)
        return compiled_set.write(folder, facts, made)

    def _made(
        self, jobs_of: Callable[[ProgramBuilder], Mapping[Job, Callable[[], jax.stages.Compiled]]]
    ) -> Mapping[Job, jax.stages.Compiled]:
        jobs = jobs_of(self)
        compile_them = partial(
            compile_all, threads=self.config.threads, show_progress=self.config.show_progress
        )
        devices = list(self.backend.mesh.devices.flat)
        if self.config.compiled is not None:
            taken = compiled_set.read(self.config.compiled, self.facts(), devices)
            if taken.keys() >= jobs.keys():
                return taken
        folder = self.config.program_folder
        if folder is None or not self.backend.keeps_programs:
            return compile_them(jobs)
        key = self._key()
        kept = program_store.Kept({}, {})
        if key is not None:
            kept = program_store.load(folder, key, devices, self.config.ahead)
        left = jobs.keys() - kept.programs.keys()
        if not left:
            return kept.programs
        files = program_store.ProgramFiles(folder, devices)
        jobs = jobs_of(dataclasses.replace(self, files=files))
        made = compile_them({name: job for name, job in jobs.items() if name in left})
        log.info("%d of %d programs were kept in %s", len(files.found), len(made), folder)
        if key is not None:
            program_store.save(folder, key, {**kept.named, **files.named(made)})
        program_store.prune(folder)
        return {**kept.programs, **made}

    def _key(self) -> str | None:
        """Return the key of the set of these programs; None if it cannot be told what they are made of."""
        config = dataclasses.replace(
            self.config, show_progress=False, program_folder=None, ahead=None, compiled=None
        )
        devices = tuple((device.id, device.process_index) for device in self.backend.mesh.devices.flat)
        place = (self.sharding, devices, jax.process_index())
        made_of = (self.graphdef, self.stage, self._drafted)
        values = (config, made_of, self.backend, self.cache, self.num_pages, place)
        return program_store.key_of(values, self._arguments)

    def facts(self) -> compiled_set.Facts:
        """Return all that the programs are made of, by which another machine tells whether they are its
        own.
        """
        parts = (self.config, (self.graphdef, self._drafted), self.cache, self.num_pages)
        return compiled_set.facts_of(*parts, self._arguments, self.backend)

    @property
    def _drafted(self) -> tuple[nnx.GraphDef[Any] | None, CacheSpec, tuple[int, ...]] | None:
        """What a draft model is made of."""
        return None if self.draft is None else (self.draft.graphdef, self.draft.cache, self.draft.taps)

    @property
    def _arguments(self) -> list[Any]:
        """All that stays on the device between the calls of programs."""
        given = (self.weights, self.state, self.kv, self.pool, self.adapters, self.draft_weights, self.text)
        return jax.tree.leaves(given)

    def forward(self, key: ProgramKey) -> jax.stages.Compiled:
        if self.stage is not None:
            name = f"stage{self.stage.number}_{key.name}"
            results = _FORWARD if self.stage.is_last else _OF_STAGE
            return self._compiled(
                self._of_stage(self.stage, key),
                *self._stage_arguments(key),
                donate=(1, 2),
                name=name,
                results=results,
            )
        return self._compiled_forward(key, self._forward(key), key.name)

    def _of_stage(self, stage: Stage, key: ProgramKey) -> Callable[..., OfStage | Forward]:
        backend, rebuild = self.backend, cast("Callable[[Weights], StagedModel]", self.rebuild)
        return make_stage(
            rebuild, stage, self._layout(key), self._shapes, backend.attention, backend.recurrent
        )

    def passed(self, key: ProgramKey) -> Passed:
        """Return the shapes of what each stage passes to the next one, on the devices of this one."""
        first = self.first or self
        assert first.stage is not None, "only stages pass something"
        arguments = first._stage_arguments(key)
        program = on_mesh(
            first._of_stage(first.stage, key), first.backend.mesh, specs_of(arguments), _OF_STAGE
        )
        made = jax.eval_shape(program, *arguments).passed
        placed: Passed = jax.tree.map(lambda each: self._placed(each.shape, each.dtype), made)
        return placed

    def _stage_arguments(self, key: ProgramKey) -> tuple[Any, ...]:
        packed = self._ints(self._layout(key).size)
        given = self._ints(self.config.max_num_seqs) if self.first is None else self.passed(key)
        return self.weights, self.kv, self.state, packed, given

    def joined(self, rows: int) -> jax.stages.Compiled:
        """Compile the forward for so many rows of one token, of which several may have the same slot."""
        key = ProgramKey(rows, rows, decode_only=True)
        return self._compiled_forward(key, self._forward(key, joins=True), f"joined_rows{rows}")

    def _compiled_forward(
        self, key: ProgramKey, program: Callable[..., Forward], name: str
    ) -> jax.stages.Compiled:
        packed = self._ints(self._layout(key).size)
        return self._compiled(
            program,
            self.weights,
            self.kv,
            self.state,
            packed,
            self.pool,
            self.adapters,
            self.draft_weights,
            donate=(1, 2),
            name=name,
            results=_FORWARD,
        )

    def encode(self, patches: int) -> jax.stages.Compiled:
        """Compile the program that encodes images of so many patches, for a model that reads them."""
        vision = self.config.vision
        assert vision is not None, "programs that encode images are compiled for models that read them"
        return self._compiled(
            make_encode(self.rebuild),
            self.weights,
            self.pool,
            input_shapes(vision, patches, self.sharding),
            self._ints(1 + patches // vision.patches_per_token),
            donate=(1,),
            name=f"encode_patches{patches}",
        )

    def window(self, key: ProgramKey) -> jax.stages.Compiled:
        program = make_window(
            self.rebuild,
            self._layout(key),
            self._shapes,
            self.backend.attention,
            self.backend.recurrent,
            self.backend.sampler,
            key.num_steps or self.config.max_decode_steps,
            self.rebuild_follower,
        )
        packed = self._ints(self._layout(key).size)
        return self._compiled(
            program,
            self.weights,
            self.kv,
            self.state,
            packed,
            self.adapters,
            self.draft_weights,
            donate=(1, 2),
            name=key.name,
            results=(JOINED, WHOLE, WHOLE),
        )

    def text_window(self, rows: int) -> jax.stages.Compiled:
        """Compile the window for so many rows that guesses by a text."""
        config, layout = self.config, self._layout(ProgramKey(rows, rows, decode_only=True, window=True))
        program = make_text_window(
            self.rebuild,
            layout,
            self._shapes,
            self.backend.attention,
            self.backend.recurrent,
            self.backend.sampler,
            config.max_decode_steps,
            num_rows=config.text_rows,
            most_guesses=config.text_guesses,
        )
        packed = self._ints(layout.size)
        arguments = (self.weights, self.kv, self.state, packed, self.adapters, self.text)
        name, results = f"text_window_rows{rows}", (JOINED, WHOLE, WHOLE)
        return self._compiled(program, *arguments, donate=(1, 2), name=name, results=results)

    def choice(self, rows: int) -> jax.stages.Compiled:
        program = make_choice(self._choice_layout(rows), self.backend.sampler, self.config.num_top)
        arguments = self._choice_arguments(rows)
        return self._compiled(program, *arguments, donate=(0,), name=f"choice_rows{rows}")

    def checked_choice(self, rows: int) -> jax.stages.Compiled:
        program = make_checked_choice(self._choice_layout(rows), self.backend.sampler, self.config.num_top)
        arguments = (*self._choice_arguments(rows), self._ints(CHECKS, rows))
        return self._compiled(program, *arguments, donate=(0,), name=f"checked_choice_rows{rows}")

    def guesses(self, rows: int) -> jax.stages.Compiled:
        """Compile the program in which the draft guesses tokens for so many rows."""
        assert self.rebuild_follower is not None, "programs that guess are compiled where something does"
        layout, backend = self._choice_layout(rows), self.backend
        program = make_guesses(
            self.rebuild_follower,
            layout,
            self._shapes,
            backend.attention,
            backend.recurrent,
            self.config.drafted_tokens,
            all_steps=backend.fixed_windows,
        )
        packed = self._ints(layout.rows_size)
        arguments = (self.weights, self.kv, self.state, packed, self.draft_weights)
        name = f"guesses_rows{rows}"
        return self._compiled(program, *arguments, donate=(1, 2), name=name, results=(JOINED, WHOLE))

    def _choice_layout(self, rows: int) -> Layout:
        return self._layout(ProgramKey(rows, rows, decode_only=True))

    def _choice_arguments(self, rows: int) -> tuple[Any, ...]:
        logits = self._placed((rows, self.config.vocab_size), jnp.float32)
        packed = self._ints(self._choice_layout(rows).rows_size)
        return self.state, logits, packed, self._ints(rows, mask_words(self.config.vocab_size))

    @property
    def _checked_rows(self) -> tuple[int, ...]:
        return self.config.buckets.decode_rows if self.config.checks_proposals else ()

    @property
    def _joined_rows(self) -> tuple[int, ...]:
        return self._checked_rows if self.cache.has_state else ()

    @property
    def _guessed_rows(self) -> tuple[int, ...]:
        return () if self.rebuild_follower is None else self.config.buckets.row_buckets

    @property
    def _text_rows(self) -> tuple[int, ...]:
        config = self.config
        return tuple(rows for rows in config.buckets.row_buckets if rows <= config.text_rows)

    def prompt_logprobs(self, hidden: Callable[[], jax.ShapeDtypeStruct]) -> jax.stages.Compiled:
        program = make_prompt_logprobs(self.rebuild, self._shapes, self.backend.logprobs)
        packed = self._ints(1 + 2 * self._shapes.max_tokens)
        return self._compiled(program, self.weights, hidden(), packed)

    def hidden_sums(self, hidden: Callable[[], jax.ShapeDtypeStruct]) -> jax.stages.Compiled:
        program = make_hidden_sums(
            self.rebuild,
            self._shapes,
            self.config.max_num_seqs,
            has_classes=self.config.num_classes > 0,
            has_projections=self.config.has_projections,
        )
        packed = self._ints(1 + 2 * self._shapes.max_tokens)
        return self._compiled(program, self.weights, hidden(), packed)

    def admission(self) -> jax.stages.Compiled:
        vocab = self.config.vocab_size
        packed = self._ints(admission_size(self.config.max_model_len))
        bias = self._placed((vocab,), jnp.float32)
        return self._compiled(make_admission(vocab), self.state, packed, bias, donate=(0,))

    def copy_pages(self) -> jax.stages.Compiled:
        return self._compiled(
            make_page_copies(self.cache),
            self.kv,
            self._ints(self.config.max_num_seqs, len(self.num_pages), 2),
            donate=(0,),
            results=JOINED,
        )

    def table_rows(self) -> jax.stages.Compiled:
        packed = self._ints(TABLE_ROWS, 1 + len(self.num_pages) * self.config.pages_per_row)
        return self._compiled(make_table_rows(), self.state, packed, donate=(0,))

    def write_adapter(self) -> jax.stages.Compiled:
        """Compile the program that writes an adapter to its slot."""
        (pool,) = self.adapters
        values = jax.ShapeDtypeStruct(adapter_shape(pool), pool.dtype, sharding=pool.sharding)
        arguments = (self.adapters, self._ints(), values)
        return self._compiled(
            make_adapter_write(self.backend.write_row), *arguments, donate=(0,), results=CUT
        )

    def _compiled(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        donate: tuple[int, ...] = (),
        name: str = "",
        results: Any = WHOLE,
    ) -> jax.stages.Compiled:
        """Compile a program. `results`: what of the program's results is cut over devices, see `on_mesh`."""
        for_all = on_mesh(program, self.backend.mesh, specs_of(arguments), results)
        # Pallas asks the default device for which chip it compiles, and that device may not be here.
        with jax.default_device(self.backend.mesh.devices.flat[0]):
            lowered = lower_program(for_all, *arguments, donate=donate, name=name)
            compiled = compile_lowered if self.files is None else self.files.program
            return compiled(lowered, self.backend.compiler_options)

    @property
    def _shapes(self) -> StepShapes:
        config = self.config
        return StepShapes(
            config.page_size,
            self.num_pages,
            self.largest.tokens,
            config.num_top,
            config.num_snapshots,
            config.adapter_rank,
        )

    def _layout(self, key: ProgramKey) -> Layout:
        return self.config.layout(key, len(self.num_pages))

    def _forward(self, key: ProgramKey, *, joins: bool = False) -> Callable[..., Forward]:
        backend = self.backend
        return make_forward(
            self.rebuild,
            self._layout(key),
            self._shapes,
            backend.attention,
            backend.recurrent,
            self.rebuild_follower,
            joins=joins,
        )

    def _hidden(self) -> jax.ShapeDtypeStruct:
        """Return the shape of `Forward.hidden`. The model is traced for it, so it is asked for once."""
        key = self.largest
        program: Callable[..., Any]
        arguments: tuple[Any, ...]
        if self.stage is not None:
            program, arguments = self._of_stage(self.stage, key), self._stage_arguments(key)
        else:
            packed = self._ints(self._layout(key).size)
            others = (self.pool, self.adapters, self.draft_weights)
            program, arguments = self._forward(key), (self.weights, self.kv, self.state, packed, *others)
        forward = on_mesh(program, self.backend.mesh, specs_of(arguments), _FORWARD)
        made = jax.eval_shape(forward, *arguments).hidden
        return self._placed(made.shape, made.dtype)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._placed(shape, jnp.int32)

    def _placed(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)


def adapter_shape(pool: jax.Array) -> tuple[int, ...]:
    """Return the shape of what a slot of the pool of adapters has, on all devices together."""
    return (*pool.shape[:-2], pool.shape[-1])


def _once(make: Callable[[], jax.ShapeDtypeStruct]) -> Callable[[], jax.ShapeDtypeStruct]:
    """Keep what `make` gives, made when it is first asked for, whichever thread asks."""
    lock = threading.Lock()
    made: list[jax.ShapeDtypeStruct] = []

    def get() -> jax.ShapeDtypeStruct:
        with lock:
            if not made:
                made.append(make())
        return made[0]

    return get
