"""The pages of one group of layers: how many a sequence needs there, and which of a prefix. No jax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.runtime.scheduling.pages import PagePool, window_pages
from penstock.runtime.scheduling.sequence import Sequence

HEADROOM_TOKENS = 48
HEADROOM_SHARE = 8
"""See `PageGroup.headroom`. More headroom means that fewer prefills are lost to preemption, but also that
fewer rows run. With 48 tokens, 64 rows, and pages for three quarters of what the rows grow to, 1.1 times the
prompts' tokens are computed (1.5 to 1.8 times without headroom), and 1 to 3 % of the rows are lost."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a waiting sequence that is computed already when the sequence enters."""

    pages: tuple[list[int], ...]
    """For each group the full pages of this part, which come first in the sequence's page table. Those that
    lie before the window of every position to be computed are not shared, and their numbers say nothing."""
    num_computed: int
    """Number of computed positions: all of the full pages and, for a fork, the first positions of the page
    after them."""
    snapshot: int | None = None
    """The snapshot of the state after these positions; None if there are none, or no layer keeps state."""
    num_found: int = 0
    """How many full pages were found, if a snapshot of the state was found after fewer only; else 0."""
    partial: tuple[int, ...] = ()
    """For each group the page of the source that holds these first positions, for the fork to copy; empty
    where there are none."""

    @property
    def num_pages(self) -> int:
        """How many full pages there are in each group."""
        return len(self.pages[0])


class PageGroup:
    """The pages of one group of layers."""

    __slots__ = ("behind", "index", "max_prefill_pages", "pool", "window", "window_pages")

    def __init__(self, index: int, pool: PagePool, window: int | None, max_prefill_pages: int) -> None:
        """`max_prefill_pages`: most pages that a sequence holds here while it is prefilled."""
        self.index = index
        """The group's place among all groups, and that of its tables in `Sequence.tables`."""
        self.pool = pool
        self.window = window
        """How many latest positions, its own included, a token attends to; None: all."""
        self.max_prefill_pages = max_prefill_pages
        self.behind = 0 if window is None else window - 1
        """How many positions before its own a token attends to, where there is a window."""
        self.window_pages = pool.num_pages if window is None else window_pages(window, pool.page_size)
        """Most pages that a sequence needs to hold while it makes one token after the other."""

    def num_unread(self, start: int) -> int:
        """How many leading pages no position from `start` on attends to."""
        return 0 if self.window is None else max(start - self.behind, 0) // self.pool.page_size

    def shared_by(self, prefix: Prefix) -> list[int]:
        """The pages of this prefix that a sequence which enters with it holds."""
        pages = prefix.pages[self.index]
        return pages if self.window is None else pages[self.num_unread(prefix.num_computed) :]

    def num_new(self, seq: Sequence, prefix: Prefix) -> int:
        """How many pages of its own a sequence enters with: enough for all tokens that are known now (with
        generated ones, if it resumes). With a window, as many as it can use at a time.
        """
        whole = self.pool.pages_for(len(seq.token_ids)) - prefix.num_pages
        if self.window is None:
            return whole
        return min(whole, self.max_prefill_pages - len(self.shared_by(prefix)))

    def headroom(self, running: Iterable[Sequence]) -> int:
        """How many pages to leave to the sequences `running` when another one enters: what their next
        HEADROOM_TOKENS tokens will need beside the pages that they give back meanwhile, but at most one in
        HEADROOM_SHARE of all pages. Without headroom, the next decode that needs a page would preempt the
        sequence that took the last one, and its prefill would be wasted.
        """
        page_size, most = self.pool.page_size, self.pool.num_pages // HEADROOM_SHARE
        num_pages = 0
        for seq in running:
            table = seq.tables[self.index]
            held = len(table.pages)
            # A prefill needs no new pages: it holds all of them, or exchanges them.
            start = min(max(seq.num_computed, seq.prefill_until), held * page_size)
            end = min(start + HEADROOM_TOKENS, seq.max_computed)
            wanted = -(-end // page_size) - held
            if self.window is not None:
                wanted = min(wanted, self.window_pages - (held - table.num_dropped))
            if wanted > 0:
                num_pages += wanted
                if num_pages >= most:
                    return most
        return num_pages

    def last_end(self, keys: list[bytes], num_pages: int) -> int:
        """The largest m up to `num_pages` for which all pages are found, by their `keys`, that the positions
        from m * page_size on attend to.
        """
        lookup, page_size = self.pool.lookup, self.pool.page_size
        end = index = num_pages
        unread = self.num_unread(end * page_size)
        while index > unread:
            index -= 1
            if lookup(keys[index]) is None:  # nothing that ends after this page can be used
                end = index
                unread = self.num_unread(end * page_size)
        return end

    def find(self, keys: list[bytes], num_pages: int) -> list[int]:
        """The first `num_pages` pages of a prefix of which `last_end` says that they can be used; 0 stands
        for those that nothing attends to.
        """
        unread = self.num_unread(num_pages * self.pool.page_size)
        pages = [0] * unread
        for key in keys[unread:num_pages]:
            page = self.pool.lookup(key)
            assert page is not None
            pages.append(page)
        return pages
