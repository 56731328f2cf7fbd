"""The pool of KV pages: who holds which page, and how often. No jax: a page is only a number here.

Ask, do, audit: `can_allocate` before `allocate`, and `check` in tests after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.runtime.errors import ConfigError


class PagePool:
    """Refcounted pages 0 .. num_pages - 1 of `page_size` token positions each.

    Each page is either free (refcount 0, on the stack) or held (refcount = number of holders). The free list
    is a stack, so every operation is O(pages touched), and the page used last, likely still in a CPU cache,
    is used next. A prefix cache would add a third state, cached (refcount 0, content kept, evictable),
    decided at one place: where `release` sees a refcount fall to 0. `can_allocate` would then count evictable
    pages as well.
    """

    __slots__ = ("_free", "_refcounts", "num_pages", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, not {num_pages}")
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, not {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._refcounts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # top of the stack = end of the list = lowest page

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Token positions of the whole pool."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, n: int) -> bool:
        return n <= len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Takes `n` free pages for one holder. RuntimeError if `can_allocate(n)` is false: ask first."""
        free = self._free
        if not 0 <= n <= len(free):
            raise RuntimeError(f"cannot allocate {n} pages; {len(free)} of {self.num_pages} are free")
        split = len(free) - n
        pages = free[split:]
        del free[split:]
        pages.reverse()
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder for each page; all of them must be held already."""
        for page in pages:
            if self._refcounts[page] < 1:
                raise RuntimeError(f"page {page} is free and cannot be retained")
            self._refcounts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer for each page; a page without holders is free at once.

        Pushed in reverse, so that the next `allocate` hands them out in their old order.
        """
        refcounts = self._refcounts
        for page in reversed(pages):
            count = refcounts[page] - 1
            if count < 0:
                raise RuntimeError(f"page {page} is free and cannot be released")
            refcounts[page] = count
            if count == 0:
                self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Audit against the pages of every holder, for tests; AssertionError tells what is wrong."""
        held: Counter[int] = Counter()
        for pages in holders:
            held.update(pages)
        if len(set(self._free)) != len(self._free):
            raise AssertionError(f"a page is free twice: {sorted(self._free)}")
        if len(self._free) + len(held) != self.num_pages:
            raise AssertionError(f"{len(self._free)} free + {len(held)} held is not {self.num_pages} pages")
        for page, count in enumerate(self._refcounts):
            if count != held[page]:
                raise AssertionError(f"page {page} has refcount {count} but {held[page]} holders")
        for page in self._free:
            if self._refcounts[page] != 0:
                raise AssertionError(f"page {page} is free but has refcount {self._refcounts[page]}")
