"""Who runs, who waits, and which slot and pages each one holds. The moves; `scheduler` decides when. No jax.

    add -> WAITING -- enter --> RUNNING -- remove --> FINISHED
              ^                    |
              +----- preempt ------+        (WAITING -- remove --> FINISHED as well)

One invariant carries the design: every running sequence arrived before every waiting one. Entry takes the
first of the queue and preemption the last of the running, so both orders hold without any sorting.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from penstock.runtime.pages import PagePool
from penstock.runtime.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the scheduler is, for routing and metrics."""

    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int
    pages_used: int
    pages_total: int


class Roster:
    """`running` and `waiting` by request id, each in order of arrival. Changed by the moves only."""

    def __init__(self, max_num_seqs: int, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.running: dict[str, Sequence] = {}
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.waiting_prompt_tokens = 0
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(range(max_num_seqs))  # a heap: the lowest slot is taken first

    def find(self, request_id: str) -> Sequence | None:
        """The active sequence of exactly this id."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def add(self, seq: Sequence) -> None:
        """A new arrival joins the end of the queue."""
        self.waiting[seq.request_id] = seq
        self.waiting_prompt_tokens += seq.num_prompt

    def can_enter(self, seq: Sequence) -> bool:
        """A slot is free, and so are the pages for all tokens known now (generated ones too, if resumed)."""
        return bool(self._free_slots) and self.pool.can_allocate(self.pool.pages_for(len(seq.token_ids)))

    def enter(self, seq: Sequence) -> int:
        """The first of the queue starts to run: lowest free slot, all pages of its known tokens. Returns the
        slot.

        A prefill therefore never allocates on its way, and never deadlocks with another one halfway.
        """
        slot = heapq.heappop(self._free_slots)
        num_tokens = len(seq.token_ids)
        seq.pages = self.pool.allocate(self.pool.pages_for(num_tokens))
        seq.slot, seq.prefill_until, seq.status = slot, num_tokens, Status.RUNNING
        del self.waiting[seq.request_id]
        self.waiting_prompt_tokens -= seq.num_prompt
        self.running[seq.request_id] = seq
        return slot

    def preempt_last(self) -> Sequence:
        """The latest arrival among the running goes back to the front of the queue.

        Slot and pages go, tokens stay: they are prefilled again after the next `enter`.
        """
        seq = next(reversed(self.running.values()))
        self._leave(seq)
        seq.status, seq.num_computed, seq.prefill_until = Status.WAITING, 0, 0
        seq.preemptions += 1
        self.waiting[seq.request_id] = seq
        self.waiting.move_to_end(seq.request_id, last=False)
        self.waiting_prompt_tokens += seq.num_prompt
        return seq

    def remove(self, seq: Sequence) -> None:
        """Running or waiting -> finished; what it held is free at once."""
        if seq.status is Status.RUNNING:
            self._leave(seq)
        else:
            del self.waiting[seq.request_id]
            self.waiting_prompt_tokens -= seq.num_prompt
        seq.status = Status.FINISHED

    def _leave(self, seq: Sequence) -> None:
        assert seq.slot is not None
        del self.running[seq.request_id]
        heapq.heappush(self._free_slots, seq.slot)
        self.pool.release(seq.pages)
        seq.slot, seq.pages = None, []

    def load(self) -> Load:
        return Load(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            waiting_prompt_tokens=self.waiting_prompt_tokens,
            pages_used=self.pool.num_used,
            pages_total=self.pool.num_pages,
        )

    def check(self) -> None:
        """Audit for tests, valid between any two moves; AssertionError tells what is wrong."""
        running, waiting = list(self.running.values()), list(self.waiting.values())
        self.pool.check(seq.pages for seq in running)
        _expect(not self.running.keys() & self.waiting.keys(), "a request is both waiting and running")
        slots = [seq.slot for seq in running if seq.slot is not None]
        _expect(len(slots) == len(running), "a running sequence has no slot")
        _expect(
            sorted(slots + self._free_slots) == list(range(self._max_num_seqs)),
            f"slots in use {slots} and free {self._free_slots} are not each slot once",
        )
        orders = [seq.order for seq in running + waiting]
        _expect(orders == sorted(orders), f"running, then waiting, is not the order of arrival: {orders}")
        prompt_tokens = sum(seq.num_prompt for seq in waiting)
        _expect(self.waiting_prompt_tokens == prompt_tokens, "waiting_prompt_tokens drifted")
        for seq in running:
            name = seq.request_id
            _expect(seq.status is Status.RUNNING, f"{name} is {seq.status} among the running")
            _expect(seq.num_computed <= len(seq.token_ids), f"{name} computed beyond its tokens")
            _expect(seq.prefill_until <= len(seq.token_ids), f"{name} prefills beyond its tokens")
            covered = len(seq.pages) * self.pool.page_size
            _expect(seq.num_computed <= covered, f"{name} computed beyond its pages")
        for seq in waiting:
            name = seq.request_id
            _expect(seq.status is Status.WAITING, f"{name} is {seq.status} among the waiting")
            _expect(not seq.pages and seq.slot is None, f"{name} waits but holds pages or a slot")
            _expect(seq.num_computed == 0, f"{name} waits but has computed positions")


def _expect(holds: bool, what: str) -> None:
    # Not `assert`: an audit that python -O drops would be none.
    if not holds:
        raise AssertionError(what)
