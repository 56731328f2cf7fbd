"""The pages of sequences, in one pool for each group of layers. No jax.

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

from collections.abc import Iterable
from collections.abc import Sequence as Items

from penstock.runtime.scheduling.pages import FlushedPages
from penstock.runtime.scheduling.paging.group import PageGroup, Prefix
from penstock.runtime.scheduling.sequence import PageTable, Sequence


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
        """Whether there are enough pages for a sequence that enters behind `prefix`, beside the headroom of
        those that run.
        """
        needs = [(group, group.num_new(seq, prefix), group.shared_by(prefix)) for group in self.all]
        return all(group.pool.can_allocate(num_new, beside=shared) for group, num_new, shared in needs) and (
            all(
                group.pool.can_allocate(num_new + group.headroom(running), beside=shared)
                for group, num_new, shared in needs
            )
        )

    def enter(self, seq: Sequence, prefix: Prefix) -> None:
        """Gives a sequence its first pages, behind those of `prefix`. To be called if there is room."""
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
        """Takes all pages of a sequence back."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.release(table.held)
        seq.tables, seq.covered = (), 0

    def hold(self, prefix: Prefix) -> None:
        """Keeps the pages of a prefix that a sequence which enters with it would share, until `let_go`."""
        for group in self.all:
            group.pool.retain(group.shared_by(prefix))

    def let_go(self, prefix: Prefix) -> None:
        """Ends what `hold` began."""
        for group in self.all:
            group.pool.release(group.shared_by(prefix))

    def would_have_room(
        self, seq: Sequence, prefix: Prefix, victims: Items[Sequence], staying: Items[Sequence]
    ) -> bool:
        """Whether a sequence could enter behind `prefix`, which is held, if the sequences `victims` gave back
        their pages and only those `staying` ran.
        """
        for group in self.all:
            gained = group.pool.num_released_with(victim.tables[group.index].held for victim in victims)
            if group.num_new(seq, prefix) + group.headroom(staying) > group.pool.num_available + gained:
                return False
        return True

    # -- forks --

    def fork_start(self, source: Sequence) -> int:
        """The first position that a fork of a sequence computes: the last one of the prompt or, with
        recurrent state, the first one of the page that holds it.
        """
        last = source.num_prompt - 1
        return last - last % self.page_size if self._has_state else last

    def can_fork(self, source: Sequence) -> bool:
        """Whether a running sequence has, or will have, all pages that its forks attend to."""
        start = self.fork_start(source)
        return all(source.tables[g.index].num_dropped <= g.num_unread(start) for g in self.windowed)

    def fork(self, source: Sequence) -> Prefix:
        """The prefix that a fork shares with `source`, which has computed it."""
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
        """Whether there are pages for a sequence's positions below `end`."""
        num_pages = -(-end // self.page_size)
        pairs = zip(self.pools, seq.tables, strict=True)
        return all(pool.can_allocate(max(num_pages - len(table.pages), 0)) for pool, table in pairs)

    def grow(self, seq: Sequence, end: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Gives a sequence pages for its positions below `end`. Returns, for each group in which it gets
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

    def reachable(self, seq: Sequence) -> int:
        """How many positions of a sequence the pages cover that it holds and those that are available."""
        pairs = zip(self.pools, seq.tables, strict=True)
        return min(len(table.pages) + pool.num_available for pool, table in pairs) * self.page_size

    def drop_unread(self, seq: Sequence, start: int) -> None:
        """Gives back the pages of a sequence that no position from `start` on attends to."""
        for group in self.windowed:
            self._drop(group, seq.tables[group.index], group.num_unread(start))

    def drop_behind(self, running: Iterable[Sequence]) -> None:
        """Gives back the pages that no position attends to that is still to be computed, or that a fork of a
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
        """Gives the pages [first, until) of a sequence their keys."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            for index in range(first, until):
                pool.publish(table.pages[index], keys[index])

    def forget_keys(self) -> FlushedPages:
        """Removes all keys, see `PagePool.forget_keys`; the numbers are those of all groups together."""
        flushed = [pool.forget_keys() for pool in self.pools]
        return FlushedPages(sum(one.freed for one in flushed), sum(one.in_use for one in flushed))

    def check(self, running: Items[Sequence]) -> None:
        """Checks all invariants against the sequences that run, for tests; the AssertionError says what is
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
