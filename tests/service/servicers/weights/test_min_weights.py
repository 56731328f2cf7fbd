"""Requests that want weights of a certain generation or later."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.v1 import types_pb2
from tests.service.rig import collect, failure_of, fake, generate, serving, stream


def wanting(generation: int, label: str = "") -> dict[str, Any]:
    return {"min_weights": types_pb2.WeightsVersion(label=label, generation=generation)}


async def test_requests_that_want_newer_weights_are_refused() -> None:
    async with serving(fake()) as rig:
        failures = [
            await failure_of(rig.inference.Generate(generate("y", **wanting(2)))),
            await failure_of(collect(rig.inference.Stream(stream("y", **wanting(2))))),
        ]
        for failure in failures:
            assert (failure.code.name, failure.reason) == ("FAILED_PRECONDITION", "WEIGHTS_TOO_OLD")
            assert dict(failure.info.metadata) == {"min_generation": "2", "generation": "1"}
        failure = await failure_of(rig.inference.Generate(generate("y", **wanting(2**64 - 1))))
        assert failure.info.metadata["min_generation"] == str(2**64 - 1)
        rig.engine.go_live("step-2")
        reply = await rig.inference.Generate(generate("y", **wanting(2, label="another")), timeout=20)
        assert reply.outputs[0].weights[0].version.label == "step-2", "only generations are compared"


@pytest.mark.parametrize("generation", [0, 1])
async def test_weights_that_are_new_enough(generation: int) -> None:
    async with serving(fake()) as rig:
        reply = await rig.inference.Generate(generate("y", **wanting(generation)), timeout=20)
    assert reply.outputs[0].text == "z"
