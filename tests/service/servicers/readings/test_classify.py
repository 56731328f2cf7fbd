"""Classify, of a golden with three classes, and what it is refused for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.runtime import Engine
from penstock.runtime.requests.reader import Classes
from penstock.runtime.requests.request import Pooling
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import failure_of, fake, serving
from tests.service.servicers.readings.test_encoders import OPTIONS, cases_of, spelled, with_words

LABELS = ("LABEL_0", "LABEL_1", "LABEL_2")


def pair(first: str, second: str) -> inference_pb2.ClassifyInput:
    return inference_pb2.ClassifyInput(pair=inference_pb2.TextPair(first=first, second=second))


@pytest.mark.ci
async def test_the_classes_are_pytorchs(tmp_path: Path) -> None:
    cases = cases_of("bert_classifier")
    halves = [(case["ids"][: len(case["ids"]) // 2], case["ids"][len(case["ids"]) // 2 :]) for case in cases]
    async with serving(Engine.from_pretrained(str(with_words("bert_classifier", tmp_path)), OPTIONS)) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_CLASSIFY in info.features
        inputs = [pair(spelled(first), spelled(second)) for first, second in halves]
        reply = await rig.inference.Classify(inference_pb2.ClassifyRequest(inputs=inputs))
        assert tuple(reply.labels) == LABELS
        for case, found in zip(cases, reply.results, strict=True):
            logits = np.array(case["logits"])
            np.testing.assert_allclose(found.logits, logits, atol=1e-5)
            expected = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(found.probabilities, expected, atol=1e-5)
            assert found.label == LABELS[int(logits.argmax())]
            assert (found.token_count, found.weights.generation) == (len(case["ids"]), 1)
        assert reply.usage.prompt_tokens == sum(len(case["ids"]) for case in cases)
        alone = inference_pb2.ClassifyInput(text="<5> <6>")
        same = inference_pb2.ClassifyInput(token_ids=types_pb2.TokenIds(ids=[5, 6]))
        long = inference_pb2.ClassifyInput(text=spelled([9] * 130))
        right = types_pb2.TRUNCATION_RIGHT
        asked = inference_pb2.ClassifyRequest(inputs=[alone, same, long], truncation=right)
        made = (await rig.inference.Classify(asked)).results
        assert list(made[0].logits) == pytest.approx(list(made[1].logits), abs=1e-6)
        assert (made[2].token_count, made[2].truncated_tokens) == (128, 2)
        asked = inference_pb2.ClassifyRequest(inputs=[pair("<5>", spelled([9] * 128))], truncation=right)
        assert "inputs[0]" in str(await failure_of(rig.inference.Classify(asked)))  # pairs are not cut
        asked = inference_pb2.ClassifyRequest(
            inputs=[pair("", "b"), inference_pb2.ClassifyInput(), inference_pb2.ClassifyInput(text="")]
        )
        failure = await failure_of(rig.inference.Classify(asked))
        assert list(failure.violations) == [
            "inputs[0].pair.first",
            "inputs[1]",
            "inputs[2].text",
        ]


async def test_a_model_without_classes() -> None:
    async with serving(fake()) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_CLASSIFY not in info.features
        asked = inference_pb2.ClassifyRequest(inputs=[inference_pb2.ClassifyInput(text="a")])
        assert "the model has no classifier" in (await failure_of(rig.inference.Classify(asked))).message


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("single_label_classification", [1 / (1 + np.e), np.e / (1 + np.e)]),
        ("multi_label_classification", [0.5, np.e / (1 + np.e)]),
        ("regression", []),
    ],
)
def test_what_numbers_mean(problem: str, expected: list[float]) -> None:
    classes = Classes(labels=("a", "b"), problem=problem, pooling=Pooling.MEAN)  # type: ignore[arg-type]
    found = classes.probabilities(np.array([0, 1], np.float32))
    assert found.tolist() == pytest.approx(expected)
    huge = classes.probabilities(np.array([-2e4, 2e4], np.float32))
    assert huge.tolist() == pytest.approx([0, 1][: len(expected)])
