"""Proposers for tests: what they propose need not be right, nor within bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from penstock.runtime.scheduling.proposals import Candidate
from penstock.runtime.scheduling.sequence import Sequence as Output

Guess = Callable[[Output, int], Sequence[int]]
"""What is proposed for an output of which at most so many tokens may be proposed."""


class Guesses:
    """Proposes whatever a function guesses, and waits for steps in flight whenever a coin says so."""

    name = "test"

    def __init__(self, guess: Guess, rng: random.Random, *, patience: float = 0.5) -> None:
        """`patience`: how likely it is to wait for the steps in flight."""
        self.guess = guess
        self._rng = rng
        self.patience = patience
        self.num_proposed = 0
        """Tokens that steps have checked."""
        self.ended_ids: list[str] = []
        """The ids of the outputs that have ended."""

    def propose(self, candidates: Sequence[Candidate], num_rows: int, room: int) -> list[Sequence[int]]:
        assert 0 < len(candidates) <= num_rows
        assert room > 0
        return [self.guess(seq, most) for seq, most in candidates]

    def is_due(self, candidates: Sequence[Candidate], num_rows: int, room: int) -> bool:
        return self._rng.random() < self.patience

    def measured(self, num_rows: int, num_proposed: int, elapsed_ns: float) -> None:
        assert elapsed_ns >= 0
        self.num_proposed += num_proposed

    def ended(self, seq: Output) -> None:
        self.ended_ids.append(seq.request_id)


def lies(rng: random.Random, vocab_size: int, right: Guess) -> Guess:
    """Make a guess that is right, wrong, half right, random, too long, or no token at all, by chance. `right`
    knows what comes next.
    """

    def guess(seq: Output, most: int) -> list[int]:
        answer = list(right(seq, most + 1))
        kind = rng.choice(["right", "wrong", "half", "random", "too many", "unknown", "none"])
        if kind == "right":
            return answer[:most]
        if kind == "wrong":
            return [(token + 1) % vocab_size for token in answer[:most]]
        if kind == "half":
            at = rng.randrange(most)
            return [token if i < at else (token + 1) % vocab_size for i, token in enumerate(answer[:most])]
        if kind == "random":
            return rng.choices(range(vocab_size), k=rng.randint(0, most))
        if kind == "too many":
            return answer + rng.choices(range(vocab_size), k=40)
        if kind == "unknown":
            return [*answer[: rng.randint(0, most)], rng.choice([-1, -2, vocab_size, 2**40])]
        return []

    return guess
