"""Makes the answer to a completion that does not stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.client import Generation, Output
from penstock.openai.answers.finishing import finish_reason, stop_reason
from penstock.openai.answers.frames import Wanted
from penstock.openai.answers.large import completion_logprobs_json, prompt_logprobs_json, spliced
from penstock.openai.answers.usage import total_usage, usage_dict
from penstock.openai.jsonbytes import json_bytes


async def completion_answer(
    answers: Sequence[Generation], answer_id: str, created: int, wanted: Wanted
) -> bytes:
    """The JSON of `completion`, with log-probabilities. Raises ApiError if an output was aborted."""
    made = completion(answers, answer_id, created, wanted)
    if wanted.vocabulary is None:
        return json_bytes(made)
    choices = []
    for answer in answers:
        of_prompt = {}
        if answer.prompt.logprobs is not None:
            of_prompt["prompt_logprobs"] = await prompt_logprobs_json(answer.prompt, wanted.vocabulary)
        for output in answer.outputs:
            own = {"logprobs": await completion_logprobs_json(output, wanted.vocabulary)}
            choices.append(own | of_prompt)
    return spliced(made, {}, choices)


def completion(answers: Sequence[Generation], answer_id: str, created: int, wanted: Wanted) -> dict[str, Any]:
    """The object "text_completion" of the answers to all prompts, in their order, without log-probabilities.
    Choice j of prompt i has the index i * n + j. Raises ApiError if an output was aborted.
    """
    choices = [
        _choice(output, answer, i * len(answer.outputs) + output.index, wanted)
        for i, answer in enumerate(answers)
        for output in answer.outputs
    ]
    return {
        "id": answer_id,
        "object": "text_completion",
        "created": created,
        "model": answers[0].model,
        "choices": choices,
        "usage": usage_dict(total_usage(answer.usage for answer in answers)),
    }


def _choice(output: Output, answer: Generation, index: int, wanted: Wanted) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": output.text,
        "logprobs": None,
        "finish_reason": finish_reason(output.finish),
        **stop_reason(output.finish),
    }
    if wanted.token_ids:
        choice["token_ids"] = output.token_ids
        choice["prompt_token_ids"] = answer.prompt.token_ids
    return choice
