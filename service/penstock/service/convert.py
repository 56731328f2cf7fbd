"""The contract's requests to validated frozen values. Refusals happen here, all violations of a request at
once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from penstock.runtime.errors import (
    InvalidRequest,
    PromptTooLong,
    UnknownModel,
    UnsupportedFeature,
    Violation,
)
from penstock.runtime.request import (
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_TOKEN_IDS,
    CacheParams,
    Request,
    SamplingParams,
    StoppingParams,
)
from penstock.service.backend import Info
from penstock.service.support import check_supported
from penstock.v1 import inference_pb2, types_pb2

T = TypeVar("T")
MAX_BAD_IDS = 100
ROLES = ("system", "user", "assistant")
_PRIORITY = frozenset({"priority"})
_MAX_DURATION_S = 315_576_000_000  # google.protobuf.Duration: 10,000 years


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to be tokenized as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Turns for the chat template."""

    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Ids used as they are."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What of the output is sent back, and how."""

    text: bool = True
    token_ids: bool = True
    skip_special_tokens: bool = True
    echo_prompt_token_ids: bool = False
    min_tokens_per_message: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One validated call of Generate or Stream, before its prompt is tokenized."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    stopping: StoppingParams
    logprobs: int | None
    options: ResponseOptions
    cache: CacheParams = field(default_factory=CacheParams)
    priority: int = 0

    def request(self, token_ids: tuple[int, ...]) -> Request:
        """The engine's request, once the prompt's ids are known."""
        return Request(
            self.request_id,
            token_ids,
            self.sampling,
            self.stopping,
            self.logprobs,
            cache=self.cache,
            priority=self.priority,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What of the server a request is checked against."""

    info: Info
    max_logprobs: int
    has_text: bool
    has_chat: bool
    has_priority: bool

    @property
    def lacking(self) -> frozenset[str]:
        """Fields of the contract that would be without effect here, and are refused."""
        return frozenset() if self.has_priority else _PRIORITY


class Violations:
    """Collects what is wrong, so that a caller learns all of it at once."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        self.found.append(Violation(field, description))

    def build(self, make: Callable[[], T]) -> T | None:
        """`make()`, or None with its violations noted."""
        try:
            return make()
        except InvalidRequest as error:
            self.found.extend(error.violations)
            return None

    def raise_if_any(self) -> None:
        if self.found:
            raise InvalidRequest(self.found)


def to_job(message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest, limits: Limits) -> Job:
    """Check the whole message.

    Raises the first that applies of UnknownModel (nothing else can be judged for another model),
    UnsupportedFeature (what is not honoured may change what the rest means: with truncation a long prompt is
    fine) and InvalidRequest with all violations. The values of unsupported fields are not looked at, except
    that `sampling.n` is honoured as far as it goes: from 1 to 1.
    """
    if message.model and message.model != limits.info.name:
        raise UnknownModel(message.model, limits.info.name)
    check_supported(message, limits.lacking)
    bad = Violations()
    request_id = message.request_id or uuid.uuid4().hex
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        bad.add("request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters, not {len(request_id)}")
    options = _options(message, limits, bad)
    prompt = _prompt(message, limits, bad)
    sampling = bad.build(lambda: _sampling(message.sampling, limits.info))
    if message.sampling.HasField("n") and message.sampling.n < 1:
        bad.add("sampling.n", f"must be at least 1, not {message.sampling.n}")
    stopping = _stopping(message.stopping, limits.info, bad)
    logprobs = message.output.logprobs if message.output.HasField("logprobs") else None
    if logprobs is not None and logprobs > limits.max_logprobs:
        bad.add("output.logprobs", f"must be at most {limits.max_logprobs} on this server, not {logprobs}")
    if logprobs is not None and not options.token_ids:
        bad.add("output.logprobs", "needs output.token_ids: log-probabilities stand beside token ids")
    cache = bad.build(lambda: CacheParams(message.cache.cache_salt, message.cache.bypass_prefix_cache))
    if message.stopping.stop and not options.text:
        bad.add("stopping.stop", "needs output.text: stop strings are searched in the text")
    bad.raise_if_any()
    assert prompt is not None
    assert sampling is not None
    assert stopping is not None
    assert cache is not None
    return Job(request_id, prompt, sampling, stopping, logprobs, options, cache, message.priority)


def _prompt(
    message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest, limits: Limits, bad: Violations
) -> Prompt | None:
    kind = message.WhichOneof("input")
    if kind == "prompt":
        if not limits.has_text:
            raise UnsupportedFeature(["prompt"])
        if not message.prompt:
            bad.add("prompt", "must not be empty")
        return TextPrompt(message.prompt)
    if kind == "chat":
        return chat_prompt(message.chat, limits, bad)
    if kind == "prompt_token_ids":
        repeated = message.prompt_token_ids.ids
        if len(repeated) >= limits.info.max_model_len:  # before anything walks over millions of ids
            raise PromptTooLong(len(repeated), limits.info.max_model_len - 1)
        ids = tuple(repeated)
        if not ids:
            bad.add("prompt_token_ids.ids", "must not be empty")
        check_token_ids("prompt_token_ids.ids", ids, limits.info.vocab_size, bad)
        return TokenPrompt(ids)
    bad.add("input", "one of prompt, prompt_token_ids and chat is required")
    return None


def chat_prompt(chat: types_pb2.ChatPrompt, limits: Limits, bad: Violations) -> ChatPrompt:
    """The turns of a chat; notes what is wrong with them."""
    if not limits.has_text:
        raise UnsupportedFeature(["chat"])
    if not limits.has_chat:
        bad.add("chat", "the model has no chat template")
    if not chat.messages:
        bad.add("chat.messages", "must not be empty")
    tools = [f"chat.messages[{i}].role" for i, m in enumerate(chat.messages) if m.role == "tool"]
    if tools:  # a turn that answers a tool call, and tool calls are refused
        raise UnsupportedFeature(tools)
    for i, turn in enumerate(chat.messages):
        if turn.role not in ROLES:
            bad.add(f"chat.messages[{i}].role", f"must be one of {', '.join(ROLES)}, not {turn.role[:40]!r}")
    return ChatPrompt(tuple({"role": m.role, "content": m.content} for m in chat.messages))


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int, bad: Violations) -> None:
    """Note ids outside the vocabulary: one violation each, as far as a status may hold them anyway."""
    if not ids or max(ids) < vocab_size:
        return
    outside = [(i, token) for i, token in enumerate(ids) if token >= vocab_size]
    for i, token in outside[:MAX_BAD_IDS]:
        bad.add(f"{field}[{i}]", f"must be below the vocabulary size {vocab_size}, not {token}")
    if len(outside) > MAX_BAD_IDS:
        bad.add(field, f"{len(outside) - MAX_BAD_IDS} more ids are not below the vocabulary size")


def _sampling(message: types_pb2.SamplingParams, info: Info) -> SamplingParams:
    """Unset fields take the model's effective defaults."""
    defaults = info.defaults
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else defaults.temperature,
        top_k=message.top_k if message.HasField("top_k") else defaults.top_k,
        top_p=message.top_p if message.HasField("top_p") else defaults.top_p,
        min_p=message.min_p if message.HasField("min_p") else defaults.min_p,
        seed=message.seed if message.HasField("seed") else None,
    )


def _stopping(message: types_pb2.StoppingParams, info: Info, bad: Violations) -> StoppingParams | None:
    ids = tuple(message.stop_token_ids)
    check_token_ids("stopping.stop_token_ids", ids, info.vocab_size, bad)
    room = MAX_STOP_TOKEN_IDS - len(info.eos_token_ids)
    if room < len(ids) <= MAX_STOP_TOKEN_IDS:
        bad.add("stopping.stop_token_ids", f"at most {room} ids with this model, not {len(ids)}")
    time_limit_s = None
    if message.HasField("time_limit"):
        time_limit_s = _seconds("stopping.time_limit", message.time_limit, bad)
    return bad.build(
        lambda: StoppingParams(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            min_tokens=message.min_tokens,
            stop=tuple(message.stop),
            stop_token_ids=ids,
            ignore_eos=message.ignore_eos,
            include_stop=message.include_stop,
            time_limit_s=time_limit_s,
        )
    )


def _seconds(field: str, duration: Duration, bad: Violations) -> float | None:
    """A Duration in seconds; None, noted, where it breaks the rules of google.protobuf.Duration."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > _MAX_DURATION_S or abs(nanos) >= 10**9 or seconds * nanos < 0:
        bad.add(field, f"is not a valid Duration: {seconds} s and {nanos} ns")
        return None
    return seconds + nanos / 1e9


def _options(
    message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest, limits: Limits, bad: Violations
) -> ResponseOptions:
    output = message.output
    per_message = 1
    if isinstance(message, inference_pb2.StreamRequest) and message.HasField("min_tokens_per_message"):
        per_message = message.min_tokens_per_message
        if per_message < 1:
            bad.add("min_tokens_per_message", "must be at least 1")
    if output.text and not limits.has_text:
        raise UnsupportedFeature(["output.text"])
    return ResponseOptions(
        text=output.text if output.HasField("text") else limits.has_text,
        token_ids=output.token_ids if output.HasField("token_ids") else True,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        echo_prompt_token_ids=output.echo_prompt_token_ids,
        min_tokens_per_message=per_message,
    )
