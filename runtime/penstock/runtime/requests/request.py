"""What a request asks for and what it gets: frozen values shared by scheduler, engine and service. No jax.

The defaults here are neutral values; the model's own defaults are filled in before such a value is made
(`sampling`). What a request asks for checks itself once, on construction, and raises
`InvalidRequest` with all violations, each with the contract's field path.

A `PromptReading` says what is wanted of a prompt after which nothing is generated: an embedding, or scores of
tokens.

Several outputs of one prompt are requests of their own in the engine, each with an id and a seed that are
made here (`outputs_of`). The first output computes the prompt; the others are its forks, which begin with its
KV pages (`scheduling.planner`).

The id of each further output has U+0000 in it, which no caller's id may have. `Abort` and duplicates go by
the request's id, and an error of one output ends all.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import secrets
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.requests.adapter import AdapterWeights
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.images import MediaItem, RotaryPositions, media_problem
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.requests.word_table import WordTable

MAX_STOP_TOKEN_IDS = 32
"""Width of each row's list of ids that the compiled sampler masks before `min_tokens`; EOS ids count."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
"""Longest id that a caller may choose."""
MAX_ENGINE_ID_CHARS = 256
"""Longest id that the engine takes: the service puts the caller's id before the request's."""
MAX_CACHE_SALT_CHARS = 256
MAX_PROPOSED_TOKENS = 16
"""Most tokens that may be proposed for an output in a step."""


class Pooling(enum.Enum):
    """What an embedding is made of: the hidden states of the last layer, after the final norm."""

    LAST_TOKEN = "last_token"
    """Of the last token alone."""
    FIRST_TOKEN = "first_token"
    """Of the first token alone, which encoders make for it."""
    MEAN = "mean"
    """Of all tokens: their mean."""
    MAX = "max"
    """Of all tokens: the largest number of each channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReading:
    """Exactly one of the two is given."""

    pooling: Pooling | None = None
    """The embedding that is wanted, or what classes are made of."""
    classes: bool = False
    """Whether the numbers of a classifier are wanted in the place of the embedding."""
    scores_from: int | None = None
    """The position of the first token whose log-probability is wanted. `Request.prompt_logprobs` says how
    many likeliest tokens are wanted beside it."""

    def violations(self, num_prompt: int, prompt_logprobs: int | None, *, generates: bool) -> list[Violation]:
        """List what is wrong with a request that reads its prompt like this. `generates`: whether it asks for
        anything of generated tokens.
        """
        bad: list[Violation] = []
        if (self.pooling is None) == (self.scores_from is None):
            bad.append(Violation("reading", "must be either an embedding or scores"))
        if self.scores_from is not None and not 0 < self.scores_from < num_prompt:
            described = f"must be from 1 to {num_prompt - 1}, not {self.scores_from}"
            bad.append(Violation("reading.scores_from", described))
        if (self.scores_from is None) != (prompt_logprobs is None):
            bad.append(Violation("output.prompt_logprobs", "must be given with scores, and only then"))
        if generates:
            bad.append(Violation("reading", "does not go with what is asked for of generated tokens"))
        return bad


def _raise_if(violations: list[Violation]) -> None:
    if violations:
        raise InvalidRequest(violations)


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When generation ends. `max_tokens` None fills the context. When `time_limit_s`, in seconds, is over,
    the output ends with what it has (TIME_LIMIT).

    The text layer (`penstock.runtime.text`) finds `stop` strings, and then ends the request in the engine.
    `min_tokens` masks EOS and stop ids in the sampler, and makes stop strings not count, until that many
    tokens are generated.
    """

    max_tokens: int | None = None
    _: KW_ONLY
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        bad: list[Violation] = []

        def refuse(name: str, described: str) -> None:
            bad.append(Violation(f"stopping.{name}", described))

        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", f"must be at least 1, not {self.max_tokens}")
        if self.min_tokens < 0:
            refuse("min_tokens", f"must be at least 0, not {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens >= 1:
            refuse("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        stop: object = self.stop
        if isinstance(stop, str):
            refuse("stop", "must be a tuple of strings, not one string")
        elif len(self.stop) > MAX_STOP_STRINGS:
            refuse("stop", f"at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}")
        for i, text in enumerate(self.stop[:MAX_STOP_STRINGS]):
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                refuse(f"stop[{i}]", f"must have 1 to {MAX_STOP_STRING_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            refuse("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        if self.time_limit_s is not None and not (math.isfinite(self.time_limit_s) and self.time_limit_s > 0):
            refuse("time_limit", f"must be above 0 s, not {self.time_limit_s}")
        _raise_if(bad)


@dataclass(frozen=True, slots=True)
class CacheParams:
    """How a request uses the prefix cache."""

    salt: str = ""
    """Prefixes are shared only among requests with the same salt."""
    bypass: bool = False
    """Whether the request neither reads from the prefix cache nor adds to it."""

    def __post_init__(self) -> None:
        if len(self.salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidRequest(
                [Violation("cache.cache_salt", f"must have at most {MAX_CACHE_SALT_CHARS} characters")]
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One output as the engine sees it: token ids in, token ids out."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: ResolvedSampling = field(default_factory=ResolvedSampling)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    _: KW_ONLY
    logprobs: int | None = None
    """None: no log-probabilities. k: those of the sampled token and of the k likeliest."""
    cache: CacheParams = field(default_factory=CacheParams)
    priority: int = 0
    """Higher priority goes first, under the scheduling policy "priority"."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens from the second on."""
    constraint: TokenConstraint | None = field(default=None, compare=False)
    """What restricts the output. It has state, so no other request may have the same one."""
    fork_of: str | None = None
    """The engine's id of the first output of the same prompt, with the very same tuple of tokens. While an
    output of that request runs, this one shares and copies its KV pages of the prompt, whatever `cache` says.
    """
    num_outputs: int = field(default=1, compare=False)
    """How many outputs of this prompt are submitted one after the other, this one included."""
    min_generation: int = 0
    """The oldest generation of weights on which the request may start."""
    received_ns: int = 0
    """When whoever submits the request got it, in monotonic ns; 0: when it came to the engine."""
    operation: str = "text_completion"
    """What the caller asked for, by OpenTelemetry's name: "chat" or "text_completion"."""
    trace_id: str = ""
    """The trace in which the request is recorded, 32 hexadecimal digits; empty: it is not recorded."""
    span_id: str = ""
    """The request's span in that trace, 16 hexadecimal digits; empty where `trace_id` is."""
    bias_row: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    """What `sampling` adds to each logit, float32[V], if it was made before the request runs."""
    media: tuple[MediaItem, ...] = ()
    """The images of the prompt, in order of their places."""
    rotary: RotaryPositions | None = field(default=None, repr=False)
    """The rotary positions of a prompt with images; None: they are the positions in the prompt."""
    reading: PromptReading | None = None
    """What is wanted of the prompt alone. The request then ends with its prompt, and generates nothing."""
    adapter: str | None = None
    """The name of the LoRA adapter with which the output is made; None: the model alone."""
    adapter_weights: AdapterWeights | None = field(default=None, compare=False, repr=False)
    """What that name meant when the request came. None: the engine looks it up."""
    hidden_states: bool = False
    """Whether the hidden state is wanted from which each token was chosen."""
    max_proposed_tokens: int | None = None
    """Most tokens that are proposed for the output in a step; 0: none are. None: the engine's own bound,
    which holds in any case."""

    @property
    def adapter_digest(self) -> str:
        """The digest of the adapter's content; empty without one."""
        return "" if self.adapter_weights is None else self.adapter_weights.digest

    def __post_init__(self) -> None:
        bad: list[Violation] = []
        name = request_id_of(self.request_id)  # without what `output_id` adds
        if not 0 < len(name) <= MAX_ENGINE_ID_CHARS:
            bad.append(Violation("request_id", f"must have 1 to {MAX_ENGINE_ID_CHARS} characters"))
        if not self.prompt_token_ids:
            bad.append(Violation("input", "the prompt has no tokens"))
        if self.logprobs is not None and self.logprobs < 0:
            bad.append(Violation("output.logprobs", f"must be at least 0, not {self.logprobs}"))
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            bad.append(Violation("output.prompt_logprobs", f"must be at least 0, not {self.prompt_logprobs}"))
        if self.prompt_logprobs is not None and self.fork_of is not None:
            bad.append(Violation("output.prompt_logprobs", "must not be asked for by a fork"))
        proposed = self.max_proposed_tokens
        if proposed is not None and not 0 <= proposed <= MAX_PROPOSED_TOKENS:
            described = f"must be from 0 to {MAX_PROPOSED_TOKENS}, not {proposed}"
            bad.append(Violation("max_proposed_tokens", described))
        problem = media_problem(self.media, self.rotary, len(self.prompt_token_ids))
        if problem is not None:
            bad.append(Violation("media", problem))
        of_tokens = (self.logprobs, self.constraint, self.fork_of, self.hidden_states or None)
        if self.reading is not None:
            generates = any(wanted is not None for wanted in of_tokens)
            bad += self.reading.violations(
                len(self.prompt_token_ids), self.prompt_logprobs, generates=generates
            )
        _raise_if(bad)


class FinishReason(enum.Enum):
    """Why an output ended, with the contract's names."""

    EOS = "eos"
    STOP = "stop"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"
    ABORTED = "aborted"
    PROMPT_READ = "prompt_read"
    """Nothing was to be generated. The contract does not have this reason."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output ended, and on what: for STOP and EOS, `stop` or `token_id` is what matched; for ABORTED,
    `message` says why.
    """

    reason: FinishReason
    _: KW_ONLY
    token_id: int | None = None
    stop: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model's raw logits, before temperature and filters."""

    sampled: float
    """That of the token itself."""
    top: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, log-probability) of the likeliest tokens, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """Monotonic times in ns (`time.monotonic_ns`); 0 if the request never got that far."""

    received_ns: int = 0
    """When whoever submitted the request got it, see `Request.received_ns`."""
    arrived_ns: int
    """When it came to the engine."""
    scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    proposed_tokens: int = 0
    """How many tokens were proposed and checked by the model."""
    accepted_tokens: int = 0
    """How many of these became tokens of the output."""


class StepOutput(NamedTuple):
    """What one engine step made for one output of a request. The last one has `finish` or `error`, and
    `timing`.

    It is a named tuple because that is cheap to make, like `PlanRow`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each token id, or none at all."""
    finish: Finish | None = None
    timing: RequestTiming | None = None
    weights_generation: int = 0
    """Generation of the weights that made these tokens."""
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, with the first tokens, if they were asked
    for."""
    hidden: NDArray[np.float32] | None = None
    """With `Request.hidden_states` one for each token id, float32[tokens, E]. Of a request that pools, in its
    last output, the pooled one, float32[E]."""

    @property
    def last(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """What `Engine.prepare` makes of a request; all outputs of the request may share it."""

    token_ids: tuple[int, ...]
    cache: CacheParams
    page_keys: tuple[bytes, ...]
    """The prefix cache's keys of the prompt's full pages."""
    in_vocabulary: bool
    """Whether the model knows every token of the prompt."""
    sampling: ResolvedSampling | None = None
    """The sampling parameters, if the model knows all their tokens; None if it does not, or if that was not
    checked."""
    bias_row: NDArray[np.float32] | None = None
    """What `sampling` adds to each logit, float32[V]; None if that is quickly made for each output."""
    adapter_weights: AdapterWeights | None = None
    """See `Request.adapter_weights`; None if there is no such adapter, or the request names none."""
    words: WordTable | None = None
    """The bad words of `sampling` that have several tokens."""

    def covers(self, sampling: ResolvedSampling) -> bool:
        """Say whether what was made of this value's `sampling` can be used for `sampling`."""
        return self.sampling is not None and self.sampling.shares_tokens(sampling)


MAX_OUTPUTS = 128
SEPARATOR = "\x00"
"""A character that no caller's id contains."""
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def output_id(request_id: str, index: int) -> str:
    """Return the engine's id of output `index`; the first output has the request's own id."""
    return request_id if index == 0 else f"{request_id}{SEPARATOR}{index}"


def request_id_of(engine_id: str) -> str:
    """Return the id of the request that an output belongs to."""
    return engine_id.partition(SEPARATOR)[0]


def output_seed(seed: int, index: int) -> int:
    """Return the seed of output `index`. The first output has the request's own seed, so that it equals the
    output of n = 1.

    The seed is SplitMix64's mixer (Steele, Lea and Flood 2014) of seed + index * gamma, which is one to one.
    """
    if index == 0:
        return seed
    z = (seed + index * _GOLDEN_GAMMA) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def outputs_of(request: Request, n: int, constraints: Sequence[TokenConstraint] = ()) -> list[Request]:
    """Make one request for each output, to be submitted in this order. `constraints` is empty, or has one for
    each output.

    Only the first output has log-probabilities of the prompt.
    """
    sampling = request.sampling
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    return [
        dataclasses.replace(
            request,
            request_id=output_id(request.request_id, index),
            sampling=sampling.seeded(output_seed(seed, index)),
            prompt_logprobs=request.prompt_logprobs if index == 0 else None,
            constraint=constraints[index] if constraints else None,
            fork_of=request.request_id if index else None,
            num_outputs=n,
        )
        for index in range(n)
    ]
