"""Sees to it that the pictures of a prompt are encoded before their tokens are computed. No jax.

A chunk may hold tokens of a picture only if the picture's embeddings are in the pool, or are computed by the
same plan, before its rows. So a chunk ends before a picture for which the pool has no room, or which would
exceed what a plan may encode. The first picture of a plan is encoded whatever it costs: so the first prompt
in order of rank goes on in every plan if there is room in the pool.

There always will be. A picture stays in the pool only while a sequence has computed a part of its tokens, and
such a sequence needs no further picture to compute the others. A waiting sequence enters only if its first
token can be computed in the same plan.
"""

from __future__ import annotations

from penstock.runtime.requests.media import MediaItem
from penstock.runtime.scheduling.plan import Encode, PictureRows
from penstock.runtime.scheduling.planning.draft import Draft
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.sequence import Sequence


class Pictures:
    """Encodes the pictures of one plan after the other."""

    def __init__(self, roster: Roster, max_encode_patches: int) -> None:
        """`max_encode_patches`: most patches that a plan encodes, unless its first picture has more."""
        self._roster = roster
        self._pool = roster.pictures
        self._most = max_encode_patches

    def can_begin(self, seq: Sequence, start: int, draft: Draft) -> bool:
        """Whether the token at position `start` of a sequence can be computed in this plan."""
        return all(self._can_use(item, draft) for item in seq.request.media if item.start <= start < item.end)

    def reach(self, seq: Sequence, start: int, end: int, draft: Draft) -> int:
        """How far the chunk of a sequence that begins at `start` can go: to `end`, or to the first picture
        before it that cannot be used in this plan. The pictures up to there are encoded by the plan if they
        are not in the pool, and the sequence holds the one that it leaves unfinished.
        """
        unfinished = None
        for item in seq.request.media:
            if item.end <= start:
                continue
            if item.start >= end:
                break
            if not self._can_use(item, draft):
                end = max(item.start, start)
                break
            picture = self._pool.find(item.digest)
            if picture is None:
                picture = self._pool.add(item.digest, item.num_tokens)
                draft.encodes.append(Encode(item, picture.blocks))
            else:
                self._pool.use(picture)
            unfinished = picture if end < item.end else None
        if end > start and unfinished is not seq.picture:
            self._roster.let_go_of_picture(seq)
            if unfinished is not None:
                self._pool.hold(unfinished)
                seq.picture = unfinished
        return end

    def rows(self, seq: Sequence, start: int, end: int, row: int) -> list[PictureRows]:
        """Where the embeddings of the pictures lie that the positions [start, end) of a sequence have, in row
        number `row` of the plan.
        """
        found = []
        for item in seq.request.media:
            first, last = max(item.start, start), min(item.end, end)
            if first < last:
                picture = self._pool.find(item.digest)
                assert picture is not None, "a chunk has tokens of a picture that is not encoded"
                found.append(
                    PictureRows(row, first - start, last - first, first - item.start, picture.blocks)
                )
        return found

    def _can_use(self, item: MediaItem, draft: Draft) -> bool:
        if self._pool.find(item.digest) is not None:
            return True
        patches = sum(encode.item.num_patches for encode in draft.encodes)
        if patches and patches + item.num_patches > self._most:
            return False
        return self._pool.has_room(item.num_tokens)
