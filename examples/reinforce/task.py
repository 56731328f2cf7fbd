"""The task: count from one number to another. A program can check an answer, and nobody has to judge it."""

from __future__ import annotations

import random
from dataclasses import dataclass

HELD_OUT_SHARE = 0.25
"""Of all questions; training never asks these."""


@dataclass(frozen=True, slots=True)
class Question:
    """Asks to count from `first` to `last`, both included."""

    first: int
    last: int

    @property
    def text(self) -> str:
        """What the user says."""
        return f"Count from {self.first} to {self.last}."

    @property
    def answer(self) -> str:
        """The only right answer, in the form that the demo model was taught: "7, 8, 9."."""
        return ", ".join(str(number) for number in range(self.first, self.last + 1)) + "."


def reward(question: Question, text: str, ended: bool) -> float:
    """1 for the right answer and nothing else, 0 otherwise. `ended` says that the model itself ended it."""
    return float(ended and text == question.answer)


def all_questions() -> list[Question]:
    """Every question of the task: counts of three to seven numbers that begin between 20 and 59."""
    return [Question(first, first + steps) for first in range(20, 60) for steps in range(2, 7)]


def split_questions(seed: int) -> tuple[list[Question], list[Question]]:
    """(questions for training, questions held out), in an order that depends on the seed alone."""
    questions = all_questions()
    random.Random(seed).shuffle(questions)
    held_out = round(HELD_OUT_SHARE * len(questions))
    return questions[held_out:], questions[:held_out]


def questions_of_step(training: list[Question], step: int, count: int, seed: int) -> list[Question]:
    """`count` questions for a step; the first step is 1. All questions come once before any comes again."""
    places = range((step - 1) * count, step * count)
    epochs = {place // len(training) for place in places}
    orders = {epoch: random.Random(f"{seed} {epoch}").sample(training, len(training)) for epoch in epochs}
    return [orders[place // len(training)][place % len(training)] for place in places]
