"""KV pages: the pool that says which are held, by how many sequences, and which are kept for their content;
and the pages that a sequence needs in each group of layers. No jax: here a page is only a number.

A group is the layers that attend equally far back. The first group has the layers without a sliding window;
in a model that has none of these, the layers with the largest window. Each further group has the layers with
one window. A sequence has a page table in each group, and page i holds positions [i * page_size, (i + 1) *
page_size) in all of them.

A sequence enters with pages for all its known tokens in a group without a window, so its prefill takes none
later. With a window it enters with as many pages as it can use at a time. While it is prefilled, it gives
back those that lie before the window and takes others for its next chunk. So a prompt may be longer than the
pool, and a sequence that runs never holds much more than its window.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from penstock.runtime.errors import ConfigError
from penstock.runtime.scheduling.sequence import PageTable, Sequence


def window_pages(window: int, page_size: int) -> int:
    """Tell how many pages hold a window and the next position, wherever in a page the window begins."""
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
        """Tell how many pages hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, n: int, beside: Items[int] = ()) -> bool:
        """Say whether `n` pages can be allocated after the pages `beside`, which are held or cached, have
        been retained.
        """
        left = len(self._free) + len(self._cached) - n
        if left >= len(beside) or left < 0:
            return left >= 0
        refcounts = self._refcounts
        return sum(refcounts[page] == 0 for page in beside) <= left

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages for one holder: free ones first, then cached ones, the oldest first. RuntimeError
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
        """Add a holder to each page; each must be held or cached, else RuntimeError."""
        refcounts = self._refcounts
        for page in pages:
            count = refcounts[page]
            if not count:
                if page not in self._cached:
                    raise RuntimeError(f"page {page} is free and cannot be retained")
                del self._cached[page]
            refcounts[page] = count + 1

    def release(self, pages: Items[int]) -> None:
        """Remove a holder from each page; each must be held, else RuntimeError. A page without holders is
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
        """Tell how many pages would have no holder if all of these holders released theirs."""
        counts = Counter(page for pages in holders for page in pages)
        return sum(self._refcounts[page] == count for page, count in counts.items())

    # -- keys --

    def publish(self, page: int, key: bytes) -> None:
        """Give a held page a key, so that `lookup` finds it; do nothing if another page has this key.
        RuntimeError if the page is not held, or has a key.
        """
        if self._refcounts[page] < 1 or self._keys[page] is not None:
            raise RuntimeError(f"page {page} is not held, or was published before")
        if key not in self._index:
            self._index[key] = page
            self._keys[page] = key

    def forget(self, page: int) -> None:
        """Make a cached page free. RuntimeError if it is not cached."""
        if page not in self._cached:
            raise RuntimeError(f"page {page} is not cached")
        del self._cached[page]
        self._drop_key(page)
        self._free.append(page)

    def lookup(self, key: bytes) -> int | None:
        """Return the held or cached page with this key; None if there is none."""
        return self._index.get(key)

    def key_of(self, page: int) -> bytes | None:
        """Return the key of a page; None if it has none."""
        return self._keys[page]

    def num_holders(self, page: int) -> int:
        """Tell how many holders a page has."""
        return self._refcounts[page]

    @property
    def num_published(self) -> int:
        """How many pages have a key."""
        return len(self._index)

    def forget_keys(self) -> FlushedPages:
        """Remove all keys, so that `lookup` finds no page any more. Cached pages become free; held ones stay
        held.
        """
        flushed = FlushedPages(freed=len(self._cached), in_use=len(self._index) - len(self._cached))
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        self._index.clear()
        self._keys = [None] * self.num_pages
        return flushed

    def _evict(self) -> int:
        """Take the oldest cached page, which loses its key, for the caller."""
        page, _ = self._cached.popitem(last=False)
        self._drop_key(page)
        return page

    def _drop_key(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        del self._index[key]
        self._keys[page] = None

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Check all invariants against the pages of every holder, for tests; the AssertionError says what is
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


HEADROOM_TOKENS = 48
HEADROOM_SHARE = 8
"""See `PageGroup.headroom`. More headroom means that fewer prefills are lost to preemption, but also that
fewer rows run. With 48 tokens, 64 rows, and pages for three quarters of what the rows grow to, 1.1 times the
prompts' tokens are computed (1.5 to 1.8 times without headroom), and 1 to 3 % of the rows are lost."""


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
        """Tell how many leading pages no position from `start` on attends to."""
        return 0 if self.window is None else max(start - self.behind, 0) // self.pool.page_size

    def shared_by(self, prefix: Prefix) -> list[int]:
        """Return the pages of this prefix that a sequence which enters with it holds."""
        pages = prefix.pages[self.index]
        return pages if self.window is None else pages[self.num_unread(prefix.num_computed) :]

    def num_new(self, seq: Sequence, prefix: Prefix) -> int:
        """Tell how many pages of its own a sequence enters with: enough for all tokens that are known now
        (with generated ones, if it resumes). With a window, as many as it can use at a time.
        """
        whole = self.pool.pages_for(len(seq.token_ids)) - prefix.num_pages
        if self.window is None:
            return whole
        return min(whole, self.max_prefill_pages - len(self.shared_by(prefix)))

    def headroom(self, running: Iterable[Sequence]) -> int:
        """Tell how many pages to leave to the sequences `running` when another one enters: what their next
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
        """Return the largest m up to `num_pages` for which all pages are found, by their `keys`, that the
        positions from m * page_size on attend to.
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
        """Return the first `num_pages` pages of a prefix of which `last_end` says that they can be used; 0
        stands for those that nothing attends to.
        """
        unread = self.num_unread(num_pages * self.pool.page_size)
        pages = [0] * unread
        for key in keys[unread:num_pages]:
            page = self.pool.lookup(key)
            assert page is not None
            pages.append(page)
        return pages


class PageGroups:
    """The pages of all groups, and who holds them."""

    def __init__(self, groups: Items[PageGroup], *, has_state: bool = False) -> None:
        """`has_state`: whether the model has recurrent state too, so forks begin at the end of a page."""
        self.all = tuple(groups)
        self._has_state = has_state
        self.windowed = tuple(group for group in groups if group.window is not None)
        """The groups whose layers have a window."""
        self.pools = tuple(group.pool for group in groups)
        self.page_size = self.pools[0].page_size

    @property
    def num_pages(self) -> int:
        """Pages of all groups together."""
        return sum(pool.num_pages for pool in self.pools)

    @property
    def num_used(self) -> int:
        """Pages that sequences hold, in all groups together."""
        return sum(pool.num_used for pool in self.pools)

    @property
    def num_cached(self) -> int:
        """Pages that are only kept for their content, in all groups together."""
        return sum(pool.num_cached for pool in self.pools)

    # -- entering and leaving --

    def have_room(self, seq: Sequence, prefix: Prefix, running: Iterable[Sequence]) -> bool:
        """Say whether there are enough pages for a sequence that enters behind `prefix`, beside the headroom
        of those that run.
        """
        needs = [(group, group.num_new(seq, prefix), group.shared_by(prefix)) for group in self.all]
        return all(group.pool.can_allocate(num_new, beside=shared) for group, num_new, shared in needs) and (
            all(
                group.pool.can_allocate(num_new + group.headroom(running), beside=shared)
                for group, num_new, shared in needs
            )
        )

    def enter(self, seq: Sequence, prefix: Prefix) -> None:
        """Give a sequence its first pages, behind those of `prefix`. To be called if there is room."""
        tables = []
        for group in self.all:
            num_new = group.num_new(seq, prefix)
            group.pool.retain(group.shared_by(prefix))  # first, so that `allocate` does not evict them
            pages = prefix.pages[group.index] + group.pool.allocate(num_new)
            tables.append(PageTable(pages, group.num_unread(prefix.num_computed)))
        seq.tables = tuple(tables)
        seq.num_computed = prefix.num_computed
        self._cover(seq)

    def leave(self, seq: Sequence) -> None:
        """Take all pages of a sequence back."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.release(table.held)
        seq.tables, seq.covered = (), 0

    def hold(self, prefix: Prefix) -> None:
        """Keep the pages of a prefix that a sequence which enters with it would share, until `let_go`."""
        for group in self.all:
            group.pool.retain(group.shared_by(prefix))

    def let_go(self, prefix: Prefix) -> None:
        """End what `hold` began."""
        for group in self.all:
            group.pool.release(group.shared_by(prefix))

    def would_have_room(
        self, seq: Sequence, prefix: Prefix, victims: Items[Sequence], staying: Items[Sequence]
    ) -> bool:
        """Say whether a sequence could enter behind `prefix`, which is held, if the sequences `victims` gave
        back their pages and only those `staying` ran.
        """
        for group in self.all:
            gained = group.pool.num_released_with(victim.tables[group.index].held for victim in victims)
            if group.num_new(seq, prefix) + group.headroom(staying) > group.pool.num_available + gained:
                return False
        return True

    # -- forks --

    def fork_start(self, source: Sequence) -> int:
        """Return the first position that a fork of a sequence computes: the last one of the prompt or, with
        recurrent state, the first one of the page that holds it.
        """
        last = source.num_prompt - 1
        return last - last % self.page_size if self._has_state else last

    def can_fork(self, source: Sequence) -> bool:
        """Say whether a running sequence has, or will have, all pages that its forks attend to."""
        start = self.fork_start(source)
        return all(source.tables[g.index].num_dropped <= g.num_unread(start) for g in self.windowed)

    def fork(self, source: Sequence) -> Prefix:
        """Return the prefix that a fork shares with `source`, which has computed it."""
        num_computed = self.fork_start(source)
        num_pages, rest = divmod(num_computed, self.page_size)
        return Prefix(
            tuple(table.pages[:num_pages] for table in source.tables),
            num_computed,
            source.recurrence.for_forks,
            partial=tuple(table.pages[num_pages] for table in source.tables) if rest else (),
        )

    # -- growing and giving back --

    def can_grow(self, seq: Sequence, end: int) -> bool:
        """Say whether there are pages for a sequence's positions below `end`."""
        num_pages = -(-end // self.page_size)
        pairs = zip(self.pools, seq.tables, strict=True)
        return all(pool.can_allocate(max(num_pages - len(table.pages), 0)) for pool, table in pairs)

    def grow(self, seq: Sequence, end: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Give a sequence pages for its positions below `end`. Returns, for each group in which it gets
        some, the group's index, the index of the first new page, and the pages.
        """
        num_pages, grown = -(-end // self.page_size), []
        for index, (pool, table) in enumerate(zip(self.pools, seq.tables, strict=True)):
            first = len(table.pages)
            if first < num_pages:
                pages = pool.allocate(num_pages - first)
                table.pages += pages
                grown.append((index, first, tuple(pages)))
        self._cover(seq)
        return grown

    def shorten(self, seq: Sequence) -> None:
        """Give back the last pages of a sequence that begins again, but for what it would enter with."""
        for group in self.all:
            table = seq.tables[group.index]
            whole = group.pool.pages_for(len(seq.token_ids))
            kept = min(whole, table.num_dropped + group.max_prefill_pages)
            group.pool.release(table.pages[kept:])
            del table.pages[kept:]
        self._cover(seq)

    def reachable(self, seq: Sequence) -> int:
        """Tell how many positions of a sequence the pages cover that it holds and those that are
        available.
        """
        pairs = zip(self.pools, seq.tables, strict=True)
        return min(len(table.pages) + pool.num_available for pool, table in pairs) * self.page_size

    def drop_unread(self, seq: Sequence, start: int) -> None:
        """Give back the pages of a sequence that no position from `start` on attends to."""
        for group in self.windowed:
            self._drop(group, seq.tables[group.index], group.num_unread(start))

    def drop_behind(self, running: Iterable[Sequence]) -> None:
        """Give back the pages that no position attends to that is still to be computed, or that a fork of a
        prompt that was just computed will compute. A dispatched step may use them, but the device runs it
        first. Pages whose tokens are not all known yet are kept, so that they can be published, and so are
        those that a prefill can exchange.
        """
        page_size = self.page_size
        for group in self.windowed:
            index, behind = group.index, group.behind
            for seq in running:
                start, table = seq.num_computed, seq.tables[index]
                # This is asked for every row of every step, and most rows have nothing to give back.
                if (start - behind) // page_size > table.num_dropped and seq.covered >= seq.prefill_until:
                    first = self.fork_start(seq) if start == seq.num_prompt else start
                    num_pages = min(group.num_unread(first), (start - seq.pending) // page_size)
                    self._drop(group, table, num_pages)

    def _drop(self, group: PageGroup, table: PageTable, num_pages: int) -> None:
        if num_pages > table.num_dropped:
            group.pool.release(table.pages[table.num_dropped : num_pages])
            table.num_dropped = num_pages

    def _cover(self, seq: Sequence) -> None:
        seq.covered = min(len(table.pages) for table in seq.tables) * self.page_size

    # -- keys --

    def publish(self, seq: Sequence, keys: list[bytes], first: int, until: int) -> None:
        """Give the pages [first, until) of a sequence their keys."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            for index in range(first, until):
                pool.publish(table.pages[index], keys[index])

    def forget_keys(self) -> FlushedPages:
        """Remove all keys, see `PagePool.forget_keys`; the numbers are those of all groups together."""
        flushed = [pool.forget_keys() for pool in self.pools]
        return FlushedPages(sum(one.freed for one in flushed), sum(one.in_use for one in flushed))

    def check(self, running: Items[Sequence]) -> None:
        """Check all invariants against the sequences that run, for tests; the AssertionError says what is
        wrong.
        """
        for group in self.all:
            group.pool.check(seq.tables[group.index].held for seq in running)
        for seq in running:
            lengths = [len(table.pages) for table in seq.tables]
            if seq.covered != min(lengths) * self.page_size or seq.num_computed > seq.covered:
                raise AssertionError(f"{seq.request_id} computed beyond its pages, or they were miscounted")
            if seq.num_computed >= seq.prefill_until and min(lengths) != max(lengths):
                raise AssertionError(f"{seq.request_id} decodes on page tables of the lengths {lengths}")
            for group in self.all:
                table = seq.tables[group.index]
                if table.num_dropped > group.num_unread(seq.num_computed):
                    raise AssertionError(f"{seq.request_id} gave back pages that it will read")
