"""Makes the answer to a completion that does not stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.client import Generation, Output, Vocabulary
from penstock.openai.answers.echo import Echo, Repeated
from penstock.openai.answers.finishing import finish_reason, stop_reason
from penstock.openai.answers.frames import Wanted
from penstock.openai.answers.large import columns_json, completion_columns, prompt_logprobs_json, spliced
from penstock.openai.answers.usage import total_usage, usage_dict
from penstock.openai.jsonbytes import json_bytes

NOTHING = Repeated("", None)
"""What a choice begins with that does not repeat its prompt."""


async def completion_answer(
    answers: Sequence[Generation], answer_id: str, created: int, wanted: Wanted, echo: Echo | None = None
) -> bytes:
    """The JSON of the object "text_completion" of the answers to all prompts, in their order. Choice j of
    prompt i has the index i * n + j. Raises ApiError if an output was aborted.
    """
    is_prompt_only = echo is not None and echo.is_all
    choices: list[dict[str, Any]] = []
    logprobs: list[dict[str, str]] = []
    for i, answer in enumerate(answers):
        begins = NOTHING if echo is None else await echo.repeated(i, answer.prompt)
        of_prompt = {}
        if wanted.prompt_logprobs and wanted.vocabulary is not None:
            of_prompt["prompt_logprobs"] = await prompt_logprobs_json(answer.prompt, wanted.vocabulary)
        for output in answer.outputs:
            index = i * len(answer.outputs) + output.index
            choices.append(_choice(output, answer, index, wanted, begins.text, is_prompt_only))
            if wanted.vocabulary is not None:
                told = await _logprobs(output, wanted.vocabulary, begins, is_prompt_only)
                logprobs.append({"logprobs": told} | of_prompt)
    made = {
        "id": answer_id,
        "object": "text_completion",
        "created": created,
        "model": answers[0].model,
        "choices": choices,
        "usage": usage_dict(total_usage(answer.usage for answer in answers)),
    }
    return json_bytes(made) if wanted.vocabulary is None else spliced(made, {}, logprobs)


def _choice(
    output: Output, answer: Generation, index: int, wanted: Wanted, begins: str, is_prompt_only: bool
) -> dict[str, Any]:
    reason = finish_reason(output.finish)
    choice: dict[str, Any] = {
        "index": index,
        "text": begins if is_prompt_only else begins + output.text,
        "logprobs": None,
        "finish_reason": "length" if is_prompt_only else reason,
        **({} if is_prompt_only else stop_reason(output.finish)),
    }
    if wanted.token_ids:
        choice["token_ids"] = [] if is_prompt_only else output.token_ids
        choice["prompt_token_ids"] = answer.prompt.token_ids
    return choice


async def _logprobs(output: Output, vocabulary: Vocabulary, begins: Repeated, is_prompt_only: bool) -> str:
    """The `logprobs` of a choice, as JSON."""
    parts = [] if begins.logprobs is None else [begins.logprobs]
    if output.logprobs is not None and not is_prompt_only:
        start = len(begins.text)
        parts.append(await completion_columns(output.logprobs, output.token_ids, vocabulary, start=start))
    return columns_json(*parts) if parts else "null"
