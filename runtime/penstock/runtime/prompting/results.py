"""What a request comes to: frozen values. Durations are seconds.

Of prompts after which nothing is generated the engine computes hidden states, of which a `VectorForm` makes
vectors, or log-probabilities, which are a `Score`. `fit_inputs` and `join` fit such prompts into the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.chat.messages import ChatTurn, ToolCall
from penstock.runtime.errors import InvalidRequest, PromptTooLong, Violation
from penstock.runtime.prompting.prompts import ContextParams, Fitted, Truncation, cut, fit
from penstock.runtime.requests.reader import Reader
from penstock.runtime.requests.request import Finish, RequestTiming, StoppingParams, TokenLogprobs
from penstock.runtime.text.interface import Text

_NO_STOPPING = StoppingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """The prompt as the model saw it."""

    token_ids: tuple[int, ...]
    truncated_tokens: int = 0
    """How many tokens were cut off."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry for each token from the second on; None where they were not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How many tokens a request has."""

    prompt_tokens: int
    cached_prompt_tokens: int
    """Of these, those that were found in the prefix cache."""
    completion_tokens: int
    """Of all outputs."""
    reasoning_tokens: int = 0
    """Of these, those of the reasoning, up to the one that completes its closing tag."""
    image_tokens: int = 0
    """Of the prompt's tokens, those that stand for its images."""
    proposed_tokens: int = 0
    """Tokens that were proposed for all outputs and checked by the model."""
    accepted_tokens: int = 0
    """Of these, those that became tokens of the outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a request, or one output of it, took from the moment when the engine took it."""

    queue: float
    """Until the engine began to work on it."""
    time_to_first_token: float | None
    """None: no token was made."""
    total: float
    preemptions: int

    @classmethod
    def of(cls, times: RequestTiming) -> Timing:
        """Return the same in seconds."""

        def seconds(end_ns: int) -> float:
            return max(0, end_ns - times.arrived_ns) / 1e9

        return cls(
            queue=seconds(times.scheduled_ns or times.finished_ns),
            time_to_first_token=seconds(times.first_token_ns) if times.first_token_ns else None,
            total=seconds(times.finished_ns),
            preemptions=times.preemptions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One of the `n` outputs of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    """Why it ended; `finish.reason` is a FinishReason."""
    timing: Timing
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry for each token id; None where they were not asked for."""
    hidden_states: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    """The hidden state from which each token was chosen, float32[tokens, hidden size]: that of the last layer
    after the final norm. None where they were not asked for, or there is no token."""
    reasoning: str = ""
    """What the model marked as thinking; it is not in `text`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that the model made; they are not in `text`."""
    weights: tuple[tuple[int, int], ...] = ()
    """(index of a token, generation of the weights that made it and those after it), as often as that
    changed."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of the whole output: the sum of its tokens' own. None without `logprobs`."""
        return None if self.logprobs is None else math.fsum(entry.sampled for entry in self.logprobs)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds, the wait in the queue included; None: no token was made."""
        return self.timing.time_to_first_token

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the output for each second from when the engine began to work on it to its end."""
        seconds = self.timing.total - self.timing.queue
        return len(self.token_ids) / seconds if seconds > 0 else 0.0

    @property
    def message(self) -> ChatTurn:
        """The assistant's turn, to go on with the conversation. Whether the model is shown its reasoning
        again is the chat template's choice.
        """
        return ChatTurn("assistant", self.text, self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request that has ended. `outputs` are in order of their index; what an output has, this has of the
    first one.
    """

    request_id: str
    model: str
    prompt: PromptInfo
    outputs: tuple[Output, ...]
    usage: Usage
    timing: Timing
    """From the first output's arrival to the last one's end."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish(self) -> Finish:
        return self.outputs[0].finish

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def message(self) -> ChatTurn:
        return self.outputs[0].message


def merged_timing(times: Sequence[RequestTiming]) -> RequestTiming | None:
    """Merge the timings of all outputs of a request: the earliest first token, the latest end, the sums of
    preemptions and of proposed and accepted tokens. Cached tokens are those of the output that was scheduled
    first, because it computed what the others found. None where there are no outputs.
    """
    if not times:
        return None
    if len(times) == 1:
        return times[0]
    scheduled = [t for t in times if t.scheduled_ns]
    first = min(scheduled, key=lambda t: (t.scheduled_ns, t.cached_prompt_tokens), default=times[0])
    return RequestTiming(
        received_ns=min((t.received_ns for t in times if t.received_ns), default=0),
        arrived_ns=min(t.arrived_ns for t in times),
        scheduled_ns=first.scheduled_ns,
        first_token_ns=min((t.first_token_ns for t in times if t.first_token_ns), default=0),
        finished_ns=max(t.finished_ns for t in times),
        preemptions=sum(t.preemptions for t in times),
        cached_prompt_tokens=first.cached_prompt_tokens,
        proposed_tokens=sum(t.proposed_tokens for t in times),
        accepted_tokens=sum(t.accepted_tokens for t in times),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorForm:
    """How vectors are made of pooled hidden states."""

    normalize: bool = True
    """Whether each is divided by its length."""
    dimensions: int | None = None
    """How many of the first numbers are kept, before that; None: all."""

    def check(self, hidden_size: int) -> None:
        """Raise InvalidRequest where the hidden states have fewer numbers than are wanted."""
        if self.dimensions is not None and not 1 <= self.dimensions <= hidden_size:
            described = f"must be from 1 to {hidden_size}, not {self.dimensions}"
            raise InvalidRequest([Violation("dimensions", described)])

    def vector(self, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the vector of a pooled hidden state, float32[dimensions]. A state of zeros stays as it
        is.
        """
        kept = pooled[: self.dimensions]
        if not self.normalize:
            return kept
        length = np.linalg.norm(kept.astype(np.float64))
        return (kept / length).astype(np.float32) if length else kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a model finds a continuation of a prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability of each token, after the prompt and the tokens before it."""

    @classmethod
    def of(cls, token_ids: tuple[int, ...], values: Sequence[TokenLogprobs]) -> Self:
        """Say of the continuation with these tokens what the engine says of each."""
        return cls(token_ids=token_ids, logprobs=tuple(value.sampled for value in values))

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return math.fsum(self.logprobs)


@contextlib.contextmanager
def naming(field: str, bad: list[Violation]) -> Iterator[None]:
    """Add what is wrong with one of several prompts to `bad`, under the name of its field: one prompt alone
    is refused without that.
    """
    try:
        yield
    except PromptTooLong as error:
        described = f"at most {error.max_prompt_tokens} tokens, not {error.num_prompt_tokens}"
        bad.append(Violation(field, described))
    except InvalidRequest as error:
        bad += [Violation(field, violation.description) for violation in error.violations]


def fit_inputs(
    inputs: Sequence[tuple[int, ...]],
    truncation: Truncation,
    room: int,
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> list[Fitted]:
    """Cut the inputs of which embeddings are made. Special tokens `around` an input stay, and what is between
    them is cut. InvalidRequest names all that are empty, or too long where nothing may be cut.
    """
    bad = list[Violation]()
    fitted: list[Fitted] = []
    for i, token_ids in enumerate(inputs):
        with naming(f"inputs[{i}]", bad):
            fitted.append(fit_input(token_ids, truncation, room, around))
        if not token_ids:
            bad.append(Violation(f"inputs[{i}]", "has no tokens"))
    if bad:
        raise InvalidRequest(bad)
    return fitted


def fit_input(
    token_ids: tuple[int, ...],
    truncation: Truncation,
    room: int,
    around: tuple[tuple[int, ...], tuple[int, ...]],
) -> Fitted:
    """Cut one input, see `fit_inputs`. PromptTooLong where nothing may be cut."""
    kept = _cut_within(token_ids, truncation, room - 1, around)
    one = fit(kept, ContextParams(truncation), _NO_STOPPING, room)
    return dataclasses.replace(one, num_truncated=one.num_truncated + len(token_ids) - len(kept))


def special_around(text: Text | None, reader: Reader | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens around a text that stay when it is cut: those of a model that reads texts
    whole.
    """
    if text is None or reader is None or not reader.reads_whole:
        return (), ()
    return text.special_around


def _cut_within(
    token_ids: tuple[int, ...],
    truncation: Truncation,
    most: int,
    around: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[int, ...]:
    before, behind = around
    end = len(token_ids) - len(behind)
    inner = most - len(before) - len(behind)
    is_around = token_ids[: len(before)] == before and token_ids[end:] == behind
    if truncation is Truncation.REJECT or len(token_ids) <= most or inner < 1 or not is_around:
        return token_ids
    return before + cut(token_ids[len(before) : end], inner, truncation) + behind


def join(
    prompt: tuple[int, ...], continuations: Sequence[tuple[int, ...]], room: int
) -> list[tuple[int, ...]]:
    """Return the prompt with each continuation. InvalidRequest where one of these is empty, and PromptTooLong
    where they do not fit together.
    """
    bad = [
        Violation(f"continuations[{i}]", "has no tokens")
        for i, continuation in enumerate(continuations)
        if not continuation
    ]
    if bad or not prompt:
        raise InvalidRequest(bad or [Violation("input", "the prompt has no tokens")])
    longest = len(prompt) + max(map(len, continuations))
    if longest > room - 1:
        raise PromptTooLong(longest, room - 1)
    return [prompt + continuation for continuation in continuations]
