"""examples/reinforce against a server of the demo model: a few steps, as its docstring says."""

from __future__ import annotations

import csv
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from examples.reinforce import __main__ as program
from examples.reinforce import plot
from examples.reinforce.learner import batch_of
from examples.reinforce.rollouts import Sample, StaleWeights, sample
from examples.reinforce.task import split_questions
from examples.reinforce.trainer import Options, Trainer
from penstock.client import Client
from tests.support.demo_server import served_demo

pytestmark = pytest.mark.ci

MOST_DIFFERENCES = {"bfloat16": (2e-3, 0.5), "float32": (5e-6, 5e-4)}
"""The most that the trainer's and the server's log-probabilities may differ, in nats, by the server's dtype:
on average over the tokens of a step, and of any token. docs/how-to/reinforce.md promises these.
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_demo() as found:
        yield found


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Run the program with few samples, and return the lines of the CSV file, its first argument."""
    flags = ("--questions", "4", "--samples", "8", "--evaluate-every", "3")
    monkeypatch.setattr(sys, "argv", ["reinforce", *arguments, *flags])
    program.main()
    with Path(arguments[0]).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def assert_they_agree(lines: Sequence[dict[str, str]], dtype: str) -> None:
    """Check the log-probabilities of a run against what is promised."""
    most_mean, most_max = MOST_DIFFERENCES[dtype]
    for line in lines[1:]:
        assert 0 < float(line["mean_difference"]) < most_mean
        assert float(line["max_difference"]) < most_max


def test_a_short_run(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step draws from the weights that the step before pushed, and both sides agree about them."""
    with Client(address) as client:
        before = client.model_info().weights.generation
        out = tmp_path / "rewards.csv"
        lines = run(str(out), "--addr", address, "--steps", "3", monkeypatch=monkeypatch)
        after = client.model_info().weights
        answer = client.generate("Once", max_tokens=3, n=2, min_weights=after.generation)
    assert [line["step"] for line in lines] == ["0", "1", "2", "3"]
    # The first update brings the checkpoint, and each step one more.
    assert [int(line["generation"]) for line in lines[1:]] == [before + 1, before + 2, before + 3]
    assert (after.generation, after.label) == (before + 4, "step 3")
    assert [[span.version for span in output.weights] for output in answer.outputs] == [[after]] * 2
    assert_they_agree(lines, "bfloat16")
    assert all(0 < float(line["reward"]) < 1 for line in lines[1:])
    assert [line["held_out"] != "" for line in lines] == [True, False, False, True]

    picture = tmp_path / "rewards.svg"
    monkeypatch.setattr(sys, "argv", ["plot", str(out), str(picture)])
    plot.main()
    drawn = ET.parse(picture).getroot()
    lines_drawn = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines_drawn] == [3, 2]


def score(client: Client, groups: Sequence[Sequence[Sample]]) -> float:
    """Return what a gradient step is to raise, as the server computes it now: the sum of each sample's
    log-probability times how much better than its group's mean it is.
    """
    advantages = iter(batch_of(groups).advantages)
    total = 0.0
    for row in (row for group in groups for row in group):
        answer = client.generate(
            token_ids=[*row.prompt, *row.tokens], max_tokens=1, prompt_logprobs=0, bypass_prefix_cache=True
        )
        assert answer.prompt.logprobs is not None
        total += float(next(advantages)) * sum(answer.prompt.logprobs.sampled[len(row.prompt) :])
    return total


def test_a_step_makes_right_answers_likelier_in_the_server(address: str) -> None:
    with Client(address) as client:
        trainer = Trainer(client, Options())
        questions = split_questions(0)[0][:4]
        groups = sample(client, questions, n=8, seed=1, generation=trainer.generation)
        assert np.any(batch_of(groups).advantages), "all samples of each question were worth the same"
        before = score(client, groups)
        trainer.learn(groups)
        assert score(client, groups) == before, "nothing was pushed yet"
        trainer.push("one step")
        assert score(client, groups) > before


def test_outputs_of_other_weights_are_refused(address: str) -> None:
    with Client(address) as client:
        trainer = Trainer(client, Options())
        with pytest.raises(StaleWeights):
            sample(client, trainer.held_out[:1], n=1, seed=0, generation=trainer.generation - 1)


@pytest.mark.sweep
def test_float32_agrees_more_closely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served_demo("--dtype", "float32") as address:
        out = str(tmp_path / "rewards.csv")
        lines = run(out, "--addr", address, "--steps", "2", monkeypatch=monkeypatch)
        assert_they_agree(lines, "float32")
