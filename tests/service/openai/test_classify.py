"""/classify as vLLM's clients use it. The fake engine's state after some tokens is (their number, their sum,
the last one, 1), which here are the numbers of four classes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.openai.describing import ANSWERS
from penstock.runtime.requests.reader import Classes, Problem, Reader
from penstock.runtime.requests.request import Pooling
from tests.service.openai.rig import front_rig
from tests.service.openai.test_openapi import against
from tests.service.rig import fake

LABELS = ("count", "sum", "last", "one")


def classifier(problem: Problem, **options: Any) -> Any:
    engine = fake(**options)
    classes = Classes(labels=LABELS, problem=problem, pooling=Pooling.LAST_TOKEN)
    reader = Reader(kind="a classifier", reads_whole=False, classes=classes)
    engine.info = dataclasses.replace(engine.info, reader=reader)
    return engine


async def test_the_classes_of_each_input() -> None:
    async with front_rig(classifier("single_label_classification")) as rig:
        reply = await rig.http.post("/classify", json={"model": "fake", "input": [[1], [1, 2]]})
        told = reply.json()
        against((await rig.http.get("/openapi.json")).json(), ANSWERS["/classify"][0], told)
        assert (told["model"], told["usage"]["prompt_tokens"]) == ("fake", 3)
        shares = np.exp([2, 3, 2, 1]) / np.exp([2, 3, 2, 1]).sum()
        assert told["data"][1] == {
            "index": 1,
            "label": "sum",
            "probs": pytest.approx(shares.tolist(), abs=1e-6),
            "num_classes": 4,
        }
        assert told["data"][0]["probs"] == pytest.approx([0.25] * 4)
        refused = await rig.http.post("/classify", json={"input": ["a", ""]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1]")


async def test_an_adapter_is_named_as_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "sql"
    folder.mkdir()
    (folder / "content").write_text("")
    engine = classifier("single_label_classification", max_adapters=1, adapter_dir=tmp_path)
    async with front_rig(engine) as rig:
        told = (await rig.http.post("/classify", json={"model": "sql", "input": [1, 2]})).json()
        assert (told["model"], told["data"][0]["label"]) == ("sql", "sum")
        assert [one.adapter for one in engine.seen] == ["sql"]
        refused = await rig.http.post("/classify", json={"model": "none", "input": [1]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


async def test_a_regression_has_numbers_and_no_label() -> None:
    async with front_rig(classifier("regression")) as rig:
        (one,) = (await rig.http.post("/classify", json={"input": [1, 2]})).json()["data"]
        assert (one["label"], one["probs"]) == (None, [2, 3, 2, 1])


async def test_a_model_without_classes() -> None:
    async with front_rig() as rig:
        refused = await rig.http.post("/classify", json={"input": "a"})
        assert refused.status_code in (400, 501)
        assert "no classifier" in refused.text
