"""The task of examples/reinforce: what is asked, and what is right."""

from __future__ import annotations

import pytest

from examples.reinforce.task import Question, all_questions, questions_of_step, reward, split_questions


@pytest.mark.parametrize(
    ("text", "ended", "worth"),
    [
        ("7, 8, 9.", True, 1),
        ("7, 8, 9.", False, 0),
        ("7, 8, 9", True, 0),
        ("7, 8.", True, 0),
        ("7, 8, 9, 10.", True, 0),
        ("8, 9.", True, 0),
        ("7, 9, 8.", True, 0),
        ("", True, 0),
    ],
)
def test_only_the_right_answer_is_rewarded(text: str, ended: bool, worth: float):
    assert reward(Question(7, 9), text, ended) == worth


def test_held_out_questions_are_never_asked_in_training():
    training, held_out = split_questions(0)
    assert sorted([*training, *held_out], key=repr) == sorted(all_questions(), key=repr)
    assert len(held_out) == 50
    assert split_questions(0) == (training, held_out)
    assert split_questions(1) != (training, held_out)


def test_all_questions_come_once_before_any_comes_again():
    training = all_questions()[:10]
    asked = [question for step in (1, 2, 3, 4, 5) for question in questions_of_step(training, step, 4, 0)]
    assert sorted(asked[:10], key=repr) == sorted(asked[10:], key=repr) == sorted(training, key=repr)
    assert asked[:10] != asked[10:]
