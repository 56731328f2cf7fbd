"""What a request passes before it is queued. No jax."""

from __future__ import annotations

import dataclasses
import secrets
import time

from penstock.runtime.requests.checks import check_token_ids, in_vocabulary, knows_tokens
from penstock.runtime.requests.fanout import PreparedPrompt
from penstock.runtime.requests.request import Request
from penstock.runtime.requests.token_bias import bias_row
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.sequence import Sequence

MANY_BIASES = 1_000
"""From this many biases on, their array is made beforehand, once for all outputs. For fewer, it would take
more memory while the request waits than it saves time."""


class Intake:
    """All work that grows with the size of a request. It is done in the thread that submits, without the
    engine's lock.
    """

    def __init__(self, scheduler: Scheduler, vocab_size: int) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size

    def prepare(self, request: Request) -> PreparedPrompt:
        """Makes what all outputs of one prompt can share: whether the model knows all tokens, the keys of the
        prefix cache, and the array of many biases. Takes about 10 ms for 100,000 tokens, or as many biases.
        Raises nothing.
        """
        token_ids, cache, sampling = request.prompt_token_ids, request.cache, request.sampling
        is_known = in_vocabulary(token_ids, self._vocab_size)
        keys = self._scheduler.page_keys(request) if is_known else ()
        if not knows_tokens(sampling, self._vocab_size):
            return PreparedPrompt(token_ids, cache, tuple(keys), is_known)
        row = None
        if len(sampling.logit_bias) + len(sampling.allowed_token_ids) >= MANY_BIASES:
            row = bias_row(sampling, self._vocab_size)
        return PreparedPrompt(token_ids, cache, tuple(keys), is_known, sampling, row)

    def admit(self, request: Request, prepared: PreparedPrompt | None) -> Sequence:
        """Makes the sequence that `Scheduler.queue` takes. A request without a seed gets one.

        Raises ValueError if `prepared` belongs to another prompt, InvalidRequest for tokens that the model
        does not have and for too many stop ids, PromptTooLong and ExceedsKVCapacity.
        """
        if prepared is None:
            prepared = self.prepare(request)
        elif prepared.token_ids is not request.prompt_token_ids or prepared.cache != request.cache:
            raise ValueError("another prompt was prepared than is submitted")
        is_covered = prepared.covers(request.sampling)
        check_token_ids(
            request,
            self._vocab_size,
            len(self._scheduler.config.eos_token_ids),
            prompt_is_known=prepared.in_vocabulary,
            sampling_is_known=is_covered,
        )
        row = prepared.bias_row if is_covered else None
        if request.sampling.seed is None:
            sampling = request.sampling.seeded(secrets.randbits(64))
            request = dataclasses.replace(request, sampling=sampling, bias_row=row)
        elif row is not None:
            request = dataclasses.replace(request, bias_row=row)
        return self._scheduler.prepare(request, time.monotonic_ns(), prepared.page_keys)
