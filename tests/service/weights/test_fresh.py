"""After an update a server answers as a fresh server on the new weights does, bit for bit, and as PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.runtime.engine import Engine
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.v1 import control_pb2, inference_pb2, types_pb2, weights_pb2
from tests.service.rig import Rig, serving
from tests.service.weights.answers import Ask, answers, asks
from tests.service.weights.fleet import Version, fleet
from tests.service.weights.pushing import COMMITTED, digest, num_bytes, push
from tests.support.goldens import GOLDEN, NAMES, small_config
from tests.support.models.tiny import VOCAB
from tests.support.suite.drawing import few
from tests.support.updating import bits

HOST = weights_pb2.STAGING_MODE_HOST
DEVICE = weights_pb2.STAGING_MODE_DEVICE
IN_PLACE = weights_pb2.STAGING_MODE_IN_PLACE
STAGINGS = pytest.mark.parametrize("staging", [HOST, DEVICE, IN_PLACE], ids=["host", "device", "in_place"])


def write_turned(name: str, directory: Path) -> Path:
    """Make a checkpoint with a golden's shapes and other weights: each tensor's bytes are those of the
    golden's in another order.
    """
    shutil.copytree(GOLDEN / name, directory)
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    for entry in find_tensors(GOLDEN / name).values():
        turned = np.roll(np.asarray(entry.map()).ravel(), 7)
        data[entry.offset : entry.offset + entry.num_bytes] = turned.tobytes()
    file.write_bytes(data)
    return directory


async def greedy(rig: Rig, case: Mapping[str, Any]) -> inference_pb2.Output:
    reply = await rig.inference.Generate(
        inference_pb2.GenerateRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=case["prompt"]),
            sampling=types_pb2.SamplingParams(temperature=0),
            stopping=types_pb2.StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True),
            output=types_pb2.OutputOptions(logprobs=8, text=False),
        )
    )
    (output,) = reply.outputs
    return output  # type: ignore[no-any-return]  # the stubs of messages are not typed here


def read(directory: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a checkpoint."""
    return {name: np.asarray(entry.map()) for name, entry in find_tensors(directory).items()}


@pytest.mark.parametrize("name", few(NAMES, [], ci=["qwen3"]))
async def test_a_golden_that_is_pushed_answers_as_pytorch(name: str, tmp_path: Path) -> None:
    """Of every architecture: the server starts with other weights, and is given those of the golden. Each
    way of staging takes its turn, with the other weights in between. Its leaves are then those of an engine
    that has loaded the golden.
    """
    cases = json.loads((GOLDEN / name / "expected.json").read_text())["cases"]
    turned, config = write_turned(name, tmp_path / name), small_config(name, page_size=16)
    fresh = Engine.from_pretrained(str(GOLDEN / name), config)
    fresh_bits = bits(fresh)
    fresh.shutdown()
    pushed = Engine.from_pretrained(str(turned), config)
    assert bits(pushed) != fresh_bits
    async with serving(pushed) as rig:
        first = [await greedy(rig, case) for case in cases]
        for output, case in zip(first, cases, strict=True):
            assert list(output.token_ids) != case["tokens"], "the weights are others"
        for staging in (HOST, DEVICE, IN_PLACE):
            reply = await push(rig, read(GOLDEN / name), size=10_000, staging=staging, version_label="golden")
            assert (reply.outcome, reply.current.label) == (COMMITTED, "golden")
            assert bits(pushed) == fresh_bits
            for case in cases:
                output = await greedy(rig, case)
                assert list(output.token_ids) == case["tokens"]
                np.testing.assert_allclose(output.logprobs.sampled, case["logprobs"], rtol=1e-4)
                assert [span.version for span in output.weights] == [reply.current]
            await push(rig, read(turned), staging=staging)
            for output, case in zip(first, cases, strict=True):
                again = await greedy(rig, case)
                assert (again.token_ids, again.logprobs) == (output.token_ids, output.logprobs)
        assert pushed.compiles_after_warmup == 0


@pytest.mark.ci
@STAGINGS
async def test_every_answer_is_a_fresh_servers(
    subject: Any, references: Mapping[str, Any], versions: Mapping[str, Version], staging: int
) -> None:
    """Packed weights, greedy and drawn tokens, there and back, in chunks that end within values. What the
    answers report adds up.
    """
    questions = asks(6, vocab=VOCAB, num_tokens=30)
    async with fleet(subject, references) as all_of:
        rig, generation = all_of.rig, subject.weights.generation
        told = {label: await tell(one, questions) for label, one in all_of.references.items()}
        assert len({str(of_one) for of_one in told.values()}) == len(told), "each version answers otherwise"
        for label in ("b", "c", "initial", "b"):
            tensors = versions[label].tensors
            previous = types_pb2.WeightsVersion(label=subject.weights.label, generation=generation)
            generation += 1
            reply = await push(rig, tensors, size=3001, staging=staging, version_label=label)
            current = types_pb2.WeightsVersion(label=label, generation=generation)
            assert (reply.outcome, reply.current, reply.previous) == (COMMITTED, current, previous)
            assert (reply.tensors_updated, reply.bytes_received) == (len(tensors), num_bytes(tensors))
            assert reply.digest == digest(tensors)
            assert reply.in_flight == weights_pb2.InFlightReport()
            assert reply.staged_in.ToNanoseconds() > 0
            assert await tell(rig, questions) == told[label]
            info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
            assert (info.weights, info.weights_digest) == (current, reply.digest)
            assert info.staged_update_id == ""


async def tell(rig: Rig, questions: Sequence[Ask]) -> list[Any]:
    """Tokens and log-probabilities alone: generations of two servers are different."""
    return [[cut[2:] for cut in answer] for answer in await answers(rig, questions)]


@pytest.mark.ci
async def test_parts_may_be_pushed_and_the_rest_stays(
    subject: Any, references: Mapping[str, Any], versions: Mapping[str, Version]
) -> None:
    """Every third tensor of "b", then the next third, then the last: fused leaves are new in parts."""
    tensors = versions["b"].tensors
    question = asks(4, vocab=VOCAB, num_tokens=20)
    async with fleet(subject, references) as all_of:
        expected = await tell(all_of.references["b"], question)
        for part in range(3):
            names = list(tensors)[part::3]
            assert await tell(all_of.rig, question) != expected
            some = {name: tensors[name] for name in names}
            reply = await push(all_of.rig, some, partial=True)
            assert (reply.tensors_updated, reply.digest) == (len(names), digest(some))
        assert await tell(all_of.rig, question) == expected


@pytest.mark.ci
async def test_another_dtype_without_loss_is_the_same(
    subject: Any, references: Mapping[str, Any], versions: Mapping[str, Version]
) -> None:
    """float32 that holds the values of bfloat16: the weights are equal, the digest is of what was sent."""
    tensors = {name: np.asarray(t, np.float32) for name, t in versions["b"].tensors.items()}
    question = [Ask((1, 2, 3), 20)]
    async with fleet(subject, references) as all_of:
        expected = await tell(all_of.references["b"], question)
        reply = await push(all_of.rig, tensors)
        assert reply.digest == digest(tensors) != digest(versions["b"].tensors)
        assert await tell(all_of.rig, question) == expected
