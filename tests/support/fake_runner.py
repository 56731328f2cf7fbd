"""A runner on Python lists: what the compiled step does, without jax, for the scheduler's tests.

Its KV cache stores the token itself at each position and is poisoned whenever a page changes hands. The model
reads its history back through the page tables, so a wrong page, position, order or length is a wrong token or
a poison read.
"""

from __future__ import annotations

from penstock.runtime.plan import Plan, StepResult
from penstock.runtime.request import FinishReason, Request, TokenLogprobs
from penstock.runtime.scheduler import SchedulerConfig

VOCAB = 50
EOS = frozenset({3, 17})
POISON = -1


def next_token(history: list[int], banned: frozenset[int]) -> int:
    """Depends on every token and their number; going on to the next id not banned stands for the mask."""
    assert POISON not in history, f"read a position that was never written: {history}"
    token = (sum(history) * 7 + len(history)) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def run_alone(request: Request, context_limit: int) -> tuple[list[int], FinishReason]:
    """What the request must produce, from the definition of its parameters."""
    stopping = request.stopping
    eos = frozenset() if stopping.ignore_eos else EOS
    history = list(request.prompt_token_ids)
    made: list[int] = []
    while True:
        may_stop = len(made) >= stopping.min_tokens
        token = next_token(history, frozenset() if may_stop else eos | set(stopping.stop_token_ids))
        history.append(token)
        made.append(token)
        if may_stop and token in eos:
            return made, FinishReason.EOS
        if may_stop and token in stopping.stop_token_ids:
            return made, FinishReason.STOP
        if len(made) == stopping.max_tokens:
            return made, FinishReason.MAX_TOKENS
        if len(history) == context_limit:
            return made, FinishReason.CONTEXT_FULL


class FakeRunner:
    """Page tables, KV and last tokens live here, as on the device; a row is known by its slot only."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.requests: dict[int, Request] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.last: dict[int, int] = {}
        self.kv = [[POISON] * config.page_size for _ in range(config.num_pages)]

    def execute(self, plan: Plan) -> StepResult:
        for slot, request in plan.new_requests:
            self.requests[slot], self.tables[slot] = request, {}
            self.last.pop(slot, None)  # it belonged to another request, or to a history that is computed anew
        for write in plan.page_writes:
            self.tables[write.slot][write.index] = write.page
            self.kv[write.page] = [POISON] * self.config.page_size
        written = set()
        for row in plan.rows:
            inputs = (self.last[row.slot],) if row.token_ids is None else row.token_ids
            assert len(inputs) == row.num_tokens
            for position, token in enumerate(inputs, row.start):
                page, offset = self._where(row.slot, position)
                assert (page, offset) not in written, "two rows write one place"
                written.add((page, offset))
                self.kv[page][offset] = token
        sampled: list[tuple[int, ...]] = []
        for row in plan.rows:
            if row.samples:
                self.last[row.slot] = self._sample(row.slot, row.start + row.num_tokens, row.bans > 0)
                sampled.append((self.last[row.slot],))
            else:
                sampled.append(())
        return StepResult(sampled, [tuple(TokenLogprobs(-float(t)) for t in tokens) for tokens in sampled])

    def _where(self, slot: int, position: int) -> tuple[int, int]:
        return self.tables[slot][position // self.config.page_size], position % self.config.page_size

    def _sample(self, slot: int, length: int, bans_stops: bool) -> int:
        history = []
        for position in range(length):
            page, offset = self._where(slot, position)
            history.append(self.kv[page][offset])
        stopping = self.requests[slot].stopping
        ends = (frozenset() if stopping.ignore_eos else EOS) | frozenset(stopping.stop_token_ids)
        return next_token(history, ends if bans_stops else frozenset())
