"""/v1/embeddings as OpenAI's client uses it."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from penstock.runtime.requests.request import Pooling
from tests.service.openai.rig import FrontRig, front_rig
from tests.support.scheduler.byte_runner import HIDDEN_SIZE, pooled_of


def unit(token_ids: list[int], size: int = HIDDEN_SIZE) -> list[float]:
    """Return the fake engine's state after these tokens, cut and divided by its length."""
    kept = [float(number) for number in pooled_of(token_ids, Pooling.LAST_TOKEN)[:size]]
    length = sum(number * number for number in kept) ** 0.5
    return [number / length for number in kept]


async def post(rig: FrontRig, **body: Any) -> tuple[int, Any]:
    reply = await rig.http.post("/v1/embeddings", json={"model": "fake", **body})
    return reply.status_code, reply.json()


async def test_numbers_are_those_of_each_input_in_its_place() -> None:
    async with front_rig() as rig:
        status, told = await post(rig, input=[[1, 2, 3], [5]])
    assert status == 200
    assert [one["index"] for one in told["data"]] == [0, 1]
    assert [one["object"] for one in told["data"]] == ["embedding"] * 2
    assert told["data"][0]["embedding"] == pytest.approx(unit([1, 2, 3]), rel=1e-6)
    assert told["data"][1]["embedding"] == pytest.approx(unit([5]), rel=1e-6)
    assert (told["object"], told["model"]) == ("list", "fake")
    assert told["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


async def test_base64_has_floats_of_32_bits() -> None:
    async with front_rig() as rig:
        _, told = await post(rig, input=[7, 8], encoding_format="base64", dimensions=2)
    data = base64.b64decode(told["data"][0]["embedding"], validate=True)
    assert struct.unpack("<2f", data) == pytest.approx(unit([7, 8], 2), rel=1e-6)


async def test_openais_client_reads_them() -> None:
    async with front_rig() as rig:
        made = await rig.openai.embeddings.create(model="fake", input=[[1, 2], [3, 4]])
        numbers = await rig.openai.embeddings.create(model="fake", input=[1, 2], encoding_format="float")
    assert made.data[0].embedding == pytest.approx(unit([1, 2]), rel=1e-6)
    assert made.data[1].embedding == pytest.approx(unit([3, 4]), rel=1e-6)
    assert numbers.data[0].embedding == pytest.approx(unit([1, 2]), rel=1e-6)
    assert made.usage.total_tokens == 4


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [1, "a"]}, 400, "input"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "top_k": 1}, 400, "top_k"),
        ({"input": [[1]] * 2049}, 400, "input"),
        ({"input": "a", "model": "other"}, 404, "model"),
        # Found by the server, and told by the name in the body.
        ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, 400, "dimensions"),
        ({"input": ["a", ""]}, 400, "input[1]"),
        ({"input": [[1], [99_999]]}, 400, "input[1][0]"),
        ({"input": [99_999]}, 400, "input[0]"),
        ({"input": "a" * 5000}, 400, "input"),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], status: int, param: str) -> None:
    async with front_rig() as rig:
        found, told = await post(rig, **body)
    assert (found, told["error"]["param"]) == (status, param), told
