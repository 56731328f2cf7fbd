"""The pool of KV pages: which pages are held, by how many sequences, and which are kept for their content. No
jax: here a page is only a number.

Call `can_allocate` before `allocate`, and `check` in tests after every step.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.runtime.errors import ConfigError


def window_pages(window: int, page_size: int) -> int:
    """How many pages hold a window and the next position, wherever in a page the window begins."""
    return -(-window // page_size) + 2


class FlushedPages(NamedTuple):
    """What became of the pages that had a key when all keys were forgotten."""

    freed: int
    """Pages that nobody held: they are free now."""
    in_use: int
    """Pages that running requests hold: they stay, and are not shared with any new request."""


class PagePool:
    """Refcounted pages 0 .. num_pages - 1 of `page_size` token positions each.

    Each page is in one of three states:

    - free: its refcount is 0 and its content is of no use. Free pages form a stack, so that the page used
      last, which is likely still in a CPU cache, is used next.
    - held: its refcount is the number of its holders. `publish` may give it a key, by which `lookup` finds
      it.
    - cached: its refcount is 0 but it has a key. Its content is kept until the page is needed for something
      else; the page whose last holder left first goes first. `retain` makes it held again.

    Every operation takes time in proportion to the pages it touches.
    """

    __slots__ = (
        "_cached",
        "_free",
        "_index",
        "_keys",
        "_max_cached",
        "_refcounts",
        "num_pages",
        "page_size",
    )

    def __init__(self, num_pages: int, page_size: int, max_cached: int | None = None) -> None:
        """`max_cached`: most pages in the state cached; None: no limit."""
        if num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, not {num_pages}")
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, not {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._max_cached = num_pages if max_cached is None else max_cached
        self._refcounts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the lowest page is at the end
        self._keys: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = (
            OrderedDict()
        )  # the page whose last holder left first comes first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """How many pages `allocate` can give: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """How many pages are held."""
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        """Number of token positions in the whole pool."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, n: int, beside: Sequence[int] = ()) -> bool:
        """Whether `n` pages can be allocated after the pages `beside`, which are held or cached, have been
        retained.
        """
        left = len(self._free) + len(self._cached) - n
        if left >= len(beside) or left < 0:
            return left >= 0
        refcounts = self._refcounts
        return sum(refcounts[page] == 0 for page in beside) <= left

    def allocate(self, n: int) -> list[int]:
        """Takes `n` pages for one holder: free ones first, then cached ones, the oldest first. RuntimeError
        if `can_allocate(n)` is false: call that first.
        """
        free = self._free
        if not 0 <= n <= self.num_available:
            raise RuntimeError(
                f"cannot allocate {n} pages; {self.num_available} of {self.num_pages} are free"
            )
        split = max(len(free) - n, 0)
        pages = free[split:]
        del free[split:]
        pages.reverse()
        while len(pages) < n:
            pages.append(self._evict())
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page; each must be held or cached, else RuntimeError."""
        refcounts = self._refcounts
        for page in pages:
            count = refcounts[page]
            if not count:
                if page not in self._cached:
                    raise RuntimeError(f"page {page} is free and cannot be retained")
                del self._cached[page]
            refcounts[page] = count + 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from each page; each must be held, else RuntimeError. A page without holders is
        free at once, or cached if it has a key.

        Pages are released in reverse order. So the next `allocate` hands out free pages in their old order,
        and of a cached prefix the end is evicted before the beginning, without which the end could not be
        found.
        """
        refcounts = self._refcounts
        for page in reversed(pages):
            count = refcounts[page] - 1
            if count < 0:
                raise RuntimeError(f"page {page} is free and cannot be released")
            refcounts[page] = count
            if count == 0:
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None
        while len(self._cached) > self._max_cached:
            self._free.append(self._evict())

    def num_released_with(self, holders: Iterable[Iterable[int]]) -> int:
        """How many pages would have no holder if all of these holders released theirs."""
        counts = Counter(page for pages in holders for page in pages)
        return sum(self._refcounts[page] == count for page, count in counts.items())

    # -- keys --

    def publish(self, page: int, key: bytes) -> None:
        """Gives a held page a key, so that `lookup` finds it; does nothing if another page has this key.
        RuntimeError if the page is not held, or has a key.
        """
        if self._refcounts[page] < 1 or self._keys[page] is not None:
            raise RuntimeError(f"page {page} is not held, or was published before")
        if key not in self._index:
            self._index[key] = page
            self._keys[page] = key

    def forget(self, page: int) -> None:
        """Makes a cached page free. RuntimeError if it is not cached."""
        if page not in self._cached:
            raise RuntimeError(f"page {page} is not cached")
        del self._cached[page]
        self._drop_key(page)
        self._free.append(page)

    def lookup(self, key: bytes) -> int | None:
        """The held or cached page with this key; None if there is none."""
        return self._index.get(key)

    def key_of(self, page: int) -> bytes | None:
        """The key of a page; None if it has none."""
        return self._keys[page]

    def num_holders(self, page: int) -> int:
        """How many holders a page has."""
        return self._refcounts[page]

    @property
    def num_published(self) -> int:
        """How many pages have a key."""
        return len(self._index)

    def forget_keys(self) -> FlushedPages:
        """Removes all keys, so that `lookup` finds no page any more. Cached pages become free; held ones stay
        held.
        """
        flushed = FlushedPages(freed=len(self._cached), in_use=len(self._index) - len(self._cached))
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        self._index.clear()
        self._keys = [None] * self.num_pages
        return flushed

    def _evict(self) -> int:
        """Takes the oldest cached page, which loses its key, for the caller."""
        page, _ = self._cached.popitem(last=False)
        self._drop_key(page)
        return page

    def _drop_key(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        del self._index[key]
        self._keys[page] = None

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Checks all invariants against the pages of every holder, for tests; the AssertionError says what is
        wrong.
        """
        held: Counter[int] = Counter()
        for pages in holders:
            held.update(pages)
        if len(set(self._free)) != len(self._free):
            raise AssertionError(f"a page is free twice: {sorted(self._free)}")
        if len(self._free) + len(self._cached) + len(held) != self.num_pages:
            raise AssertionError(
                f"{len(self._free)} free + {len(self._cached)} cached + {len(held)} held is not "
                f"{self.num_pages} pages"
            )
        for page, count in enumerate(self._refcounts):
            if count != held[page]:
                raise AssertionError(f"page {page} has refcount {count} but {held[page]} holders")
        for page in self._free:
            if self._refcounts[page] != 0:
                raise AssertionError(f"page {page} is free but has refcount {self._refcounts[page]}")
            if self._keys[page] is not None or page in self._cached:
                raise AssertionError(f"page {page} is free but has a key or is cached")
        for page in self._cached:
            if self._refcounts[page] != 0 or self._keys[page] is None:
                raise AssertionError(f"page {page} is cached but is held or has no key")
        if len(self._cached) > self._max_cached:
            raise AssertionError(f"{len(self._cached)} pages are cached; {self._max_cached} may be")
        keys = {key: page for page, key in enumerate(self._keys) if key is not None}
        if keys != self._index:
            raise AssertionError("the index does not tell what the pages' keys are")
