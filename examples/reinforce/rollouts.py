"""Asks the server for samples, and keeps of each what training needs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from examples.reinforce.task import Question, reward
from penstock.client import Client, FinishReason, Generation, Output

MAX_TOKENS = 40
"""Of an answer. The longest right one takes fewer."""
AT_ONCE = 32
"""Questions on their way to the server."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One output of the server, and what it is worth."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The generated ids. The end token is one of them, if the model ended the output."""
    logprobs: tuple[float, ...]
    """What the server says of each generated token: the natural logarithm of its probability."""
    text: str
    reward: float


class StaleWeights(RuntimeError):
    """An output was made with other weights than those that were pushed last."""


def sample(
    client: Client, questions: Sequence[Question], *, n: int, seed: int, generation: int
) -> list[list[Sample]]:
    """`n` samples of each question, drawn from the model's own distribution.

    `generation` is that of the weights that were pushed last: the server must use these or newer ones. Raises
    StaleWeights if an output was made with any others.
    """

    def ask(number: int) -> list[Sample]:
        answer = client.generate(
            messages=[{"role": "user", "content": questions[number].text}],
            n=n,
            seed=seed + number,
            min_weights=generation,
            max_tokens=MAX_TOKENS,
            logprobs=0,
            echo_prompt_token_ids=True,
            # The model's defaults may sharpen or cut its distribution. The tokens would then not be samples
            # of the policy whose log-probabilities the server returns, and the gradient would be biased.
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
        )
        return [_sample_of(questions[number], answer, output, generation) for output in answer.outputs]

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(ask, range(len(questions))))


def _sample_of(question: Question, answer: Generation, output: Output, generation: int) -> Sample:
    used = {span.version.generation for span in output.weights}
    if used != {generation}:
        raise StaleWeights(f"an output was made with the weights {sorted(used)}, not with {generation}")
    assert output.logprobs is not None, "they were asked for"
    ended = output.finish.reason is FinishReason.EOS
    return Sample(
        prompt=answer.prompt.token_ids,
        tokens=output.token_ids,
        logprobs=output.logprobs.sampled,
        text=output.text,
        reward=reward(question, output.text, ended),
    )


def mean_reward(groups: Sequence[Sequence[Sample]]) -> float:
    """Compute the mean reward of all samples."""
    rewards = [sample.reward for group in groups for sample in group]
    return sum(rewards) / len(rewards)
