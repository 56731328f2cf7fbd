"""PagePool: cases made by hand, and random use compared with a plain list of holders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import ConfigError
from penstock.runtime.scheduling.pages import PagePool


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


def test_an_allocation_that_does_not_fit_fails_and_changes_nothing():
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


def test_a_published_page_is_cached_after_its_last_holder_and_found_by_its_key():
    pool = PagePool(3, 16)
    pages = pool.allocate(2)
    pool.publish(pages[0], b"x")
    assert (pool.lookup(b"x"), pool.lookup(b"y")) == (0, None)
    pool.release(pages)
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (2, 1, 0, 3)
    pool.check([])
    pool.retain([0])
    assert (pool.num_cached, pool.num_used) == (0, 1)
    pool.check([[0]])


def test_free_pages_are_taken_before_cached_ones_and_those_in_order_of_their_release():
    pool = PagePool(4, 16)
    for key in (b"a", b"b", b"c"):
        (page,) = pool.allocate(1)
        pool.publish(page, key)
    pool.release([1])
    pool.release([0, 2])  # of pages that are released together, the last is taken first
    assert pool.allocate(2) == [3, 1]
    assert [pool.lookup(key) for key in (b"a", b"b", b"c")] == [0, None, 2]
    pool.retain([2])
    pool.release([2])  # it was held again, so now "a" is the oldest
    assert pool.allocate(1) == [0]
    pool.check([[3, 1], [0]])


def test_pages_to_be_shared_do_not_count_as_available():
    pool = PagePool(3, 16)
    pages = pool.allocate(2)
    pool.publish(0, b"a")
    pool.publish(1, b"b")
    pool.release(pages[:1])
    assert pool.can_allocate(2)
    assert pool.can_allocate(2, beside=[1])  # held
    assert not pool.can_allocate(2, beside=[0, 1])  # the other is cached
    assert pool.can_allocate(1, beside=[0, 1])


def test_one_key_belongs_to_one_page_and_a_page_has_one_key():
    pool = PagePool(3, 16)
    pages = pool.allocate(2)
    pool.publish(0, b"a")
    pool.publish(1, b"a")  # the same content again, so this page has no key
    assert pool.lookup(b"a") == 0
    with pytest.raises(RuntimeError, match="page 0 is not held, or was published before"):
        pool.publish(0, b"b")
    with pytest.raises(RuntimeError, match="page 2 is not held"):
        pool.publish(2, b"b")
    pool.release(pages)
    assert (pool.num_free, pool.num_cached) == (2, 1)


def test_no_more_is_cached_than_allowed():
    pool = PagePool(4, 16, max_cached=2)
    pages = pool.allocate(3)
    for page in pages:
        pool.publish(page, bytes([page]))
    pool.release(pages)
    assert [pool.lookup(bytes([page])) for page in pages] == [0, 1, None]
    pool.check([])


def test_keys_are_forgotten_at_once():
    pool = PagePool(4, 16)
    held, cached = pool.allocate(2), pool.allocate(1)
    for page in (0, 2):
        pool.publish(page, bytes([page]))
    pool.release(cached)
    assert pool.forget_keys() == (1, 1)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 0, 2)
    assert pool.lookup(bytes([0])) is None
    pool.check([held])


def test_pages_that_holders_would_free_together():
    pool = PagePool(4, 16)
    one, shared = pool.allocate(1), pool.allocate(2)
    pool.retain(shared)
    pool.retain(shared[:1])
    assert pool.num_released_with([[*one, *shared]]) == 1
    assert pool.num_released_with([[*one, *shared], shared]) == 2
    assert pool.num_released_with([[*one, *shared], shared, shared[:1]]) == 3


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
    pool._free[0] = held[0]  # page 2 is lost and page 0 both free and held; the sum does not show it
    with pytest.raises(AssertionError, match="page 0 is free but has refcount 1"):
        pool.check([held])
    pool = PagePool(3, 16)
    held = pool.allocate(1)
    pool.publish(0, b"a")
    pool._index.clear()
    with pytest.raises(AssertionError, match="the index does not tell"):
        pool.check([held])
    pool._keys[2] = b"b"
    with pytest.raises(AssertionError, match="page 2 is free but has a key"):
        pool.check([held])
    pool = PagePool(3, 16)
    pool.publish(pool.allocate(1)[0], b"a")
    pool.release([0])
    pool._keys[0] = None
    with pytest.raises(AssertionError, match="page 0 is cached but is held or has no key"):
        pool.check([])
    pool._keys[0], pool._max_cached = b"a", 0
    with pytest.raises(AssertionError, match="1 pages are cached; 0 may be"):
        pool.check([])


@pytest.mark.parametrize(("num_pages", "page_size", "name"), [(0, 16, "num_pages"), (4, 0, "page_size")])
def test_sizes_are_positive(num_pages, page_size, name):
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        PagePool(num_pages, page_size)


@given(
    st.integers(1, 8),
    st.integers(0, 8),
    st.lists(
        st.tuples(st.sampled_from(["take", "share", "drop", "publish", "find", "forget"]), st.integers(0, 7))
    ),
)
def test_random_use_agrees_with_a_list_of_holders(num_pages, max_cached, script):
    """`content` is what each page would hold: allocating a page overwrites it, and a key must find what was
    published.
    """
    pool = PagePool(num_pages, 16, max_cached)
    holders: list[list[int]] = []
    content = [b""] * num_pages
    for turn, (action, n) in enumerate(script):
        in_use = {page for pages in holders for page in pages}
        if action == "take":
            assert pool.can_allocate(n) == (n <= num_pages - len(in_use))
            if pool.can_allocate(n):
                pages = pool.allocate(n)
                assert len(pages) == n
                assert not in_use & set(pages)
                holders.append(pages)
                for page in pages:
                    content[page] = bytes([turn, page])
        elif action == "find" and script:
            for key in list(pool._index)[:n]:
                found = pool.lookup(key)
                assert found is not None
                assert content[found] == key
                pool.retain([found])
                holders.append([found])
        elif action == "forget":
            pool.forget_keys()
        elif action == "publish" and in_use:
            page = sorted(in_use)[n % len(in_use)]
            if pool._keys[page] is None:
                pool.publish(page, content[page])
        elif holders and action == "share":
            shared = list(holders[n % len(holders)])
            pool.retain(shared)
            holders.append(shared)
        elif holders:
            pool.release(holders.pop(n % len(holders)))
        pool.check(holders)
        assert pool.num_used == len({page for pages in holders for page in pages})
        assert pool.num_cached <= max_cached
