"""Which prompts are computed in a step, and how much of each. No jax.

`Cuts` chooses the snapshots of recurrent state. A row of a prefill may keep the state after one of the pages
whose ends it computes. Of these it takes

1. the last page before the end of its prompt, if forks wait to begin there;
2. the page behind which the waiting sequences will be spared most tokens that have stepped aside until this
   page, or a later one, is published;
3. the page up to which the sequence found pages of others when it entered, although it had to begin before
   them, because there was no snapshot: there may be more sequences with this prefix and another ending;
4. the last page before its last token, or of this row if it does not get so far: the whole sequence may come
   again, or go on in another request.

`Images` has the images of prompts encoded. A chunk may hold tokens of an image only if the image's
embeddings are in the pool, or are computed by the same plan, before its rows. So a chunk ends before an
image for which the pool has no room, or which would exceed what a plan may encode. The first image of a
plan is encoded whatever it costs: so the first prompt in order of rank goes on in every plan if there is room
in the pool.

There always will be. An image stays in the pool only while a sequence has computed a part of its tokens, and
such a sequence needs no further image to compute the others. A waiting sequence enters only if its first
token can be computed in the same plan.

Where an image's tokens see those behind them (`SchedulerConfig.whole_image_tokens`), no chunk ends within
an image. A chunk that would ends before it; one that begins there goes to the image's end, beyond what it
was to get, as long as the step has room. A step always has room for the first in order of rank. A chunk may
begin within an image behind pages that are shared: their keys depend on the whole image, so what these
pages hold has seen all of it.
"""

from __future__ import annotations

from collections import deque

from penstock.runtime.requests.images import MediaItem
from penstock.runtime.scheduling.admission import Admission
from penstock.runtime.scheduling.plan import NO_SNAPSHOT_USE, Draft, Encode, ImageRows, PlanRow, SnapshotUse
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence
from penstock.runtime.scheduling.snapshots import Snapshots


class Cuts:
    """Chooses the snapshots of rows, for a model that has some."""

    def __init__(self, roster: Roster, snapshots: Snapshots) -> None:
        self._roster = roster
        self._snapshots = snapshots

    def use(self, seq: Sequence, start: int, end: int) -> SnapshotUse:
        """Return what the row of a prefill does that computes these positions. To be called once for each
        row, before the pages that it fills are published.
        """
        source = self._snapshots.source_of(seq, start)
        num_pages, entry = self._keep(seq, start, end)
        return SnapshotUse(
            source=-1 if source is None else source,
            cut=0 if entry is None else num_pages * self._roster.groups.page_size - start,
            cut_to=0 if entry is None else entry,
        )

    def _keep(self, seq: Sequence, start: int, end: int) -> tuple[int, int | None]:
        """Return (the number of the sequence's pages after which the row keeps the state, the snapshot that
        it writes); no snapshot if the row keeps none.
        """
        roster, snapshots = self._roster, self._snapshots
        size = roster.groups.page_size
        before, last = start // size, end // size
        if before == last or not seq.sharing.is_shareable:
            return 0, None
        keys = seq.sharing.keys if roster.cache.serves(seq.request) else []
        for_forks = roster.groups.fork_start(seq) // size
        if before < for_forks <= last and seq.recurrence.for_forks is None and roster.has_forks(seq):
            entry = snapshots.write(keys[for_forks - 1] if keys else None)
            if entry is not None:
                snapshots.hold_for_forks(seq, entry)
            return for_forks, entry
        last = min(last, len(keys))  # a chunk behind proposed tokens may end with a page that has no key yet
        if last <= before:
            return 0, None
        awaited = self._awaited(keys, before, last)
        branch = seq.recurrence.branch
        for num_pages in (awaited, branch if before < branch <= last else 0):
            if num_pages and snapshots.find(keys[num_pages - 1]) is None:
                return num_pages, snapshots.write(keys[num_pages - 1])
        num_pages = min(last, (seq.prefill_until - 1) // size)
        if num_pages == before or snapshots.find(keys[num_pages - 1]) is not None:
            return 0, None
        return num_pages, snapshots.write_again(seq, keys[num_pages - 1])

    def _awaited(self, keys: list[bytes], before: int, last: int) -> int:
        """Return the number of pages, above `before` and at most `last`, after which a snapshot spares most
        to the sequences that await pages of these; 0 if none is awaited.
        """
        waiting = self._roster.waiting
        best = most = beyond = 0
        if waiting.any_aside:
            for num_pages in range(last, before, -1):
                beyond += waiting.num_aside(keys[num_pages - 1])
                if num_pages * beyond > most:
                    best, most = num_pages, num_pages * beyond
        return best


class Images:
    """Encodes the images of one plan after the other."""

    def __init__(self, roster: Roster, max_encode_patches: int, *, can_cut: bool) -> None:
        """`max_encode_patches`: most patches that a plan encodes, unless its first image has more.
        can_cut: whether a chunk may end within an image.
        """
        self._roster = roster
        self._pool = roster.images
        self._most = max_encode_patches
        self._can_cut = can_cut

    def can_begin(self, seq: Sequence, start: int, draft: Draft, room: int) -> bool:
        """Say whether the token at position `start` of a sequence can be computed in this plan, which has
        room for so many tokens more.
        """
        return all(
            self._can_use(item, draft) and (self._can_cut or item.end - start <= room)
            for item in seq.request.media
            if item.start <= start < item.end
        )

    def reach(self, seq: Sequence, start: int, end: int, most: int, draft: Draft) -> int:
        """Tell how far the chunk of a sequence that begins at `start` can go: to `end`, or to the first
        image before it that cannot be used in this plan, or that would be cut; or to the end of the image
        at `start`, but not beyond `most`. The images up to there are encoded by the plan if they are not in
        the pool, and the sequence holds the one that it leaves unfinished.
        """
        cut = next((item for item in seq.request.media if item.start < end < item.end), None)
        if cut is not None and not self._can_cut:
            at_image = cut.end if cut.end <= most else start
            end = cut.start if cut.start > start else at_image
        unfinished = None
        for item in seq.request.media:
            if item.end <= start:
                continue
            if item.start >= end:
                break
            if not self._can_use(item, draft):
                end = max(item.start, start)
                break
            image = self._pool.find(item.digest)
            if image is None:
                image = self._pool.add(item.digest, item.num_tokens)
                draft.encodes.append(Encode(item, image.blocks))
            else:
                self._pool.use(image)
            unfinished = image if end < item.end else None
        if end > start and unfinished is not seq.image:
            self._roster.let_go_of_image(seq)
            if unfinished is not None:
                self._pool.hold(unfinished)
                seq.image = unfinished
        return end

    def rows(self, seq: Sequence, start: int, end: int, row: int) -> list[ImageRows]:
        """Tell where the embeddings of the images lie that the positions [start, end) of a sequence have,
        in row number `row` of the plan.
        """
        found = []
        for item in seq.request.media:
            first, last = max(item.start, start), min(item.end, end)
            if first < last:
                image = self._pool.find(item.digest)
                assert image is not None, "a chunk has tokens of an image that is not encoded"
                found.append(
                    ImageRows(row, first - start, last - first, first - item.start, item, image.blocks)
                )
        return found

    def _can_use(self, item: MediaItem, draft: Draft) -> bool:
        if self._pool.find(item.digest) is not None:
            return True
        patches = sum(encode.item.num_patches for encode in draft.encodes)
        if patches and patches + item.num_patches > self._most:
            return False
        return self._pool.has_room(item.num_tokens)


LEAST_TOKENS = 16
"""Fewest prompt tokens of a step, and of a step that is worth measuring: the time of fewer is lost in noise.
"""
_LONG = 4
"""A prompt that would take more than this many whole steps shares them with those behind it."""
_SHARE = 4
"""One part in this many of a step is kept for the prompts behind a long one."""
_FLOOR = 32
"""A long prompt behind another long one gets one part in this many of a step."""


class Prefills:
    """Shares the prompt tokens of a step among the sequences that are partly prefilled and those that enter.

    The first prompt that would take more than _LONG steps leaves a part of each step to the prompts behind
    it, so that these need not wait for all of it. Long prompts among these get little; the others get what
    they need, in order of rank. The long prompt gets what is left.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, admission: Admission) -> None:
        self._config = config
        self._roster = roster
        self._admission = admission
        can_cut = not config.whole_image_tokens
        self._images = Images(roster, config.max_encode_patches, can_cut=can_cut)
        snapshots = roster.snapshots
        self._cuts = None if snapshots is None else Cuts(roster, snapshots)
        self._blocked: Sequence | None = None
        """The first sequence in line, if it could not enter in the last step."""

    def add(self, draft: Draft, prefills: list[Sequence]) -> None:
        """Add chunks of `prefills`, which are running sequences, and of the sequences that enter, in order
        of rank.
        """
        waiting = self._roster.waiting
        whole = budget = self._budget(draft, len(prefills))
        room = self._room(draft)
        self._blocked = None
        most = draft.max_chunk or budget
        parts: list[tuple[Sequence, int]] = []
        """The sequences that get a chunk, and where it begins."""
        underway = deque(prefills)
        entering, shared = True, False
        while budget > 0:
            candidate = waiting.first(admit=draft.admit) if entering else None
            if candidate is not None and self._config.whole_prompts and candidate.num_prompt > budget:
                break  # it is the first of the next step
            if candidate is not None and not (underway and underway[0].rank < candidate.rank):
                prefix = self._admission.may_enter(candidate, draft)
                if prefix is not None:
                    start = prefix.num_computed
                    prefix = prefix if self._images.can_begin(candidate, start, draft, room) else None
                if prefix is None:
                    entering = candidate.awaits is not None  # if it did not step aside, no other may enter
                    self._blocked = None if entering else candidate
                    continue
                self._admission.enter(candidate, prefix, draft)
                seq = candidate
            elif underway:
                seq = underway.popleft()
            else:
                break
            count = budget
            if seq.prefill_until - seq.num_computed > _LONG * whole:
                if shared:
                    count = max(whole // _FLOOR, 1)
                elif underway or (entering and waiting):
                    count = budget - budget // _SHARE
                shared = True
            start = seq.num_computed
            taken = self._advance(seq, min(count, budget, most), room, draft)
            if taken:  # none if an image that comes next cannot be encoded in this plan
                parts.append((seq, start))
                draft.chunked.add(seq)
                budget -= taken
                room -= taken
        for seq, start in parts:  # share out what was kept for other prompts and not used
            left = min(budget, start + most - seq.num_computed)
            if left > 0:
                budget -= self._advance(seq, left, left, draft)
        for seq, start in parts:
            if start < seq.recompute_until:
                again = min(seq.num_computed, seq.recompute_until) - start
                self._roster.counts.recomputed_tokens += again
            if seq.request.media:
                draft.images += self._images.rows(seq, start, seq.num_computed, len(draft.rows))
            if self._cuts is not None:
                # Nobody can use the row's pages before the next step, when its snapshot can be read too.
                use = self._cuts.use(seq, start, seq.num_computed)
                if use != NO_SNAPSHOT_USE:
                    draft.snapshots[len(draft.rows)] = use
                self._publish(seq)
            _add_row(draft, seq, start)

    def _budget(self, draft: Draft, num_prefills: int) -> int:
        """Return the prompt tokens of this step: what the decodes leave and, if there are decodes, at most
        what `draft.prefill_budget` allows.

        `draft.prefill_budget` is meant for one prompt. For n prompts it is multiplied by the square root of
        n: as a group they lose more by waiting, and the machine by running half empty, than the decodes lose
        (16 prompts of 256 tokens without AMX, simulated: 18 % of the throughput with one target for all, 6 %
        so).
        A sequence that stepped aside, or that stands behind one that lacks pages, does not count. Where steps
        are padded, the budget is the largest that needs no padding, but at least LEAST_TOKENS, so that the
        step can be measured.
        """
        budget = self._room(draft)
        num_decodes = self._config.max_num_batched_tokens - budget
        if not num_decodes or draft.prefill_budget is None:
            return budget
        waiting, num_prompts = self._roster.waiting, num_prefills
        first = waiting.first(admit=draft.admit)
        if first is not None and first is not self._blocked:
            num_prompts += min(waiting.num_in_line(admit=draft.admit), self._roster.num_free_slots)
        wanted = int(max(draft.prefill_budget, 1) * max(num_prompts, 1) ** 0.5)
        if wanted >= budget:
            return budget
        wanted += num_decodes
        sizes = [size for size in self._config.step_sizes if size >= num_decodes + LEAST_TOKENS]
        if sizes:
            wanted = max((size for size in sizes if size <= wanted), default=sizes[0])
        return min(budget, wanted - num_decodes)

    def _room(self, draft: Draft) -> int:
        """Tell how many tokens the step has room for beside the decodes that it has."""
        num_decodes = len(draft.rows)  # or more, where tokens are proposed for them
        if draft.proposed:
            num_decodes = sum(row.num_tokens for row in draft.rows)
        return self._config.max_num_batched_tokens - num_decodes

    def _advance(self, seq: Sequence, most: int, room: int, draft: Draft) -> int:
        """Add up to `most` tokens to the next chunk of a prefill, or up to `room` to reach the end of an
        image. Returns how many it added.
        """
        start = seq.num_computed
        # With a sliding window, perhaps fewer positions than `prefill_until` have pages.
        end = min(start + most, seq.prefill_until, seq.covered)
        if seq.request.media:
            end = self._images.reach(seq, start, end, min(start + room, seq.covered), draft)
        seq.num_computed = end
        if self._cuts is None:
            self._publish(seq)
        return end - start

    def _publish(self, seq: Sequence) -> None:
        """Let others share what a prefill has computed."""
        roster, end = self._roster, seq.num_computed
        if end >= seq.sharing.publish_at:
            roster.cache.publish(seq, end)
        if end >= roster.groups.fork_start(seq):
            roster.waiting.happened(seq)  # its forks can share the prompt now


def _add_row(draft: Draft, seq: Sequence, start: int) -> None:
    """Add the row of a prefill's chunk, from `start` to where the sequence has advanced. The last chunk
    samples the next token, unless the request ends with its prompt.
    """
    assert seq.slot is not None
    end = seq.num_computed
    samples = end == seq.prefill_until and seq.request.reading is None
    seq.pending += samples
    bans = int(samples and end <= seq.bans_until)
    if seq.of_prompt.is_wanted and start < seq.num_prompt:
        row = len(draft.rows)
        draft.prompts[row] = seq
        pooled = seq.of_prompt.plan_pooling(start, end)
        if pooled is not None:
            draft.pooled[row] = pooled
    draft.rows.append(
        PlanRow(seq.request_id, seq.slot, start, end - start, tuple(seq.token_ids[start:end]), samples, bans)
    )
    draft.sampling.append(seq if samples else None)
