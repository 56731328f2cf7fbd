"""Converts the contract's requests for generation, with their parameters, chats and images, to validated
frozen values. A refusal names all violations of a request at once. Of the images nothing is decoded here.

`encode_prompt` and `encode_words` turn a request's texts into token ids.
"""

from __future__ import annotations

import dataclasses
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration

from penstock.runtime.chat.messages import Chat, ChatTurn, RawTool, ToolCall
from penstock.runtime.errors import InvalidRequest, PromptTooLong, UnknownModel, UnsupportedFeature, Violation
from penstock.runtime.grammar.bad_words import check_bad_words
from penstock.runtime.images.decoding import BadImage, check_bytes
from penstock.runtime.images.image import Image, ImageLimits
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.prompting.jobs import Job, word_ids
from penstock.runtime.prompting.prompts import (
    ChatPrompt,
    ContextParams,
    Encoded,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Truncation,
    check_length,
    encode,
    images_of,
    most_cut_tokens,
)
from penstock.runtime.requests.grammar import MAX_CHOICES, Grammar, GrammarKind
from penstock.runtime.requests.request import (
    MAX_OUTPUTS,
    MAX_PROPOSED_TOKENS,
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SEPARATOR,
    CacheParams,
    StoppingParams,
)
from penstock.runtime.requests.sampling import FIELDS, ResolvedSampling, SamplingParams
from penstock.runtime.text.interface import Text
from penstock.service.access.callers import Caller
from penstock.service.access.ownership import engine_id
from penstock.service.access.roles import check_adapter
from penstock.service.requests.support import Refused, check_supported
from penstock.service.threads.lanes import INLINE_BYTES, MESSAGE_BYTES, Lanes
from penstock.v1 import inference_pb2, types_pb2

T = TypeVar("T")
MAX_VIOLATIONS = 20
"""How many violations are kept; more than a status has room for."""
IDS_AT_ONCE = 16_384
"""How many ids are copied and checked at a time; that takes about half a millisecond."""
_MAX_DURATION_S = 315_576_000_000  # google.protobuf.Duration: 10,000 years
TRUNCATIONS = {
    types_pb2.TRUNCATION_REJECT: Truncation.REJECT,
    types_pb2.TRUNCATION_LEFT: Truncation.LEFT,
    types_pb2.TRUNCATION_RIGHT: Truncation.RIGHT,
    types_pb2.TRUNCATION_MIDDLE: Truncation.MIDDLE,
}


class Ids(Protocol):
    """A repeated field of token ids, which are never below 0. Asking for its length is cheap."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> list[int]: ...


class Violations:
    """Collects violations, so that a caller learns all of them at once.

    It keeps the first MAX_VIOLATIONS and counts the others, so that half a million bad ids cost no more than
    twenty.
    """

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._num_more = 0

    @property
    def is_full(self) -> bool:
        """Whether further violations are only counted."""
        return len(self.found) >= MAX_VIOLATIONS

    def add(self, field: str, description: str) -> None:
        if self.is_full:
            self._num_more += 1
        else:
            self.found.append(Violation(field, description))

    def add_uncollected(self, count: int) -> None:
        """Count `count` more violations, of which only the number is reported."""
        self._num_more += count

    def allows(self, field: str, count: int, most: int, what: str) -> bool:
        """Say whether there are at most `most` values; add a violation if not. To be asked before anything
        walks over them.
        """
        if count > most:
            self.add(field, f"at most {most} {what}, not {count}")
        return count <= most

    def build(self, make: Callable[[], T]) -> T | None:
        """Return `make()`. If it raises InvalidRequest, add its violations and return None."""
        try:
            return make()
        except InvalidRequest as error:
            for violation in error.violations:
                self.add(violation.field, violation.description)
            return None

    def raise_if_any(self) -> None:
        if self._num_more:
            raise InvalidRequest([*self.found, Violation("", f"and {self._num_more} more violations")])
        if self.found:
            raise InvalidRequest(self.found)


def token_ids(field: str, ids: Ids, vocab_size: int, bad: Violations) -> tuple[int, ...]:
    """Copy the ids of a repeated field. Adds a violation for each id that is outside the vocabulary, with its
    index.

    They are copied in parts, because no other thread runs while a part is copied: a million ids at once would
    keep the event loop waiting for tens of milliseconds, on whichever thread that is done.
    """
    taken: list[int] = []
    for start in range(0, len(ids), IDS_AT_ONCE):
        part = ids[start : start + IDS_AT_ONCE]
        if max(part) >= vocab_size:
            _note_unknown(field, start, part, vocab_size, bad)
        taken += part
    return tuple(taken)


def _note_unknown(field: str, start: int, ids: Sequence[int], vocab_size: int, bad: Violations) -> None:
    for i, token in enumerate(ids):
        if bad.is_full:
            bad.add_uncollected(sum(map(vocab_size.__le__, ids[i:])))
            return
        if token >= vocab_size:
            bad.add(f"{field}[{start + i}]", f"must be below the vocabulary size {vocab_size}, not {token}")


def sampling_params(
    message: types_pb2.SamplingParams, info: ModelInfo, bad: Violations
) -> ResolvedSampling | None:
    """Convert the sampling parameters; unset fields take the model's defaults. Returns None, and adds
    violations, if a value is wrong. Bad words are only checked here: `with_bad_words` adds them once they are
    tokenized.
    """
    vocab = info.vocab_size
    allowed = _allowed_ids(message, vocab, bad)
    biases = _biases(message, vocab, bad)

    def value(name: str) -> Any:
        is_set = message.HasField(name)  # type: ignore[arg-type]  # one of its literals
        return getattr(message, name) if is_set else None

    bad.build(lambda: check_bad_words(message.bad_words))
    asked = SamplingParams(**{name: value(name) for name in (*FIELDS, "seed")})
    sampling = bad.build(lambda: asked.resolved(info.defaults))
    if sampling is None or not (biases or allowed):
        return sampling
    return bad.build(lambda: dataclasses.replace(sampling, logit_bias=biases, allowed_token_ids=allowed))


def _allowed_ids(message: types_pb2.SamplingParams, vocab: int, bad: Violations) -> tuple[int, ...]:
    field, ids = "sampling.allowed_token_ids", message.allowed_token_ids
    if not bad.allows(field, len(ids), vocab, "ids (the vocabulary)"):
        return ()
    return tuple(dict.fromkeys(token_ids(field, ids, vocab, bad)))


def _biases(message: types_pb2.SamplingParams, vocab: int, bad: Violations) -> tuple[tuple[int, float], ...]:
    """List the biases in the order of their token ids."""
    field, biases = "sampling.logit_bias", message.logit_bias
    if not (biases and bad.allows(field, len(biases), vocab, "tokens (the vocabulary)")):
        return ()
    # numpy sorts them, because it lets other threads run meanwhile.
    tokens: list[int] = np.sort(np.fromiter(biases, np.uint32, len(biases))).tolist()
    for token in tokens[bisect_left(tokens, vocab) :]:
        bad.add(f"{field}[{token}]", f"must be below the vocabulary size {vocab}")
    return tuple([(token, biases[token]) for token in tokens])


def num_outputs(message: types_pb2.SamplingParams, most: int, bad: Violations) -> int:
    """Tell how many outputs the request asks for."""
    if message.HasField("n") and not 1 <= message.n <= most:
        bad.add("sampling.n", f"must be from 1 to {most}, not {message.n}")
    return message.n if message.HasField("n") else 1


def truncation_of(message: types_pb2.ContextOptions, default: Truncation) -> Truncation:
    """Return the truncation that the request asks for, or the default where it names none that there is."""
    return TRUNCATIONS.get(message.truncation, default)


def context_params(message: types_pb2.ContextOptions, default: Truncation, bad: Violations) -> ContextParams:
    """Return what the request wants done with a prompt that leaves too little room."""
    if message.truncation not in (types_pb2.TRUNCATION_UNSPECIFIED, *TRUNCATIONS):
        bad.add("context.truncation", f"{message.truncation} is no value of Truncation")
    reserve = message.reserve_tokens if message.HasField("reserve_tokens") else None
    return ContextParams(truncation_of(message, default), reserve, message.cap_max_tokens)


def stopping_params(
    message: types_pb2.StoppingParams, info: ModelInfo, bad: Violations
) -> StoppingParams | None:
    field, room = "stopping.stop_token_ids", MAX_STOP_TOKEN_IDS - len(info.eos_token_ids)
    ids: tuple[int, ...] = ()
    if bad.allows(field, len(message.stop_token_ids), room, "ids with this model"):
        ids = token_ids(field, message.stop_token_ids, info.vocab_size, bad)
    stop: tuple[str, ...] = ()
    if bad.allows("stopping.stop", len(message.stop), MAX_STOP_STRINGS, "strings"):
        stop = tuple(message.stop)
    time_limit_s = None
    if message.HasField("time_limit"):
        time_limit_s = seconds("stopping.time_limit", message.time_limit, bad)
    return bad.build(
        lambda: StoppingParams(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            min_tokens=message.min_tokens,
            stop=stop,
            stop_token_ids=ids,
            ignore_eos=message.ignore_eos,
            include_stop=message.include_stop,
            time_limit_s=time_limit_s,
        )
    )


def seconds(field: str, duration: Duration, bad: Violations) -> float | None:
    """Convert a Duration to seconds. Returns None, and adds a violation, if it breaks the rules of
    google.protobuf.Duration.
    """
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > _MAX_DURATION_S or abs(nanos) >= 10**9 or seconds * nanos < 0:
        bad.add(field, f"is not a valid Duration: {seconds} s and {nanos} ns")
        return None
    return seconds + nanos / 1e9


MAX_PARTS = 10_000
"""The most parts that all turns of a chat may have together."""
WHY_NO_IMAGES = "the model reads no images"
_MAX_NAMED = 20
"""How many images an error names that the model cannot read at all."""


def media(
    messages: Sequence[types_pb2.Image], limits: ImageLimits | None, bad: Violations
) -> tuple[Image, ...]:
    """Read the images of a prompt of text or token ids. Adds what is wrong with them to `bad`."""
    return _checked([(f"media[{i}]", image) for i, image in enumerate(messages)], "media", limits, bad)


def contents(
    turns: Sequence[types_pb2.ChatMessage], limits: ImageLimits | None, bad: Violations
) -> list[str | tuple[str | Image, ...]] | None:
    """Return what is said in each turn of a chat. Adds what is wrong with parts to `bad`, and returns None if
    there are too many. Raises UnsupportedFeature for images if `limits` is None: the model reads none.
    """
    found: list[tuple[str, types_pb2.Image]] = []
    num_parts = 0
    for i, turn in enumerate(turns):
        if not turn.parts:
            continue
        at = f"chat.messages[{i}]"
        num_parts += len(turn.parts)
        if num_parts > MAX_PARTS:
            bad.add(f"{at}.parts", f"at most {MAX_PARTS} parts in all messages together")
            return None
        if turn.content:
            bad.add(f"{at}.parts", "not together with content")
        for j, part in enumerate(turn.parts):
            kind = part.WhichOneof("part")
            if kind == "image":
                found.append((f"{at}.parts[{j}].image", part.image))
            elif kind is None:
                bad.add(f"{at}.parts[{j}]", "one of text and image is required")
    images = iter(_checked(found, "chat.messages", limits, bad))
    return [_content(turn, images) for turn in turns]


def _content(turn: types_pb2.ChatMessage, images: Iterator[Image]) -> str | tuple[str | Image, ...]:
    if not turn.parts:
        return turn.content
    none = Image(b"")
    return tuple(
        part.text if part.WhichOneof("part") != "image" else next(images, none) for part in turn.parts
    )


def _checked(
    found: Sequence[tuple[str, types_pb2.Image]], where: str, limits: ImageLimits | None, bad: Violations
) -> tuple[Image, ...]:
    """Return the images, each of which has its path; `where` is the path of all of them. None of them if
    there are too many.
    """
    if not found:
        return ()
    if limits is None:
        raise UnsupportedFeature([path for path, _ in found[:_MAX_NAMED]], WHY_NO_IMAGES)
    if not bad.allows(where, len(found), limits.max_images, "images"):
        return ()
    images = []
    for path, message in found:
        image = Image(message.data, message.media_type)
        try:
            check_bytes(image, limits)
        except BadImage as error:
            bad.add(f"{path}.{error.part}", str(error))
        images.append(image)
    return tuple(images)


MAX_TURNS = 10_000
MAX_TOOLS = 1_000
MAX_CALLS = 10_000
"""The most tool calls that all turns of a chat may have together."""
_PART_COST = 64
"""The cost of converting one turn, one part of it or one tool, in bytes, beside the bytes that it has."""


def message_cost(chat: types_pb2.ChatPrompt) -> int:
    """Compute the cost of converting the message of this RPC with this chat in it, in bytes, as
    `Lanes.convert` expects it.
    """
    cost = MESSAGE_BYTES.get() + _PART_COST * (len(chat.messages) + len(chat.tools))
    if cost <= INLINE_BYTES:  # else parts are not worth counting, and there may be many turns
        cost += _PART_COST * sum(len(turn.parts) for turn in chat.messages)
    return cost


def chat_prompt(
    message: types_pb2.ChatPrompt, codec: Text | None, images: ImageLimits | None, bad: Violations
) -> ChatPrompt | None:
    """Convert a chat, its tools and its template. Adds what is wrong with them to `bad`, and returns None if
    anything is. Raises UnsupportedFeature if the model has no tokenizer, and for images if `images` is
    None: the model reads none.
    """
    if codec is None:
        raise UnsupportedFeature(["chat"])
    if not codec.has_chat_template and not message.chat_template:
        bad.add("chat", "the model has no chat template, and the request brings none")
    if not _is_within_bounds(message, bad):
        return None
    said = contents(message.messages, images, bad)
    if said is None:
        return None
    chat = bad.build(
        lambda: Chat.parse(
            [
                ChatTurn(
                    turn.role,
                    content,
                    tuple(ToolCall(c.id, c.name, c.arguments_json) for c in turn.tool_calls),
                    turn.tool_call_id,
                    turn.reasoning,
                    turn.name,
                )
                for turn, content in zip(message.messages, said, strict=True)
            ],
            [RawTool(t.name, t.description, t.parameters_json, t.strict) for t in message.tools],
            message.tool_choice,
            message.chat_template,
            message.template_options_json,
            parallel_tool_calls=message.parallel_tool_calls or not message.HasField("parallel_tool_calls"),
        )
    )
    return None if chat is None else ChatPrompt(chat)


def _is_within_bounds(message: types_pb2.ChatPrompt, bad: Violations) -> bool:
    """Say whether the chat has few enough turns, tools and calls to look at all of them; add a violation if
    not.
    """
    few_turns = bad.allows("chat.messages", len(message.messages), MAX_TURNS, "messages")
    few_tools = bad.allows("chat.tools", len(message.tools), MAX_TOOLS, "tools")
    if not (few_turns and few_tools):
        return False
    return _has_few_calls(message.messages, bad)


def _has_few_calls(turns: Sequence[types_pb2.ChatMessage], bad: Violations) -> bool:
    count = 0
    for i, turn in enumerate(turns):
        count += len(turn.tool_calls)
        if count > MAX_CALLS:
            bad.add(f"chat.messages[{i}].tool_calls", f"at most {MAX_CALLS} calls in all messages together")
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Switches. A request that uses a part that is off is refused as UNSUPPORTED_FEATURE; the error names the
    flag.
    """

    constraints: bool = True
    """Whether requests may have a constraint, or a `chat.tool_choice` that requires a call, which needs a
    grammar, too.
    """
    request_templates: bool = False
    """Whether a request may bring a chat template of its own. It is a program of the caller's, so it runs in
    a process of its own.
    """
    vllm_service: bool = False
    """Whether the server also answers vLLM's gRPC service."""


DEFAULT_FEATURES = Features()

_NEED_TEXT: Refused = {"prompt": (), "chat": (), "sampling.bad_words": (), "output.text": (False,)}
_NEED_GRAMMARS: Refused = {f"constraint.{kind.value}": () for kind in GrammarKind}
_WHY_NO_GRAMMARS = dict.fromkeys(
    [*_NEED_GRAMMARS, "chat.tool_choice"], "it was started with --no-constraints"
)
WHY_NO_ADAPTERS = {"adapter": "the server was started without --max-adapters"}
_WHY_NO_TEMPLATES = {"chat.chat_template": "it was started without --allow-request-templates"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedJob(Job):
    """A job that one call of Generate or Stream asks for, with its caller and with what is sent back."""

    return_token_ids: bool = True
    echo_prompt_token_ids: bool = False
    min_tokens_per_message: int = 1
    tool_call_deltas: bool = False
    owner: str = ""
    """The id of the caller."""

    @property
    def engine_id(self) -> str:
        """The id of the request in the engine."""
        return engine_id(self.owner, self.request_id)

    def of(self, caller: Caller) -> Self:
        """Return the job as this caller's, with its cached prefixes only where those find them who may.
        Raises Forbidden if the caller may not use its adapter.
        """
        if self.adapter is not None:
            check_adapter(caller, self.adapter)
        cache = dataclasses.replace(self.cache, salt=caller.cache_salt(self.cache.salt))
        return dataclasses.replace(self, owner=caller.id, cache=cache)

    def without_load(self) -> Self:
        """Return the job without what is no longer needed once its requests are made."""
        return dataclasses.replace(
            self, prompt=TokenPrompt(()), sampling=ResolvedSampling(), grammar=None, bad_words=()
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server checks requests against."""

    info: ModelInfo
    max_logprobs: int
    codec: Text | None
    has_grammars: bool
    has_priority: bool
    has_adapters: bool = False
    max_outputs: int = MAX_OUTPUTS
    max_outputs_queued: int = MAX_OUTPUTS
    """The most inputs of Embed, and continuations of Score."""
    truncation: Truncation = Truncation.REJECT
    """What an unset `context.truncation` means."""
    features: Features = DEFAULT_FEATURES
    """What the operator lets callers use. `has_grammars` is false if constraints are switched off."""

    @property
    def has_text(self) -> bool:
        return self.codec is not None

    @property
    def has_chat(self) -> bool:
        return self.codec is not None and self.codec.has_chat_template

    @property
    def has_hidden_states(self) -> bool:
        """Whether the engine tells hidden states."""
        return self.info.hidden_size > 0

    @property
    def lacking(self) -> Refused:
        """Fields of the contract that would have no effect on this server, and are therefore refused."""
        return {
            **self.lacking_engine,
            **({} if self.has_text else _NEED_TEXT),
            **({} if self.has_hidden_states else {"output.hidden_states": ()}),
            **({} if self.has_grammars else _NEED_GRAMMARS),
            **({} if self.info.images is not None else {"media": ()}),
            **self.lacking_templates,
        }

    @property
    def lacking_engine(self) -> Refused:
        """The part of `lacking` that all requests to the engine have in common."""
        return {
            **({} if self.has_priority else {"priority": ()}),
            **({} if self.has_adapters else {"adapter": ()}),
        }

    @property
    def lacking_templates(self) -> Refused:
        """The part of `lacking` that all messages with chats have in common: callers' own templates. The
        names of the model's templates are accepted.
        """
        if self.features.request_templates:
            return {}
        return {"chat.chat_template": () if self.codec is None else self.codec.template_names}

    @property
    def why_lacking(self) -> Mapping[str, str]:
        """The flags that are responsible for `lacking`."""
        why = _WHY_NO_TEMPLATES | {"media": WHY_NO_IMAGES} | WHY_NO_ADAPTERS
        return why if self.features.constraints else why | _WHY_NO_GRAMMARS


def check_generates(limits: Limits, feature: str) -> None:
    """Raise UnsupportedFeature where the model has no next token, which this needs."""
    reader = limits.info.reader
    if reader is not None:
        raise UnsupportedFeature([feature], f"the model is {reader.kind}, which has no next token")


def to_job(message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest, limits: Limits) -> ServedJob:
    """Check the whole message.

    Raises the first of these that applies: UnknownModel, because nothing else can be judged for another
    model; UnsupportedFeature, because a field that is not honoured may change what the others mean (with
    truncation a long prompt is fine); InvalidRequest with all violations. The values of unsupported fields
    are not checked.
    """
    check_model(message.model, limits)
    check_generates(limits, message.DESCRIPTOR.name.removesuffix("Request"))
    check_supported(message, limits.lacking, limits.why_lacking)
    bad = Violations()
    request_id = request_id_of(message.request_id, bad)
    output = message.output
    return_text = output.text if output.HasField("text") else limits.has_text
    return_token_ids = output.token_ids if output.HasField("token_ids") else True
    skip_special = output.skip_special_tokens if output.HasField("skip_special_tokens") else True
    per_message = _min_tokens_per_message(message, bad)
    prompt = _prompt(message, limits, bad)
    sampling = sampling_params(message.sampling, limits.info, bad)
    n = num_outputs(message.sampling, limits.max_outputs, bad)
    stopping = stopping_params(message.stopping, limits.info, bad)
    grammar = _grammar(message, prompt, limits, bad)
    context = _context(message, prompt, limits, bad)
    logprobs = _num_logprobs(message.output, "logprobs", limits, bad)
    prompt_logprobs = _num_logprobs(message.output, "prompt_logprobs", limits, bad)
    if logprobs is not None and not return_token_ids:
        bad.add("output.logprobs", "needs output.token_ids: log-probabilities stand beside token ids")
    if output.hidden_states and not return_token_ids:
        bad.add("output.hidden_states", "needs output.token_ids: hidden states stand beside token ids")
    cache = bad.build(lambda: CacheParams(message.cache.cache_salt, message.cache.bypass_prefix_cache))
    max_proposed = message.max_proposed_tokens if message.HasField("max_proposed_tokens") else None
    if max_proposed is not None and max_proposed > MAX_PROPOSED_TOKENS:
        bad.add("max_proposed_tokens", f"must be from 0 to {MAX_PROPOSED_TOKENS}, not {max_proposed}")
    if message.stopping.stop and not return_text:
        bad.add("stopping.stop", "needs output.text: stop strings are searched in the text")
    if isinstance(prompt, ChatPrompt) and prompt.chat.ends_at_call and not return_text:
        bad.add("chat.parallel_tool_calls", "false needs output.text: calls are found in the text")
    bad.raise_if_any()
    assert prompt is not None
    assert sampling is not None
    assert stopping is not None
    assert cache is not None
    return ServedJob(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        bad_words=tuple(message.sampling.bad_words),
        stopping=stopping,
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        hidden_states=output.hidden_states,
        max_proposed_tokens=max_proposed,
        grammar=grammar,
        context=context,
        cache=cache,
        priority=message.priority,
        adapter=message.adapter or None,
        min_generation=message.min_weights.generation,
        return_text=return_text,
        skip_special_tokens=skip_special,
        return_token_ids=return_token_ids,
        echo_prompt_token_ids=output.echo_prompt_token_ids,
        min_tokens_per_message=per_message,
        tool_call_deltas=isinstance(message, inference_pb2.StreamRequest) and message.tool_call_deltas,
    )


def _context(
    message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest,
    prompt: Prompt | None,
    limits: Limits,
    bad: Violations,
) -> ContextParams:
    """Read the context parameters. A prompt with images is never cut, as a part of an image means nothing."""
    has_images = prompt is not None and bool(images_of(prompt))
    context = context_params(message.context, Truncation.REJECT if has_images else limits.truncation, bad)
    if has_images and context.truncation is not Truncation.REJECT:
        bad.add("context.truncation", "a prompt with images is not cut; leave it out")
    return context


def check_model(name: str, limits: Limits) -> None:
    """Raise UnknownModel where a request is meant for another model than the one that is served."""
    if name and name != limits.info.name:
        raise UnknownModel(name, limits.info.name)


def request_id_of(given: str, bad: Violations) -> str:
    """Return the request's id: the caller's, or a new one."""
    request_id = given or uuid.uuid4().hex
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        bad.add("request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters, not {len(request_id)}")
    if SEPARATOR in request_id:
        bad.add("request_id", "must not hold the character U+0000")
    return request_id


def _num_logprobs(output: types_pb2.OutputOptions, name: str, limits: Limits, bad: Violations) -> int | None:
    """Read the number of log-probabilities asked for, or None."""
    if not output.HasField(name):  # type: ignore[arg-type]  # one of two literals
        return None
    value: int = getattr(output, name)
    if value > limits.max_logprobs:
        bad.add(f"output.{name}", f"must be at most {limits.max_logprobs} on this server, not {value}")
    return value


def _prompt(
    message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest, limits: Limits, bad: Violations
) -> Prompt | None:
    kind = message.WhichOneof("input")
    images = media(message.media, limits.info.images, bad)
    if kind == "prompt":
        if not message.prompt:
            bad.add("prompt", "must not be empty")
        return TextPrompt(message.prompt, images)
    if kind == "chat":
        if message.media:
            bad.add("media", "not together with chat, whose turns have their own images")
        return chat_prompt(message.chat, limits.codec, limits.info.images, bad)
    if kind == "prompt_token_ids":
        field, repeated, room = (
            "prompt_token_ids.ids",
            message.prompt_token_ids.ids,
            limits.info.max_model_len,
        )
        rejects = truncation_of(message.context, limits.truncation) is Truncation.REJECT
        if rejects and len(repeated) >= room:  # checked before anything walks over all of them
            raise PromptTooLong(len(repeated), room - 1)
        if not bad.allows(field, len(repeated), most_cut_tokens(room), "ids (also where they are to be cut)"):
            return None
        if not repeated:
            bad.add(field, "must not be empty")
        return TokenPrompt(token_ids(field, repeated, limits.info.vocab_size, bad), images)
    bad.add("input", "one of prompt, prompt_token_ids and chat is required")
    return None


def _grammar(
    message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest,
    prompt: Prompt | None,
    limits: Limits,
    bad: Violations,
) -> Grammar | None:
    """Read the grammar that the output must match, or None."""
    required = isinstance(prompt, ChatPrompt) and bool(prompt.chat.required_tools)
    enforced_by = prompt.chat.enforced_by if isinstance(prompt, ChatPrompt) else ()
    if enforced_by and not limits.has_grammars:
        raise UnsupportedFeature(enforced_by, limits.why_lacking.get("chat.tool_choice", ""))
    kind = message.constraint.WhichOneof("kind")
    if kind is None:
        if message.HasField("constraint"):
            bad.add("constraint", "one of json_schema, json_object, regex, ebnf and choice is required")
        return None
    if required:
        bad.add("constraint", "not together with a chat.tool_choice that requires a call")
    value = message.constraint
    if not bad.allows("constraint.choice", len(value.choice.choices), MAX_CHOICES, "choices"):
        return None
    makers = {
        "json_schema": lambda: Grammar.json_schema(value.json_schema),
        "json_object": Grammar.json_object,
        "regex": lambda: Grammar.regex(value.regex),
        "ebnf": lambda: Grammar.ebnf(value.ebnf),
        "choice": lambda: Grammar.choice(value.choice.choices),
    }
    return bad.build(makers[kind])


def _min_tokens_per_message(
    message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest, bad: Violations
) -> int:
    if not isinstance(message, inference_pb2.StreamRequest) or not message.HasField("min_tokens_per_message"):
        return 1
    if message.min_tokens_per_message < 1:
        bad.add("min_tokens_per_message", "must be at least 1")
    return message.min_tokens_per_message


INLINE_CHARS = 2000
"""Shorter texts are tokenized on the event loop, in well under a millisecond; a hop to a thread
costs more.
"""
_ID_COST = 1
"""The cost of looking at one token id, in bytes of a message."""
_CALL_CHARS = 100
"""The cost of one call of the tokenizer, and of one part of a chat, in characters of a long text."""


async def encode_prompt(
    codec: Text | None,
    prompt: Prompt,
    lanes: Lanes,
    *,
    room: int,
    cuts: bool = False,
    add_special_tokens: bool | None = None,
    reader: ImageReader | None = None,
) -> Encoded:
    """Encode a prompt into token ids for a context of `room` tokens. Chats, long texts and prompts with
    images are encoded in a thread. If `add_special_tokens` is None, they are added to text, and not to chats.
    `reader` reads the images; None: the model reads none.

    Megabytes are not tokenized just to learn that they are too long. Raises PromptTooLong for a text that
    leaves no room for one more token, whatever its tokens are. With `cuts` a longer prompt will be cut; then
    InvalidRequest says that it is too long to read just to keep a small part of it.
    """
    work = partial(
        encode, codec, prompt, room=room, cuts=cuts, add_special_tokens=add_special_tokens, reader=reader
    )
    if images := images_of(prompt):
        return await lanes.images(work, len(images), MESSAGE_BYTES.get())
    if isinstance(prompt, TokenPrompt):
        # With a reader they are searched for the places of images.
        return work() if reader is None else await lanes.convert(work, _ID_COST * len(prompt.token_ids))
    if isinstance(prompt, ChatPrompt):
        if prompt.chat.template is not None:
            return await lanes.template(work)
        return await lanes.text(work, chat_weight(prompt.chat))
    text = prompt.text
    if len(text) <= INLINE_CHARS:
        return work()
    assert codec is not None, "conversion refuses text where there is no tokenizer"
    # checked before it waits for a thread
    check_length(prompt, text, codec.max_token_chars, room=room, cuts=cuts)
    return await lanes.text(work, len(text))


def chat_weight(chat: Chat) -> int:
    """Compute the cost of rendering and tokenizing a chat, in characters of a text.

    All of it may become part of the prompt, not only the turns: tools, the arguments of calls, and the
    template's options. So it is the size of the message that brought it, and something for each of its parts.
    """
    num_calls = sum(len(turn.tool_calls) for turn in chat.messages)
    return MESSAGE_BYTES.get() + _CALL_CHARS * (1 + len(chat.messages) + len(chat.tools) + num_calls)


async def encode_words(codec: Text | None, words: Sequence[str], lanes: Lanes) -> tuple[tuple[int, ...], ...]:
    """Encode bad words into token ids, in all their spellings. Many of them are encoded in a thread."""
    work = partial(word_ids, codec, words)
    num_chars = sum(len(word) + _CALL_CHARS for word in words)
    return work() if num_chars <= INLINE_CHARS else await lanes.text(work, num_chars)
