"""Makes the answer to a completion that does not stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.client import Generation, Output
from penstock.openai.answers.finishing import finish_reason, stop_reason
from penstock.openai.answers.frames import Wanted
from penstock.openai.answers.logprobs import completion_logprobs, prompt_logprobs
from penstock.openai.answers.usage import total_usage, usage_dict


def completion(answers: Sequence[Generation], answer_id: str, created: int, wanted: Wanted) -> dict[str, Any]:
    """The object "text_completion" of the answers to all prompts, in their order. Choice j of prompt i has
    the index i * n + j. Raises ApiError if an output was aborted.
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
    if wanted.vocabulary is not None:
        if output.logprobs is not None:
            choice["logprobs"], _ = completion_logprobs(
                output.logprobs, output.token_ids, wanted.vocabulary, 0
            )
        if answer.prompt.logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                answer.prompt.logprobs, answer.prompt.token_ids, wanted.vocabulary
            )
    if wanted.token_ids:
        choice["token_ids"] = output.token_ids
        choice["prompt_token_ids"] = answer.prompt.token_ids
    return choice
