"""Which compiled programs exist and which one runs a plan. Pure functions, no jax.

XLA compiles for fixed shapes, so a plan is padded up to one of a small set of (tokens, rows) shapes. Few
shapes mean a short warm-up; shapes close to the plan mean little wasted work. Decode steps are the common
case and have two programs per row bucket: a window, which chooses its tokens itself, and a forward, for steps
whose tokens wait for the host's masks or whose hidden states are wanted. Steps with a prefill chunk have a
forward per token bucket, all with the largest row bucket: there the tokens dominate the cost, padding rows
are cheap, and programs are not.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from penstock.runtime.errors import ConfigError

MIN_BUCKET = 4
"""On CPU a matmul with M below 4 falls off XLA's fast path, so four rows cost no more than one."""
FIRST_TOKEN_BUCKET = 16
ROW_GROWTH = 4
TOKEN_GROWTH = 2
NATIVE_TOKEN_GROWTH = 8
"""Where kernels skip padding: a bucket far above what is needed costs little, a program seconds to make."""


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """One compiled program: `tokens` input positions spread over `rows` rows.

    `decode_only` tells apart programs of equal shape: (16, 16) may exist both as "row i has token i" and as a
    mixed step of 16 tokens split among 16 rows in any way.
    """

    tokens: int
    rows: int
    decode_only: bool = False
    window: bool = False
    """A loop of decode steps that chooses its tokens, which only a program that is `decode_only` can be."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ascending bucket sizes. A program may have more rows than tokens; then some rows are always padding."""

    token_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, sizes in (("token_buckets", self.token_buckets), ("row_buckets", self.row_buckets)):
            if not sizes:
                raise ConfigError(f"{name} must not be empty")
            if sizes[0] < 1:
                raise ConfigError(f"{name} must be at least 1, not {sizes[0]}")
            if any(a >= b for a, b in pairwise(sizes)):
                raise ConfigError(f"{name} must ascend without repeats, not {sizes}")
        if self.token_buckets[-1] < self.row_buckets[-1]:
            raise ConfigError(
                f"token_buckets end in {self.token_buckets[-1]} and row_buckets in {self.row_buckets[-1]}; "
                "the former must not be less, because a step needs one token for every row"
            )

    @classmethod
    def default(
        cls, max_num_seqs: int, max_num_batched_tokens: int, *, token_growth: int = TOKEN_GROWTH
    ) -> Buckets:
        """Rows 4, 16, 64, ... up to max_num_seqs; tokens from 16 up to max_num_batched_tokens, each bucket
        `token_growth` times the one before.

        Neither ends below 4 (see MIN_BUCKET): a smaller limit is served with padding rows.
        """
        if max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be at least 1, not {max_num_seqs}")
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens, {max_num_batched_tokens}, must be at least "
                f"max_num_seqs, {max_num_seqs}"
            )
        most_tokens = max(max_num_batched_tokens, MIN_BUCKET)
        return cls(
            token_buckets=_geometric(FIRST_TOKEN_BUCKET, token_growth, most_tokens),
            row_buckets=_geometric(MIN_BUCKET, ROW_GROWTH, max(max_num_seqs, MIN_BUCKET)),
        )

    def keys(self) -> tuple[ProgramKey, ...]:
        """Every program that `select` can return, each once, largest first.

        Largest first because it takes longest to compile (the best order for several compiler threads) and
        needs the most memory (if it does not fit, start-up fails at once and not after minutes).
        """
        keys = [ProgramKey(rows, rows, True, window) for rows in self.row_buckets for window in (True, False)]
        keys += [ProgramKey(tokens, self.row_buckets[-1]) for tokens in self.token_buckets]
        return tuple(
            sorted(keys, key=lambda key: (key.tokens, key.rows, key.decode_only, key.window), reverse=True)
        )

    def select(self, num_tokens: int, num_rows: int, *, window: bool = False) -> ProgramKey:
        """The smallest program that fits; ValueError if none does. A `window` has one token in every row."""
        rows, tokens = self.row_buckets, self.token_buckets
        if not 1 <= num_rows <= rows[-1]:
            raise ValueError(f"num_rows {num_rows} is not from 1 to {rows[-1]}")
        if (window and num_tokens != num_rows) or num_tokens < num_rows:
            raise ValueError(f"{num_rows} rows with {num_tokens} tokens cannot be {window=}")
        if num_tokens == num_rows:
            size = rows[bisect_left(rows, num_rows)]
            return ProgramKey(size, size, True, window)
        if num_tokens > tokens[-1]:
            raise ValueError(f"num_tokens {num_tokens} is above {tokens[-1]}")
        return ProgramKey(tokens[bisect_left(tokens, num_tokens)], rows[-1])


def _geometric(first: int, factor: int, last: int) -> tuple[int, ...]:
    """first, first * factor, ... below `last`, then `last`."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)
