"""What the kernels for TPUs share: copies between the chip's large memory and its own, and which positions
tokens attend to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import lax

from penstock.runtime.ops.kv_rows import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Pages:
    """Some of a row's pages, which follow each other, on their way to the chip: `span` of them at a time,
    into places that come round. All methods are called within a kernel.
    """

    kv: Any
    """The cache [page, planes, KH, page size, dim]."""
    page_at: Callable[[Any], Any]
    """Returns the number int32[] in the cache of each of the row's pages, the first of which is 0."""
    places: Any
    """[stages, planes, KH, span * page size, dim]. Behind the last page it has what was there before."""
    arrived: Any
    """A semaphore for each stage."""
    first: Any
    """int32[]: the first page that is wanted."""
    count: Any
    """int32[]: how many are."""

    @property
    def span(self) -> int:
        """How many pages a place has."""
        return int(self.places.shape[3] // self.kv.shape[3])

    @property
    def num_steps(self) -> Any:
        """How often `take` can be called, int32[]."""
        return lax.div(self.count + (self.span - 1), jnp.int32(self.span))

    def begin(self) -> None:
        """Send for what the first steps take."""
        for i in range(self.places.shape[0] - 1):
            self._each(jnp.int32(i), lambda copy: copy.start())

    def take(self, step: Any) -> tuple[Any, Any]:
        """Send for the pages of a later step, and wait for those of this one. Return their place, and the
        position of the first of their tokens, both int32[].
        """
        stages, size = self.places.shape[0], self.kv.shape[3]
        self._each(step + (stages - 1), lambda copy: copy.start())
        self._each(step, lambda copy: copy.wait())
        return self._place(step), (self.first + step * self.span) * size

    def _place(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.places.shape[0]))

    def _each(self, step: Any, act: Callable[[Any], None]) -> None:
        size, place = self.kv.shape[3], self._place(step)
        for i in range(self.span):
            number = step * self.span + i

            @pl.when(number < self.count)
            def _(i: int = i, number: Any = number) -> None:
                page = self.kv.at[self.page_at(self.first + number)]
                to = self.places.at[place, :, :, pl.ds(i * size, size)]
                act(pltpu.make_async_copy(page, to, self.arrived.at[place]))


def in_pieces(block: int, first: Any, count: Any, copy: Callable[[Any, Any], Any]) -> None:
    """Copy `count` tokens of a block between the memories, and wait for it. They go in pieces of 1, 2, 4, ...
    tokens, up to `block`, so nothing is touched that belongs to another block. `copy` makes the copy of a
    piece from its places among all tokens, where the block begins at `first`, and its places in the block.
    """
    for finish in (False, True):  # wait for what all pieces have started
        size = block
        while size:
            place = count - lax.rem(count, jnp.int32(2 * size))

            @pl.when(lax.rem(lax.div(count, jnp.int32(size)), jnp.int32(2)) == 1)
            def _(size: int = size, place: Any = place, finish: bool = finish) -> None:
                piece = copy(pl.ds(first + place, size), pl.ds(place, size))
                piece.wait() if finish else piece.start()

            size //= 2


@dataclass(frozen=True, slots=True)
class KVRows:
    """The KV rows of the pages in one of their places on the chip."""

    pages: Any
    """[stages, planes, KH, positions, dim] in floats, or int8 [stages, planes, columns, positions, lanes], as
    `kv_rows` says."""
    stage: Any
    """Which place, int32[]."""
    scales: tuple[tuple[Any, ...], ...]
    """For each plane its columns of scales, float32 [positions, lanes], where each fourth lane has one; ()
    for floats."""
    num_heads: int
    """Heads of keys."""

    @classmethod
    def of(cls, pages: Any, stage: Any, num_heads: int) -> KVRows:
        """Make it of the places, which of them, and how many heads of keys there are."""
        _, planes, columns, _, lanes = pages.shape
        if pages.dtype != jnp.int8:
            return cls(pages, stage, (), num_heads)

        def floats(plane: int, column: int) -> Any:
            """Join each byte with the three that follow it."""
            word = pages[stage, plane, column].astype(jnp.int32) & 255
            bits = word
            for i in range(1, SCALE_BYTES):
                bits |= pltpu.roll(word, lanes - i, 1) << (8 * i)
            return lax.bitcast_convert_type(bits, jnp.float32)

        behind = range(columns - -(-num_heads * SCALE_BYTES // lanes), columns)
        scales = tuple(tuple(floats(plane, column) for column in behind) for plane in range(planes))
        return cls(pages, stage, scales, num_heads)

    def read(self, plane: int, head: int, wide: int) -> Any:
        """Return the first `wide` channels, a multiple of the lanes, of a head's keys or values [positions,
        wide]: in the cache's dtype, or in float32 if that is int8.
        """
        if not self.scales:
            return self.pages[self.stage, plane, head, :, :wide]
        *_, columns, _, lanes = self.pages.shape
        of_head = (columns - len(self.scales[plane])) // self.num_heads
        parts = [self.pages[self.stage, plane, head * of_head + i] for i in range(wide // lanes)]
        numbers = jnp.concatenate([part.astype(jnp.int32).astype(jnp.float32) for part in parts], axis=1)
        column, place = divmod(head * SCALE_BYTES, lanes)
        return numbers * self.scales[plane][column][:, place : place + 1]


@dataclass(frozen=True, slots=True)
class Visible:
    """Which positions the tokens of a block attend to, which follow each other in their row."""

    block: int
    """How many tokens the block has at most."""
    window: int | None
    """As in `AttentionOptions`."""
    chunk: int | None
    """As in `AttentionOptions`."""

    def oldest(self, position: Any) -> Any:
        """Return the oldest position that a token at this one attends to."""
        oldest = jnp.int32(0)
        if self.window is not None:
            oldest = jnp.maximum(oldest, position - (self.window - 1))
        if self.chunk is not None:
            oldest = jnp.maximum(oldest, position - lax.rem(position, jnp.int32(self.chunk)))
        return oldest

    def seen(self, asking: Any, at: Any, position: Any) -> Any:
        """Tell which positions `at` the tokens at `asking` attend to, in a block that begins at
        `position`.
        """
        seen = at <= asking
        if self.window is not None:
            seen &= at > asking - self.window
        if self.chunk is not None:
            began = position - lax.rem(position, jnp.int32(self.chunk))
            own = began
            for n in range(1, self.block // self.chunk + 2):
                own = own + jnp.where(asking >= began + n * self.chunk, self.chunk, 0)
            seen &= at >= own
        return seen
