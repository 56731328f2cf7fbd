"""Prompt lookup: what followed the same words earlier is likely to follow them again. No jax.

A sequence that copies (it edits a file, quotes its prompt, repeats itself) goes through tokens that are there
already. `Copy` follows it: it finds where the newest tokens of the sequence occurred before, else in what
ended sequences with the same cache salt and adapter have said (`Earlier`), and as long as the next token is
the one that came next there, it goes on from there. Where a grammar leaves no choice, it follows the grammar.
So it knows for every token whether it would have been proposed rightly, whether tokens are proposed or not,
and this is all that is learned of a sequence. `Costs` learns what steps of so many rows take. `Lookup`
proposes as many tokens as will, by both, bring the most tokens in the time, and none where steps without
proposals bring as many.

(Prompt lookup is an idea of Saxena, 2023.)
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.proposals import Candidate
from penstock.runtime.scheduling.sequence import Sequence
from penstock.runtime.scheduling.text_windows import TextWindows

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

_REST = 99
"""After a look that proposes nothing, nobody looks for so many times as long as that took. So outputs that
repeat nothing lose a hundredth of their time, however many they are."""


def find(tokens: Tokens, newest: Items[int]) -> int | None:
    """Tell where the longest end of `newest` occurs last in `tokens`: the index behind it. None if not even
    its last _SHORTEST tokens occur. What stands at the end of `tokens`, with nothing behind it, does not
    count.
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


_FIRST_OF_PAIR = 1 << 32
"""What the first token of a pair is multiplied by, so that each pair has a number of its own."""
_BETWEEN = -1
"""Stands between two sequences, and is no token."""
_MIX = 1_000_003
_PLACES = 4
"""How many places `Pairs` has for a token."""


class Pairs:
    """Tells at once that two tokens have never stood side by side, so that nobody looks for them. It may err
    about two that have not, and never about two that have.
    """

    __slots__ = ("_mask", "_seen")

    def __init__(self, tokens: Tokens, most_tokens: int) -> None:
        """`most_tokens`: for how many tokens there are enough places, these included."""
        self._seen = bytearray(1 << (_PLACES * max(most_tokens, 64)).bit_length())
        self._mask = len(self._seen) - 1
        self.add_all(tokens)

    def add_all(self, tokens: Tokens) -> None:
        """Take in all pairs of neighbours."""
        places = (tokens[:-1].astype(np.int64) * _MIX + tokens[1:]) & self._mask
        np.frombuffer(self._seen, np.uint8)[places] = 1

    def add(self, first: int, second: int) -> None:
        """Take in one pair."""
        self._seen[(first * _MIX + second) & self._mask] = 1

    def may_have(self, first: int, second: int) -> bool:
        """Say whether this pair may have been taken in."""
        return self._seen[(first * _MIX + second) & self._mask] != 0


class Said(NamedTuple):
    """Tokens of sequences that have ended, with _BETWEEN behind each."""

    tokens: Tokens
    pairs: Pairs
    num_added: int
    """How many tokens `pairs` has taken in, since it was made."""

    def find(self, newest: Items[int]) -> int | None:
        """See `find`."""
        if len(newest) < _SHORTEST or not self.pairs.may_have(newest[-2], newest[-1]):
            return None
        return find(self.tokens, newest)


class Text:
    """A text that never changes, in which each pair of neighbours is found without looking through it."""

    _MOST_PLACES = 4096
    """Of a pair that stands there more often, the last so many places are looked at: all would take
    milliseconds."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = np.append(tokens, _BETWEEN).astype(np.int32)
        pairs = tokens[:-1].astype(np.int64) * _FIRST_OF_PAIR + tokens[1:]
        self._places = np.argsort(pairs, kind="stable")
        """The places of the first tokens of all pairs, those of equal ones side by side and in order."""
        self._pairs = pairs[self._places]

    def find(self, newest: Items[int]) -> int | None:
        """See `find`."""
        if len(newest) < _SHORTEST:
            return None
        pair = newest[-2] * _FIRST_OF_PAIR + newest[-1]
        begin, end = np.searchsorted(self._pairs, (pair, pair + 1))
        found = self._places[max(begin, end - self._MOST_PLACES) : end] + 1
        for length in range(_SHORTEST + 1, min(_LONGEST, len(newest)) + 1):
            longer = found[found >= length - 1]
            longer = longer[self.tokens[longer - (length - 1)] == newest[-length]]
            if not longer.size:
                break
            found = longer
        return int(found[-1]) + 1 if found.size else None


class Earlier:
    """What the sequences that have ended were made of, by cache salt and adapter, as prefixes are shared: as
    much of each pair as of a sequence, and only of the pairs that were used last.
    """

    _MOST_PAIRS = 16

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, str], Said] = OrderedDict()

    def add(self, request: Request, tokens: Tokens) -> None:
        """Keep tokens of a sequence that has ended."""
        pair = _pair(request)
        new = np.append(tokens, _BETWEEN).astype(np.int32)
        before = self._said.pop(pair, None)
        kept = new[-MOST_TOKENS:]
        if before is not None:
            kept = np.concatenate([before.tokens, new])[-MOST_TOKENS:]
        num_added = len(new) + (0 if before is None else before.num_added)
        if before is None or num_added > 2 * MOST_TOKENS:
            self._said[pair] = Said(kept, Pairs(kept, 2 * MOST_TOKENS), len(kept))
        else:
            before.pairs.add_all(new)
            self._said[pair] = Said(kept, before.pairs, num_added)
        if len(self._said) > self._MOST_PAIRS:
            self._said.popitem(last=False)

    def of(self, request: Request) -> Said | None:
        """Return what a request may find; None if there is nothing, or if it shares no prefixes either."""
        return None if request.cache.bypass else self._said.get(_pair(request))


def _pair(request: Request) -> tuple[str, str]:
    """Return what requests that share words have in common."""
    return request.cache.salt, request.adapter_digest


class Copy:
    """Follows one sequence."""

    __slots__ = ("_at", "_num_seen", "_other", "_pairs", "_size", "_tokens", "rate")

    def __init__(self, token_ids: Items[int], rate: float) -> None:
        """`rate`: what is believed of the sequence."""
        self._num_seen = len(token_ids)
        known = token_ids[-MOST_TOKENS:]
        self._size = len(known)
        self._tokens = np.empty(2 * self._size + 64, np.int32)
        self._tokens[: self._size] = known
        self._pairs = Pairs(self.tokens[:-1], len(self._tokens))
        """All but the last pair, which nothing has followed yet."""
        self._other: Tokens | None = None
        """What it follows, if that is not the sequence itself."""
        self._at = self._find(known[-_LONGEST:])
        self.rate = rate
        """How often the next token was the one that would have been proposed, lately."""

    @property
    def tokens(self) -> Tokens:
        """The latest tokens of the sequence."""
        return self._tokens[: self._size]

    def catch_up(self, token_ids: Items[int]) -> bool:
        """Take in what a sequence of these tokens has got since the last call. Returns whether that is
        something, and does not follow anything in the sequence itself.
        """
        if len(token_ids) == self._num_seen:
            return False
        for token in token_ids[self._num_seen :]:
            if self._at is not None:
                is_right = self._followed[self._at] == token
                self.rate += _LEARN * (is_right - self.rate)
                self._at = self._at + 1 if is_right else None
                self._leave_ended()
            self._append(token)
        self._num_seen = len(token_ids)
        if self._at is None:
            self._other = None
            self._at = self._find(token_ids[-_LONGEST:])
        return self._at is None

    def follow(self, said: Said | Text, newest: Items[int]) -> None:
        """Follow what others have said, if the newest tokens occur there."""
        self._at, self._other = said.find(newest[-_LONGEST:]), said.tokens
        self._leave_ended()

    def expect(self, token_ids: Items[int]) -> None:
        """Follow these tokens, which are expected next."""
        self._at, self._other = 0, np.array([*token_ids, _BETWEEN], np.int32)

    @property
    def _followed(self) -> Tokens:
        return self._tokens if self._other is None else self._other

    def _find(self, newest: Items[int]) -> int | None:
        """Tell where the newest tokens occurred before in the sequence, see `find`."""
        if len(newest) < _SHORTEST or not self._pairs.may_have(newest[-2], newest[-1]):
            return None
        return find(self.tokens, newest)

    def _leave_ended(self) -> None:
        """Follow nothing any more if the other sequence that is followed has ended here. In `Earlier` each
        has its end behind it.
        """
        if self._at is not None and self._other is not None and self._other[self._at] == _BETWEEN:
            self._at = None

    def _append(self, token: int) -> None:
        if self._size == len(self._tokens):
            self._make_room()
        elif self._size >= _SHORTEST:
            self._pairs.add(*self._tokens[self._size - 2 : self._size].tolist())
        self._tokens[self._size] = token
        self._size += 1

    def _make_room(self) -> None:
        """Forget what is oldest, or take more memory."""
        if self._size >= 2 * MOST_TOKENS:
            dropped = self._size - MOST_TOKENS
            if self._at is not None and self._other is None:
                self._at = None if self._at < dropped else self._at - dropped
            self._tokens[:MOST_TOKENS] = self._tokens[dropped:]
            self._size = MOST_TOKENS
        else:
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._pairs = Pairs(self.tokens, len(self._tokens))

    @property
    def has_guess(self) -> bool:
        """Whether it knows of tokens that may come next."""
        return self._at is not None

    def guess(self, count: int) -> list[int]:
        """Guess the next tokens, if the sequence goes on as it did before. One that repeats its newest tokens
        goes on with these.
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
        """Return what a step without proposals takes; None where that was not measured lately."""
        times = self._fresh((False, num_rows))
        return median_low(times) if times else None

    def checked_ns(self, num_rows: int, plain_ns: float, most_proposed: int) -> list[float]:
        """Return what steps take in which 0, 1, ... `most_proposed` tokens are proposed for so many rows, of
        which a step without proposals takes `plain_ns`. What was not measured, or only once or twice, is
        taken to be little more than what is known of fewer, so that it is tried.
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

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        computes_again: bool = False,
        reads_earlier: bool = True,
        text: Tokens | None = None,
        text_windows: TextWindows | None = None,
    ) -> None:
        """computes_again: whether the step behind a wrong proposal computes accepted tokens again, and so has
        no proposals. reads_earlier: whether what ended sequences have said may be proposed. text: what may be
        proposed for all, where nothing else is found. text_windows: the windows that guess by the text
        themselves; while there are some, nothing of it is proposed here for the outputs for which they guess.
        None: no window does.
        """
        self._clock_ns = clock_ns
        self._computes_again = computes_again
        self._rests_until_ns = 0
        self._copies: dict[Sequence, Copy] = {}
        self._costs = Costs()
        self._earlier = Earlier() if reads_earlier else None
        self._text = None if text is None else Text(text)
        self._text_windows = text_windows
        self._rate = _FIRST_RATE
        """What is believed of a new sequence."""

    def propose(self, candidates: Items[Candidate], num_rows: int, room: int) -> Items[Items[int]]:
        """See `Proposer`."""
        copies, counts = self._look(candidates, num_rows, room, _GAIN)
        return [copy.guess(count) for copy, count in zip(copies, counts, strict=True)] or [()] * len(
            candidates
        )

    def is_due(self, candidates: Items[Candidate], num_rows: int, room: int) -> bool:
        """See `Proposer`."""
        return bool(self._look(candidates, num_rows, room, _WAIT_GAIN)[1])

    def _look(
        self, candidates: Items[Candidate], num_rows: int, room: int, gain: float
    ) -> tuple[list[Copy], list[int]]:
        """Return what follows each candidate, and how many tokens to propose for it; nothing where none are
        to be proposed, or while it rests.
        """
        began_ns = self._clock_ns()
        if began_ns < self._rests_until_ns:
            return [], []
        copies = self._caught_up(candidates)
        counts = self._counts(candidates, copies, num_rows, room, gain)
        if any(counts):
            return copies, counts
        now_ns = self._clock_ns()
        self._rests_until_ns = now_ns + _REST * (now_ns - began_ns)
        return [], []

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
            if self._earlier is not None and tokens.size and not seq.request.cache.bypass:
                self._earlier.add(seq.request, tokens)
            self._rate = max(self._rate + _LEARN * (copy.rate - self._rate), _LEAST_RATE)

    def _caught_up(self, candidates: Items[Candidate]) -> list[Copy]:
        """Return what follows each candidate."""
        copies: list[Copy] = []
        for seq, _ in candidates:
            copy = self._copies.get(seq)
            if copy is None:
                copy = self._copies[seq] = Copy(seq.token_ids, self._rate)
                is_lost = not copy.has_guess
            else:
                is_lost = copy.catch_up(seq.token_ids)
            if is_lost:
                self._follow_others(copy, seq)
            if seq.forced:
                copy.expect(seq.forced)
            copies.append(copy)
        return copies

    def _follow_others(self, copy: Copy, seq: Sequence) -> None:
        """Follow what ended sequences have said, else the text, if the newest tokens occur there."""
        earlier = None if self._earlier is None else self._earlier.of(seq.request)
        is_read = self._text_windows is not None and self._text_windows.guess_for(seq)
        for said in (earlier, None if is_read else self._text):
            if said is not None and not copy.has_guess:
                copy.follow(said, seq.token_ids)

    def _counts(
        self, candidates: Items[Candidate], copies: Items[Copy], num_rows: int, room: int, gain: float
    ) -> list[int]:
        """Tell how many tokens to propose for each candidate, so that a step brings the most tokens in the
        time that it takes; none unless that is `gain` times what a step without proposals brings.
        """
        counts = [0] * len(candidates)
        # The next token of any row that is likeliest to be right comes next.
        likeliest = [(-copy.rate, i) for i, copy in enumerate(copies) if copy.has_guess]
        plain_ns = self._costs.plain_ns(num_rows) if likeliest else None
        if plain_ns is None:
            return counts
        heapq.heapify(likeliest)
        order: list[int] = []
        tokens, all_right = [float(num_rows)], [1.0]
        tried = [0] * len(candidates)
        while likeliest and len(order) < room:
            chance, i = heapq.heappop(likeliest)
            order.append(i)
            tokens.append(tokens[-1] - chance)
            all_right.append(all_right[-1] * copies[i].rate)
            tried[i] += 1
            if tried[i] < candidates[i].most:
                heapq.heappush(likeliest, (chance * copies[i].rate, i))
        took_ns = self._costs.checked_ns(num_rows, plain_ns, len(order))
        if self._computes_again:
            # The step behind has at most as many tokens, and brings one of each row.
            again = [1 - right for right in all_right]
            tokens = [made + num_rows * chance for made, chance in zip(tokens, again, strict=True)]
            took_ns = [took * (1 + chance) for took, chance in zip(took_ns, again, strict=True)]
        speeds = [made / took for made, took in zip(tokens, took_ns, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] < gain * speeds[0]:
            return counts
        for i in order[:best]:
            counts[i] += 1
        return counts
