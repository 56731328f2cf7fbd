"""Steps that a runner has dispatched: a type for those that wait for their choice, and one for those that
wait for their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import NonFiniteLogits
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.device.hidden_rows import HiddenRows
from penstock.runtime.execution.device.prompt_logprobs import PromptLogprobs
from penstock.runtime.execution.step_programs import Chosen
from penstock.runtime.loop.interface import StepShape
from penstock.runtime.ops.sampling_codes import NON_FINITE
from penstock.runtime.ops.token_reports import read_logprobs
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.request import TokenLogprobs
from penstock.runtime.scheduling.plan import Plan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingChoice:
    """A step whose model runs, and whose tokens are not chosen yet. `ModelRunner.choose` chooses them."""

    plan: Plan
    packed_ns: int
    """See `DispatchedStep`."""
    shape: StepShape
    """See `DispatchedStep`."""
    key: ProgramKey
    logits: jax.Array
    packed: NDArray[np.int32]
    """The first part of the step's buffer, which the choice needs."""
    constraints: Mapping[int, TokenConstraint]
    """Row to constraint."""
    logprobs: Sequence[int | None]
    """See `AwaitingTokens`."""
    prompt: PromptLogprobs | None
    hidden: HiddenRows | None

    @property
    def awaits_choice(self) -> bool:
        """See `DispatchedStep`."""
        return True

    @property
    def skipped(self) -> frozenset[int]:
        """See `DispatchedStep`. Before the choice no row is skipped."""
        return frozenset()

    @property
    def late(self) -> frozenset[int]:
        """See `DispatchedStep`."""
        return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingTokens:
    """A step whose tokens are chosen on the device. A copy for the host is on its way."""

    plan: Plan
    packed_ns: int
    """See `DispatchedStep`."""
    shape: StepShape
    """See `DispatchedStep`."""
    chosen: Chosen
    logprobs: Sequence[int | None]
    """For each row, how many log-probabilities of likeliest tokens it wants; None: not even the sampled
    token's. This is noted here because the slot may belong to another request when the result is read."""
    prompt: PromptLogprobs | None = None
    """Log-probabilities of prompt tokens; None where no row wants any."""
    hidden: HiddenRows | None = None
    """Hidden states; None where no row wants any."""
    errors: Mapping[int, Exception] = field(default_factory=dict)
    """Row to error, for rows for which no token can be chosen."""
    skipped: frozenset[int] = frozenset()
    """See `DispatchedStep`."""
    late: frozenset[int] = frozenset()
    """See `DispatchedStep`."""

    @property
    def awaits_choice(self) -> bool:
        """See `DispatchedStep`."""
        return False

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row wants log-probabilities; if not, they stay on the device."""
        return any(wanted is not None for wanted in self.logprobs)

    def sent(self) -> AwaitingTokens:
        """Starts to copy to the host what it will read of this step. Returns the step."""
        self.chosen.tokens.copy_to_host_async()
        if self.wants_logprobs:
            self.chosen.logprobs.copy_to_host_async()
        return self

    def read(self, num_top: int) -> StepResult:
        """Blocks until the result is on the host. `num_top`: how many likeliest tokens the programs
        report.
        """
        plan = self.plan
        tokens = np.asarray(self.chosen.tokens)[: plan.num_steps, : len(plan.rows)].T
        token_ids: list[Sequence[int]] = tokens.tolist()
        errors = dict(self.errors)
        for i, row in enumerate(plan.rows):
            if not row.samples:
                token_ids[i] = ()
        for i in self.skipped.union(errors):
            token_ids[i] = ()  # they were chosen without a mask
        if tokens.min() < 0:
            for i, made in enumerate(token_ids):
                if NON_FINITE in made:
                    errors.setdefault(i, NonFiniteLogits())
                token_ids[i] = [token for token in made if token >= 0]
        logprobs: list[Sequence[TokenLogprobs]] = [()] * len(plan.rows)
        if self.wants_logprobs:
            values = np.asarray(self.chosen.logprobs)
            for i, k in enumerate(self.logprobs):
                if k is not None:
                    logprobs[i] = [read_logprobs(values[s, i], num_top, k) for s in range(len(token_ids[i]))]
        prompt = {} if self.prompt is None else self.prompt.read(num_top)
        hidden = {} if self.hidden is None else self.hidden.read()
        for i, values in hidden.items():
            if not np.isfinite(values).all():
                errors.setdefault(i, NonFiniteLogits())
        return StepResult(token_ids, logprobs, errors=errors, prompt_logprobs=prompt, hidden=hidden)


PendingStep = AwaitingChoice | AwaitingTokens
