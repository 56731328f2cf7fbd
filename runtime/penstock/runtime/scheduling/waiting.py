"""The sequences that wait to run, in order of rank, and what they wait for. No jax.

A sequence that might enter stands in line. A sequence that cannot enter before a running one has computed
something steps aside until that event. Until then it costs nothing, however many such sequences there are,
and does not hold up the line. Whoever brings an event about calls `happened`; the sequences that awaited it
stand in line again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator

from penstock.runtime.scheduling.sequence import Sequence, Status, rank_of

NEXT_STEP = "the next step"
"""The event that `Planner.make` announces when it begins."""
FEATURE_SLOT = "a feature slot"
"""The event that a feature slot is given back."""
ADAPTER_SLOT = "an adapter's slot"
"""The event that an adapter has no user any more, so that another one may have its slot."""


class Waiting:
    """The sequences in the state WAITING. An event is any hashable value: the key of a page (it is
    published), or a sequence (it has computed its prompt, gives back pages of it, or stops running).
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Prompt tokens of all waiting sequences."""
        self.num_started = 0
        """How many of the waiting sequences belong to requests that have started."""
        self._num = 0
        self._new: list[Sequence] = []  # in line, by rank
        self._started: list[Sequence] = []  # in line, by rank; their requests have started
        # Event to the sequences that stepped aside for it. A sequence that was taken out meanwhile stays in
        # the list, and is recognised by its `awaits`.
        self._aside: dict[Hashable, list[Sequence]] = {}

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences, in order of rank. This sorts them, so it is not for every step."""
        aside = [seq for event, seqs in self._aside.items() for seq in seqs if seq.awaits == event]
        return iter(sorted([*self._new, *self._started, *aside], key=rank_of))

    @property
    def awaited(self) -> tuple[Hashable, ...]:
        """The events for which sequences have stepped aside."""
        return tuple(self._aside)

    @property
    def any_aside(self) -> bool:
        """Whether any sequence has stepped aside; if not, no event needs to be announced."""
        return bool(self._aside)

    def num_aside(self, event: Hashable) -> int:
        """Tell how many sequences have stepped aside for this event."""
        return sum(seq.awaits == event for seq in self._aside.get(event, ()))

    def is_aside_before(self, event: Hashable, seq: Sequence) -> bool:
        """Say whether a sequence that ranks before `seq` has stepped aside for this event."""
        return any(other.awaits == event and other.rank < seq.rank for other in self._aside.get(event, ()))

    def num_in_line(self, *, admit: bool = True) -> int:
        """Tell how many sequences stand in line; with `admit` false, how many whose requests have started."""
        return len(self._started) + (len(self._new) if admit else 0)

    def first(self, *, admit: bool = True) -> Sequence | None:
        """Return the first sequence in line; with `admit` false, the first whose request has started. None if
        there is none.
        """
        new = self._new[0] if admit and self._new else None
        started = self._started[0] if self._started else None
        if new is None or started is None:
            return new or started
        return new if new.rank < started.rank else started

    def add(self, seq: Sequence) -> None:
        """Add a sequence to the line."""
        seq.status = Status.WAITING
        self._num += 1
        self.prompt_tokens += seq.num_prompt
        self.num_started += seq.has_started
        insort(self._line_of(seq), seq, key=rank_of)

    def take(self, seq: Sequence) -> None:
        """Remove a sequence, which waits no more."""
        if seq.awaits is None:
            self._leave_line(seq)
        seq.awaits = None
        self._num -= 1
        self.prompt_tokens -= seq.num_prompt
        self.num_started -= seq.has_started

    def start(self, seq: Sequence) -> None:
        """Note that the request of a waiting sequence has started."""
        if seq.awaits is None:
            take_ranked(self._new, seq)
            insort(self._started, seq, key=rank_of)
        seq.has_started = True
        self.num_started += 1

    def step_aside(self, seq: Sequence, event: Hashable) -> None:
        """Let all others pass a sequence that stands in line, until `event` happens."""
        self._leave_line(seq)
        seq.awaits = event
        self._aside.setdefault(event, []).append(seq)

    def happened(self, event: Hashable) -> None:
        """Put the sequences that awaited this event back in line."""
        seqs = self._aside.pop(event, None)
        if seqs is None:
            return
        for seq in seqs:
            if seq.awaits == event:
                seq.awaits = None
                self._line_of(seq).append(seq)
        for line in (self._new, self._started):
            line.sort(key=rank_of)  # usually two sorted runs, which the sort merges at once

    def _line_of(self, seq: Sequence) -> list[Sequence]:
        return self._started if seq.has_started else self._new

    def _leave_line(self, seq: Sequence) -> None:
        take_ranked(self._line_of(seq), seq)

    def check(self) -> None:
        """Check all invariants, for tests; the AssertionError says what is wrong."""
        everybody = list(self)
        if len(everybody) != self._num or len(set(everybody)) != self._num:
            raise AssertionError(f"{self._num} should wait, each once, not {len(everybody)}")
        if self.prompt_tokens != sum(seq.num_prompt for seq in everybody):
            raise AssertionError("the waiting prompts' tokens drifted")
        if self.num_started != sum(seq.has_started for seq in everybody):
            raise AssertionError("the number of those whose requests have started drifted")
        for line in (self._new, self._started):
            ranks = [seq.rank for seq in line]
            if ranks != sorted(ranks):
                raise AssertionError(f"a line is not in order of rank: {ranks}")
            if any(seq.awaits is not None or self._line_of(seq) is not line for seq in line):
                raise AssertionError("one who awaits something, or belongs to the other line, stands in line")


def take_ranked(seqs: list[Sequence], seq: Sequence) -> None:
    """Remove a sequence from a list in order of rank. Ranks are unique, so a search by rank finds it."""
    index = bisect_left(seqs, seq.rank, key=rank_of)
    assert seqs[index] is seq
    del seqs[index]
