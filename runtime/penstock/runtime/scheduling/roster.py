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

from penstock.runtime.requests.request import request_id_of
from penstock.runtime.scheduling.adapter_slots import AdapterSlots
from penstock.runtime.scheduling.image_pool import ImagePool
from penstock.runtime.scheduling.load import Counts, Load, LostPages
from penstock.runtime.scheduling.pages import PageGroup, PageGroups, PagePool, Prefix
from penstock.runtime.scheduling.prefix_cache import PrefixCache
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import NEVER, Sequence, Status, rank_of
from penstock.runtime.scheduling.snapshots import Snapshots
from penstock.runtime.scheduling.waiting import ADAPTER_SLOT, FEATURE_SLOT, Waiting, take_ranked


class Roster:
    """All active sequences. Other modules change it by the moves only."""

    def __init__(self, config: SchedulerConfig) -> None:
        most_cached = config.prefix_cache_pages
        self.groups = PageGroups(
            [
                PageGroup(
                    index,
                    PagePool(group.num_pages, config.page_size, most_cached),
                    group.window,
                    config.max_prefill_pages(group),
                )
                for index, group in enumerate(config.groups)
            ],
            has_state=config.has_state,
        )
        """The pages, by group of layers."""
        self.waiting = Waiting()
        self.snapshots = Snapshots(config.num_snapshots) if config.num_snapshots else None
        """The snapshots of recurrent state; None where there are none."""
        self.cache = PrefixCache(self.groups, self.waiting, self.snapshots, enabled=most_cached != 0)
        self.adapters = AdapterSlots(config.max_adapters)
        """The adapters that are on the device."""
        self.images = ImagePool(config.image_blocks)
        """The images whose embeddings are on the device."""
        self.running: list[Sequence] = []
        self.counts = Counts()
        """What has been counted since the start."""
        self.preempted: list[LostPages] = []
        """The sequences that were preempted since somebody emptied this list, oldest first."""
        self._max_num_seqs = config.max_num_seqs
        self._num_turns = config.num_turns
        self.has_state = config.has_state
        """See `SchedulerConfig.has_state`."""
        slots, features = config.max_num_seqs, config.feature_slots
        self._num_feature_slots = slots if features is None else features
        self._free_slots = list(range(slots))  # heaps, so that the lowest slot is taken first
        self._free_feature_slots = list(range(self._num_feature_slots))
        self._active: dict[str, Sequence] = {}
        self._outputs: dict[str, list[Sequence]] = {}  # active outputs by request, in order of arrival
        self._num_arrived: dict[str, int] = {}  # outputs so far of the requests that have active ones

    def has_outputs(self, request_id: str) -> bool:
        """Say whether any output of this request is active."""
        return request_id in self._outputs

    def requests(self) -> tuple[str, ...]:
        """Return the ids of the requests that have active outputs, in order of arrival."""
        return tuple(self._outputs)

    def outputs_of(self, request_id: str) -> Iterable[Sequence]:
        """Return the active outputs of a request, in order of arrival."""
        return self._outputs.get(request_id, ())

    def find(self, request_id: str) -> Sequence | None:
        """Return the active sequence of exactly this id; None if there is none."""
        return self._active.get(request_id)

    def active(self) -> list[Sequence]:
        """List all running and waiting sequences, in order of arrival."""
        return list(self._active.values())

    def oldest(self, most: int) -> list[Sequence]:
        """Return the first to arrive of all running and waiting sequences, at most so many."""
        return list(itertools.islice(self._active.values(), most))

    @property
    def num_started_requests(self) -> int:
        """How many requests have started and have active outputs."""
        return sum(outputs[0].has_started for outputs in self._outputs.values())

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def has_feature_slot_for(self, seq: Sequence) -> bool:
        """Say whether a feature slot is free, or the sequence needs none."""
        return bool(self._free_feature_slots) or not seq.needs_feature_slot

    def has_adapter_slot_for(self, seq: Sequence) -> bool:
        """Say whether the adapter of the sequence is on the device or can have a slot there, and nobody
        before it waits for one; true if it needs none.
        """
        digest = seq.request.adapter_digest
        if not digest:
            return True
        return self.adapters.can_take(digest) and not self.waiting.is_aside_before(ADAPTER_SLOT, seq)

    def add(self, seq: Sequence) -> None:
        """Add a new sequence to the queue."""
        self._active[seq.request_id] = seq
        name = request_id_of(seq.request_id)
        outputs = self._outputs.setdefault(name, [])
        outputs.append(seq)
        self._num_arrived[name] = self._num_arrived.get(name, 0) + 1
        seq.has_started = outputs[0].has_started
        self.waiting.add(seq)

    def source_of(self, seq: Sequence) -> Sequence | None:
        """Find the running output whose prompt a waiting fork is to share, whether computed already or not.
        None if there is none, or if the fork ran before: then it computes what the prefix cache does not
        have.

        Prompts are compared by identity, so that another request which uses the id of a former one is never
        taken for the source.
        """
        request = seq.request
        if request.fork_of is None or seq.preemptions or (self.has_state and self.snapshots is None):
            return None
        for other in self._outputs.get(request_id_of(request.fork_of), ()):
            same = other.request.prompt_token_ids is request.prompt_token_ids
            same = same and other.request.adapter_digest == request.adapter_digest
            if same and other.sharing.is_shareable and self.groups.can_fork(other):
                return other
        return None

    def has_forks(self, source: Sequence) -> bool:
        """Say whether forks wait, or are still to come, that could begin with the prompt of this running
        sequence.
        """
        name, prompt = request_id_of(source.request_id), source.request.prompt_token_ids
        return self._num_arrived[name] < source.request.num_outputs or any(
            other.status is Status.WAITING
            and other.request.fork_of is not None
            and not other.preemptions
            and other.request.prompt_token_ids is prompt
            for other in self._outputs[name]
        )

    def can_enter(self, seq: Sequence, prefix: Prefix) -> bool:
        """Say whether the slots that a sequence needs are free, and its own pages beside the shared ones and
        the headroom of the running sequences.
        """
        if not (self._free_slots and self.has_feature_slot_for(seq) and self.has_adapter_slot_for(seq)):
            return False
        return self.groups.have_room(seq, prefix, self.running)

    def enter(self, seq: Sequence, prefix: Prefix) -> int:
        """Start a waiting sequence behind its prefix, in the lowest free slots, with pages for all its known
        tokens or, in groups with a window, for as many as it can use at a time. Returns the slot.

        So a prefill takes no page without giving one back, and two prefills never deadlock halfway. If
        another request holds some of the pages too that it gives back, it preempts others as a decode does
        (`PageSupply`).
        """
        slot = heapq.heappop(self._free_slots)
        if seq.needs_feature_slot:
            seq.feature_slot = heapq.heappop(self._free_feature_slots)
        self.groups.enter(seq, prefix)
        if self.snapshots is not None:
            is_whole = prefix.num_computed == self.groups.fork_start(seq)
            self.snapshots.enter(seq, prefix, for_forks=is_whole and self.has_forks(seq))
        sizes = self._turn_sizes()
        seq.slot, seq.turn, seq.prefill_until = slot, sizes.index(min(sizes)), len(seq.token_ids)
        self.cache.begin(seq, prefix.num_pages)
        self.waiting.take(seq)
        if not seq.has_started:
            self._start(seq)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=rank_of)
        return slot

    def even_out_turns(self) -> None:
        """Move running sequences to other turns until no turn has two more than another one: of a turn with
        most of them the last in rank, to one with fewest. Sequences end in any turn, and what is left would
        otherwise have few rows in one step and many in the next.
        """
        sizes = self._turn_sizes()
        while max(sizes) - min(sizes) > 1:
            source, to = sizes.index(max(sizes)), sizes.index(min(sizes))
            moved = next(seq for seq in reversed(self.running) if seq.turn == source)
            moved.turn = to
            sizes[source] -= 1
            sizes[to] += 1

    def _turn_sizes(self) -> list[int]:
        """Count the running sequences of each turn."""
        sizes = [0] * self._num_turns
        for seq in self.running:
            sizes[seq.turn] += 1
        return sizes

    def _start(self, seq: Sequence) -> None:
        """Note that the first output of a request enters."""
        seq.has_started = True
        for other in self._outputs[request_id_of(seq.request_id)]:
            if other is not seq:
                self.waiting.start(other)

    def preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the queue.

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

    def remove(self, seq: Sequence) -> None:
        """End a running or waiting sequence; what it held is free at once."""
        if seq.status is Status.RUNNING:
            self._leave(seq)
        else:
            was_before = seq.awaits == ADAPTER_SLOT
            self.waiting.take(seq)
            if was_before:
                self.waiting.happened(ADAPTER_SLOT)
        del self._active[seq.request_id]
        name = request_id_of(seq.request_id)
        self._outputs[name].remove(seq)
        if not self._outputs[name]:
            del self._outputs[name], self._num_arrived[name]
        seq.status = Status.FINISHED

    def _leave(self, seq: Sequence) -> None:
        assert seq.slot is not None
        take_ranked(self.running, seq)
        self.cache.leave(seq)
        heapq.heappush(self._free_slots, seq.slot)
        if seq.feature_slot is not None:
            heapq.heappush(self._free_feature_slots, seq.feature_slot)
            self.waiting.happened(FEATURE_SLOT)
        if seq.adapter_slot is not None and self.adapters.give(seq.request.adapter_digest):
            self.waiting.happened(ADAPTER_SLOT)
        self.groups.leave(seq)
        if self.snapshots is not None:
            self.snapshots.leave(seq)
        self.let_go_of_image(seq)
        seq.slot = seq.feature_slot = seq.adapter_slot = None

    def let_go_of_image(self, seq: Sequence) -> None:
        """Note that a sequence computes no further token of the image that it holds, if it holds one."""
        if seq.image is not None:
            self.images.let_go(seq.image)
            seq.image = None

    def forget_images(self) -> None:
        """Forget all embeddings of images: new weights would make others. Sequences in the midst of an
        image have it encoded again.
        """
        for seq in self.running:
            self.let_go_of_image(seq)
        self.images.forget()

    def load(self) -> Load:
        return Load(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            waiting_prompt_tokens=self.waiting.prompt_tokens,
            pages_used=self.groups.num_used,
            pages_cached=self.groups.num_cached,
            pages_total=self.groups.num_pages,
        )

    def check(self) -> None:
        """Check all invariants, for tests; valid between any two moves. The AssertionError says what is
        wrong.
        """
        running, waiting = self.running, list(self.waiting)
        self.waiting.check()
        listed = sorted([*running, *waiting], key=lambda seq: seq.order)
        _expect(listed == self.active(), "running and waiting are not all the active ones, each once")
        self.groups.check(running)
        if self.snapshots is not None:
            self.snapshots.check(running)
        self.adapters.check(digest for seq in running if (digest := seq.request.adapter_digest))
        self.images.check(seq.image for seq in running if seq.image is not None)
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
        for seq in waiting:
            name = seq.request_id
            _expect(seq.status is Status.WAITING, f"{name} is {seq.status} among the waiting")
            _expect(not seq.tables and seq.slot is None, f"{name} waits but holds pages or a slot")
            _expect(seq.image is None, f"{name} waits but holds an image")
            _expect(seq.feature_slot is None, f"{name} waits but holds a feature slot")
            _expect(seq.adapter_slot is None, f"{name} waits but holds an adapter's slot")
            _expect(seq.num_computed == 0, f"{name} waits but has computed positions")
            _expect(seq.sharing.publish_at == NEVER, f"{name} waits but publishes pages")
            self._check_awaited(seq)
        for name, outputs in self._outputs.items():
            has = any(seq.status is Status.RUNNING or seq.preemptions for seq in outputs)
            flags = {seq.has_started for seq in outputs}
            _expect(flags == {True} or flags == {has}, f"{name} has started: {has}, not {flags}")

    def _check_awaited(self, seq: Sequence) -> None:
        """Check that what a sequence awaits will happen."""
        event, name, size = seq.awaits, seq.request_id, self.groups.page_size
        if isinstance(event, Sequence):
            will = event.status is Status.RUNNING and event.sharing.is_shareable
            will = will and self.groups.can_fork(event)
            will = will and event.num_computed < self.groups.fork_start(event)
            _expect(will, f"{name} awaits what will not happen")
        elif isinstance(event, bytes):
            promised = any(
                event in other.sharing.keys[other.sharing.num_published : other.prefill_until // size]
                for other in self.running
                if other.sharing.publish_at != NEVER and other.rank[0] <= seq.rank[0]
            )
            _expect(promised and event in seq.sharing.keys, f"{name} awaits what nobody promised")
        elif event == FEATURE_SLOT:
            _expect(not self.has_feature_slot_for(seq), f"{name} awaits a feature slot, and one is free")
        elif event == ADAPTER_SLOT:
            _expect(not self.has_adapter_slot_for(seq), f"{name} awaits an adapter's slot, and can have one")


def _expect(holds: bool, what: str) -> None:
    # `assert` would check nothing under python -O.
    if not holds:
        raise AssertionError(what)
