"""Jobs: requests that have been checked, and what is done with them before the engine has them.

A `Job` is a request before its prompt is tokenized. Each part of what is done with it is a function of its
own, because the service does them in different threads, with traces and bounds of its own between them
(`ServedRequest.prepare`); `prepare_job` does them all on the caller's. The order is the same, so a request of
which two parts are wrong gets the same error: `test_embedded_alike.py` compares them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.chat.enforce.enforceable import (
    Refusal,
    schema_grammar,
    with_enforceable_schemas,
    with_sound_schemas,
    without_schemas,
)
from penstock.runtime.chat.enforce.forced_calls import call_grammar, calls_or_answer, thinking_first
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.grammar.bad_words import bad_word_ids
from penstock.runtime.grammar.compile.compiler import GrammarCompiler
from penstock.runtime.prompting.interface import TextEngine
from penstock.runtime.prompting.prompts import (
    ChatPrompt,
    ContextParams,
    Encoded,
    Fitted,
    Prompt,
    Truncation,
    encode,
    fit,
)
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.grammar import Grammar, GrammarKind
from penstock.runtime.requests.request import CacheParams, PreparedPrompt, Request, StoppingParams, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.text.assembler import Assembler
from penstock.runtime.text.interface import Text


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
    adapter: str | None = None
    """The name of the LoRA adapter with which the outputs are made; None: the model alone."""
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
    max_proposed_tokens: int | None = None
    """See `Request.max_proposed_tokens`."""
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
        """Make the engine's request for one output, once the ids of the prompt and of the bad words are
        known. `encoded` is what `prompt` was fitted from.
        """
        return Request(
            self.engine_id,
            prompt.token_ids,
            sampling,
            prompt.stopping,
            logprobs=self.logprobs,
            cache=self.cache,
            priority=self.priority,
            adapter=self.adapter,
            prompt_logprobs=self.prompt_logprobs,
            hidden_states=self.hidden_states,
            max_proposed_tokens=self.max_proposed_tokens,
            min_generation=self.min_generation,
            received_ns=self.received_ns,
            operation=self.operation,
            trace_id=self.trace_id,
            span_id=self.span_id,
            media=encoded.media,
            rotary=encoded.rotary,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job that is ready to be submitted."""

    job: Job
    requests: Sequence[Request]
    """One for each output, to be submitted in this order."""
    shared: Sequence[PreparedPrompt]
    """What `submit` needs of each of them; outputs of one prompt have the same value."""
    prompt: Fitted
    text: str
    """What a conversation was rendered to; else empty."""


def prepare_job(engine: TextEngine, job: Job) -> PreparedJob:
    """Tokenize the prompt, cut it to fit, compile the grammar and make a request for each output. Raises
    InvalidRequest, PromptTooLong, CostlyGrammar, or UnavailableError where compiling takes too long.
    """
    room = engine.info.room
    encoded = encode(engine.text, job.prompt, room=room, cuts=job.cuts, reader=engine.images)
    prompt = fit(encoded.token_ids, job.context, job.stopping, room)
    words = word_ids(engine.text, job.bad_words)
    sampling = with_bad_words(job.sampling, words, engine.info.vocab_size)
    constraints = constraints_of(job, encoded.text, engine.text, engine.forms, engine.grammars)
    requests = outputs_of(job.request(prompt, sampling, encoded), job.n, constraints)
    shared = [engine.prepare(requests[0])] * job.n
    return PreparedJob(job=job, requests=requests, shared=shared, prompt=prompt, text=encoded.text)


def word_ids(codec: Text | None, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of bad words, in all their spellings. InvalidRequest where a word is empty or too
    long, or there are too many.
    """
    if not words:
        return ()
    assert codec is not None, "bad words are refused where there is no tokenizer"
    return bad_word_ids(codec, words)


def with_bad_words(
    sampling: ResolvedSampling, words: tuple[tuple[int, ...], ...], vocab_size: int
) -> ResolvedSampling:
    """Return `sampling` that also forbids these sequences of token ids. InvalidRequest where no token is left
    that may be drawn.
    """
    if not (words or sampling.bad_words or sampling.logit_bias):
        return sampling  # nothing is forbidden
    sampling = dataclasses.replace(sampling, bad_words=words)
    forbidden = {token for token, bias in sampling.logit_bias if bias == float("-inf")}
    forbidden |= {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.allowed_token_ids and forbidden.issuperset(sampling.allowed_token_ids):
        described = "all of them are forbidden by bad_words or logit_bias"
        raise InvalidRequest([Violation("sampling.allowed_token_ids", described)])
    if len(forbidden) == vocab_size:
        raise InvalidRequest([Violation("sampling.logit_bias", "forbids every token")])
    return sampling


def constraints_of(
    job: Job, text: str, codec: Text | None, forms: ChatForms, compiler: GrammarCompiler | None
) -> Sequence[TokenConstraint]:
    """Make a constraint for each output, or none where the job asks for none. `text` is what a conversation
    was rendered to. It may take seconds. InvalidRequest where the grammar means nothing, or the model has no
    form of calls that could be required.
    """
    if job.grammar is None and not job.calls_enforced_by:
        return ()
    assert compiler is not None, "grammars are refused where they cannot be compiled"
    grammar = job.grammar
    if isinstance(job.prompt, ChatPrompt) and codec is not None:
        grammar = _of_chat(grammar, job.prompt.chat, text, forms, codec.added_tokens, compiler)
    assert grammar is not None, "calls that are enforced have a grammar"
    return compiler.compile(grammar).constraints(job.n, grammar.field)


def _of_chat(
    answer: Grammar | None,
    chat: Chat,
    text: str,
    forms: ChatForms,
    token_ids: Mapping[str, int],
    compiler: GrammarCompiler,
) -> Grammar | None:
    """Write the grammar of the whole output to a conversation that was rendered to `text`: of its reasoning,
    its calls, and of the answer, which the caller's grammar is for.
    """
    if not chat.enforced_by:
        return answer and dataclasses.replace(answer, before=thinking_first(forms, text, token_ids))
    chat, of_calls = _calls_of_chat(chat, text, forms, token_ids, compiler)
    if answer is None:
        return of_calls
    return dataclasses.replace(answer, before=calls_or_answer(forms, chat, text, token_ids))


def _calls_of_chat(
    chat: Chat, text: str, forms: ChatForms, token_ids: Mapping[str, int], compiler: GrammarCompiler
) -> tuple[Chat, Grammar]:
    """Return the grammar of the calls, which compiles, and the chat with as much of its tools' schemas as
    that enforces. InvalidRequest if it does not enforce all of a strict tool's.
    """

    def calls_of(chat: Chat) -> str:
        calls = call_grammar(forms, chat, text, token_ids)
        assert calls is not None, "calls are enforced"
        return calls

    def compiled(calls: str) -> Grammar:
        grammar = Grammar(GrammarKind.EBNF, calls, _field_of_calls(chat))
        compiler.compile(grammar)
        return grammar

    chat = with_sound_schemas(chat)
    calls = calls_of(chat)
    try:
        return chat, compiled(calls)
    except InvalidRequest as error:
        refused = error
    enforceable = with_enforceable_schemas(chat, _refusal(compiler))
    for looser in (enforceable, without_schemas(chat)):
        if looser != chat:
            with contextlib.suppress(InvalidRequest):
                return looser, compiled(calls_of(looser))
    raise InvalidRequest([Violation(v.field, _without_grammar(v.description)) for v in refused.violations])


def _refusal(compiler: GrammarCompiler) -> Refusal:
    """Tell why the compiler refuses the schema of a tool. After as long as a compile may take, refuse
    whatever it has not seen, so that many parts cannot take long.
    """
    until = time.monotonic() + compiler.config.time_limit_s

    def refusal(tool: Tool, schema: Mapping[str, Any]) -> str | None:
        if time.monotonic() > until:
            return "trying all parts of the schema took too long"
        try:
            return compiler.refusal(schema_grammar(tool, schema))
        except InvalidRequest as error:
            return error.violations[0].description

    return refusal


def _without_grammar(message: str) -> str:
    """Return an error's message without the lines of the server's own grammar that it shows."""
    return re.sub(r"^at \d+\(\d+\): |\n +\d+ \| .*", "", message, flags=re.DOTALL)


def _field_of_calls(chat: Chat) -> str:
    """Name the contract's field that an error in the grammar of calls is told of."""
    strict = [tool for tool in chat.callable_tools if tool.strict]
    if not strict:
        return "chat.tool_choice"
    return f"chat.tools[{chat.tools.index(strict[0])}].parameters_json" if len(strict) == 1 else "chat.tools"


def assembler_of(
    job: Job, request: Request, index: int, text: str, codec: Text | None, forms: ChatForms
) -> Assembler:
    """Build what makes text, reasoning and calls of tools of output `index`, which `request` asks for. `text`
    is what a conversation was rendered to. Its answer is a text of its own; any other output goes on from its
    prompt.
    """
    parser, visible, ends_at_call = None, frozenset[str](), False
    after = () if isinstance(job.prompt, ChatPrompt) else request.prompt_token_ids
    if isinstance(job.prompt, ChatPrompt) and job.return_text:
        ends_at_call = job.ends_at_call
        parser = forms.parser(job.prompt.chat, text)
        visible = forms.markers(job.prompt.chat)
    return Assembler(
        request.stopping,
        codec if job.return_text else None,
        index=index,
        skip_special_tokens=job.skip_special_tokens,
        parser=parser,
        visible=visible,
        ends_at_call=ends_at_call,
        after=after,
    )
