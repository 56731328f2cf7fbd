"""Which compiled programs exist, and which one runs a plan. Pure functions, no jax.

XLA compiles for fixed shapes, so a plan is padded up to one of a small set of (tokens, rows) shapes. Few
shapes mean a short warm-up; shapes close to the plan mean little wasted work. Decode steps are the common
case and have two programs per row bucket: a window, which samples its tokens itself (on accelerators one for
each length, see `step_programs`), and a forward, for steps whose tokens wait for the host's masks or whose
hidden states are wanted. Steps with a prefill chunk have a forward per token bucket, all with the largest row
bucket: in these the tokens dominate the cost, padding rows are cheap, and more programs would not be.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import astuple, dataclass
from itertools import pairwise

from penstock.runtime.errors import ConfigError

MIN_BUCKET = 4
"""On CPU a matrix product with fewer than 4 rows leaves XLA's fast path, and is ten times slower than with
four.
"""
FIRST_TOKEN_BUCKET = 16
ROW_GROWTH = 2
TOKEN_GROWTH = 2
CPU_ROW_GROWTH = 4
"""On CPU, with native kernels or without: a program takes seconds to compile."""
NATIVE_TOKEN_GROWTH = 8
"""For kernels that skip padding: a bucket far above what is needed costs little, a program seconds to
compile."""
WINDOW_GROWTH = 2


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """One compiled program: `tokens` input positions shared among `rows` rows.

    `decode_only` distinguishes programs of equal shape: (16, 16) may exist both as "row i has token i" and as
    a mixed step of 16 tokens that 16 rows share in any way.

    `num_steps` concerns windows only: the number of decode steps; 0: as many as the step's buffer says.
    """

    tokens: int
    rows: int
    decode_only: bool = False
    window: bool = False
    """Whether the program is a loop of decode steps that samples its tokens; only a `decode_only` program can
    be one."""
    num_steps: int = 0

    @property
    def name(self) -> str:
        """What profiles call the program; no two keys have the same name."""
        if self.window:
            return f"window_rows{self.rows}" + (f"_steps{self.num_steps}" if self.num_steps else "")
        return (
            f"decode_rows{self.rows}" if self.decode_only else f"forward_tokens{self.tokens}_rows{self.rows}"
        )


@dataclass(frozen=True, slots=True)
class Buckets:
    """Bucket sizes, in ascending order. A program may have more rows than tokens; then some rows are always
    padding.
    """

    token_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]
    window_steps: tuple[int, ...] = (0,)
    """Lengths of windows, each of which has a program; (0,): one program for any length; (): there are no
    windows."""
    decodes: bool = True
    """Whether there are decode steps. The programs of a model that generates nothing are those of prompts."""
    checked_rows: tuple[int, ...] = ()
    """Further numbers of rows, above `row_buckets`, of decode steps with proposed tokens, which have a row
    each. There are no windows of so many rows, and no steps with prompts."""

    def __post_init__(self) -> None:
        for name, sizes in (("token_buckets", self.token_buckets), ("row_buckets", self.row_buckets)):
            if not sizes:
                raise ConfigError(f"{name} must not be empty")
            if sizes[0] < 1:
                raise ConfigError(f"{name} must be at least 1, not {sizes[0]}")
            if any(a >= b for a, b in pairwise(sizes)):
                raise ConfigError(f"{name} must ascend without repeats, not {sizes}")
        if any(a >= b for a, b in pairwise((self.row_buckets[-1], *self.checked_rows))):
            raise ConfigError(f"checked_rows must ascend from row_buckets on, not {self.checked_rows}")
        if self.window_steps[:1] not in ((), (1,)) and self.window_steps != (0,):
            raise ConfigError(f"window_steps must begin with 1, or be (0,) or (), not {self.window_steps}")
        if any(a >= b for a, b in pairwise(self.window_steps)):
            raise ConfigError(f"window_steps must ascend without repeats, not {self.window_steps}")
        if self.token_buckets[-1] < self.row_buckets[-1]:
            raise ConfigError(
                f"token_buckets end in {self.token_buckets[-1]} and row_buckets in {self.row_buckets[-1]}; "
                "the former must not be less, because a step needs one token for every row"
            )

    @property
    def has_windows(self) -> bool:
        """Whether there are windows of decode steps."""
        return self.decodes and bool(self.window_steps)

    @property
    def decode_rows(self) -> tuple[int, ...]:
        """The numbers of rows of decode steps, those with proposed tokens included."""
        return self.row_buckets + self.checked_rows

    @classmethod
    def default(
        cls,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        token_growth: int = TOKEN_GROWTH,
        row_growth: int = CPU_ROW_GROWTH,
        max_window: int | None = None,
        has_windows: bool = True,
        decodes: bool = True,
        most_rows: int | None = None,
    ) -> Buckets:
        """Choose row buckets from 4 up to max_num_seqs, each `row_growth` times the one before; token buckets
        from 16 up to max_num_batched_tokens, each `token_growth` times the one before; with `max_window`,
        windows of 1, 2, 4 and so on steps, and without `has_windows` none. `most_rows`: the most rows of a
        step with proposed tokens; None: max_num_seqs.

        Neither kind ends below 4 (see MIN_BUCKET): a smaller limit is served with padding rows.
        """
        if max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be at least 1, not {max_num_seqs}")
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens, {max_num_batched_tokens}, must be at least "
                f"max_num_seqs, {max_num_seqs}"
            )
        most_tokens, most_seqs = max(max_num_batched_tokens, MIN_BUCKET), max(max_num_seqs, MIN_BUCKET)
        checked = most_rows or most_seqs
        return cls(
            token_buckets=geometric(FIRST_TOKEN_BUCKET, token_growth, most_tokens),
            row_buckets=geometric(MIN_BUCKET, row_growth, most_seqs) if decodes else (most_seqs,),
            checked_rows=geometric(most_seqs, row_growth, checked)[1:] if checked > most_seqs else (),
            window_steps=()
            if not has_windows
            else (0,)
            if max_window is None
            else geometric(1, WINDOW_GROWTH, max_window),
            decodes=decodes,
        )

    def keys(self) -> tuple[ProgramKey, ...]:
        """List every program that `select` can return, each once, largest first.

        The largest takes longest to compile, so this is the best order for several compiler threads. It also
        needs the most memory: if it does not fit, start-up fails at once and not after minutes.
        """
        decoded = self.row_buckets if self.decodes else ()
        keys = [ProgramKey(rows, rows, True) for rows in (*decoded, *self.checked_rows)]
        keys += [ProgramKey(rows, rows, True, True, steps) for rows in decoded for steps in self.window_steps]
        keys += [ProgramKey(tokens, self.row_buckets[-1]) for tokens in self.token_buckets]
        return tuple(sorted(keys, key=astuple, reverse=True))

    def select(
        self, num_tokens: int, num_rows: int, *, window: bool = False, num_steps: int = 1
    ) -> ProgramKey:
        """Select the smallest program that fits; ValueError if none does. A `window` has one token in every
        row, and may have several steps.
        """
        tokens = self.token_buckets
        is_decode = num_tokens == num_rows and self.decodes
        rows = self.decode_rows if is_decode and not window else self.row_buckets
        if not 1 <= num_rows <= rows[-1]:
            raise ValueError(f"num_rows {num_rows} is not from 1 to {rows[-1]}")
        if (window and num_tokens != num_rows) or num_tokens < num_rows:
            raise ValueError(f"{num_rows} rows with {num_tokens} tokens cannot be {window=}")
        if is_decode:
            size = rows[bisect_left(rows, num_rows)]
            return ProgramKey(size, size, True, window, self._length(num_steps) if window else 0)
        if num_tokens > tokens[-1]:
            raise ValueError(f"num_tokens {num_tokens} is above {tokens[-1]}")
        return ProgramKey(tokens[bisect_left(tokens, num_tokens)], rows[-1])

    def _length(self, num_steps: int) -> int:
        steps = self.window_steps
        if steps == (0,):
            return 0
        if num_steps > steps[-1]:
            raise ValueError(f"num_steps {num_steps} is above {steps[-1]}")
        return steps[bisect_left(steps, num_steps)]


def geometric(first: int, factor: int, last: int) -> tuple[int, ...]:
    """Yield first, first * factor, ... below `last`, then `last`."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)
