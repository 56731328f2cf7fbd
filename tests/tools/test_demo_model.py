"""The demo model, served: its answers are right, and the engine computes what the training forward computes.

The training forward (tools/demo_model) shares no code with the engine: no cache, no pages, its own attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from penstock.runtime import Engine, SamplingParams, StoppingParams
from penstock.runtime.loading.hub import resolve_model
from tests.support.models.demo import demo_engine
from tools.demo_model.sample import Model

pytestmark = pytest.mark.ci

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with demo_engine() as engine:
        yield engine


def ask(engine: Engine, question: str) -> str:
    assert engine.text is not None
    prompt = engine.text.encode(
        engine.text.render_chat([{"role": "user", "content": question}]), add_special_tokens=False
    )
    return engine.generate(prompt, sampling=GREEDY, stopping=StoppingParams(max_tokens=80)).text


@pytest.mark.parametrize(
    ("question", "numbers"),
    [
        ("What is 3 + 4?", [3, 4, 7]),
        ("what is 12 + 9?", [12, 9, 21]),
        ("count to 5", [1, 2, 3, 4, 5]),
        ("Count from 3 to 9", [3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_small_chats_are_answered(engine: Engine, question: str, numbers: list[int]) -> None:
    assert [int(n) for n in re.findall(r"\d+", ask(engine, question))] == numbers


def test_a_story_goes_on_as_the_training_forward_says(engine: Engine) -> None:
    """80 greedy tokens in float32, computed twice."""
    model = Model.load(Path(resolve_model("demo")))
    for prompt in ("Once upon a time", "One day, a fox named"):
        # The tools' own code is not held to the engine's strictness about ranks and dtypes.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            (expected,) = model.complete([prompt], max_new=80)
        result = engine.generate(prompt, sampling=GREEDY, stopping=StoppingParams(max_tokens=80))
        assert result.text == expected
        assert len(result.text.split()) > 20
