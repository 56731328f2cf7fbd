"""Compiled programs for what only some steps need: log-probabilities of the prompt; hidden states; penalties
and biases, whose arrays are written when the request gets its slot; the pages that forks copy; the page
tables of sequences that enter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from penstock.runtime.execution.step_programs import AdapterPool, KVCache, Rebuild, StepShapes, Weights
from penstock.runtime.models.load_rules import AXIS
from penstock.runtime.ops.adapters import WriteRow
from penstock.runtime.ops.cache_spec import CacheSpec, LatentKV, PagedKV
from penstock.runtime.ops.collectives import summed
from penstock.runtime.ops.sampler import LogprobsOp, RowState, Sampled, report
from penstock.runtime.ops.sampling_codes import IN_PROMPT, LOGPROBS
from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.plan import PageCopy

TABLE_ROWS = 8
"""How many page tables one call of `make_table_rows`'s program takes."""
_PROMPT_TILE = 32


def make_prompt_logprobs(
    rebuild: Rebuild, shapes: StepShapes, logprobs_of: LogprobsOp
) -> Callable[[Weights, Array, Array], Array]:
    """Make a program for log-probabilities of prompt tokens: (weights, `Forward.hidden`, packed) ->
    int32[max_tokens, 1 + 2 * num_top], see `read_logprobs`. packed int32[1 + 2 * max_tokens] holds how many
    tokens there are, for each the index of the token before it, and the tokens themselves.
    """
    size = -(-shapes.max_tokens // _tile(shapes)) * _tile(shapes)

    def prompt_logprobs(weights: Weights, hidden: Array, packed: Array) -> Array:
        model = rebuild(weights)

        def step(tile: _Tile, out: Array) -> Array:
            tokens = tile.others
            num_rows = jnp.minimum(tile.left, tokens.shape[0])
            logits = model.logits(hidden[tile.tokens], num_rows)
            made = logprobs_of(logits, tokens, shapes.num_top, num_rows)
            read = report(Sampled(tokens, *made), jnp.int32(LOGPROBS))
            return lax.dynamic_update_slice_in_dim(out, read, tile.start, 0)

        out = jnp.zeros((size, 1 + 2 * shapes.num_top), jnp.int32)
        return _over_tiles(packed, shapes, step, out)[: shapes.max_tokens]

    return prompt_logprobs


def make_adapter_write(write_row: WriteRow) -> Callable[[AdapterPool, Array, Array], AdapterPool]:
    """Make a program that writes an adapter: (pool, slot int32[], values [units * rank]) -> pool."""

    def write(pool: AdapterPool, slot: Array, values: Array) -> AdapterPool:
        return (write_row(pool[0], slot, values),)

    return write


def make_hidden_sums(
    rebuild: Rebuild,
    shapes: StepShapes,
    max_rows: int,
    *,
    has_classes: bool = False,
    has_projections: bool = False,
) -> Callable[[Weights, Array, Array], Array]:
    """Make a program that pools hidden states after the final norm: (weights, `Forward.hidden`, packed) ->
    float32[max_rows, E], or [max_rows, E + classes], with what the classifier makes of their means. A model
    with projections reads each text in one step: the result is what these make of the means, times the number
    of tokens, by which the scheduler divides sums.
    packed int32[1 + 2 * max_tokens] holds how many tokens there are, for each its index in the step, and for
    each the row of the result that it is added to; or max_rows more than that row, which gets the largest
    number of each channel then.
    """

    def hidden_sums(weights: Weights, hidden: Array, packed: Array) -> Array:
        model = rebuild(weights)
        _, rows = packed[1:].reshape(2, -1)
        to_add, to_max = _rows_to_pool(rows, packed[0], max_rows)
        has_maxima = jnp.zeros((max_rows,), bool).at[to_max].set(True, mode="drop")

        def step(tile: _Tile, out: Array) -> Array:
            states = model.normalized(hidden[tile.tokens])
            to_add, to_max = _rows_to_pool(tile.others, tile.left, max_rows)
            added = out.at[to_add].add(states, mode="drop")
            pooled: Array = lax.cond(
                (to_max < max_rows).any(),
                lambda out: out.at[to_max].max(states, mode="drop"),
                lambda out: out,
                added,
            )
            return pooled

        begin = jnp.where(has_maxima, -jnp.inf, 0).astype(jnp.float32)
        begin = jnp.broadcast_to(begin[:, None], (max_rows, hidden.shape[1]))
        sums = _over_tiles(packed, shapes, step, begin)
        if not (has_classes or has_projections):
            return sums
        counts = jnp.zeros((max_rows,), jnp.float32).at[to_add].add(1, mode="drop")
        counts = jnp.maximum(counts, 1)[:, None]
        means = sums / counts
        if has_projections:
            projected: Array = cast("Any", model).projected(means)
            return projected * counts
        return jnp.concatenate([sums, cast("Any", model).classes(means)], axis=1)

    return hidden_sums


def _rows_to_pool(rows: Array, count: Array, max_rows: int) -> tuple[Array, Array]:
    """Cut the first `count` of the numbers of `make_hidden_sums` into the rows that states are added to, and
    those that get the largest ones: both have the length of `rows`, and max_rows in the places of others.
    """
    counts = jnp.arange(rows.shape[0]) < count
    to_add = jnp.where(counts & (rows < max_rows), rows, max_rows)
    return to_add, jnp.where(counts & (rows >= max_rows), rows - max_rows, max_rows)


class _Tile(NamedTuple):
    """Some of the tokens that a program is told of, as many in each tile."""

    start: Array  # int32[] how many come before
    left: Array  # int32[] how many there are from here on; what comes behind them is padding
    tokens: Array  # int32[tile] the index of each in the step
    others: Array  # int32[tile] the number that goes with each


def _tile(shapes: StepShapes) -> int:
    return min(_PROMPT_TILE, shapes.max_tokens)


def _over_tiles(
    packed: Array, shapes: StepShapes, step: Callable[[_Tile, Array], Array], out: Array
) -> Array:
    """Compute what `step` makes of `out`, tile by tile. packed int32[1 + 2 * max_tokens] holds how many
    tokens there are, for each its index in the step, and for each another number.
    """
    size, count = _tile(shapes), packed[0]
    padding = -shapes.max_tokens % size
    tokens, others = (jnp.pad(part, (0, padding)) for part in packed[1:].reshape(2, -1))

    def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start, out = carry
        here = (lax.dynamic_slice_in_dim(part, start, size) for part in (tokens, others))
        return start + size, step(_Tile(start, count - start, *here), out)

    return lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), out))[1]


def admission_size(max_model_len: int) -> int:
    """Return the length of the buffer of `make_admission`'s program, in int32 words."""
    return 3 + max_model_len


def make_admission(vocab_size: int) -> Callable[[RowState, Array, Array], RowState]:
    """Make a program that writes the token counts and biases of a feature slot: (state, packed
    int32[admission_size], bias float32[V]) -> state. packed holds the feature slot, the number of tokens in
    the prompt, the number of tokens in all, and the tokens.
    """

    def admit(state: RowState, packed: Array, bias: Array) -> RowState:
        slot, num_prompt, count, tokens = packed[0], packed[1], packed[2], packed[3:]
        place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        made = jnp.where((place >= num_prompt) & (place < count), tokens, vocab_size)
        prompt = jnp.where(place < num_prompt, tokens, vocab_size)
        history = jnp.zeros((vocab_size,), jnp.int32)
        history = history.at[prompt].set(IN_PROMPT, mode="drop").at[made].add(1, mode="drop")
        return state._replace(history=state.history.at[slot].set(history), bias=state.bias.at[slot].set(bias))

    return admit


def pack_admission(
    feature_slot: int, request: Request, made: tuple[int, ...], max_model_len: int
) -> NDArray[np.int32]:
    """Pack the buffer of `make_admission`'s program. `made` are the tokens that the request has generated
    already.
    """
    buffer = np.zeros(admission_size(max_model_len), np.int32)
    tokens = request.prompt_token_ids + made if request.sampling.has_penalties else ()
    buffer[:3] = feature_slot, min(len(request.prompt_token_ids), len(tokens)), len(tokens)
    buffer[3 : 3 + len(tokens)] = tokens
    return buffer


def make_page_copies(spec: CacheSpec) -> Callable[[KVCache, Array], KVCache]:
    """Make a program that copies pages in all layers that have some: (cache, pairs int32[most, G, 2] of
    source and destination in each group of layers) -> cache. Destinations past the cache's end mark padding,
    which comes last.

    A loop over the pairs runs in place and costs as much as the copies; a scatter would also gather the
    padding (64 pairs of 64 KB in 8 layers on CPU: 34 ms, where the loop takes 0.2 ms for three real pairs).
    """

    is_paged = [
        isinstance(layer, PagedKV | LatentKV) and spec.keeps(entry) for entry, layer in enumerate(spec.layers)
    ]
    groups = list(compress(spec.group_of, is_paged))
    paged = compress(spec.layers, is_paged)
    pieces = [layer.pieces if isinstance(layer, LatentKV) else 1 for layer in paged]

    def copy_pages(kv: KVCache, pairs: Array) -> KVCache:
        pages = tuple(compress(kv, is_paged))
        if not pages:
            return kv
        num_pages = pages[0].shape[0] * pieces[0]
        count = jnp.sum((pairs[:, groups[0], 1] < num_pages).astype(jnp.int32))

        def body(i: Array, pages: tuple[Array, ...]) -> tuple[Array, ...]:
            # Once for each group, because an index in each layer would double the time of tracing.
            sources = [pairs[i, group, 0] for group in range(pairs.shape[1])]
            destinations = [pairs[i, group, 1] for group in range(pairs.shape[1])]
            return tuple(
                _copied(layer, sources[group], destinations[group], dealt)
                for layer, group, dealt in zip(pages, groups, pieces, strict=True)
            )

        copied = iter(lax.fori_loop(0, count, body, pages))
        return tuple(next(copied) if paged else entry for entry, paged in zip(kv, is_paged, strict=True))

    return copy_pages


def _copied(layer: Array, source: Array, destination: Array, pieces: int) -> Array:
    """Return a layer's cache with one page copied. Of pages that are dealt over devices (`dealt_pages`) the
    one that has the source sends it to all by a sum.
    """
    if pieces == 1:
        page = lax.dynamic_slice_in_dim(layer, source, 1, 0)
        return lax.dynamic_update_slice_in_dim(layer, page, destination, 0)
    device = lax.axis_index(AXIS)
    page = lax.dynamic_slice_in_dim(layer, source // pieces, 1, 0)
    bits = lax.bitcast_convert_type(page, f"uint{8 * page.dtype.itemsize}")
    bits = summed(jnp.where(source % pieces == device, bits, 0), AXIS)
    before = lax.dynamic_slice_in_dim(layer, destination // pieces, 1, 0)
    page = jnp.where(destination % pieces == device, lax.bitcast_convert_type(bits, page.dtype), before)
    return lax.dynamic_update_slice_in_dim(layer, page, destination // pieces, 0)


def pack_page_copies(copies: Sequence[PageCopy], most: int, num_pages: Sequence[int]) -> NDArray[np.int32]:
    """Pack the second argument of `make_page_copies`'s program. `num_pages` has the pages of each group, and
    there are as many copies in one group as in any other.
    """
    pairs = np.empty((most, len(num_pages), 2), np.int32)
    pairs[:] = np.reshape(num_pages, (1, -1, 1))
    for group in range(len(num_pages)) if copies else ():
        ours = [(copy.source, copy.destination) for copy in copies if copy.group == group]
        pairs[: len(ours), group] = ours
    return pairs


def make_table_rows() -> Callable[[RowState, Array], RowState]:
    """Make a program that writes whole page tables: (state, int32[TABLE_ROWS, 1 + G * P] of slot and its
    table in each group of layers) -> state. A slot past the last one marks padding. There is no loop whose
    end the device computes, because on a GPU the host would read that back in each iteration.
    """

    def write(state: RowState, packed: Array) -> RowState:
        parts = jnp.split(packed[:, 1:], len(state.tables), axis=1)
        pairs = zip(state.tables, parts, strict=True)
        slots = packed[:, 0]
        return state._replace(tables=tuple(table.at[slots].set(part, mode="drop") for table, part in pairs))

    return write


def pack_table_rows(slots: Sequence[int], tables: NDArray[np.int32]) -> NDArray[np.int32]:
    """Pack the second argument of `make_table_rows`'s program, from all tables int32[G, S, P]; at most
    TABLE_ROWS slots.
    """
    num_groups, num_slots, width = tables.shape
    buffer = np.full((TABLE_ROWS, 1 + num_groups * width), num_slots, np.int32)
    buffer[: len(slots), 0] = slots
    for group, table in enumerate(tables):
        first = 1 + group * width
        buffer[: len(slots), first : first + width] = table[list(slots)]
    return buffer
