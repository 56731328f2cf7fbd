"""Which tokens are proposed for the rows of a plan. No jax.

The model checks proposed tokens in the step that they are proposed for: it samples a token after each of
them, with the same function and the same random numbers as if it came there one token at a time, and what it
samples counts up to the first token that was not proposed. So proposals change how fast an output grows, and
never what it is (the coupling is that of Daliri, Musco and Suresh, arXiv 2408.07978).

A proposer must know all tokens of a sequence. So proposals are made only while no step is in flight; and
while a step with proposals is in flight no other plan is made, because the host does not know yet where its
sequences go on, and a step without them would read all weights for the others alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from penstock.runtime.scheduling.plan import Draft, drafted_tokens
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence


class Candidate(NamedTuple):
    """A sequence for which tokens may be proposed."""

    seq: Sequence
    most: int
    """How many tokens at most, at least 1."""


class Proposer(Protocol):
    """Guesses tokens. Whatever it proposes, outputs stay the same. It is called with the engine's lock held,
    so it must not take long.
    """

    @property
    def name(self) -> str:
        """What metrics call it."""
        ...

    def propose(self, candidates: Items[Candidate], num_rows: int, room: int) -> Items[Items[int]]:
        """Propose the next tokens of each candidate, or what stands for guesses of a draft model
        (`drafted_tokens`); none where that would not pay. It is for a step with `num_rows` rows, those of the
        candidates included. What goes beyond the bounds of a candidate, or beyond `room` tokens in all, is
        dropped.
        """
        ...

    def is_due(self, candidates: Items[Candidate], num_rows: int, room: int) -> bool:
        """Say whether it pays to wait for the steps in flight, so that tokens can be proposed behind
        theirs.
        """
        ...

    def measured(self, num_rows: int, num_proposed: int, elapsed_ns: float) -> None:
        """Take note of how long a decode step took, with what the host did for it."""
        ...

    def ended(self, seq: Sequence) -> None:
        """Take note that a sequence has ended."""
        ...


class Proposals:
    """Asks a proposer, and keeps its proposals within bounds."""

    def __init__(self, config: SchedulerConfig, roster: Roster, proposer: Proposer) -> None:
        self._config = config
        self._roster = roster
        self._proposer = proposer

    def is_due(self) -> bool:
        """Say whether to make no plan until the steps in flight are committed. See `Proposer.is_due`."""
        candidates, num_rows, room = self._candidates()
        return bool(candidates) and self._proposer.is_due(candidates, num_rows, room)

    def choose(self, draft: Draft) -> None:
        """Set what is proposed for the rows of a plan, while no earlier plan is in flight and no request can
        enter: steps with prompts have no room for more rows than sequences. Pages never have to be taken from
        a sequence for it: without them, nothing is proposed.
        """
        if draft.in_flight:
            return
        candidates, num_rows, room = self._candidates()
        if not candidates:
            return
        proposed: dict[Sequence, tuple[int, ...]] = {}
        guesses = self._proposer.propose(candidates, num_rows, room)
        for (seq, most), guessed in zip(candidates, guesses, strict=True):
            if guessed and room and (tokens := self._known(seq, guessed[: min(most, room)])):
                proposed[seq] = tokens
                room -= len(tokens)
        if proposed and self._have_pages(proposed):
            draft.proposed, draft.proposer = proposed, self._proposer.name

    def _candidates(self) -> tuple[list[Candidate], int, int]:
        """Return the sequences for which tokens may be proposed, the number of all rows of decodes, and for
        how many tokens there is room. None while a prompt is computed: then a step has enough to do.
        """
        config, roster = self._config, self._roster
        running = roster.running
        room = min(config.most_rows, config.max_num_batched_tokens) - len(running)
        candidates: list[Candidate] = []
        if room < 1:
            return candidates, 0, 0
        num_rows = 0
        for seq in running:
            if seq.sits_out:
                continue
            if seq.num_computed < seq.prefill_until:
                return [], 0, 0
            left = seq.max_computed - seq.num_computed
            if left < 1:
                continue
            num_rows += 1
            most = min(config.max_proposed_tokens, left - 1)
            if seq.most_proposed is not None:
                most = min(most, seq.most_proposed)
            if most > 0:
                candidates.append(Candidate(seq, most))
        return candidates, num_rows, room

    def _known(self, seq: Sequence, tokens: Items[int]) -> tuple[int, ...]:
        """Return the tokens before the first that the model does not know, or what stands for guesses of a
        draft. These do not go with a constraint, whose masks need tokens on the host.
        """
        vocab_size, drafted = self._config.vocab_size, drafted_tokens(len(tokens))
        if drafted and tuple(tokens) == drafted:
            return () if seq.is_constrained else drafted[: self._config.drafted_tokens]
        for i, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                return tuple(tokens[:i])
        return tuple(tokens)

    def _have_pages(self, proposed: dict[Sequence, tuple[int, ...]]) -> bool:
        """Say whether all decodes can have the pages of their next positions, with those of their
        proposals.
        """
        groups, needed = self._roster.groups, 0
        for seq in self._roster.running:
            if not seq.sits_out:
                end = seq.num_computed + 1 + len(proposed.get(seq, ()))
                # A sequence that decodes has tables of the same length in all groups.
                needed += max(-(-end // groups.page_size) - len(seq.tables[0].pages), 0)
        return all(pool.can_allocate(needed) for pool in groups.pools)
