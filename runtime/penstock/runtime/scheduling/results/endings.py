"""Ends sequences, and remembers the ids of those that have ended. No jax."""

from __future__ import annotations

from penstock.runtime.requests.request import Finish, FinishReason, StepOutput, TokenLogprobs
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.sequence import Sequence
from penstock.runtime.scheduling.stopping import NEVER_NS

FINISHED_MEMORY = 4096
"""How many ids of ended outputs `Endings.has_finished` remembers."""


class Endings:
    """Ends the sequences of one roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._finished: dict[str, None] = {}
        """The ids of the outputs that ended last, oldest first."""
        self.next_deadline_ns = NEVER_NS
        """No active sequence's time limit passes before this. It may be the limit of a sequence that has
        ended."""

    def expect(self, seq: Sequence) -> None:
        """Notes the time limit of a sequence that was queued."""
        self.next_deadline_ns = min(self.next_deadline_ns, seq.rules.deadline_ns)

    def end(
        self,
        seq: Sequence,
        now_ns: int,
        *,
        weights_generation: int,
        finish: Finish | None = None,
        error: Exception | None = None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> StepOutput:
        """Ends a sequence, by `finish` or `error`, and makes its last StepOutput. Its slot and pages are free
        when this returns.
        """
        self._roster.remove(seq)
        self._finished.pop(seq.request_id, None)  # an id that is used again counts as the newest
        self._finished[seq.request_id] = None
        if len(self._finished) > FINISHED_MEMORY:
            del self._finished[next(iter(self._finished))]
        return StepOutput(
            request_id=seq.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            finish=finish,
            timing=seq.timing(now_ns),
            weights_generation=weights_generation,
            error=error,
            prompt_logprobs=prompt_logprobs,
        )

    def expire(self, now_ns: int, *, weights_generation: int) -> list[StepOutput]:
        """Ends the active sequences whose time limit has passed. Costs nothing while no time limit is due."""
        if now_ns < self.next_deadline_ns:
            return []
        active = self._roster.active()
        self.next_deadline_ns = min(
            (deadline for seq in active if (deadline := seq.rules.deadline_ns) > now_ns), default=NEVER_NS
        )
        finish = Finish(FinishReason.TIME_LIMIT)
        return [
            self.end(seq, now_ns, weights_generation=weights_generation, finish=finish)
            for seq in active
            if seq.rules.deadline_ns <= now_ns
        ]

    def has_finished(self, request_id: str) -> bool:
        """Whether an output of this id ended, in any way, among the last FINISHED_MEMORY, and the id is not
        in use again.
        """
        return request_id in self._finished and self._roster.find(request_id) is None
