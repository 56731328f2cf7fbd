"""Converts the contract's requests to validated frozen values. A refusal names all violations of a request at
once.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from penstock.runtime.errors import PromptTooLong, UnknownModel, UnsupportedFeature
from penstock.runtime.generation.jobs import Job
from penstock.runtime.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt, images_of
from penstock.runtime.requests.context import ContextParams, Truncation, most_cut_tokens
from penstock.runtime.requests.fanout import MAX_OUTPUTS, SEPARATOR
from penstock.runtime.requests.grammar import MAX_CHOICES, Grammar, GrammarKind
from penstock.runtime.requests.request import (
    MAX_REQUEST_ID_CHARS,
    CacheParams,
    ResolvedSampling,
)
from penstock.runtime.text.interface import Text
from penstock.service.access.callers import Caller
from penstock.service.access.ownership import engine_id
from penstock.service.backend import Info
from penstock.service.requests.convert_chat import chat_prompt
from penstock.service.requests.convert_media import WHY_NO_IMAGES, media
from penstock.service.requests.convert_params import (
    Violations,
    context_params,
    num_outputs,
    sampling_params,
    stopping_params,
    token_ids,
    truncation_of,
)
from penstock.service.requests.features import DEFAULT_FEATURES, Features
from penstock.service.requests.support import Refused, check_supported
from penstock.v1 import inference_pb2, types_pb2

_NEED_TEXT: Refused = {"prompt": (), "chat": (), "sampling.bad_words": (), "output.text": (False,)}
_NEED_GRAMMARS: Refused = {f"constraint.{kind.value}": () for kind in GrammarKind}
_WHY_NO_GRAMMARS = dict.fromkeys(
    [*_NEED_GRAMMARS, "chat.tool_choice"], "it was started with --no-constraints"
)
_WHY_NO_TEMPLATES = {"chat.chat_template": "it was started without --allow-request-templates"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedJob(Job):
    """A job that one call of Generate or Stream asks for, with its caller and with what is sent back."""

    return_token_ids: bool = True
    echo_prompt_token_ids: bool = False
    min_tokens_per_message: int = 1
    owner: str = ""
    """The id of the caller."""

    @property
    def engine_id(self) -> str:
        """The id of the request in the engine."""
        return engine_id(self.owner, self.request_id)

    def of(self, caller: Caller) -> Self:
        """The job as this caller's, with its cached prefixes only where those find them who may."""
        cache = dataclasses.replace(self.cache, salt=caller.cache_salt(self.cache.salt))
        return dataclasses.replace(self, owner=caller.id, cache=cache)

    def without_load(self) -> Self:
        """The job without what is no longer needed once its requests are made."""
        return dataclasses.replace(
            self, prompt=TokenPrompt(()), sampling=ResolvedSampling(), grammar=None, bad_words=()
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server checks requests against."""

    info: Info
    max_logprobs: int
    codec: Text | None
    has_grammars: bool
    has_priority: bool
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
            **({} if self.has_priority else {"priority": ()}),
            **({} if self.has_text else _NEED_TEXT),
            **({} if self.has_hidden_states else {"output.hidden_states": ()}),
            **({} if self.has_grammars else _NEED_GRAMMARS),
            **({} if self.info.images is not None else {"media": ()}),
            **self.lacking_templates,
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
        why = _WHY_NO_TEMPLATES | {"media": WHY_NO_IMAGES}
        return why if self.features.constraints else why | _WHY_NO_GRAMMARS


def to_job(message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest, limits: Limits) -> ServedJob:
    """Check the whole message.

    Raises the first of these that applies: UnknownModel, because nothing else can be judged for another
    model; UnsupportedFeature, because a field that is not honoured may change what the others mean (with
    truncation a long prompt is fine); InvalidRequest with all violations. The values of unsupported fields
    are not checked.
    """
    check_model(message.model, limits)
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
        grammar=grammar,
        context=context,
        cache=cache,
        priority=message.priority,
        min_generation=message.min_weights.generation,
        return_text=return_text,
        skip_special_tokens=skip_special,
        return_token_ids=return_token_ids,
        echo_prompt_token_ids=output.echo_prompt_token_ids,
        min_tokens_per_message=per_message,
    )


def _context(
    message: inference_pb2.GenerateRequest | inference_pb2.StreamRequest,
    prompt: Prompt | None,
    limits: Limits,
    bad: Violations,
) -> ContextParams:
    """The context parameters. A prompt with images is never cut, as a part of an image means nothing."""
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
    """The request's id: the caller's, or a new one."""
    request_id = given or uuid.uuid4().hex
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        bad.add("request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters, not {len(request_id)}")
    if SEPARATOR in request_id:
        bad.add("request_id", "must not hold the character U+0000")
    return request_id


def _num_logprobs(output: types_pb2.OutputOptions, name: str, limits: Limits, bad: Violations) -> int | None:
    """The number of log-probabilities asked for, or None."""
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
    """The grammar that the output must match, or None."""
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
