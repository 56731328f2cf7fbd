"""What following a grammar may cost: processor time for masks and for accepting tokens.

llguidance itself bounds the work of one step, in units that do not depend on the machine (`build_matcher`).
This module bounds what many such steps may cost together, in time, because llguidance does not report how
much work it did. The time is that of the thread that did the work, so other load does not count. Ordinary
grammars use a fifth of it.
"""

from __future__ import annotations

from collections.abc import Callable

REQUEST_S = 0.1
"""Seconds that the outputs of a request may use together, beyond what their tokens earn."""
OUTPUT_S = 0.005
"""Seconds more for each output of a request: all of them begin before any token is made."""
CALL_S = 0.05
"""Most seconds that one mask, or one token that is accepted, counts for. A collection of Python's garbage, or
a pause of a virtual machine, may fall into any of them. It takes hundreds of milliseconds, and says nothing
of the grammar. So a budget is spent by three slow ones at the soonest."""
FEW_TOKENS = 16
"""If a request spends its budget with fewer tokens than this, the grammar costs too much, whatever the
request. With more tokens, the reason may be what the prompt made the model write, so other requests may still
use the grammar."""
TOKEN_S = 0.002
"""Seconds that a token earns. A mask takes 20 to 400 us, in new states of the lexer up to 3 ms; that of a
very ambiguous grammar takes hundreds of milliseconds."""


class Budget:
    """Time that may be used: `most_s` seconds at first, and also at most; each token gives back up to
    `token_s`. It is spent once more than `most_s` + T * `token_s` was used over some T tokens.
    """

    def __init__(self, most_s: float, token_s: float = TOKEN_S) -> None:
        self._most_s, self._token_s = most_s, token_s
        self._left_s = most_s

    def earn(self) -> None:
        """Give back the time of one token."""
        self._left_s = min(self._most_s, self._left_s + self._token_s)

    def use(self, seconds: float) -> None:
        """Take time from the budget, in seconds."""
        self._left_s -= seconds

    @property
    def is_spent(self) -> bool:
        """Whether more time was used than there was."""
        return self._left_s < 0


def request_budget(num_outputs: int = 1) -> Budget:
    """Return the budget that the outputs of one request share."""
    return Budget(REQUEST_S + OUTPUT_S * num_outputs)


class Account:
    """Counts the time that the outputs of one request use."""

    def __init__(self, budget: Budget, on_costly: Callable[[], None] = lambda: None) -> None:
        """`on_costly` is called if the grammar itself is too costly, and not just the text that was written
        under it.
        """
        self._budget, self._on_costly = budget, on_costly
        self._num_tokens = 0

    def earn(self) -> None:
        """Note that an output has one more token."""
        self._num_tokens += 1
        self._budget.earn()

    def use(self, seconds: float) -> bool:
        """Use the time of one mask, or of one token, in seconds. Returns whether there is time left."""
        self._budget.use(min(seconds, CALL_S))
        if not self._budget.is_spent:
            return True
        self.refuse()
        return False

    def refuse(self) -> None:
        """Note that the request costs too much, as its budget or llguidance shows."""
        if self._num_tokens < FEW_TOKENS:
            self._on_costly()
