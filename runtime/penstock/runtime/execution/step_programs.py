"""What the compiled programs of a step compute.

- `make_forward`: input tokens through the model to logits. One program per bucket of tokens, and one per
  bucket of rows for steps of one token a row; for a model with state by slot one more per bucket of rows, for
  steps where tokens are proposed.
- `make_stage`: the part of that which one stage of a model has whose layers are cut into stages.
- `make_choice`: samples tokens from logits. One program per bucket of rows. It is separate from the forward
  so that the host can compute the masks of constraints while the device runs the model.
- `make_checked_choice`: the same where tokens are proposed, which are checked too.
- `make_window`: both of these in a loop of decode steps. One program per bucket of rows, or per bucket and
  length.
- `make_text_window`: the same loop, whose steps check what a text makes them guess. One program per bucket of
  rows that leaves room for guesses.
- `make_guesses`: what a draft model, or heads of the checkpoint, guess to follow. One program per bucket of
  rows.

Either computes whatever the served model computes, in the same programs, so that it has the keys and values
of every position that the served model has (`Follower`).

`request_programs` has the programs that only some requests need.

Weights, KV cache and row state are arguments, so new weights need no compilation. KV cache and state are
donated, so a step updates them in place. The host reads back a step's tokens and, if a row wants
log-probabilities, a second, larger array of them (`Chosen`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.images import Pool, media_argument, media_of_rows, media_of_tokens
from penstock.runtime.execution.proposed_rows import BEFORE, GUESS, PLACE
from penstock.runtime.execution.step_buffer import FEEDBACK, Layout, Unpacked
from penstock.runtime.execution.text_guesses import CONTEXT, NO_TOKEN, TextTables, guess_from
from penstock.runtime.models.layers.images import MediaInputs
from penstock.runtime.models.layers.inputs import Passed
from penstock.runtime.models.stages import Stage
from penstock.runtime.ops.adapters import AdapterRows
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp, make_meta, with_pages
from penstock.runtime.ops.kv_rows import read_kv, write_kv
from penstock.runtime.ops.recurrent.operations import RecurrentOps
from penstock.runtime.ops.sampler import RowState, Sampled, SamplerOp, report
from penstock.runtime.ops.sampling_codes import PENALTIES
from penstock.runtime.ops.state_copies import Copies, choose_copies
from penstock.runtime.scheduling.plan import FIRST_DRAFTED

KVCache = tuple[Any, ...]
"""The model's cache, with an entry for each layer; see `cache_spec`."""
Weights = tuple[Array, ...]
"""The model's state as flat leaves, because flattening nnx's own tree on every call costs milliseconds of
Python."""


class StepModel(Protocol):
    """What a step asks of a model; `penstock.runtime.models.decoder.CausalLM` is one."""

    def __call__(
        self,
        token_ids: Array,
        positions: Array,
        kv: KVCache,
        metas: tuple[AttentionMeta, ...],
        *,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[Array, KVCache]:
        """Turn tokens and positions int32[T] -> hidden states [T, E] and the updated cache. `metas` has one
        entry for each group of the cache's layers. A model that reads images also takes `media`, see
        `media.sections`, one that adapters change `adapters`, and one that an EAGLE head follows `taps`.
        """
        ...

    def logits(self, hidden: Array, num_rows: Array) -> Array:
        """Turn hidden states [R, E] -> logits float32[R, V]. Rows from num_rows, int32[], on are padding;
        what they hold is undefined.
        """
        ...

    def normalized(self, hidden: Array) -> Array:
        """Turn hidden states [R, E] -> the same after the final norm, which `logits` multiplies by the head,
        float32 [R, E]. A model with a classifier also has `classes`, see `CausalLM.classes`.
        """
        ...


class StagedModel(StepModel, Protocol):
    """A model whose layers may be cut into stages."""

    def stage(
        self,
        stage: Stage,
        given: Array | Passed,
        positions: Array,
        kv: KVCache,
        metas: tuple[AttentionMeta, ...],
        *,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[Passed, KVCache]:
        """See `CausalLM.stage`."""
        ...


class PredictingModel(Protocol):
    """A layer that predicts the token after the next one: one of the served model (`CausalLM`), or an EAGLE
    head beside it (`HeadOfTarget`).
    """

    def kept(self, hidden: Array, num_tokens: Array) -> Array:
        """Turn what the served model gives, [T, ...], into what `predict` reads of the position before,
        [T, E].
        """
        ...

    def predict(
        self,
        token_ids: Array,
        before: Array,
        kv: KVCache,
        meta: AttentionMeta,
        *,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[Array, KVCache]:
        """See `CausalLM.predict`."""
        ...

    def predicted_logits(self, hidden: Array, num_rows: Array) -> Array:
        """See `CausalLM.predicted_logits`."""
        ...

    def tokens(self, guessed: Array) -> Array:
        """Turn places in these logits, int32[R], into tokens of the served model."""
        ...


AdapterPool = tuple[Array, ...]
"""The pool of adapters, see `AdapterRows`; () where there are none."""
Carried = Any
"""What a follower hands from one guess to the next: arrays with an entry for each row, or ()."""
Rebuild = Callable[[Weights], StepModel]
GUESSED = -1
"""See `Chosen.guessed`."""


class Forward(NamedTuple):
    """What the model computes in one step."""

    kv: KVCache
    state: RowState
    logits: Array  # float32[R, V] after each row's last token
    hidden: Array  # [most tokens of a step, E] of every token


class Chosen(NamedTuple):
    """What the host reads of a dispatch; N is 1, or the most steps of a window."""

    tokens: Array  # int32[N, R]; NO_TOKEN where a row made none, NON_FINITE where it cannot
    logprobs: Array  # int32[N, R, 1 + 2 * num_top], see `report`; zeros where no row has LOGPROBS
    # int32[N, R] for each token whether it was guessed rightly (GUESSED), else how many tokens were guessed
    # to follow it; None where the program guesses none.
    guessed: Array | None = None


class Follower(Protocol):
    """What guesses tokens, as programs see it. Its entries stand behind those of its target in the cache, and
    have the pages of the first group of layers.
    """

    @property
    def num_layers(self) -> int:
        """Its entries in the cache."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of its target whose inputs it reads; (): it reads the hidden states behind the last."""
        ...

    def follow(
        self,
        tokens: Array,
        hidden: Array,
        kv: KVCache,
        meta: AttentionMeta,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> KVCache:
        """Turn tokens int32[T] that its target computes, and the hidden states that this gave, [T, E] or
        those of the taps side by side -> the whole cache with what it keeps of them.
        """
        ...

    def before(self, kv: KVCache, meta: AttentionMeta) -> Carried:
        """Return what its first guess reads beside the tokens of a step."""
        ...

    def guess(
        self,
        tokens: Array,
        before: Carried,
        kv: KVCache,
        meta: AttentionMeta,
        attention: AttentionOp,
        recurrent: RecurrentOps,
        num_rows: Array,
    ) -> tuple[Array, Carried, KVCache]:
        """Turn tokens int32[R] and what it reads beside them -> logits float32[R, V] of what follows, what
        its next guess reads, and the whole cache. Rows from num_rows on are padding.
        """
        ...

    def tokens(self, guessed: Array) -> Array:
        """Turn places in its logits, int32[R], into tokens of its target."""
        ...


class Draft(NamedTuple):
    """A draft model. It reads tokens alone."""

    model: StepModel
    num_layers: int
    """Its entries in the cache."""
    num_groups: int
    """Groups of layers that it would have alone."""
    vocab_size: int
    taps: tuple[int, ...] = ()

    def follow(
        self,
        tokens: Array,
        hidden: Array,
        kv: KVCache,
        meta: AttentionMeta,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> KVCache:
        """See `Follower`."""
        return self._run(tokens, kv, meta, attention, recurrent)[1]

    def before(self, kv: KVCache, meta: AttentionMeta) -> Carried:
        """See `Follower`."""
        return ()

    def guess(
        self,
        tokens: Array,
        before: Carried,
        kv: KVCache,
        meta: AttentionMeta,
        attention: AttentionOp,
        recurrent: RecurrentOps,
        num_rows: Array,
    ) -> tuple[Array, Carried, KVCache]:
        """See `Follower`."""
        hidden, kv = self._run(tokens, kv, meta, attention, recurrent)
        return self.model.logits(hidden, num_rows), (), kv

    def _run(
        self,
        tokens: Array,
        kv: KVCache,
        meta: AttentionMeta,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[Array, KVCache]:
        # Its target may know tokens that it does not know.
        known, metas = jnp.minimum(tokens, self.vocab_size - 1), (meta,) * self.num_groups
        return _on_last(
            kv,
            self.num_layers,
            lambda entries: self.model(
                known, meta.positions, entries, metas, attention=attention, recurrent=recurrent
            ),
        )

    def tokens(self, guessed: Array) -> Array:
        """See `Follower`."""
        return guessed


class Heads(NamedTuple):
    """A layer that predicts the token after the next one, of the served checkpoint or an EAGLE head. It reads
    each token with a hidden state of the position before, so the first of its entries in the cache keeps
    those of all positions: whoever shares a page, or copies it, finds there what the next token needs.
    Position 0 has none before it, and reads zeros. For each further guess the layer reads what it gave
    itself.
    """

    model: PredictingModel
    num_layers: int
    """See `Follower`."""
    dtype: jnp.dtype
    """That of hidden states."""
    hidden_size: int
    """Their channels."""
    taps: tuple[int, ...] = ()
    """See `Follower`."""

    def follow(
        self,
        tokens: Array,
        hidden: Array,
        kv: KVCache,
        meta: AttentionMeta,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> KVCache:
        """See `Follower`."""
        own = len(kv) - self.num_layers
        with jax.named_scope("follower"):
            states = self.model.kept(hidden, meta.num_tokens).astype(self.dtype)
            kept = write_kv(kv[own], states[:, None], None, meta.write_slots)
            kv = (*kv[:own], kept, *kv[own + 1 :])
            before = self.before(kv, meta)
        return self._run(tokens, before, kv, meta, attention, recurrent)[1]

    def before(self, kv: KVCache, meta: AttentionMeta) -> Array:
        """See `Follower`: hidden states [T, E]."""
        kept = kv[len(kv) - self.num_layers]
        page_size, at = kept.shape[3], jnp.maximum(meta.positions - 1, 0)
        pages = meta.page_table[meta.token_rows, at // page_size]
        rows = kept[pages, :, :, at % page_size][..., None, :]
        hidden = read_kv(rows, self.dtype, self.hidden_size)[:, 0, 0, 0].astype(self.dtype)
        # What is not read may be another request's, or no number.
        is_read = (meta.positions > 0) & (jnp.arange(at.shape[0]) < meta.num_tokens)
        return jnp.where(is_read[:, None], hidden, jnp.zeros((), self.dtype))

    def guess(
        self,
        tokens: Array,
        before: Carried,
        kv: KVCache,
        meta: AttentionMeta,
        attention: AttentionOp,
        recurrent: RecurrentOps,
        num_rows: Array,
    ) -> tuple[Array, Carried, KVCache]:
        """See `Follower`."""
        hidden, kv = self._run(tokens, before, kv, meta, attention, recurrent)
        return self.model.predicted_logits(hidden, num_rows), hidden, kv

    def _run(
        self,
        tokens: Array,
        before: Carried,
        kv: KVCache,
        meta: AttentionMeta,
        attention: AttentionOp,
        recurrent: RecurrentOps,
    ) -> tuple[Array, KVCache]:
        return _on_last(
            kv,
            self.num_layers - 1,
            lambda entries: self.model.predict(
                tokens, before, entries, meta, attention=attention, recurrent=recurrent
            ),
        )

    def tokens(self, guessed: Array) -> Array:
        """See `Follower`."""
        return self.model.tokens(guessed)


def _on_last(
    kv: KVCache, count: int, run: Callable[[KVCache], tuple[Array, KVCache]]
) -> tuple[Array, KVCache]:
    """Run a follower on its entries of the cache, the last `count`. Returns its result, and the whole
    cache.
    """
    own = len(kv) - count
    with jax.named_scope("follower"):
        made, written = run(kv[own:])
    return made, (*kv[:own], *written)


RebuildFollower = Callable[[Weights, Weights], Follower]
"""Takes the weights of the served model, and those of the draft; () where the model has heads."""


class Joined(NamedTuple):
    """The rows of a step, all of one token, where those of each slot have become one row with their tokens in
    order of position. That of the lowest position has all of them.
    """

    slots: Array  # int32[R], past the last slot for rows that have no token left
    q_lens: Array  # int32[R]
    order: Array  # int32[R] the row whose token has come to each place
    places: Array  # int32[R] the place to which the token of each row has come


def join_rows(slots: Array, starts: Array, q_lens: Array, num_slots: int) -> Joined:
    """Join rows of the same slot into one. slots, starts, q_lens int32[R]; q_lens are 1, then 0 for padding.
    State by slot goes through the tokens of a row one after the other, so it does not matter to it how they
    came to be in one row.
    """
    row, is_real = jnp.arange(slots.shape[0], dtype=jnp.int32), q_lens > 0
    is_same = (slots[:, None] == slots[None, :]) & is_real[:, None] & is_real[None, :]
    num_before = (is_same & (starts[None, :] < starts[:, None])).sum(axis=1)
    is_first = is_real & (num_before == 0)
    joined = jnp.where(is_first, is_same.sum(axis=1), 0).astype(jnp.int32)
    begins = (jnp.cumsum(joined) - joined).astype(jnp.int32)
    first = jnp.argmax(is_same & is_first[None, :], axis=1)
    places = jnp.where(is_real, begins[first] + num_before, row).astype(jnp.int32)
    return Joined(
        slots=jnp.where(is_first, slots, num_slots),
        q_lens=joined,
        order=jnp.zeros_like(row).at[places].set(row, unique_indices=True),
        places=places,
    )


class StepShapes(NamedTuple):
    """The sizes that all programs of a runner have in common."""

    page_size: int
    num_pages: tuple[int, ...]  # of each group of layers
    max_tokens: int
    """Most tokens of any step: `Forward.hidden` is padded to it."""
    num_top: int
    """How many likeliest tokens are reported."""
    num_snapshots: int = 0
    """Snapshots of state."""
    adapter_rank: int = 0
    """The rank for which slots of adapters have room."""


def _run_model(
    model: StepModel,
    layout: Layout,
    shapes: StepShapes,
    attention: AttentionOp,
    recurrent: RecurrentOps,
    *,
    kv: KVCache,
    batch: Unpacked,
    tokens: Array,
    page_tables: tuple[Array, ...],
    last: Array,
    starts: Array,
    held: Array | None,
    adapters: AdapterPool,
    follower: Follower | None,
    guesses: Array | None = None,
    media: MediaInputs | None = None,
    shifts: Array | None = None,
    joined: Joined | None = None,
) -> tuple[Array, Array, KVCache, Array | None]:
    """Return (logits float32[R, V], hidden [T, E], cache, `RowState.held`); `last` int32[R] replaces
    FEEDBACK, and `guesses` int32[R, K] the numbers below it. A model that reads images has `media` or, in a
    window, `shifts`. With `joined` the model runs over these rows, and the results are those of the rows
    before.
    """
    if joined is not None:
        tokens = tokens[joined.order]
    metas, copies = _metas(layout, shapes, batch, page_tables, starts, held, joined)
    meta = metas[0]
    if guesses is not None:
        tokens = jnp.where(tokens < FEEDBACK, _guessed(guesses[meta.token_rows], tokens), tokens)
    tokens = jnp.where(tokens == FEEDBACK, last[meta.token_rows], tokens)
    if shifts is not None:
        media = media_of_rows(shifts, meta.positions, meta.token_rows)
    with jax.named_scope("model"):
        given = {"attention": attention, "recurrent": recurrent, **media_argument(media)}
        if adapters and batch.adapter_slots is not None:
            adapter_slots = batch.adapter_slots[meta.token_rows]
            given["adapters"] = AdapterRows(adapters[0], adapter_slots, shapes.adapter_rank)
        own, taps = (len(kv), ()) if follower is None else (len(kv) - follower.num_layers, follower.taps)
        if taps:
            given["taps"] = taps
        hidden, written = model(tokens, meta.positions, kv[:own], metas, **given)
        kv, followed = (*written, *kv[own:]), hidden
        if taps:
            size = hidden.shape[1] // (1 + len(taps))
            hidden, followed = hidden[:, :size], hidden[:, size:]
        at = jnp.maximum(jnp.cumsum(batch.q_lens) - 1, 0)
        if joined is not None:
            hidden = hidden[joined.places]
        num_rows = jnp.sum((batch.q_lens > 0).astype(jnp.int32))
        logits = model.logits(hidden[at], num_rows)
    if follower is not None:
        kv = follower.follow(tokens, followed, kv, meta, attention, recurrent)
    return logits, hidden, kv, None if copies is None else copies.held


def _metas(
    layout: Layout,
    shapes: StepShapes,
    batch: Unpacked,
    page_tables: tuple[Array, ...],
    starts: Array,
    held: Array | None,
    joined: Joined | None = None,
) -> tuple[tuple[AttentionMeta, ...], Copies | None]:
    """Return the row and page of each token, for each group of layers, and which copies of state are read and
    written; None without state by slot. The arguments are those of `_run_model`.
    """
    copies, q_lens, slots = None, batch.q_lens, batch.sampling.slots
    if joined is not None:
        q_lens, slots = joined.q_lens, joined.slots
    if held is not None:
        snapshots = batch.snapshots and batch.snapshots.only_at(starts == batch.starts)
        copies = choose_copies(held, slots, starts, q_lens, snapshots, shapes.num_snapshots)
    meta = make_meta(
        starts=starts,
        q_lens=q_lens,
        page_table=page_tables[0],
        num_tokens=layout.key.tokens,
        decode_only=layout.key.decode_only and joined is None,
        page_size=shapes.page_size,
        num_pages=shapes.num_pages[0],
        state_from=None if copies is None else copies.read,
        state_to=None if copies is None else copies.written,
        state_cut=None if copies is None else copies.cut,
        state_cut_to=None if copies is None else copies.cut_to,
    )
    others = zip(page_tables[1:], shapes.num_pages[1:], strict=True)
    further = (with_pages(meta, table, shapes.page_size, num_pages) for table, num_pages in others)
    return (meta, *further), copies


def _guessed(guesses: Array, codes: Array) -> Array:
    """Return the guesses that these numbers stand for, see `drafted_tokens`: guesses int32[N, K], codes
    int32[N]. Numbers that stand for none have any.
    """
    places = jnp.clip(FIRST_DRAFTED - codes, 0, guesses.shape[1] - 1)
    return jnp.take_along_axis(guesses, places[:, None], axis=1)[:, 0]


def _of_rows(by_slot: Array, batch: Unpacked) -> Array:
    """Turn values by slot [S, ...] -> values by row [R, ...]; those of padding rows are undefined."""
    return by_slot[jnp.minimum(batch.sampling.slots, by_slot.shape[0] - 1)]


def _add_pages(state: RowState, batch: Unpacked) -> RowState:
    """Return the state with the new page-table entries of this step."""
    at = (batch.sampling.slots, batch.page_indices)
    pairs = zip(state.tables, batch.pages, strict=True)
    return state._replace(tables=tuple(table.at[at].set(pages, mode="drop") for table, pages in pairs))


def make_forward(
    rebuild: Rebuild,
    layout: Layout,
    shapes: StepShapes,
    attention: AttentionOp,
    recurrent: RecurrentOps,
    rebuild_follower: RebuildFollower | None = None,
    *,
    joins: bool = False,
) -> Callable[[Weights, KVCache, RowState, Array, Pool, AdapterPool, Weights], Forward]:
    """Make a program that runs the model over one step of any mix of chunks and decodes. The last argument is
    the draft's weights; () without one.

    `joins`: rows of one token may have the same slot, and the model keeps state by slot, so it is given one
    row for each slot (`join_rows`). Where the model keeps none, rows of the same slot need no such program.
    """

    def forward(
        weights: Weights,
        kv: KVCache,
        state: RowState,
        packed: Array,
        pool: Pool,
        adapters: AdapterPool,
        draft: Weights,
    ) -> Forward:
        batch = layout.unpack_rows(packed)
        state = _add_pages(state, batch)
        joined, images = None, layout.images_view(packed) if layout.has_images else None
        if joins:
            joined = join_rows(batch.sampling.slots, batch.starts, batch.q_lens, state.tokens.shape[0])
            images = None if images is None else images[:, joined.order]
        logits, hidden, kv, held = _run_model(
            rebuild(weights),
            layout,
            shapes,
            attention,
            recurrent,
            kv=kv,
            batch=batch,
            tokens=layout.unpack_tokens(packed),
            page_tables=tuple(_of_rows(table, batch) for table in state.tables),
            last=_of_rows(state.tokens, batch),
            starts=batch.starts,
            held=state.held,
            adapters=adapters,
            follower=None if rebuild_follower is None else rebuild_follower(weights, draft),
            guesses=None if state.guesses is None else _of_rows(state.guesses, batch),
            media=None
            if images is None
            else media_of_tokens(images, pool, decode_only=layout.key.decode_only),
            joined=joined,
        )
        state = state._replace(held=held)
        padding = shapes.max_tokens - hidden.shape[0]
        return Forward(kv, state, logits, jnp.pad(hidden, ((0, padding), (0, 0))))

    return forward


class OfStage(NamedTuple):
    """What a stage that is not the last one computes in one step."""

    kv: KVCache
    state: RowState
    passed: Passed
    """What the next stage is given."""


def make_stage(
    rebuild: Callable[[Weights], StagedModel],
    stage: Stage,
    layout: Layout,
    shapes: StepShapes,
    attention: AttentionOp,
    recurrent: RecurrentOps,
) -> Callable[[Weights, KVCache, RowState, Array, Array | Passed], OfStage | Forward]:
    """Make the program of one stage of a model's layers for one step, for prefill chunks and decodes. Its
    last argument is, for the first stage, each slot's last token int32[S] and, for another, what the stage
    before has passed. Rows have no adapters, no images and no proposed tokens.
    """

    def compute(
        weights: Weights, kv: KVCache, state: RowState, packed: Array, given: Array | Passed
    ) -> OfStage | Forward:
        model, batch = rebuild(weights), layout.unpack_rows(packed)
        state = _add_pages(state, batch)
        page_tables = tuple(_of_rows(table, batch) for table in state.tables)
        metas, copies = _metas(layout, shapes, batch, page_tables, batch.starts, state.held)
        meta = metas[0]
        if not isinstance(given, tuple):
            tokens, last = layout.unpack_tokens(packed), _of_rows(given, batch)
            given = jnp.where(tokens == FEEDBACK, last[meta.token_rows], tokens)
        with jax.named_scope("model"):
            passed, kv = model.stage(
                stage, given, meta.positions, kv, metas, attention=attention, recurrent=recurrent
            )
        state = state._replace(held=None if copies is None else copies.held)
        if not stage.is_last:
            return OfStage(kv, state, passed)
        hidden, at = passed.x, jnp.maximum(jnp.cumsum(batch.q_lens) - 1, 0)
        with jax.named_scope("model"):
            logits = model.logits(hidden[at], jnp.sum((batch.q_lens > 0).astype(jnp.int32)))
        padding = shapes.max_tokens - hidden.shape[0]
        return Forward(kv, state, logits, jnp.pad(hidden, ((0, padding), (0, 0))))

    return compute


def make_choice(
    layout: Layout, sampler: SamplerOp, num_top: int
) -> Callable[[RowState, Array, Array, Array], tuple[RowState, Chosen]]:
    """Make a program that samples the tokens after one step's logits: (state, logits float32[R, V], packed
    buffer without tokens, mask int32[R, W]) -> (state, what was chosen).
    """

    def choose(state: RowState, logits: Array, packed: Array, mask: Array) -> tuple[RowState, Chosen]:
        batch = layout.unpack_rows(packed)
        with jax.named_scope("sampler"):
            sampled = sampler(logits, state, batch.sampling, batch.flags, mask, num_top=num_top)
        state = _add_history(state, batch, sampled.tokens, batch.max_samples > 0)
        chosen = Chosen(sampled.tokens[None], report(sampled, batch.flags)[None])
        return _keep(state, batch, sampled.tokens), chosen

    return choose


def make_checked_choice(
    layout: Layout, sampler: SamplerOp, num_top: int
) -> Callable[[RowState, Array, Array, Array, Array], tuple[RowState, Chosen]]:
    """Do what `make_choice` does, for a step with rows of proposed tokens. It also takes what `pack_checks`
    makes, int32[3, R]. A row makes no token unless all proposed tokens up to its own are what was sampled
    before them, nor if its max_samples is 0, as that of a row without its mask. The last row of a slot that
    makes one has the slot's next input.

    All rows are sampled at once, unless some have penalties: then those of one place after the other, because
    each counts the tokens before it.
    """

    def choose(
        state: RowState, logits: Array, packed: Array, mask: Array, checks: Array
    ) -> tuple[RowState, Chosen]:
        batch, num_rows = layout.unpack_rows(packed), layout.key.rows
        before, places, guessed = checks[BEFORE], checks[PLACE], checks[GUESS]
        is_guess, num_slots = places > 0, state.tokens.shape[0]
        if state.guesses is not None:
            drafted = _guessed(_of_rows(state.guesses, batch), guessed)
            guessed = jnp.where(guessed < FEEDBACK, drafted, guessed)
        in_turn = (batch.flags & PENALTIES) != 0

        def counting(tokens: Array) -> Array:
            """Tell which rows count, by what was sampled at all places before theirs."""
            wrong = jnp.cumsum((is_guess & (tokens[before] != guessed)).astype(jnp.int32))
            # A proposal's rows lie one behind the other.
            return (wrong == wrong[jnp.arange(num_rows) - places]) & (batch.max_samples > 0)

        def one_turn(carry: tuple[Array, RowState, Sampled]) -> tuple[Array, RowState, Sampled]:
            place, state, others = carry
            has_turn = ~in_turn | (places == place)
            rows = batch.sampling._replace(slots=jnp.where(has_turn, batch.sampling.slots, num_slots))
            with jax.named_scope("sampler"):
                made = sampler(logits, state, rows, batch.flags, mask, num_top=num_top)
            sampled = Sampled(
                *(
                    jnp.where(has_turn.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
                    for new, old in zip(made, others, strict=True)
                )
            )
            counted = has_turn & counting(sampled.tokens)
            return place + 1, _add_history(state, batch, sampled.tokens, counted), sampled

        nothing = Sampled(
            jnp.zeros((num_rows,), jnp.int32),
            jnp.zeros((num_rows,), jnp.float32),
            jnp.zeros((num_rows, num_top), jnp.int32),
            jnp.zeros((num_rows, num_top), jnp.float32),
        )
        turns = jnp.where(in_turn, places.max() + 1, 1)
        begin = (jnp.int32(0), state, nothing)
        _, state, sampled = lax.while_loop(lambda carry: carry[0] < turns, one_turn, begin)
        counts = counting(sampled.tokens)
        goes_on = jnp.where(counts & is_guess, before, num_rows)
        is_last = counts.at[goes_on].set(False, mode="drop")
        tokens = jnp.where(counts, sampled.tokens, NO_TOKEN)
        chosen = Chosen(tokens[None], report(sampled, batch.flags)[None])
        kept = batch._replace(max_samples=jnp.where(is_last, batch.max_samples, 0))
        return _keep(state, kept, sampled.tokens), chosen

    return choose


def make_window(
    rebuild: Rebuild,
    layout: Layout,
    shapes: StepShapes,
    attention: AttentionOp,
    recurrent: RecurrentOps,
    sampler: SamplerOp,
    max_steps: int,
    rebuild_follower: RebuildFollower | None = None,
) -> Callable[[Weights, KVCache, RowState, Array, AdapterPool, Weights], tuple[KVCache, RowState, Chosen]]:
    """Make a program that loops over decode steps. A call runs as many steps as its buffer's header says, or
    fewer when every row has ended. No row has a mask.

    A program for a fixed number of steps runs all of them, even when every row has ended. Such programs are
    for accelerators, where XLA reads the condition of a loop of unknown length back to the host in each
    iteration.
    """

    def window(
        weights: Weights, kv: KVCache, state: RowState, packed: Array, adapters: AdapterPool, draft: Weights
    ) -> tuple[KVCache, RowState, Chosen]:
        model = rebuild(weights)
        follower = None if rebuild_follower is None else rebuild_follower(weights, draft)
        batch = layout.unpack_rows(packed)
        state = _add_pages(state, batch)
        page_tables = tuple(_of_rows(table, batch) for table in state.tables)
        shifts = layout.images_view(packed) if layout.has_images else None

        def more(carry: _Window) -> Array:
            # The first step runs even where no row samples: a prefill chunk of one token must be written.
            return (carry.step == 0) | ((carry.step < batch.num_steps) & jnp.any(carry.alive))

        def one_step(carry: _Window) -> _Window:
            logits, _, kv, held = _run_model(
                model,
                layout,
                shapes,
                attention,
                recurrent,
                kv=carry.kv,
                batch=batch,
                tokens=feedback,
                page_tables=page_tables,
                last=carry.tokens,
                starts=batch.starts + carry.advanced,
                held=carry.state.held,
                adapters=adapters,
                follower=follower,
                shifts=shifts,
            )
            state = carry.state._replace(held=held)
            banned = carry.step < batch.bans
            rows = batch.sampling._replace(positions=batch.sampling.positions + carry.step, banned=banned)
            with jax.named_scope("sampler"):
                made = sampler(logits, state, rows, batch.flags, None, num_top=shapes.num_top)
            sampled = made.tokens
            token = jnp.where(carry.alive, sampled, NO_TOKEN)
            ended = ((sampled[:, None] == rows.stop_ids).any(axis=1) & ~banned) | (sampled < 0)
            step = carry.step + 1
            alive = carry.alive & ~ended & (step < jnp.minimum(batch.max_samples, batch.num_steps))
            return _Window(
                step=step,
                # While the others go on, a row that has ended repeats its last step: with the same token at
                # the same position it writes the values that are there already. (State by slot keeps a
                # copy.)
                alive=alive,
                advanced=carry.advanced + alive.astype(jnp.int32),
                tokens=jnp.where(alive, sampled, carry.tokens),
                sampled=jnp.where(carry.alive, sampled, carry.sampled),
                kv=kv,
                state=_add_history(state, batch, sampled, carry.alive),
                chosen=Chosen(
                    carry.chosen.tokens.at[carry.step].set(token),
                    carry.chosen.logprobs.at[carry.step].set(report(made, batch.flags)),
                ),
            )

        rows = layout.key.rows
        tokens = layout.unpack_tokens(packed)
        first = jnp.where(tokens == FEEDBACK, _of_rows(state.tokens, batch), tokens)
        feedback = jnp.full_like(tokens, FEEDBACK)
        begin = _Window(
            step=jnp.int32(0),
            alive=batch.max_samples > 0,
            advanced=jnp.zeros((rows,), jnp.int32),
            tokens=first,
            sampled=jnp.zeros((rows,), jnp.int32),
            kv=kv,
            state=state,
            chosen=Chosen(
                jnp.full((max_steps, rows), NO_TOKEN, jnp.int32),
                jnp.zeros((max_steps, rows, 1 + 2 * shapes.num_top), jnp.int32),
            ),
        )
        if layout.key.num_steps:
            end = lax.fori_loop(0, layout.key.num_steps, lambda _, carry: one_step(carry), begin)
        else:
            end = lax.while_loop(more, one_step, begin)
        return end.kv, _keep(end.state, batch, end.sampled), end.chosen

    return window


class _Places(NamedTuple):
    """Which row of a batch, and which place in what is guessed for it, each of T rows of a step computes:
    place 0 is the row's own input, and place p its p-th guess.
    """

    rows: Array  # int32[T]
    places: Array  # int32[T]
    is_real: Array  # bool[T]; those that are real come first
    counts: Array  # int32[R] how many guesses of the row are computed
    number: Array  # int32[1 + K, R] which of the T rows computes a place; without meaning where none does
    is_computed: Array  # bool[1 + K, R]


def place_guesses(runs: Array, counts: Array, most: int, num_rows: int) -> _Places:
    """Give each row that runs, bool[R], one of `num_rows` rows for its input, and one for each guess of the
    row. Of these it has `counts`, int32[R], at most `most`. The first guesses of all rows come before the
    second ones of any, and those for which no row is left are not computed. There are at least R rows.
    """
    place = jnp.arange(1 + most, dtype=jnp.int32)[:, None]
    is_wanted = runs[None, :] & (place <= counts[None, :])
    number = (jnp.cumsum(is_wanted.reshape(-1).astype(jnp.int32)) - 1).reshape(is_wanted.shape)
    is_computed = is_wanted & (number < num_rows)
    at = jnp.arange(num_rows, dtype=jnp.int32)
    is_of = (number.reshape(-1)[None, :] == at[:, None]) & is_computed.reshape(-1)[None, :]
    source = jnp.argmax(is_of, axis=1).astype(jnp.int32)
    return _Places(
        rows=source % runs.shape[0],
        places=source // runs.shape[0],
        is_real=at < is_computed.sum(),
        counts=is_computed[1:].sum(axis=0, dtype=jnp.int32),
        number=jnp.clip(number, 0, num_rows - 1),
        is_computed=is_computed,
    )


def make_text_window(
    rebuild: Rebuild,
    layout: Layout,
    shapes: StepShapes,
    attention: AttentionOp,
    recurrent: RecurrentOps,
    sampler: SamplerOp,
    max_steps: int,
    *,
    num_rows: int,
    most_guesses: int,
) -> Callable[[Weights, KVCache, RowState, Array, AdapterPool, TextTables], tuple[KVCache, RowState, Chosen]]:
    """Make a program that makes what `make_window` makes, token for token, in fewer steps: each of its steps
    has `num_rows` rows, of which those that are left check what a text makes them guess (`guess_from`), at
    most `most_guesses` for a row. They are rows of one token of the same slot, see `proposed_rows`. What a
    wrong guess leaves in the cache is written again before the window ends, or lies behind the row's end.

    No row has a mask, an image or state by slot, and nothing else guesses.
    """
    wide = dataclasses.replace(layout, key=ProgramKey(num_rows, num_rows, decode_only=True, window=True))

    def window(
        weights: Weights,
        kv: KVCache,
        state: RowState,
        packed: Array,
        adapters: AdapterPool,
        text: TextTables,
    ) -> tuple[KVCache, RowState, Chosen]:
        model = rebuild(weights)
        batch = layout.unpack_rows(packed)
        state = _add_pages(state, batch)
        assert state.recent is not None, "slots have places for their newest tokens where windows read a text"
        page_tables = tuple(_of_rows(table, batch) for table in state.tables)
        num_slots, rows = state.tokens.shape[0], layout.key.rows
        most_made = jnp.minimum(batch.max_samples, batch.num_steps)

        def more(carry: _TextWindow) -> Array:
            return carry.is_first | jnp.any(carry.alive)

        def one_step(carry: _TextWindow) -> _TextWindow:
            guesses, num_known = guess_from(text, carry.recent, most_guesses)
            counts = jnp.minimum(jnp.minimum(num_known, batch.most_guesses), most_made - carry.made - 1)
            # As in `make_window`, the first step runs even where no row samples.
            runs = carry.alive | (carry.is_first & (batch.q_lens > 0))
            at = place_guesses(runs, jnp.where(carry.alive, counts, 0), most_guesses, num_rows)
            inputs = jnp.concatenate([carry.tokens[:, None], guesses], axis=1)[at.rows, at.places]
            index = carry.made[at.rows] + at.places  # of the token that each row makes
            banned = index < batch.bans[at.rows]
            of_rows = jax.tree.map(lambda field: field[at.rows], batch.sampling)
            sampling = of_rows._replace(
                slots=jnp.where(at.is_real, of_rows.slots, num_slots),
                positions=of_rows.positions + index,
                banned=banned,
            )
            adapter_slots = None if batch.adapter_slots is None else batch.adapter_slots[at.rows]
            logits, _, kv, _ = _run_model(
                model,
                wide,
                shapes,
                attention,
                recurrent,
                kv=carry.kv,
                batch=batch._replace(
                    q_lens=at.is_real.astype(jnp.int32), sampling=sampling, adapter_slots=adapter_slots
                ),
                tokens=jnp.full((num_rows,), FEEDBACK, jnp.int32),
                page_tables=tuple(table[at.rows] for table in page_tables),
                last=inputs,
                starts=batch.starts[at.rows] + index,
                held=None,
                adapters=adapters,
                follower=None,
            )
            with jax.named_scope("sampler"):
                made = sampler(logits, carry.state, sampling, batch.flags, None, num_top=shapes.num_top)
            ended = ((made.tokens[:, None] == sampling.stop_ids).any(axis=1) & ~banned) | (made.tokens < 0)
            sampled, has_ended = made.tokens[at.number], ended[at.number]  # [1 + K, R]
            is_right = (sampled[:-1] == guesses.T) & ~has_ended[:-1] & at.is_computed[1:]
            counted = jnp.concatenate([carry.alive[None, :], is_right]).astype(jnp.int32)
            is_made = jnp.cumprod(counted, axis=0) > 0
            num_made = is_made.sum(axis=0, dtype=jnp.int32)
            newest = jnp.maximum(num_made - 1, 0)[None, :]
            last = jnp.take_along_axis(sampled, newest, axis=0)[0]
            is_over = jnp.take_along_axis(has_ended, newest, axis=0)[0]
            total = carry.made + num_made
            tokens = jnp.where(num_made > 0, last, carry.tokens)
            recent = jnp.concatenate([carry.recent, sampled.T], axis=1)
            kept = num_made[:, None] + jnp.arange(CONTEXT)[None, :]
            # Where a row makes no token, it goes past the end, and is dropped.
            to = jnp.where(at.is_real & is_made[at.places, at.rows], index, max_steps), at.rows
            how = jnp.where(at.places > 0, GUESSED, at.counts[at.rows])
            chosen = carry.chosen
            assert chosen.guessed is not None, "the window began with a place for it"
            return _TextWindow(
                is_first=jnp.bool_(False),
                alive=carry.alive & ~is_over & (total < most_made),
                made=total,
                tokens=tokens,
                recent=jnp.take_along_axis(recent, kept, axis=1),
                kv=kv,
                state=_add_history(carry.state, batch, sampled[0], carry.alive),
                chosen=Chosen(
                    chosen.tokens.at[to].set(made.tokens, mode="drop"),
                    chosen.logprobs.at[to].set(report(made, batch.flags), mode="drop"),
                    chosen.guessed.at[to].set(how, mode="drop"),
                ),
            )

        tokens = layout.unpack_tokens(packed)
        first = jnp.where(tokens == FEEDBACK, _of_rows(state.tokens, batch), tokens)
        begin = _TextWindow(
            is_first=jnp.bool_(True),
            alive=batch.max_samples > 0,
            made=jnp.zeros((rows,), jnp.int32),
            tokens=first,
            recent=_of_rows(state.recent, batch),
            kv=kv,
            state=state,
            chosen=Chosen(
                jnp.full((max_steps, rows), NO_TOKEN, jnp.int32),
                jnp.zeros((max_steps, rows, 1 + 2 * shapes.num_top), jnp.int32),
                jnp.zeros((max_steps, rows), jnp.int32),
            ),
        )
        end = lax.while_loop(more, one_step, begin)
        state = _keep(end.state, batch, end.tokens)
        assert state.recent is not None, "it was there before"
        slots = jnp.where(batch.max_samples > 0, batch.sampling.slots, num_slots)
        state = state._replace(recent=state.recent.at[slots].set(end.recent, mode="drop"))
        return end.kv, state, end.chosen

    return window


def make_guesses(
    rebuild_follower: RebuildFollower,
    layout: Layout,
    shapes: StepShapes,
    attention: AttentionOp,
    recurrent: RecurrentOps,
    most: int,
    *,
    all_steps: bool,
) -> Callable[[Weights, KVCache, RowState, Array, Weights], tuple[KVCache, RowState]]:
    """Make a program in which a draft model, or heads, guess what follows the last samples of slots: (the
    model's weights, cache, state, packed buffer without tokens, the draft's weights) -> (cache, state). Each
    row's MAX_SAMPLES says how many tokens, at most `most`. A guess is the likeliest token.

    `all_steps`: whether `most` steps are computed however few are needed, see `make_window`.
    """

    def guess(
        weights: Weights, kv: KVCache, state: RowState, packed: Array, draft: Weights
    ) -> tuple[KVCache, RowState]:
        follower = rebuild_follower(weights, draft)
        batch = layout.unpack_rows(packed)
        state = _add_pages(state, batch)
        assert state.guesses is not None, "slots have places for the guesses of a draft"
        page_table, num_rows = _of_rows(state.tables[0], batch), layout.key.rows
        vocab_size = state.history.shape[1]
        num_real = jnp.sum((batch.q_lens > 0).astype(jnp.int32))

        def meta_from(starts: Array) -> AttentionMeta:
            return make_meta(
                starts=starts,
                q_lens=batch.q_lens,
                page_table=page_table,
                num_tokens=num_rows,
                decode_only=True,
                page_size=shapes.page_size,
                num_pages=shapes.num_pages[0],
            )

        def one_step(
            step: Array, carry: tuple[Array, Array, Carried, KVCache, Array]
        ) -> tuple[Array, Array, Carried, KVCache, Array]:
            tokens, advanced, before, kv, guesses = carry
            meta = meta_from(batch.starts + advanced)
            logits, after, kv = follower.guess(tokens, before, kv, meta, attention, recurrent, num_real)
            made = follower.tokens(jnp.argmax(logits[:, :vocab_size], axis=-1).astype(jnp.int32))
            guesses = guesses.at[:, step].set(made)
            # A row that has all its guesses repeats its last step, as in a window: it has no further pages.
            goes_on = step + 1 < batch.max_samples
            before = jax.tree.map(lambda new, old: jnp.where(goes_on[:, None], new, old), after, before)
            advanced = advanced + goes_on.astype(jnp.int32)
            return jnp.where(goes_on, made, tokens), advanced, before, kv, guesses

        num_steps = most if all_steps else batch.num_steps
        begin = (
            _of_rows(state.tokens, batch),
            jnp.zeros((num_rows,), jnp.int32),
            follower.before(kv, meta_from(batch.starts)),
            kv,
            jnp.zeros((num_rows, most), jnp.int32),
        )
        *_, kv, guesses = lax.fori_loop(0, num_steps, one_step, begin)
        kept = state.guesses.at[batch.sampling.slots].set(guesses, mode="drop")
        return kv, state._replace(guesses=kept)

    return guess


class _Window(NamedTuple):
    """What a loop of decode steps carries from one iteration to the next."""

    step: Array  # int32[]
    alive: Array  # bool[R] rows that make a token in the next step
    advanced: Array  # int32[R] how many positions the row has advanced
    tokens: Array  # int32[R] input of the next step
    sampled: Array  # int32[R] the row's newest token
    kv: KVCache
    state: RowState
    chosen: Chosen


class _TextWindow(NamedTuple):
    """What a loop of steps that check guesses carries from one iteration to the next."""

    is_first: Array  # bool[]
    alive: Array  # bool[R] rows that make a token in the next step
    made: Array  # int32[R] how many tokens the row has made
    tokens: Array  # int32[R] input of the next step
    recent: Array  # int32[R, CONTEXT] the row's newest tokens
    kv: KVCache
    state: RowState
    chosen: Chosen


def _keep(state: RowState, batch: Unpacked, sampled: Array) -> RowState:
    """Store the newest tokens as the input of the next step. What came before them is known only where a text
    window keeps it, so that nothing is guessed from what an earlier request has left in the slot.
    """
    num_slots, recent = state.tokens.shape[0], state.recent
    slots = jnp.where(batch.max_samples > 0, batch.sampling.slots, num_slots)
    if recent is not None:
        alone = jnp.full((slots.shape[0], CONTEXT), NO_TOKEN, jnp.int32).at[:, -1].set(sampled)
        recent = recent.at[slots].set(alone, mode="drop")
    return state._replace(tokens=state.tokens.at[slots].set(sampled, mode="drop"), recent=recent)


def _add_history(state: RowState, batch: Unpacked, sampled: Array, alive: Array) -> RowState:
    """Count the sampled tokens of rows with penalties."""
    counts = alive & ((batch.sampling.features & PENALTIES) != 0) & (sampled >= 0)
    slots = jnp.where(counts, batch.sampling.feature_slots, state.history.shape[0])
    return state._replace(history=state.history.at[slots, sampled].add(1, mode="drop"))
