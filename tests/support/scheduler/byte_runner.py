"""The fake runner with a model whose tokens are known beforehand: it counts bytes upwards. No jax.

Token b is the byte b. After "a" comes "b", after "b" comes "c", after "z" the end token. Output i of a
request begins i letters later: of "a", output 2 is "def...". A script may replace this for a prompt, or for
one output of it. Under a constraint the token is the lowest allowed one that is not below the expected one,
or else the lowest allowed one.

Each next token follows from the one that the runner reads from its KV cache, through the page tables that
plans wrote. Log-probabilities and hidden states are made up, of tokens and their places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.failing import as_exception
from penstock.runtime.requests.constraint import TokenConstraint, mask_words
from penstock.runtime.requests.request import SEPARATOR, Pooling, Request, TokenLogprobs
from penstock.runtime.scheduling.plan import Plan, PlanRow, StepResult
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence as Scheduled
from tests.support.models.byte_text import EOS
from tests.support.scheduler.fake_runner import GARBAGE, Entry, LazyRunner, LazyStep

HIDDEN_SIZE = 4
Scripts = Mapping[tuple[tuple[int, ...], int | None], Sequence[int]]
"""Prompt, and output or None for all outputs, to the tokens that come; behind them comes the end token."""


def logprobs_of(token: int, top: int) -> TokenLogprobs:
    """Make up log-probabilities: the sampled token has -token/8, and the likeliest tokens are token, token +
    1, ...
    """
    return TokenLogprobs(-token / 8, tuple((token + i, -(token + i) / 8) for i in range(top)))


def prompt_logprobs_of(token_ids: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Make up log-probabilities of each prompt token but the first: half of those of `logprobs_of`."""
    return tuple(
        TokenLogprobs(-token / 16, tuple((token + i, -(token + i) / 16) for i in range(top)))
        for token in token_ids[1:]
    )


def hidden_of(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the made-up hidden state after these tokens: their number, their sum, the last one and 1."""
    return np.array([len(token_ids), sum(token_ids), token_ids[-1], 1], np.float32)


def pooled_of(token_ids: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    """Return the made-up embedding of these tokens."""
    if pooling is Pooling.LAST_TOKEN:
        return hidden_of(token_ids)
    states = np.stack([hidden_of(token_ids[: end + 1]) for end in range(len(token_ids))])
    mean = (states.sum(axis=0, dtype=np.float64) / len(states)).astype(np.float32)
    pooled: dict[Pooling, NDArray[np.float32]] = {
        Pooling.FIRST_TOKEN: states[0],
        Pooling.MAX: states.max(axis=0),
        Pooling.MEAN: mean,
    }
    return pooled[pooling]


class _Pages(dict[int, list[Entry | None]]):
    """The pages of a group of layers, of which most are never written."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self._page_size = page_size

    def __missing__(self, page: int) -> list[Entry | None]:
        self[page] = [None] * self._page_size
        return self[page]


class ByteRunner(LazyRunner):
    """See the module's docstring."""

    def __init__(self, config: SchedulerConfig, scripts: Scripts, vocab_size: int) -> None:
        super().__init__(config)
        self.scripts = scripts
        self.before_step: Callable[[], None] = lambda: None
        """Called on the engine's thread before a step has its tokens."""
        self.is_put_off: Callable[[Plan], bool] = lambda plan: False
        """Whether a plan shall make no token, as if no mask were ready."""
        self._vocab_size = vocab_size
        self._masks: dict[int, dict[int, NDArray[np.int64] | Exception]] = {}
        """Step to row to the tokens that its constraint allows, or what it raised."""
        self._allowed: dict[int, NDArray[np.int64]] = {}
        """Slot to the tokens that its row's constraint allows in the step that is computed."""

    def new_kv(self) -> Any:
        return [_Pages(self.config.page_size) for _ in self.config.groups]

    # -- steps --

    def execute_async(self, plan: Plan) -> LazyStep:
        step = super().execute_async(plan)
        return dataclasses.replace(step, awaits_choice=True) if self.is_put_off(plan) else step

    def choose(self, step: LazyStep) -> LazyStep:
        plan = step.plan
        self.log.append(("choose", plan.step_id))
        self.unchosen.pop(plan.step_id, None)
        if self.is_put_off(plan):
            skipped = frozenset(i for i, row in enumerate(plan.rows) if row.samples)
            return dataclasses.replace(step, awaits_choice=False, skipped=skipped)
        masks = self._masks[plan.step_id] = {}
        for i, row in enumerate(plan.rows):
            constraint = self.holders[row.slot].constraint
            if row.samples and constraint is not None:
                try:
                    masks[i] = _allowed(constraint, self._vocab_size)
                except BaseException as error:  # noqa: BLE001 -- a panic in Rust is no Exception
                    masks[i] = as_exception(error)
        return dataclasses.replace(step, awaits_choice=False)

    def wait(self, step: LazyStep) -> StepResult:
        if not self.is_put_off(step.plan):
            self.before_step()
        return super().wait(step)

    def execute(self, plan: Plan, skipped: Collection[int] = ()) -> StepResult:
        masks = self._masks.pop(plan.step_id, {})
        errors = {i: mask for i, mask in masks.items() if isinstance(mask, Exception)}
        self._allowed = {
            plan.rows[i].slot: mask for i, mask in masks.items() if not isinstance(mask, Exception)
        }
        result = super().execute(plan, {*skipped, *errors})
        for i in errors:  # a step that was dispatched meanwhile may have such a row, too
            self.ended.add(plan.rows[i].slot)
            self.last[plan.rows[i].slot] = GARBAGE[0]
        prompt: dict[int, tuple[TokenLogprobs, ...]] = {}
        hidden: dict[int, NDArray[np.float32]] = {}
        logprobs: list[list[TokenLogprobs]] = []
        for i, (row, made) in enumerate(zip(plan.rows, result.token_ids, strict=True)):
            request = self.requests[row.slot]
            top = request.logprobs
            logprobs.append([] if top is None else [logprobs_of(token, top) for token in made])
            if row.token_ids is not None and request.prompt_logprobs is not None:
                tokens = request.prompt_token_ids
                known = prompt_logprobs_of(tokens, request.prompt_logprobs)
                prompt[i] = known[row.start : row.start + row.num_tokens]
            if i in plan.pooled:
                pooling = None if request.reading is None else request.reading.pooling
                end = 1 if pooling is Pooling.FIRST_TOKEN else row.num_tokens
                states = [
                    hidden_of(request.prompt_token_ids[: row.start + at + 1])
                    for at in range(plan.pooled[i], end)
                ]
                hidden[i] = np.max(states, axis=0) if pooling is Pooling.MAX else np.sum(states, axis=0)
            elif request.hidden_states and made:
                hidden[i] = hidden_of(self._history(row))
        return dataclasses.replace(
            result, logprobs=logprobs, errors=errors, prompt_logprobs=prompt, hidden=hidden
        )

    def _history(self, row: PlanRow) -> list[int]:
        """Return the tokens up to the row's last input."""
        return [self.read(row.slot, 0, position)[0] for position in range(row.start + row.num_tokens)]

    # -- the model --

    def sample(self, row: PlanRow, step: int) -> int:
        if row.slot in self.ended:
            return GARBAGE[0]
        request = self.requests[row.slot]
        length = row.start + row.num_tokens + step
        last, _ = self.read(row.slot, 0, length - 1)
        token = self.following(request, length - len(request.prompt_token_ids), last)
        if step < row.bans:
            ends = self.end_ids(request)
            while token in ends:
                token = ord("a") if token == EOS else token + 1
        allowed = self._allowed.get(row.slot)
        if allowed is None:
            return token
        return int(next((other for other in allowed if other >= token), allowed[0]))

    def following(self, request: Request, num_made: int, last: int) -> int:
        """Return the token after `last`, which is the generated one of this number, counted from 0."""
        index = int(request.request_id.partition(SEPARATOR)[2] or 0)
        prompt = request.prompt_token_ids
        script = self.scripts.get((prompt, index), self.scripts.get((prompt, None)))
        if script is not None:
            return script[num_made] if num_made < len(script) else EOS
        if num_made == 0:
            last += index
        return EOS if last == ord("z") else ord("a") if last >= EOS else last + 1


class ByteProposer:
    """Proposes the same number of tokens once for each output. So many of them are those that come."""

    name = "lookup"

    def __init__(self, proposed: int, accepted: int) -> None:
        self._proposed, self._accepted = proposed, accepted
        self._asked: set[Scheduled] = set()
        self.following: Callable[[Request, int, int], int] = lambda request, num_made, last: 0

    def propose(self, candidates: Sequence[Any], num_rows: int, room: int) -> list[list[int]]:
        return [self._guess(each.seq) for each in candidates]

    def _guess(self, seq: Scheduled) -> list[int]:
        if seq in self._asked:
            return []
        self._asked.add(seq)
        guessed = list[int]()
        for i in range(self._proposed):
            last = guessed[-1] if guessed else seq.token_ids[-1]
            right = self.following(seq.request, len(seq.token_ids) - seq.num_prompt + i, last)
            guessed.append(right if i < self._accepted else right - 1)
        return guessed

    def is_due(self, candidates: Sequence[Any], num_rows: int, room: int) -> bool:
        return any(each.seq not in self._asked for each in candidates)

    def measured(self, num_rows: int, num_proposed: int, elapsed_ns: float) -> None:
        """Take no note of times."""

    def ended(self, seq: Scheduled) -> None:
        """Take no note of ends."""


def _allowed(constraint: TokenConstraint, vocab_size: int) -> NDArray[np.int64]:
    mask = np.zeros(mask_words(vocab_size), np.int32)
    constraint.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
