"""The loop: sample, reward, make a gradient step, push the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import optax

from examples.reinforce.learner import Figures, batch_of, make_update
from examples.reinforce.policy import logprobs_of, to_push
from examples.reinforce.rollouts import Sample, mean_reward, sample
from examples.reinforce.task import questions_of_step, split_questions
from penstock.client import Client
from penstock.runtime.loading.hub import DEMO_DIRECTORY
from tools.demo_model.export import read_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to train."""

    questions: int = 16
    """Asked in each step."""
    samples: int = 8
    """Of each question."""
    rate: float = 1e-4
    """The learning rate of Adam."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one step measured. `_s` stands for seconds."""

    step: int
    generation: int
    """Of the weights that the samples were drawn with."""
    reward: float
    """The mean of all samples."""
    mean_difference: float
    max_difference: float
    """Between the trainer's and the server's log-probabilities of the sampled tokens, in nats."""
    sample_s: float
    train_s: float
    push_s: float


class Trainer:
    """Holds the weights in float32, and keeps a server's weights equal to them, up to the server's dtype."""

    def __init__(self, client: Client, options: Options) -> None:
        """Read the demo model's checkpoint and push it, so that both sides begin with the same weights."""
        self._client = client
        self._options = options
        self._training, self.held_out = split_questions(options.seed)
        self._dtype = client.model_info(include_tensors=True).tensors[0].dtype
        self.params, config = read_checkpoint(DEMO_DIRECTORY)
        optimizer = optax.adam(options.rate)
        self._state = optimizer.init(self.params)
        self._update = make_update(logprobs_of(config, self._dtype), optimizer)
        self.generation = 0
        """Of the weights that were pushed last."""
        self.push("before training")

    def learn(self, groups: Sequence[Sequence[Sample]]) -> Figures:
        """One gradient step on samples; each group has those of one question. Nothing is pushed."""
        self.params, self._state, figures = self._update(self.params, self._state, batch_of(groups))
        jax.block_until_ready(self.params)
        return figures

    def push(self, label: str) -> None:
        """Give the server the trainer's weights. When this returns, they serve."""
        update = self._client.update_weights(to_push(self.params, self._dtype), label=label)
        self.generation = update.current.generation

    def step(self, number: int) -> Step:
        """One gradient step on samples of the weights that serve; then the new weights serve.

        The first step is number 1. Steps of equal number and seed ask the same questions.
        """
        options, generation = self._options, self.generation
        started = time.perf_counter()
        questions = questions_of_step(self._training, number, options.questions, options.seed)
        seed = (options.seed * 100_000 + number) * options.questions
        groups = sample(self._client, questions, n=options.samples, seed=seed, generation=generation)
        sampled = time.perf_counter()
        figures = self.learn(groups)
        trained = time.perf_counter()
        self.push(f"step {number}")
        pushed = time.perf_counter()
        return Step(
            step=number,
            generation=generation,
            reward=mean_reward(groups),
            mean_difference=float(figures.mean_difference),
            max_difference=float(figures.max_difference),
            sample_s=sampled - started,
            train_s=trained - sampled,
            push_s=pushed - trained,
        )

    def held_out_reward(self) -> float:
        """Draw samples of the held-out questions with the weights that serve; return their mean reward."""
        seed = 2**40 + self._options.seed * 1000
        return mean_reward(sample(self._client, self.held_out, n=4, seed=seed, generation=self.generation))
