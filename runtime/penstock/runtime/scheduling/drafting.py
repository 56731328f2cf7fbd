"""How many tokens a draft model, or the heads of a checkpoint, guess. No jax.

Either computes on the device whatever the served model computes, so it knows all tokens at any time, and its
guesses go into a step without passing through the host. What is decided here is for how many tokens of each
sequence it is asked: `Drafting` learns how often the guesses for a sequence are right, and `Costs` what steps
take, its own part included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

from penstock.runtime.scheduling.lookup import Costs
from penstock.runtime.scheduling.plan import drafted_tokens
from penstock.runtime.scheduling.proposals import Candidate
from penstock.runtime.scheduling.sequence import Sequence

_FIRST_RATE = 0.7
_LEAST_RATE = 0.3
"""What a sequence begins with, at least, so that others' failures are not held against it for ever."""
_LEARN = 0.1
_TRY_AGAIN = 64
"""After so many tokens without guesses, what was learned of a sequence is forgotten; after twice as many each
time, as long as no guess is right."""
_GAIN = 1.03
"""Guesses must bring so many times the tokens of steps without, because times are measured, not known."""
_WAIT_GAIN = 1.15
"""The same where the steps in flight have to be waited for first."""


class _Record:
    """What is known of one sequence."""

    __slots__ = ("accepted", "at", "proposed", "rate", "rest")

    def __init__(self, seq: Sequence, rate: float) -> None:
        self.rate = rate
        """How often a guess was right, lately, if all before it were."""
        self.at = len(seq.token_ids)
        """How many tokens the sequence had after its last guesses."""
        self.proposed, self.accepted = seq.proposed_tokens, seq.accepted_tokens
        self.rest = _TRY_AGAIN
        """After how many tokens without guesses some are tried again."""

    def catch_up(self, seq: Sequence) -> None:
        """Learn from the guesses that were checked since the last call, which are those of one step."""
        proposed, accepted = seq.proposed_tokens - self.proposed, seq.accepted_tokens - self.accepted
        if proposed:
            self.proposed, self.accepted, self.at = (
                seq.proposed_tokens,
                seq.accepted_tokens,
                len(seq.token_ids),
            )
            if accepted:
                self.rest = _TRY_AGAIN
            for _ in range(accepted):
                self.rate += _LEARN * (1 - self.rate)
            if accepted < proposed:
                self.rate -= _LEARN * self.rate
        elif self.rate < _FIRST_RATE and len(seq.token_ids) - self.at >= self.rest:
            self.rate, self.at = _FIRST_RATE, len(seq.token_ids)
            self.rest *= 2


class Drafting:
    """The proposers "draft" and "heads"."""

    def __init__(self, name: str, *, computes_again: bool = False) -> None:
        """`name`: that of the proposer. computes_again: see `Lookup`."""
        self.name = name
        self._computes_again = computes_again
        self._records: dict[Sequence, _Record] = {}
        self._costs = Costs()
        self._rate = _FIRST_RATE
        """What is believed of a new sequence."""

    def propose(self, candidates: Items[Candidate], num_rows: int, room: int) -> Items[Items[int]]:
        """See `Proposer`. What stands for the guesses is that of `drafted_tokens`."""
        count = self._count(candidates, num_rows, room, _GAIN)
        return [
            () if candidate.seq.is_constrained else drafted_tokens(min(count, candidate.most))
            for candidate in candidates
        ]

    def is_due(self, candidates: Items[Candidate], num_rows: int, room: int) -> bool:
        """See `Proposer`."""
        return self._count(candidates, num_rows, room, _WAIT_GAIN) > 0

    def measured(self, num_rows: int, num_proposed: int, elapsed_ns: float) -> None:
        """See `Proposer`."""
        self._costs.measured(num_rows, num_proposed, elapsed_ns)

    def ended(self, seq: Sequence) -> None:
        """See `Proposer`."""
        record = self._records.pop(seq, None)
        if record is not None:
            record.catch_up(seq)
            self._rate = max(self._rate + _LEARN * (record.rate - self._rate), _LEAST_RATE)

    def _count(self, candidates: Items[Candidate], num_rows: int, room: int, gain: float) -> int:
        """Tell how many tokens the draft guesses for each candidate, so that a step brings the most tokens in
        the time that it takes: as many for each, because the draft guesses for all rows at once. None unless
        that is `gain` times what a step without guesses brings. Nothing is guessed for a sequence under a
        constraint, whose masks need its tokens on the host.
        """
        asked = [candidate for candidate in candidates if not candidate.seq.is_constrained]
        plain_ns = self._costs.plain_ns(num_rows)
        if plain_ns is None or not asked:
            return 0
        rates = [self._rate_of(seq) for seq, _ in asked]
        best, best_speed = 0, gain * num_rows / plain_ns
        made, num_guessed, all_right = float(num_rows), 0, 1.0
        for count in range(1, max(most for _, most in asked) + 1):
            further = [rate**count for rate, (_, most) in zip(rates, asked, strict=True) if count <= most]
            made, num_guessed = made + sum(further), num_guessed + len(further)
            if num_guessed > room:
                break
            took_ns = self._costs.checked_ns(num_rows, plain_ns, num_guessed)[-1]
            all_right *= math.prod(
                rate for rate, (_, most) in zip(rates, asked, strict=True) if count <= most
            )
            # The step behind a wrong guess has at most as many tokens, and brings one of each row.
            again = 1 - all_right if self._computes_again else 0.0
            speed = (made + num_rows * again) / (took_ns * (1 + again))
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    def _rate_of(self, seq: Sequence) -> float:
        record = self._records.get(seq)
        if record is None:
            record = self._records[seq] = _Record(seq, self._rate)
        record.catch_up(seq)
        return record.rate
