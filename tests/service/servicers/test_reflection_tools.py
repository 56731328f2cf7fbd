"""grpcurl and ghz call the server by reflection alone, as their users do. Building them takes a minute."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.service.rig import Rig, serving
from tests.support.toolchains import go_program

pytestmark = pytest.mark.sweep("grpcurl")
WAIT_S = 60.0
DESCRIBED = {
    "penstock.v1.InferenceService.Generate": "rpc Generate ( .penstock.v1.GenerateRequest ) returns",
    "penstock.v1.ControlService": "rpc WatchLoad ( .penstock.v1.WatchLoadRequest ) returns ( stream",
    "penstock.v1.SamplingParams.temperature": "optional double temperature = 1;",
    "penstock.v1.GenerateRequest.input": "oneof input {",
    "penstock.v1.FEATURE_CHAT": "FEATURE_CHAT = 1;",
    "penstock.v1.SamplingParams.LogitBiasEntry": "map<uint32, float> logit_bias = 10;",
    "grpc.health.v1.Health.Check": "rpc Check (",
    "grpc.reflection.v1.ServerReflection.ServerReflectionInfo": "rpc ServerReflectionInfo (",
}


async def run(program: str, *arguments: str) -> tuple[int, str]:
    """Run one of the programs, which calls the server in this process."""
    path = await asyncio.to_thread(go_program, program)
    process = await asyncio.create_subprocess_exec(
        path, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def grpcurl(rig: Rig, *arguments: str) -> tuple[int, str]:
    return await run("grpcurl", "-plaintext", rig.server.address, *arguments)


async def test_grpcurl_describes_everything_that_has_a_name() -> None:
    async with serving() as rig:
        for symbol, line in DESCRIBED.items():
            code, said = await grpcurl(rig, "describe", symbol)
            assert (code, line in said) == (0, True), said
        code, said = await grpcurl(rig, "describe", "penstock.v1.SamplingParams.top_p")
        assert "1 switches it off." in said, "the comment of the field is shown"
        code, said = await grpcurl(rig, "describe", "penstock.v1.InferenceService.Nope")
    assert code != 0
    assert "Symbol not found: penstock.v1.InferenceService.Nope" in said


async def test_ghz_calls_a_method_that_it_finds_by_reflection() -> None:
    async with serving() as rig:
        code, said = await run(
            "ghz", "--insecure", "--call", "penstock.v1.InferenceService.Generate",
            "--data", '{"prompt": "x"}', "--total", "5", "--concurrency", "1", "--format", "json",
            rig.server.address,
        )  # fmt: skip
    assert code == 0, said
    assert json.loads(said)["statusCodeDistribution"] == {"OK": 5}
