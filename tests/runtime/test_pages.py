"""PagePool: hand-made cases, and a random walk against a plain list of holders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import ConfigError
from penstock.runtime.pages import PagePool


def test_pages_come_lowest_first_and_return_in_their_old_order():
    pool = PagePool(6, 16)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    pool.release([2, 3, 4])
    assert pool.allocate(4) == [2, 3, 4, 5]


def test_allocating_no_pages_takes_none():
    pool = PagePool(2, 16)
    assert pool.allocate(0) == []
    assert pool.num_free == 2


def test_counts():
    pool = PagePool(5, 16)
    pool.allocate(2)
    assert (pool.num_free, pool.num_used) == (3, 2)
    assert pool.can_allocate(3)
    assert not pool.can_allocate(4)


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(num_tokens, pages):
    assert PagePool(5, 16).pages_for(num_tokens) == pages


def test_what_was_not_asked_for_fails_and_changes_nothing():
    pool = PagePool(3, 16)
    held = pool.allocate(2)
    with pytest.raises(RuntimeError, match="cannot allocate 2 pages; 1 of 3"):
        pool.allocate(2)
    with pytest.raises(RuntimeError, match="cannot allocate -1"):
        pool.allocate(-1)
    pool.check([held])


def test_a_shared_page_is_free_only_after_its_last_holder():
    pool = PagePool(3, 16)
    pages = pool.allocate(2)
    pool.retain(pages[:1])
    pool.check([pages, pages[:1]])
    pool.release(pages)
    assert pool.num_used == 1
    pool.check([pages[:1]])
    pool.release(pages[:1])
    assert pool.num_used == 0
    pool.check([])


def test_free_pages_can_be_neither_retained_nor_released():
    pool = PagePool(2, 16)
    with pytest.raises(RuntimeError, match="page 1 is free and cannot be retained"):
        pool.retain([1])
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(RuntimeError, match="page 0 is free and cannot be released"):
        pool.release(pages)


def test_check_notices_every_kind_of_damage():
    pool = PagePool(3, 16)
    held = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 free \\+ 0 cached \\+ 1 held is not 3"):  # a leak
        pool.check([held[:1]])
    with pytest.raises(AssertionError, match="page 0 has refcount 1 but 2 holders"):  # shared without retain
        pool.check([held, held[:1]])
    with pytest.raises(
        AssertionError, match="1 free \\+ 0 cached \\+ 3 held is not 3"
    ):  # a page used after its release
        pool.check([held, [2]])
    pool.retain(held[:1])
    with pytest.raises(AssertionError, match="page 0 has refcount 2 but 1 holders"):
        pool.check([held])
    pool = PagePool(3, 16)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check([])
    pool = PagePool(3, 16)
    held = pool.allocate(1)
    pool._free[0] = held[0]  # page 2 lost, page 0 both free and held: the sum alone would not show it
    with pytest.raises(AssertionError, match="page 0 is free but has refcount 1"):
        pool.check([held])


@pytest.mark.parametrize(("num_pages", "page_size", "name"), [(0, 16, "num_pages"), (4, 0, "page_size")])
def test_sizes_are_positive(num_pages, page_size, name):
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        PagePool(num_pages, page_size)


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 7))))
def test_random_use_agrees_with_a_list_of_holders(num_pages, script):
    pool = PagePool(num_pages, 16)
    holders: list[list[int]] = []
    for action, n in script:
        if action == "take":
            in_use = {page for pages in holders for page in pages}
            assert pool.can_allocate(n) == (n <= num_pages - len(in_use))
            if pool.can_allocate(n):
                pages = pool.allocate(n)
                assert len(pages) == n
                assert not in_use & set(pages)
                holders.append(pages)
        elif holders and action == "share":
            shared = list(holders[n % len(holders)])
            pool.retain(shared)
            holders.append(shared)
        elif holders:
            pool.release(holders.pop(n % len(holders)))
        pool.check(holders)
        assert pool.num_used == len({page for pages in holders for page in pages})
