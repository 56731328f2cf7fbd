"""Steps of ragged rows for the operations of recurrent layers: which tokens each row has, which entry of the
state it goes on from, and which it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from hypothesis import strategies as st

from penstock.runtime.ops.attention import AttentionMeta, make_meta

_made = jax.jit(make_meta, static_argnames=("num_tokens", "decode_only", "page_size", "num_pages"))
"""Without jit, each of its fifty operations would be compiled by itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """`new` tokens of one sequence. fresh: they are its first, so it goes on from zeros. cut: after so many
    of them the state is kept too; 0: it is not.
    """

    new: int
    fresh: bool = False
    cut: int = 0


def rows_of(most_tokens: int) -> st.SearchStrategy[Row]:
    """Draw a row of 1 to `most_tokens` tokens, with a cut or without one."""
    numbers = st.integers(1, most_tokens)
    return numbers.flatmap(
        lambda new: st.builds(Row, new=st.just(new), fresh=st.booleans(), cut=st.integers(0, new))
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Rows in a program of `tokens` tokens and `num_rows` rows, with `entries` entries of state. The entries
    are drawn by `seed`, three for each row: one that it reads and two that it writes. cuts: the program knows
    of cuts.
    """

    rows: tuple[Row, ...]
    tokens: int
    num_rows: int
    entries: int
    decode: bool
    seed: int
    cuts: bool = True

    def _drawn(self) -> Sequence[int]:
        drawn: Sequence[int] = np.random.default_rng(self.seed).permutation(self.entries).tolist()
        return drawn

    @property
    def reads(self) -> list[int | None]:
        """For each row the entry that it goes on from; None: zeros."""
        return [None if row.fresh else self._drawn()[3 * at] for at, row in enumerate(self.rows)]

    @property
    def writes(self) -> list[int]:
        """For each row the entry that it writes."""
        return [self._drawn()[3 * at + 1] for at in range(len(self.rows))]

    @property
    def keeps(self) -> list[int]:
        """For each row the entry that it writes where it has a cut."""
        return [self._drawn()[3 * at + 2] for at in range(len(self.rows))]

    @property
    def spans(self) -> list[slice]:
        """For each row its tokens."""
        ends = np.cumsum([row.new for row in self.rows]).tolist()
        return [slice(end - row.new, end) for end, row in zip(ends, self.rows, strict=True)]

    @property
    def meta(self) -> AttentionMeta:
        """As a step's program makes it. Padding rows read and write nothing."""

        def padded(values: Sequence[int], padding: int) -> np.ndarray:
            rest = [padding] * (self.num_rows - len(values))
            return np.array([*values, *rest], np.int32)

        past = self.entries
        reads = [past if entry is None else entry for entry in self.reads]
        meta: AttentionMeta = _made(
            starts=padded([0 if row.fresh else 7 for row in self.rows], 0),
            q_lens=padded([row.new for row in self.rows], 0),
            page_table=np.zeros((self.num_rows, 64), np.int32),
            num_tokens=self.tokens,
            decode_only=self.decode,
            page_size=8,
            num_pages=1,
            state_from=padded(reads, past),
            state_to=padded(self.writes, past),
            state_cut=padded([row.cut for row in self.rows], 0) if self.cuts else None,
            state_cut_to=padded(self.keeps, past) if self.cuts else None,
        )
        return meta
