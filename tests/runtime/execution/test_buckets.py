"""Which programs exist, and that the selected program exists, fits, and is the smallest that fits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.buckets import Buckets, ProgramKey


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "row_buckets", "token_buckets"),
    [
        (256, 2048, (4, 16, 64, 256), (16, 32, 64, 128, 256, 512, 1024, 2048)),
        (100, 300, (4, 16, 64, 100), (16, 32, 64, 128, 256, 300)),
        (64, 64, (4, 16, 64), (16, 32, 64)),
        (17, 17, (4, 16, 17), (16, 17)),
        (16, 16, (4, 16), (16,)),
        (5, 6, (4, 5), (6,)),
        (4, 8, (4,), (8,)),
        (1, 1, (4,), (4,)),  # three of the four rows are padding
    ],
)
def test_default_sizes(max_num_seqs, max_num_batched_tokens, row_buckets, token_buckets):
    buckets = Buckets.default(max_num_seqs, max_num_batched_tokens)
    assert buckets.row_buckets == row_buckets
    assert buckets.token_buckets == token_buckets


def test_keys_are_largest_first_with_mixed_programs_for_the_largest_row_bucket_only():
    assert Buckets.default(64, 64).keys() == (
        ProgramKey(64, 64, decode_only=True, window=True),
        ProgramKey(64, 64, decode_only=True),
        ProgramKey(64, 64),
        ProgramKey(32, 64),
        ProgramKey(16, 64),
        ProgramKey(16, 16, decode_only=True, window=True),
        ProgramKey(16, 16, decode_only=True),
        ProgramKey(4, 4, decode_only=True, window=True),
        ProgramKey(4, 4, decode_only=True),
    )


def test_token_buckets_may_grow_faster():
    """Larger factors suit devices on which padding costs little: there are fewer programs, and the largest is
    still the budget.
    """
    assert Buckets.default(4, 512, token_growth=8).token_buckets == (16, 128, 512)
    assert Buckets.default(4, 20, token_growth=8).token_buckets == (16, 20)


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 4), (4, 4), (5, 16), (16, 16), (17, 64), (64, 64)])
def test_steps_of_a_token_in_every_row_are_selected_by_rows(num_rows, size, window):
    key = Buckets.default(64, 128).select(num_rows, num_rows, window=window)
    assert key == ProgramKey(size, size, True, window)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "key"),
    [
        (2, 1, ProgramKey(16, 64)),
        (16, 4, ProgramKey(16, 64)),
        (17, 4, ProgramKey(32, 64)),
        (16, 5, ProgramKey(16, 64)),
        (128, 64, ProgramKey(128, 64)),
    ],
)
def test_other_steps_are_selected_by_tokens(num_tokens, num_rows, key):
    assert Buckets.default(64, 128).select(num_tokens, num_rows) == key


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "window", "message"),
    [
        (0, 0, True, "num_rows 0 is not from 1 to 64"),
        (65, 65, True, "num_rows 65 is not from 1 to 64"),
        (129, 64, False, "num_tokens 129 is above 128"),
        (3, 4, False, "4 rows with 3 tokens cannot be window=False"),
        (5, 4, True, "4 rows with 5 tokens cannot be window=True"),
    ],
)
def test_a_plan_that_fits_no_program_is_refused(num_tokens, num_rows, window, message):
    with pytest.raises(ValueError, match=message):
        Buckets.default(64, 128).select(num_tokens, num_rows, window=window)


@settings(deadline=None)  # the machine that runs this may be busy
@given(st.integers(1, 40), st.integers(0, 60), st.data())
def test_whatever_is_selected_is_listed_and_the_smallest_that_fits(max_num_seqs, more_tokens, data):
    buckets = Buckets.default(max_num_seqs, max_num_seqs + more_tokens)
    num_rows = data.draw(st.integers(1, max_num_seqs), label="rows")
    num_tokens = data.draw(st.integers(num_rows, max_num_seqs + more_tokens), label="tokens")
    decode_only = num_tokens == num_rows
    window = decode_only and data.draw(st.booleans(), label="window")
    key = buckets.select(num_tokens, num_rows, window=window)
    keys = buckets.keys()
    assert len(set(keys)) == len(keys)
    kind = [k for k in keys if (k.decode_only, k.window) == (decode_only, window)]
    fitting = [k for k in kind if k.tokens >= num_tokens and k.rows >= num_rows]
    assert key in fitting
    assert all(key.tokens <= other.tokens and key.rows <= other.rows for other in fitting)
    if key.decode_only:
        assert key.tokens == key.rows


@settings(deadline=None)  # the machine that runs this may be busy
@given(st.integers(1, 40), st.integers(0, 60))
def test_every_listed_program_has_a_plan_that_selects_it(max_num_seqs, more_tokens):
    buckets = Buckets.default(max_num_seqs, max_num_seqs + more_tokens)
    reached = set()
    for num_rows in range(1, buckets.row_buckets[-1] + 1):
        reached |= {buckets.select(num_rows, num_rows, window=window) for window in (True, False)}
        for num_tokens in range(num_rows + 1, buckets.token_buckets[-1] + 1):
            reached.add(buckets.select(num_tokens, num_rows))
    assert reached == set(buckets.keys())


def test_only_steps_with_proposals_have_more_rows_than_sequences() -> None:
    """Such a step has a row for each proposed token: there are decode programs of as many rows, and neither
    windows nor steps with prompts.
    """
    buckets = Buckets.default(3, 64, most_rows=15)
    assert (buckets.row_buckets, buckets.checked_rows, buckets.decode_rows) == ((4,), (15,), (4, 15))
    assert buckets.keys() == (
        ProgramKey(64, 4),
        ProgramKey(32, 4),
        ProgramKey(16, 4),
        ProgramKey(15, 15, decode_only=True),
        ProgramKey(4, 4, decode_only=True, window=True),
        ProgramKey(4, 4, decode_only=True),
    )
    assert buckets.select(5, 5) == ProgramKey(15, 15, decode_only=True)
    assert buckets.select(4, 4, window=True) == ProgramKey(4, 4, decode_only=True, window=True)
    assert buckets.select(6, 4) == ProgramKey(16, 4)
    for window, num_tokens in ((True, 5), (False, 6)):
        with pytest.raises(ValueError, match="num_rows 5 is not from 1 to 4"):
            buckets.select(num_tokens, 5, window=window)
    assert Buckets.default(4, 64, most_rows=40, row_growth=2).checked_rows == (8, 16, 32, 40)
    assert Buckets.default(16, 64, most_rows=16).checked_rows == ()
    with pytest.raises(ConfigError, match="checked_rows must ascend from row_buckets on"):
        Buckets((16,), (4,), checked_rows=(4,))


@pytest.mark.parametrize(
    ("token_buckets", "row_buckets", "message"),
    [
        ((), (4,), "token_buckets must not be empty"),
        ((16,), (), "row_buckets must not be empty"),
        ((16,), (0, 4), "row_buckets must be at least 1, not 0"),
        ((16, 16), (4,), "token_buckets must ascend without repeats"),
        ((16,), (8, 4), "row_buckets must ascend without repeats"),
        ((16,), (4, 32), "token_buckets end in 16 and row_buckets in 32"),
    ],
)
def test_bad_sizes_are_refused_by_name(token_buckets, row_buckets, message):
    with pytest.raises(ConfigError, match=message):
        Buckets(token_buckets, row_buckets)


def test_default_refuses_bad_limits_by_name():
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 1, not 0"):
        Buckets.default(0, 16)
    with pytest.raises(ConfigError, match="max_num_batched_tokens, 7, must be at least max_num_seqs, 8"):
        Buckets.default(8, 7)


def test_windows_of_fixed_lengths() -> None:
    """The shortest window that is long enough is selected. There is one program for each number of rows and
    each length.
    """
    buckets = Buckets.default(16, 64, row_growth=2, max_window=6)
    assert buckets.row_buckets == (4, 8, 16)
    assert buckets.window_steps == (1, 2, 4, 6)
    assert sum(key.window for key in buckets.keys()) == 3 * 4  # noqa: SIM118 # a method, not a mapping's
    selected = [buckets.select(5, 5, window=True, num_steps=steps) for steps in range(1, 7)]
    assert selected == [ProgramKey(8, 8, True, True, steps) for steps in (1, 2, 4, 4, 6, 6)]
    assert set(selected) <= set(buckets.keys())
    with pytest.raises(ValueError, match="num_steps 7 is above 6"):
        buckets.select(5, 5, window=True, num_steps=7)
    assert buckets.select(20, 5).num_steps == buckets.select(5, 5).num_steps == 0


def test_one_program_for_windows_of_any_length() -> None:
    buckets = Buckets.default(16, 64)
    assert buckets.row_buckets == (4, 16)
    selected = {buckets.select(5, 5, window=True, num_steps=steps) for steps in (1, 2, 64)}
    assert selected == {ProgramKey(16, 16, True, True)}


def test_there_may_be_no_windows() -> None:
    buckets = Buckets.default(8, 64, has_windows=False)
    assert not buckets.has_windows
    assert Buckets.default(8, 64).has_windows
    assert not any(key.window for key in buckets.keys())  # noqa: SIM118 # no mapping
    assert buckets.select(3, 3).decode_only


@pytest.mark.parametrize("steps", [(2, 4), (1, 1), (1, 4, 2)])
def test_lengths_of_windows_are_checked(steps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="window_steps"):
        Buckets((16,), (4,), steps)
