"""Which sequences run and which wait, and the slot and pages that each one holds. No jax.

This module has the moves between these states; `scheduler` decides when to make them.

    add -> WAITING -- enter --> RUNNING -- remove --> FINISHED
              ^                    |
              +----- preempt ------+        (WAITING -- remove --> FINISHED as well)

Running and waiting sequences are both kept in order of `Sequence.rank`: the first is served first, the last
is preempted first. A running sequence may rank behind a waiting one: it entered while the other waited for a
shared prefix or a feature slot, or before a request of higher priority came.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Iterable

from penstock.runtime.requests.fanout import request_id_of
from penstock.runtime.scheduling.load import Counts, Load, LostPages
from penstock.runtime.scheduling.pages import PagePool
from penstock.runtime.scheduling.prefix_cache import Prefix, PrefixCache
from penstock.runtime.scheduling.sequence import NEVER, Sequence, Status, rank_of
from penstock.runtime.scheduling.waiting import FEATURE_SLOT, Waiting, take_ranked

HEADROOM_TOKENS = 48
HEADROOM_SHARE = 8
"""See `Roster.headroom`. More headroom means that fewer prefills are lost to preemption, but also that fewer
rows run. With 48 tokens, 64 rows, and pages for three quarters of what the rows grow to, 1.1 times the
prompts' tokens are computed (1.5 to 1.8 times without headroom), and 1 to 3 % of the rows are lost."""


class Roster:
    """All active sequences. Other modules change it by the moves only."""

    def __init__(
        self,
        max_num_seqs: int,
        num_pages: int,
        page_size: int,
        prefix_cache_pages: int | None = None,
        *,
        sliding_window: int | None = None,
        max_prefill_pages: int | None = None,
        feature_slots: int | None = None,
        has_state: bool = False,
    ) -> None:
        """`max_prefill_pages`: most pages that a sequence holds while it is prefilled; None: the pages of all
        its tokens. See `SchedulerConfig` for the other arguments.
        """
        self.pool = PagePool(num_pages, page_size, prefix_cache_pages)
        self.waiting = Waiting()
        self.cache = PrefixCache(self.pool, self.waiting, enabled=prefix_cache_pages != 0)
        self.running: list[Sequence] = []
        self.counts = Counts()
        """What has been counted since the start."""
        self.preempted: list[LostPages] = []
        """The sequences that were preempted since somebody emptied this list, oldest first."""
        self._max_num_seqs = max_num_seqs
        self._sliding_window = sliding_window
        self.has_state = has_state
        """See `SchedulerConfig.has_state`."""
        self._max_prefill_pages = max_prefill_pages or num_pages
        self._num_feature_slots = max_num_seqs if feature_slots is None else feature_slots
        self._free_slots = list(range(max_num_seqs))  # heaps, so that the lowest slot is taken first
        self._free_feature_slots = list(range(self._num_feature_slots))
        self._active: dict[str, Sequence] = {}
        self._outputs: dict[str, list[Sequence]] = {}  # active outputs by request, in order of arrival

    def has_outputs(self, request_id: str) -> bool:
        """Whether any output of this request is active."""
        return request_id in self._outputs

    def requests(self) -> tuple[str, ...]:
        """The ids of the requests that have active outputs, in order of arrival."""
        return tuple(self._outputs)

    def outputs_of(self, request_id: str) -> Iterable[Sequence]:
        """The active outputs of a request, in order of arrival."""
        return self._outputs.get(request_id, ())

    def find(self, request_id: str) -> Sequence | None:
        """The active sequence of exactly this id; None if there is none."""
        return self._active.get(request_id)

    def active(self) -> list[Sequence]:
        """All running and waiting sequences, in order of arrival."""
        return list(self._active.values())

    def oldest(self, most: int) -> list[Sequence]:
        """The first to arrive of all running and waiting sequences, at most so many."""
        return list(itertools.islice(self._active.values(), most))

    @property
    def num_started_requests(self) -> int:
        """How many requests have started and have active outputs."""
        return sum(outputs[0].has_started for outputs in self._outputs.values())

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def has_feature_slot_for(self, seq: Sequence) -> bool:
        """Whether a feature slot is free, or the sequence needs none."""
        return bool(self._free_feature_slots) or not seq.needs_feature_slot

    def add(self, seq: Sequence) -> None:
        """Adds a new sequence to the queue."""
        self._active[seq.request_id] = seq
        outputs = self._outputs.setdefault(request_id_of(seq.request_id), [])
        outputs.append(seq)
        seq.has_started = outputs[0].has_started
        self.waiting.add(seq)

    def source_of(self, seq: Sequence) -> Sequence | None:
        """Finds the running output whose prompt a waiting fork is to share, whether computed already or not.
        None if there is none, or if the fork ran before: then it computes what the prefix cache does not
        have.

        Prompts are compared by identity, so that another request which uses the id of a former one is never
        taken for the source.
        """
        request = seq.request
        if request.fork_of is None or seq.preemptions or self.has_state:
            return None
        for other in self._outputs.get(request_id_of(request.fork_of), ()):
            same = other.request.prompt_token_ids is request.prompt_token_ids
            if same and other.sharing.is_shareable and not other.num_dropped:
                return other
        return None

    def fork(self, seq: Sequence, source: Sequence) -> Prefix:
        """The prefix that a fork shares with `source`: all positions of the prompt but the last, which must
        be computed.
        """
        num_computed = seq.num_prompt - 1
        num_pages, rest = divmod(num_computed, self.pool.page_size)
        return Prefix(source.pages[:num_pages], num_computed, source.pages[num_pages] if rest else None)

    def num_unread(self, start: int) -> int:
        """How many leading pages no position from `start` on attends to."""
        window = self._sliding_window
        return 0 if window is None else max(start - window + 1, 0) // self.pool.page_size

    def shared_by(self, prefix: Prefix) -> list[int]:
        """The pages of this prefix that a sequence which enters with it holds."""
        return prefix.pages[self.num_unread(prefix.num_computed) :]

    def num_new(self, seq: Sequence, prefix: Prefix) -> int:
        """How many pages of its own a sequence enters with: enough for all tokens that are known now (with
        generated ones, if it resumes). With a sliding window, as many as it can use at a time, because it
        exchanges them as it goes.
        """
        whole = self.pool.pages_for(len(seq.token_ids)) - len(prefix.pages)
        return min(whole, self._max_prefill_pages - len(self.shared_by(prefix)))

    def can_enter(self, seq: Sequence, prefix: Prefix) -> bool:
        """Whether the slots that a sequence needs are free, and its own pages beside the shared ones and the
        `headroom` of the running sequences.
        """
        if not (self._free_slots and self.has_feature_slot_for(seq)):
            return False
        num_new, shared = self.num_new(seq, prefix), self.shared_by(prefix)
        return self.pool.can_allocate(num_new, beside=shared) and self.pool.can_allocate(
            num_new + self.headroom(self.running), beside=shared
        )

    def headroom(self, running: Iterable[Sequence]) -> int:
        """How many pages to leave to the sequences `running` when another one enters: what their next
        HEADROOM_TOKENS tokens will need, but at most one in HEADROOM_SHARE of all pages. Without headroom,
        the next decode that needs a page would preempt the sequence that took the last one, and its prefill
        would be wasted.
        """
        page_size, most = self.pool.page_size, self.pool.num_pages // HEADROOM_SHARE
        num_pages = 0
        for seq in running:
            # A prefill needs no new pages: it holds all of them, or exchanges them.
            start = min(max(seq.num_computed, seq.prefill_until), len(seq.pages) * page_size)
            end = min(start + HEADROOM_TOKENS, seq.max_computed)
            num_pages += max(-(-end // page_size) - len(seq.pages), 0)
            if num_pages >= most:
                return most
        return num_pages

    def enter(self, seq: Sequence, prefix: Prefix) -> int:
        """Starts a waiting sequence behind its prefix, in the lowest free slots, with pages for all its known
        tokens. Returns the slot.

        So a prefill never takes a page from the pool on its way, and two prefills never deadlock halfway.
        With a sliding window a prefill exchanges the pages that it will not read again for new ones. If
        another request holds some of them too, it preempts others as a decode does (`page_supply`).
        """
        shared = prefix.pages
        slot = heapq.heappop(self._free_slots)
        if seq.needs_feature_slot:
            seq.feature_slot = heapq.heappop(self._free_feature_slots)
        num_tokens = len(seq.token_ids)
        num_new = self.num_new(seq, prefix)
        self.pool.retain(self.shared_by(prefix))  # first, so that `allocate` does not evict them
        seq.pages = shared + self.pool.allocate(num_new)
        seq.num_dropped = self.num_unread(prefix.num_computed)
        seq.num_computed = prefix.num_computed
        seq.slot, seq.prefill_until = slot, num_tokens
        self.cache.begin(seq, len(shared))
        self.waiting.take(seq)
        if not seq.has_started:
            self._start(seq)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=rank_of)
        return slot

    def _start(self, seq: Sequence) -> None:
        """Notes that the first output of a request enters."""
        seq.has_started = True
        for other in self._outputs[request_id_of(seq.request_id)]:
            if other is not seq:
                self.waiting.start(other)

    def preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to the queue.

        It gives back its slot and pages and keeps its tokens, which are prefilled again after it enters
        again.
        """
        self._leave(seq)
        self.preempted.append(LostPages(seq.request_id, seq.num_computed))
        self.counts.preemptions += 1
        seq.recompute_until = max(seq.recompute_until, seq.num_computed)
        seq.num_computed = seq.prefill_until = 0
        seq.preemptions += 1
        self.waiting.add(seq)

    def drop_pages(self, seq: Sequence, num_pages: int) -> None:
        """Gives back the leading `num_pages` of a running sequence, which it will not read again."""
        self.pool.release(seq.pages[seq.num_dropped : num_pages])
        if not seq.num_dropped:
            self.waiting.happened(seq)  # its forks cannot share its pages any more
        seq.num_dropped = num_pages

    def remove(self, seq: Sequence) -> None:
        """Ends a running or waiting sequence; what it held is free at once."""
        if seq.status is Status.RUNNING:
            self._leave(seq)
        else:
            self.waiting.take(seq)
        del self._active[seq.request_id]
        name = request_id_of(seq.request_id)
        self._outputs[name].remove(seq)
        if not self._outputs[name]:
            del self._outputs[name]
        seq.status = Status.FINISHED

    def _leave(self, seq: Sequence) -> None:
        assert seq.slot is not None
        take_ranked(self.running, seq)
        self.cache.leave(seq)
        heapq.heappush(self._free_slots, seq.slot)
        if seq.feature_slot is not None:
            heapq.heappush(self._free_feature_slots, seq.feature_slot)
            self.waiting.happened(FEATURE_SLOT)
        self.pool.release(seq.held_pages)
        seq.slot, seq.feature_slot, seq.pages, seq.num_dropped = None, None, [], 0

    def load(self) -> Load:
        return Load(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            waiting_prompt_tokens=self.waiting.prompt_tokens,
            pages_used=self.pool.num_used,
            pages_cached=self.pool.num_cached,
            pages_total=self.pool.num_pages,
        )

    def check(self) -> None:
        """Checks all invariants, for tests; valid between any two moves. The AssertionError says what is
        wrong.
        """
        running, waiting = self.running, list(self.waiting)
        self.waiting.check()
        self.pool.check(seq.held_pages for seq in running)
        listed = sorted([*running, *waiting], key=lambda seq: seq.order)
        _expect(listed == self.active(), "running and waiting are not all the active ones, each once")
        slots = [seq.slot for seq in running if seq.slot is not None]
        _expect(len(slots) == len(running), "a running sequence has no slot")
        _expect(
            sorted(slots + self._free_slots) == list(range(self._max_num_seqs)),
            f"slots in use {slots} and free {self._free_slots} are not each slot once",
        )
        ranks = [seq.rank for seq in running]
        _expect(ranks == sorted(ranks), f"the running are not in order of rank: {ranks}")
        held = [seq.feature_slot for seq in running if seq.feature_slot is not None]
        _expect(
            sorted(held + self._free_feature_slots) == list(range(self._num_feature_slots)),
            f"feature slots in use {held} and free {self._free_feature_slots} are not each once",
        )
        for seq in running:
            name = seq.request_id
            _expect(seq.status is Status.RUNNING, f"{name} is {seq.status} among the running")
            has = seq.feature_slot is not None
            _expect(has is seq.needs_feature_slot, f"{name} has a feature slot: {has}")
            _expect(seq.num_computed < len(seq.token_ids) + max(seq.pending, 1), f"{name} computed too far")
            _expect(seq.num_computed <= seq.max_computed, f"{name} computed beyond its limit")
            _expect(seq.prefill_until <= len(seq.token_ids), f"{name} prefills beyond its tokens")
            covered = len(seq.pages) * self.pool.page_size
            _expect(seq.num_computed <= covered, f"{name} computed beyond its pages")
        for seq in waiting:
            name = seq.request_id
            _expect(seq.status is Status.WAITING, f"{name} is {seq.status} among the waiting")
            _expect(not seq.pages and seq.slot is None, f"{name} waits but holds pages or a slot")
            _expect(seq.feature_slot is None, f"{name} waits but holds a feature slot")
            _expect(seq.num_computed == 0, f"{name} waits but has computed positions")
            _expect(seq.sharing.publish_at == NEVER, f"{name} waits but publishes pages")
            self._check_awaited(seq)
        for name, outputs in self._outputs.items():
            has = any(seq.status is Status.RUNNING or seq.preemptions for seq in outputs)
            flags = {seq.has_started for seq in outputs}
            _expect(flags == {True} or flags == {has}, f"{name} has started: {has}, not {flags}")

    def _check_awaited(self, seq: Sequence) -> None:
        """Checks that what a sequence awaits will happen."""
        event, name, size = seq.awaits, seq.request_id, self.pool.page_size
        if isinstance(event, Sequence):
            will = event.status is Status.RUNNING and event.sharing.is_shareable and not event.num_dropped
            _expect(will and event.num_computed < seq.num_prompt - 1, f"{name} awaits what will not happen")
        elif isinstance(event, bytes):
            promised = any(
                event in other.sharing.keys[other.sharing.num_published : other.prefill_until // size]
                for other in self.running
                if other.sharing.publish_at != NEVER and other.rank[0] <= seq.rank[0]
            )
            _expect(promised and event in seq.sharing.keys, f"{name} awaits what nobody promised")
        elif event == FEATURE_SLOT:
            _expect(not self.has_feature_slot_for(seq), f"{name} awaits a feature slot, and one is free")


def _expect(holds: bool, what: str) -> None:
    # `assert` would check nothing under python -O.
    if not holds:
        raise AssertionError(what)
