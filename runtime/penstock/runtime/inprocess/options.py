"""The keyword arguments of `Engine.generate`, `stream` and `chat`, and how they become a job."""

from __future__ import annotations

import difflib
import operator
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, cast

from penstock.runtime.chat.from_mappings import tools_of, turns_of
from penstock.runtime.chat.messages import Chat, ChatTurn, Tool
from penstock.runtime.errors import InvalidRequest, UnsupportedFeature, Violation
from penstock.runtime.images.image import Image
from penstock.runtime.prompting.interface import TextEngine
from penstock.runtime.prompting.jobs import Job
from penstock.runtime.prompting.prompts import ChatPrompt, ContextParams, Prompt, TextPrompt, TokenPrompt
from penstock.runtime.requests.output_constraints import Constraint, grammar_of
from penstock.runtime.requests.request import MAX_OUTPUTS, SEPARATOR, CacheParams, StoppingParams
from penstock.runtime.requests.sampling import SamplingParams


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `chat`. None is the same as leaving one out."""

    request_id: str | Sequence[str] | None
    """Names the request, for `Engine.abort`; by default a new id. A list of prompts takes a list of ids."""
    sampling: SamplingParams | None
    """How tokens are drawn; what is left out is the model's default."""
    stopping: StoppingParams | None
    """When an output ends."""
    n: int | None
    """How many outputs; the prompt is computed once for all. Output 0 is what n = 1 gives."""
    logprobs: int | None
    """Return the log-probability of each token, and of this many likeliest ones (may be 0)."""
    prompt_logprobs: int | None
    """The same for the prompt's tokens, in `Generation.prompt`."""
    hidden_states: bool | None
    """Return the hidden state from which each token was chosen, in `Output.hidden_states`."""
    max_proposed_tokens: int | None
    """The most tokens that are proposed for an output in a step, where the engine speculates; 0: none. By
    default the engine's own bound, which holds in any case."""
    constraint: Constraint | None
    """What each output is held to: JsonSchema, JsonObject, Regex, Ebnf or Choice."""
    priority: int | None
    """Higher runs first, where the engine's scheduling policy is "priority"."""
    adapter: str | None
    """The name of the LoRA adapter with which the outputs are made, see `Engine.adapters`."""
    context: ContextParams | None
    """What to do with a prompt that leaves too little room; by default it is refused."""
    cache: CacheParams | None
    """How the request uses the prefix cache."""
    return_text: bool | None
    """False: token ids only."""
    skip_special_tokens: bool | None
    """Whether special tokens have no text; by default they have none."""


class PromptOptions(RequestOptions, total=False):
    """Keyword arguments of `generate` and `stream`."""

    media: Sequence[Image] | Sequence[Sequence[Image]] | None
    """The images of the prompt, one for each place that it has for one (such as "<|image_pad|>"). A list of
    prompts takes a list of such sequences."""


class ChatOptions(RequestOptions, total=False):
    """Keyword arguments of `chat`. Its images are parts of the messages."""

    tools: Sequence[Tool | Mapping[str, Any]] | None
    """What the model may call; mappings: name, description and parameters, bare or as in the OpenAI API."""
    tool_choice: str | None
    """"auto" (the default), "none", "required" or a tool's name."""
    chat_template: str | None
    """Jinja, or the name of one of the model's templates; by default the model's own."""
    template_options: Mapping[str, Any] | None
    """Further variables of the template, such as {"enable_thinking": False}."""
    parallel_tool_calls: bool | None
    """Whether an output may have several calls, as it may by default; if not, it ends with its first one."""


Messages: TypeAlias = Sequence[ChatTurn | Mapping[str, Any]]
Prompts: TypeAlias = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""One prompt of text or token ids, or several."""

_KINDS: Mapping[str, type] = {
    "sampling": SamplingParams,
    "stopping": StoppingParams,
    "context": ContextParams,
    "cache": CacheParams,
    "request_id": str,
    "n": int,
    "logprobs": int,
    "prompt_logprobs": int,
    "hidden_states": bool,
    "max_proposed_tokens": int,
    "priority": int,
    "adapter": str,
    "return_text": bool,
    "skip_special_tokens": bool,
}


def job_of(engine: TextEngine, prompt: Prompt, options: RequestOptions) -> Job:
    """Make the job that the keyword arguments ask for. TypeError for an argument that does not exist or is of
    the wrong class; InvalidRequest or UnsupportedFeature, with the field, for what this engine cannot do.
    """
    given = _given(options)
    request_id = given.get("request_id", "") or uuid.uuid4().hex
    constraint: Constraint | None = given.get("constraint")
    sampling: SamplingParams = given.get("sampling") or SamplingParams()
    job = Job(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling.resolved(engine.info.defaults),
        bad_words=tuple(sampling.bad_words),
        stopping=given.get("stopping") or StoppingParams(),
        n=given.get("n", 1),
        logprobs=given.get("logprobs"),
        prompt_logprobs=given.get("prompt_logprobs"),
        hidden_states=given.get("hidden_states", False),
        max_proposed_tokens=given.get("max_proposed_tokens"),
        grammar=None if constraint is None else grammar_of(constraint),
        context=given.get("context") or ContextParams(),
        cache=given.get("cache") or CacheParams(),
        priority=given.get("priority", 0),
        adapter=given.get("adapter"),
        return_text=given.get("return_text", engine.text is not None),
        skip_special_tokens=given.get("skip_special_tokens", True),
    )
    _check(engine, job)
    return job


def _given(options: RequestOptions) -> dict[str, Any]:
    """Return the arguments that are not None."""
    known = [*_KINDS, "constraint"]
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise TypeError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        kind = _KINDS.get(name, object)
        if value is None:
            continue
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{name}: must be {kind.__name__}, not {type(value).__name__}")
        given[name] = value
    return given


def _check(engine: TextEngine, job: Job) -> None:
    """Say whether this engine can do it."""
    if job.priority and engine.config.scheduling_policy != "priority":
        raise UnsupportedFeature(["priority"], 'the scheduling policy is not "priority"')
    if (job.grammar is not None or job.calls_enforced_by) and engine.grammars is None:
        fields = job.calls_enforced_by if job.grammar is None else [job.grammar.field]
        raise UnsupportedFeature(fields, "the model has no tokenizer that could have grammars")
    bad = []
    most = min(MAX_OUTPUTS, engine.config.max_queued_requests)
    if not 1 <= job.n <= most:
        bad.append(Violation("sampling.n", f"must be from 1 to {most}, not {job.n}"))
    if SEPARATOR in job.request_id:
        bad.append(Violation("request_id", "must not hold the character U+0000"))
    if job.grammar is not None and job.requires_call:
        bad.append(Violation("constraint", "not together with a chat.tool_choice that requires a call"))
    if engine.text is None:
        bad += _text_problems(job)
    elif job.stopping.stop and not job.return_text:
        bad.append(Violation("stopping.stop", "needs return_text: stop strings are searched in the text"))
    if job.ends_at_call and not job.return_text:
        bad.append(
            Violation("chat.parallel_tool_calls", "false needs return_text: calls are found in the text")
        )
    if bad:
        raise InvalidRequest(bad)


def _text_problems(job: Job) -> list[Violation]:
    """List what needs a tokenizer, which this model lacks."""
    bad = []
    if not isinstance(job.prompt, TokenPrompt):
        bad.append(Violation("input", "this model has no tokenizer; pass token ids"))
    if job.stopping.stop:
        bad.append(Violation("stopping.stop", "this model has no tokenizer to find stop strings with"))
    if job.bad_words:
        bad.append(Violation("sampling.bad_words", "this model has no tokenizer to find words with"))
    if job.return_text:
        bad.append(Violation("return_text", "this model has no tokenizer to make text with"))
    return bad


def prompt_job(engine: TextEngine, prompt: Any, options: PromptOptions) -> Job:
    """Make the job of one prompt of text or of token ids, see `prompt_of` and `job_of`."""
    rest: dict[str, Any] = dict(options)
    media = rest.pop("media", None)
    return job_of(engine, prompt_of(prompt, media or ()), cast(RequestOptions, rest))


def prompt_of(prompt: Any, media: Any = ()) -> Prompt:
    """Make a prompt of text or of token ids. InvalidRequest where it is empty, TypeError where it is neither,
    or where `media` has anything but images.
    """
    images = tuple(media)
    if not all(isinstance(image, Image) for image in images):
        raise TypeError("media: give a sequence of Image, such as [Image(path)]")
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest([Violation("prompt", "must not be empty")])
        return TextPrompt(prompt, images)
    try:
        token_ids = tuple(map(operator.index, prompt))
    except TypeError as error:
        raise TypeError(f"prompt: give a text or a sequence of token ids: {error}") from error
    if not token_ids:
        raise InvalidRequest([Violation("input", "the prompt has no tokens")])
    return TokenPrompt(token_ids, images)


def is_list_of_prompts(prompt: Prompts) -> bool:
    """Say whether it is several prompts and not one. An empty sequence is one prompt, without tokens."""
    return not isinstance(prompt, str) and len(prompt) > 0 and not hasattr(prompt[0], "__index__")


def jobs_of(engine: TextEngine, prompts: Prompts, options: PromptOptions) -> list[Job]:
    """Make a job for each prompt of a list. `request_id` is then a sequence of as many ids, and `media` of as
    many sequences of images.
    """
    rest: dict[str, Any] = dict(options)
    ids: Sequence[str | None] = rest.pop("request_id", None) or [None] * len(prompts)
    if isinstance(ids, str) or len(ids) != len(prompts):
        raise TypeError(f"request_id: give a sequence of {len(prompts)} ids, one for each prompt")
    media: Sequence[Any] = rest.pop("media", None) or [()] * len(prompts)
    if len(media) != len(prompts) or any(isinstance(each, Image) for each in media):
        raise TypeError(f"media: give {len(prompts)} sequences of images, one for each prompt")
    return [
        job_of(engine, prompt_of(prompt, each), cast(RequestOptions, {**rest, "request_id": request_id}))
        for prompt, request_id, each in zip(prompts, ids, media, strict=True)
    ]


def chat_job(engine: TextEngine, messages: Messages, options: ChatOptions) -> Job:
    """Make the job of a conversation. InvalidRequest with everything that is wrong with it."""
    rest: dict[str, Any] = dict(options)
    tools = rest.pop("tools", None)
    choice, template = rest.pop("tool_choice", None), rest.pop("chat_template", None)
    variables, parallel = rest.pop("template_options", None), rest.pop("parallel_tool_calls", None)
    for name, value, kind in (
        ("tool_choice", choice, str),
        ("chat_template", template, str),
        ("template_options", variables, Mapping),
        ("parallel_tool_calls", parallel, bool),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name}: must be {kind.__name__}, not {type(value).__name__}")
    chat = Chat(
        tuple(turns_of(messages)),
        tuple(tools_of(tools or ())),
        choice or "auto",
        template,
        dict(variables or {}),
        parallel_tool_calls=parallel is not False,
    )
    return job_of(engine, ChatPrompt(chat), cast(RequestOptions, rest))
