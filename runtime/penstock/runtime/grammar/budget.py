"""What following a grammar may cost: processor time of masks and of accepted tokens.

llguidance bounds the work of one step by itself, in units that do not depend on the machine
(`build_matcher`). What many such steps may cost together is bounded here, in time, because llguidance does
not tell how much it did. It is the time of the thread that did the work, so other load does not count; and
honest grammars use a fifth of it.
"""

from __future__ import annotations

from collections.abc import Callable

REQUEST_S = 0.1
"""What the outputs of a request may use together beyond what their tokens earn."""
OUTPUT_S = 0.005
"""So much more for each of its outputs: they all begin before a token is made."""
FEW_TOKENS = 16
"""Where a request spends its budget with fewer tokens, the grammar costs too much whoever uses it. Else
it may have been what the prompt had the model write, so that the grammar is refused to nobody else.
"""
TOKEN_S = 0.002
"""What a token earns. Masks take 20 to 400 us, those in new territory up to 3 ms; a very ambiguous grammar's
take hundreds of milliseconds."""


class Budget:
    """Time that may be used: so much at first and at most, and what was used comes back with each token. It
    is spent once over some T tokens more than `most_s` + T * TOKEN_S was used.
    """

    def __init__(self, most_s: float, token_s: float = TOKEN_S) -> None:
        self._most_s, self._token_s = most_s, token_s
        self._left_s = most_s

    def earn(self) -> None:
        """A token was made."""
        self._left_s = min(self._most_s, self._left_s + self._token_s)

    def use(self, seconds: float) -> None:
        self._left_s -= seconds

    @property
    def is_spent(self) -> bool:
        return self._left_s < 0


def request_budget(num_outputs: int = 1) -> Budget:
    """What the outputs of one request share."""
    return Budget(REQUEST_S + OUTPUT_S * num_outputs)


class Account:
    """Where the use of a request's outputs is booked."""

    def __init__(self, budget: Budget, on_costly: Callable[[], None] = lambda: None) -> None:
        """`on_costly` is called where the grammar is at fault, and not what was written under it."""
        self._budget, self._on_costly = budget, on_costly
        self._num_tokens = 0

    def earn(self) -> None:
        """An output has one more token."""
        self._num_tokens += 1
        self._budget.earn()

    def use(self, seconds: float) -> bool:
        """Whether there is time left after that was used."""
        self._budget.use(seconds)
        if not self._budget.is_spent:
            return True
        self.refuse()
        return False

    def refuse(self) -> None:
        """The request costs too much, as its budget or llguidance shows."""
        if self._num_tokens < FEW_TOKENS:
            self._on_costly()
