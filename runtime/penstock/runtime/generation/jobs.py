"""A request that has been checked, before its prompt is tokenized."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.runtime.generation.prompts import ChatPrompt, Encoded, Prompt
from penstock.runtime.requests.context import ContextParams, Fitted, Truncation
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.requests.request import CacheParams, Request, ResolvedSampling, StoppingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: a prompt, and what is to be made of it."""

    request_id: str
    prompt: Prompt
    sampling: ResolvedSampling
    """Without the bad words."""
    stopping: StoppingParams
    bad_words: tuple[str, ...] = ()
    n: int = 1
    """How many outputs."""
    logprobs: int | None = None
    """None: no log-probabilities; k: those of each token and of the k likeliest ones."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the prompt's tokens from the second on."""
    grammar: Grammar | None = None
    """What each output must match."""
    context: ContextParams = field(default_factory=ContextParams)
    cache: CacheParams = field(default_factory=CacheParams)
    priority: int = 0
    min_generation: int = 0
    """The oldest generation of weights on which the outputs may start."""
    received_ns: int = 0
    """When the request was received, in monotonic ns; 0: when it comes to the engine."""
    trace_id: str = ""
    """The trace in which the request is recorded, in hexadecimal digits; empty: it is not recorded."""
    span_id: str = ""
    """The request's span in that trace; empty where `trace_id` is."""
    hidden_states: bool = False
    """Whether the hidden state is wanted from which each token was chosen."""
    return_text: bool = True
    """Whether the outputs become text. Stop strings, reasoning and calls of tools are found in text only."""
    skip_special_tokens: bool = True

    @property
    def engine_id(self) -> str:
        """The engine's id of the request."""
        return self.request_id

    @property
    def operation(self) -> str:
        """What is asked for, by OpenTelemetry's name."""
        return "chat" if isinstance(self.prompt, ChatPrompt) else "text_completion"

    @property
    def cuts(self) -> bool:
        """Whether a prompt that is too long is cut instead of refused."""
        return self.context.truncation is not Truncation.REJECT

    @property
    def requires_call(self) -> bool:
        """Whether the output must be a call of a tool, which a grammar sees to."""
        return isinstance(self.prompt, ChatPrompt) and bool(self.prompt.chat.required_tools)

    @property
    def calls_enforced_by(self) -> tuple[str, ...]:
        """The contract's fields by which calls of tools, or their arguments, need a grammar."""
        return self.prompt.chat.enforced_by if isinstance(self.prompt, ChatPrompt) else ()

    @property
    def ends_at_call(self) -> bool:
        """Whether an output ends with its first call of a tool, without a grammar that sees to it."""
        return isinstance(self.prompt, ChatPrompt) and self.prompt.chat.ends_at_call

    def request(self, prompt: Fitted, sampling: ResolvedSampling, encoded: Encoded) -> Request:
        """The engine's request for one output, once the ids of the prompt and of the bad words are known.
        `encoded` is what `prompt` was fitted from.
        """
        return Request(
            self.engine_id,
            prompt.token_ids,
            sampling,
            prompt.stopping,
            logprobs=self.logprobs,
            cache=self.cache,
            priority=self.priority,
            prompt_logprobs=self.prompt_logprobs,
            hidden_states=self.hidden_states,
            min_generation=self.min_generation,
            received_ns=self.received_ns,
            operation=self.operation,
            trace_id=self.trace_id,
            span_id=self.span_id,
            media=encoded.media,
            rotary=encoded.rotary,
        )
