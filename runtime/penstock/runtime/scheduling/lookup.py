"""Prompt lookup: what followed the same words earlier is likely to follow them again. No jax.

A sequence that copies (it edits a file, quotes its prompt, repeats itself) goes through tokens that are there
already. `Copy` follows it: it finds where the newest tokens of the sequence occurred before, else in what
ended sequences with the same cache salt and adapter have said (`Earlier`), and as long as the next token is
the one that came next there, it goes on from there. So it knows for every token whether it would have been
proposed rightly, whether tokens are proposed or not, and this is all that is learned of a sequence. `Costs`
learns what steps of so many rows take. `Lookup` proposes as many tokens as will, by both, bring the most
tokens in the time, and none where steps without proposals bring as many.

(Prompt lookup is an idea of Saxena, 2023.)
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence as Items
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.proposals import Candidate
from penstock.runtime.scheduling.sequence import Sequence

Tokens = NDArray[np.int32]

MOST_TOKENS = 32_768
"""The latest tokens of a sequence that are looked through. This many take about 10 us."""
_LONGEST, _SHORTEST = 4, 2
"""How many of the newest tokens must have occurred before, at most and at least."""
_FIRST_RATE = 0.5
_LEAST_RATE = 0.3
"""What a sequence begins with, at least, so that others' failures are not held against it for ever."""
_LEARN = 0.15
_GAIN = 1.03
"""Proposals must bring so many times the tokens of steps without, because times are measured, not known."""
_WAIT_GAIN = 1.15
"""The same where the steps in flight have to be waited for first."""


def find(tokens: Tokens, newest: Items[int]) -> int | None:
    """Where the longest end of `newest` occurs last in `tokens`: the index behind it. None if not even its
    last _SHORTEST tokens occur. What stands at the end of `tokens`, with nothing behind it, does not count.
    """
    if len(newest) < _SHORTEST:
        return None
    found = np.flatnonzero(tokens[:-1] == newest[-1])
    for length in range(2, min(_LONGEST, len(newest)) + 1):
        longer = found[found >= length - 1]
        longer = longer[tokens[longer - (length - 1)] == newest[-length]]
        if not longer.size:
            if length <= _SHORTEST:
                return None
            break
        found = longer
    return int(found[-1]) + 1


_NOTHING: Tokens = np.empty(0, np.int32)
_BETWEEN = -1
"""Stands between two sequences, and is no token."""


class Earlier:
    """What the sequences that have ended were made of, by cache salt and adapter, as prefixes are shared: as
    much of each pair as of a sequence, and only of the pairs that were used last.
    """

    _MOST_PAIRS = 16

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, str], Tokens] = OrderedDict()

    def add(self, request: Request, tokens: Tokens) -> None:
        """Keep tokens of a sequence that has ended."""
        pair = _pair(request)
        before = self._tokens.pop(pair, _NOTHING)
        self._tokens[pair] = np.concatenate([before, tokens, [_BETWEEN]], dtype=np.int32)[-MOST_TOKENS:]
        if len(self._tokens) > self._MOST_PAIRS:
            self._tokens.popitem(last=False)

    def of(self, request: Request) -> Tokens:
        """What a request may find; nothing if it shares no prefixes either."""
        pair = _pair(request)
        return _NOTHING if request.cache.bypass else self._tokens.get(pair, _NOTHING)


def _pair(request: Request) -> tuple[str, str]:
    """What requests that share words have in common."""
    return request.cache.salt, request.adapter_digest


class Copy:
    """Follows one sequence."""

    __slots__ = ("_at", "_num_seen", "_other", "_size", "_tokens", "rate")

    def __init__(self, token_ids: Items[int], rate: float, earlier: Tokens = _NOTHING) -> None:
        """`rate`: what is believed of the sequence. `earlier`: what others have said."""
        self._num_seen = len(token_ids)
        known = token_ids[-MOST_TOKENS:]
        self._size = len(known)
        self._tokens = np.empty(2 * self._size + 64, np.int32)
        self._tokens[: self._size] = known
        self._at: int | None = None
        self._other: Tokens | None = None
        """What it follows, if that is not the sequence itself."""
        self._find(known[-_LONGEST:], earlier)
        self.rate = rate
        """How often the next token was the one that would have been proposed, lately."""

    @property
    def tokens(self) -> Tokens:
        """The latest tokens of the sequence."""
        return self._tokens[: self._size]

    def catch_up(self, token_ids: Items[int], earlier: Tokens = _NOTHING) -> None:
        """Take in what a sequence of these tokens has got since the last call."""
        new = token_ids[self._num_seen :]
        self._num_seen = len(token_ids)
        for token in new:
            if self._at is not None:
                is_right = self._followed[self._at] == token
                self.rate += _LEARN * (is_right - self.rate)
                self._at = self._at + 1 if is_right else None
                self._leave_ended()
            self._append(token)
        if new and self._at is None:
            self._find(token_ids[-_LONGEST:], earlier)

    @property
    def _followed(self) -> Tokens:
        return self._tokens if self._other is None else self._other

    def _find(self, newest: Items[int], earlier: Tokens) -> None:
        """Look for the newest tokens in the sequence, and else in what others have said."""
        self._other = None
        self._at = find(self.tokens, newest)
        if self._at is None and len(earlier):
            self._at, self._other = find(earlier, newest), earlier
            self._leave_ended()

    def _leave_ended(self) -> None:
        """Follow nothing any more if the other sequence that is followed has ended here. In `Earlier` each
        has its end behind it.
        """
        if self._at is not None and self._other is not None and self._other[self._at] == _BETWEEN:
            self._at = None

    def _append(self, token: int) -> None:
        if self._size == len(self._tokens):
            if self._size >= 2 * MOST_TOKENS:
                dropped = self._size - MOST_TOKENS
                if self._at is not None and self._other is None:
                    self._at = None if self._at < dropped else self._at - dropped
                self._tokens[:MOST_TOKENS] = self._tokens[dropped:]
                self._size = MOST_TOKENS
            else:
                self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self._size] = token
        self._size += 1

    @property
    def has_guess(self) -> bool:
        """Whether it knows of tokens that may come next."""
        return self._at is not None

    def guess(self, count: int) -> list[int]:
        """The next tokens, if the sequence goes on as it did before. One that repeats its newest tokens goes
        on with these.
        """
        if self._at is None:
            return []
        end = self._size if self._other is None else len(self._other)
        known: list[int] = self._followed[self._at : min(self._at + count, end)].tolist()
        if self._other is not None:
            return known[: known.index(_BETWEEN)] if _BETWEEN in known else known
        while len(known) < count:
            known += known[: count - len(known)]
        return known


_KEPT_TIMES = 5
_LEAST_TIMES = 3
"""Fewer times are not believed if they are longer than what was expected: one may be an accident."""
_FRESH = 256
"""A time is believed for so many measurements, because steps become slower as contexts grow."""
_EACH_ROW = 0.03
"""By which part a row makes a step longer, until that is measured."""


class Costs:
    """What a decode step takes, by its number of rows, where each proposed token counts as one; and what it
    takes without any proposals, because such steps overlap with the host's work.
    """

    def __init__(self) -> None:
        self._num_measured = 0
        self._times: dict[tuple[bool, int], tuple[int, deque[float]]] = {}
        """(whether tokens are proposed, rows) to when that was measured last, and the last times in ns."""

    def measured(self, num_rows: int, num_proposed: int, elapsed_ns: float) -> None:
        """Take note of a step."""
        self._num_measured += 1
        key = (num_proposed > 0, num_rows + num_proposed)
        times = self._fresh(key)
        times = deque(maxlen=_KEPT_TIMES) if times is None else times
        times.append(max(elapsed_ns, 1.0))
        self._times[key] = self._num_measured, times

    def _fresh(self, key: tuple[bool, int]) -> deque[float] | None:
        last, times = self._times.get(key, (0, None))
        return times if self._num_measured - last <= _FRESH else None

    def plain_ns(self, num_rows: int) -> float | None:
        """What a step without proposals takes; None where that was not measured lately."""
        times = self._fresh((False, num_rows))
        return median_low(times) if times else None

    def checked_ns(self, num_rows: int, plain_ns: float, most_proposed: int) -> list[float]:
        """What steps take in which 0, 1, ... `most_proposed` tokens are proposed for so many rows, of which a
        step without proposals takes `plain_ns`. What was not measured, or only once or twice, is taken to be
        little more than what is known of fewer, so that it is tried.
        """
        known = plain_ns
        expected = [plain_ns]
        for count in range(1, most_proposed + 1):
            times = self._fresh((True, num_rows + count)) or ()
            known *= 1 + _EACH_ROW
            if times:
                measured = median_low(times)
                known = measured if len(times) >= _LEAST_TIMES else min(measured, known)
            expected.append(known)
        return expected


class Lookup:
    """The proposer "lookup"."""

    name = "lookup"

    def __init__(self) -> None:
        self._copies: dict[Sequence, Copy] = {}
        self._costs = Costs()
        self._earlier = Earlier()
        self._rate = _FIRST_RATE
        """What is believed of a new sequence."""

    def propose(self, candidates: Items[Candidate], num_rows: int, room: int) -> Items[Items[int]]:
        """See `Proposer`."""
        copies = self._caught_up(candidates)
        counts = self._counts(candidates, copies, num_rows, room, _GAIN)
        return [copy.guess(count) if count else () for copy, count in zip(copies, counts, strict=True)]

    def is_due(self, candidates: Items[Candidate], num_rows: int, room: int) -> bool:
        """See `Proposer`."""
        copies = self._caught_up(candidates)
        return any(self._counts(candidates, copies, num_rows, room, _WAIT_GAIN))

    def measured(self, num_rows: int, num_proposed: int, elapsed_ns: float) -> None:
        """See `Proposer`."""
        self._costs.measured(num_rows, num_proposed, elapsed_ns)

    def ended(self, seq: Sequence) -> None:
        """See `Proposer`."""
        copy = self._copies.pop(seq, None)
        if copy is not None:
            copy.catch_up(seq.token_ids)  # tokens of the last steps may have come since
            tokens = copy.tokens
            if seq.request.fork_of is not None:  # outputs of one prompt keep it once
                tokens = tokens[max(len(tokens) - seq.num_generated, 0) :]
            if tokens.size and not seq.request.cache.bypass:
                self._earlier.add(seq.request, tokens)
            self._rate = max(self._rate + _LEARN * (copy.rate - self._rate), _LEAST_RATE)

    def _caught_up(self, candidates: Items[Candidate]) -> list[Copy]:
        """What follows each candidate."""
        copies: list[Copy] = []
        for seq, _ in candidates:
            copy, earlier = self._copies.get(seq), self._earlier.of(seq.request)
            if copy is None:
                copy = self._copies[seq] = Copy(seq.token_ids, self._rate, earlier)
            else:
                copy.catch_up(seq.token_ids, earlier)
            copies.append(copy)
        return copies

    def _counts(
        self, candidates: Items[Candidate], copies: Items[Copy], num_rows: int, room: int, gain: float
    ) -> list[int]:
        """How many tokens to propose for each candidate, so that a step brings the most tokens in the time
        that it takes; none unless that is `gain` times what a step without proposals brings.
        """
        counts = [0] * len(candidates)
        plain_ns = self._costs.plain_ns(num_rows)
        if plain_ns is None:
            return counts
        # The next token of any row that is likeliest to be right comes next.
        likeliest = [(-copy.rate, i) for i, copy in enumerate(copies) if copy.has_guess]
        heapq.heapify(likeliest)
        order: list[int] = []
        tokens = [float(num_rows)]
        tried = [0] * len(candidates)
        while likeliest and len(order) < room:
            chance, i = heapq.heappop(likeliest)
            order.append(i)
            tokens.append(tokens[-1] - chance)
            tried[i] += 1
            if tried[i] < candidates[i].most:
                heapq.heappush(likeliest, (chance * copies[i].rate, i))
        took_ns = self._costs.checked_ns(num_rows, plain_ns, len(order))
        speeds = [made / took for made, took in zip(tokens, took_ns, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] < gain * speeds[0]:
            return counts
        for i in order[:best]:
            counts[i] += 1
        return counts
