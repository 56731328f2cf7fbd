"""Embeddings and scores by an engine of the program's own: as many prompts at once as keep it busy."""

from __future__ import annotations

import queue
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import (
    GenerationError,
    InvalidRequest,
    QueueFull,
    UnsupportedFeature,
    Violation,
)
from penstock.runtime.inprocess.active_ids import EmbeddedEngine
from penstock.runtime.inprocess.options import prompt_of
from penstock.runtime.prompting.prompts import Truncation, encode
from penstock.runtime.prompting.results import Score, VectorForm, fit_inputs, join, naming, special_around
from penstock.runtime.requests.request import (
    CacheParams,
    FinishReason,
    Pooling,
    PromptReading,
    Request,
    StepOutput,
    output_id,
)

TextOrIds = str | Sequence[int]
"""A text, or token ids."""
Inbox = queue.SimpleQueue[StepOutput | None]
"""What the engine brings for prompts that are read. None, from any thread, ends the reading."""


class ReadingOptions(TypedDict, total=False):
    """Keyword arguments of `embed` and `score`. None is the same as leaving one out."""

    request_id: str | None
    """Names the request, for `Engine.abort`; by default a new id."""
    priority: int | None
    """Higher runs first, where the engine's scheduling policy is "priority"."""
    adapter: str | None
    """The name of the LoRA adapter with which the inputs are read, see `Engine.adapters`."""
    cache: CacheParams | None
    """How the prompts use the prefix cache."""


_KINDS: Mapping[str, type] = {"request_id": str, "priority": int, "adapter": str, "cache": CacheParams}


def embed(
    engine: EmbeddedEngine,
    inputs: Sequence[TextOrIds],
    *,
    pooling: Pooling | str | None,
    form: VectorForm,
    truncation: Truncation | str,
    options: ReadingOptions,
    inbox: Inbox | None = None,
) -> NDArray[np.float32]:
    """See `Engine.embed`."""
    info = engine.info
    form.check(info.hidden_size)
    reading = PromptReading(pooling=_pooling(pooling, info.pooling))
    allowed = _truncation(truncation)
    cuts = allowed is not Truncation.REJECT
    token_ids = _ids_of_all(engine, "inputs", inputs, special=True, cuts=cuts)
    around = special_around(engine.text, info.reader)
    prompts = [one.token_ids for one in fit_inputs(token_ids, allowed, info.room, around)]
    outputs = read(engine, prompts, [reading] * len(prompts), options, inbox)
    width = form.dimensions or info.hidden_size
    vectors = np.zeros((len(outputs), width), np.float32)
    for row, output in zip(vectors, outputs, strict=True):
        assert output.hidden is not None, "a prompt that was read has its embedding"
        row[:] = form.vector(output.hidden)
    return vectors


def score(
    engine: EmbeddedEngine,
    prompt: TextOrIds,
    continuations: Sequence[TextOrIds],
    options: ReadingOptions,
    inbox: Inbox | None = None,
) -> list[Score]:
    """See `Engine.score`."""
    first = _token_ids(engine, prompt, special=True)
    parts = _ids_of_all(engine, "continuations", continuations, special=False)
    if not parts:
        return []
    prompts = join(first, parts, engine.info.room)
    readings = [PromptReading(scores_from=len(first))] * len(parts)
    outputs = read(engine, prompts, readings, options, inbox)
    return [Score.of(part, output.prompt_logprobs) for part, output in zip(parts, outputs, strict=True)]


def read(
    engine: EmbeddedEngine,
    prompts: Sequence[tuple[int, ...]],
    readings: Sequence[PromptReading],
    options: ReadingOptions,
    inbox: Inbox | None = None,
) -> list[StepOutput]:
    """Read the last output of each prompt. The first error ends them all, and is raised. Raises
    GenerationError where somebody puts None into `inbox`, by default one of its own.
    """
    given = _checked(engine, options)
    request_id = cast("str", given.get("request_id")) or uuid.uuid4().hex
    brought = queue.SimpleQueue() if inbox is None else inbox

    def sink(outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            brought.put(output)

    waiting = deque(
        Request(
            output_id(request_id, i),
            prompt,
            reading=reading,
            prompt_logprobs=None if reading.scores_from is None else 0,
            cache=cast("CacheParams", given.get("cache", CacheParams())),
            priority=cast("int", given.get("priority", 0)),
            adapter=cast("str | None", given.get("adapter")),
            operation="embeddings" if reading.pooling is not None else "text_completion",
        )
        for i, (prompt, reading) in enumerate(zip(prompts, readings, strict=True))
    )
    order = [request.request_id for request in waiting]
    running: set[str] = set()
    ended: dict[str, StepOutput] = {}
    most = 2 * engine.config.max_num_seqs
    engine.active_ids.take(request_id)
    try:
        while waiting or running:
            while waiting and len(running) < most:
                try:
                    engine.submit(waiting[0], sink)
                except QueueFull:
                    if not running:
                        raise
                    break
                running.add(waiting.popleft().request_id)
            output = brought.get()
            if output is None:
                raise GenerationError("the reading was ended before its time")
            running.discard(output.request_id)
            if output.error is not None:
                raise output.error.with_traceback(None)
            assert output.finish is not None, "a request that generates nothing has one output"
            if output.finish.reason is not FinishReason.PROMPT_READ:
                raise GenerationError(f"the request was aborted: {output.finish.message}")
            ended[output.request_id] = output
    finally:
        if running:
            engine.cancel(*running)
        engine.active_ids.release(request_id)
    return [ended[name] for name in order]


def _checked(engine: EmbeddedEngine, options: ReadingOptions) -> dict[str, object]:
    """Return the options that are not None. TypeError for one that does not exist or is of the wrong
    class.
    """
    given: dict[str, object] = {}
    for name, value in options.items():
        if name not in _KINDS:
            raise TypeError(f"unknown option {name!r}")
        if value is not None and not isinstance(value, _KINDS[name]):
            raise TypeError(f"{name}: must be {_KINDS[name].__name__}, not {type(value).__name__}")
        if value is not None:
            given[name] = value
    if given.get("priority") and engine.config.scheduling_policy != "priority":
        raise UnsupportedFeature(["priority"], 'the scheduling policy is not "priority"')
    return given


def _several(name: str, values: Sequence[TextOrIds]) -> Sequence[TextOrIds]:
    if isinstance(values, str) or (len(values) > 0 and hasattr(values[0], "__index__")):
        raise TypeError(f"{name}: give a sequence of texts or of sequences of token ids, not one of them")
    return values


def _ids_of_all(
    engine: EmbeddedEngine, name: str, values: Sequence[TextOrIds], *, special: bool, cuts: bool = False
) -> list[tuple[int, ...]]:
    """Return the token ids of each. InvalidRequest names all that are empty or too long."""
    bad: list[Violation] = []
    found: list[tuple[int, ...]] = []
    for i, value in enumerate(_several(name, values)):
        with naming(f"{name}[{i}]", bad):
            found.append(_token_ids(engine, value, special=special, cuts=cuts))
    if bad:
        raise InvalidRequest(bad)
    return found


def _token_ids(
    engine: EmbeddedEngine, value: TextOrIds, *, special: bool, cuts: bool = False
) -> tuple[int, ...]:
    """Return the token ids of a text or of what are some already."""
    prompt = prompt_of(value)
    if engine.text is None and isinstance(value, str):
        raise UnsupportedFeature(["prompt"], "this model has no tokenizer")
    room = engine.info.room
    return encode(engine.text, prompt, room=room, cuts=cuts, add_special_tokens=special).token_ids


def _pooling(given: Pooling | str | None, otherwise: Pooling) -> Pooling:
    """Return the pooling, given also by its value. InvalidRequest for what is none."""
    try:
        return otherwise if given is None else Pooling(given)
    except ValueError:
        names = ", ".join(member.value for member in Pooling)
        raise InvalidRequest([Violation("pooling", f"must be one of {names}, not {given!r}")]) from None


def _truncation(given: Truncation | str) -> Truncation:
    """Return the truncation, given also by its value. InvalidRequest for what is none."""
    try:
        return Truncation(given)
    except ValueError:
        names = ", ".join(member.value for member in Truncation)
        raise InvalidRequest([Violation("truncation", f"must be one of {names}, not {given!r}")]) from None
