"""Profile over gRPC, on an engine whose profiles end when the test says so."""

from __future__ import annotations

import asyncio
import io
import shutil
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.runtime.errors import ConfigError, ProfileFailed
from penstock.service.options import ServerOptions
from penstock.service.servicers import control as control_module
from penstock.v1 import control_pb2, telemetry_pb2
from tests.service.fake import FakeEngine
from tests.service.rig import Rig, failure_of, fake, serving, until
from tests.support.fake_profiler import FILES, FakeProfiler


@pytest.fixture
def engine() -> FakeEngine:
    return fake()


@pytest.fixture
def profiler(engine: FakeEngine) -> FakeProfiler:
    return engine.profiler


@pytest.fixture
async def rig(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(engine, profile_dir=tmp_path, profile_keep=3) as rig:
        yield rig


def asked(rig: Rig, **fields: Any) -> Any:
    return rig.control.Profile(telemetry_pb2.ProfileRequest(**fields), timeout=60)


async def rest(call: Any) -> list[telemetry_pb2.ProfileResponse]:
    """Return what is left of the answer."""
    replies = []
    while (reply := await call.read()) is not grpc.aio.EOF:
        replies.append(reply)
    return replies


async def test_it_says_when_it_begins_and_what_was_written(
    rig: Rig, profiler: FakeProfiler, tmp_path: Path
) -> None:
    call = asked(rig, steps=7, timeout={"seconds": 2, "nanos": 500_000_000})
    started = await call.read()
    assert started.started.path == str(tmp_path / "profile-1")
    ((folder, options, keep),) = profiler.begun
    assert (folder, options.steps, options.timeout_s, keep) == (tmp_path, 7, 2.5, 3)
    profiler.end(steps=8)
    (finished,) = await rest(call)
    assert finished.WhichOneof("event") == "finished"
    assert finished.finished == telemetry_pb2.ProfileFinished(
        path=started.started.path,
        steps=8,
        bytes=sum(map(len, FILES.values())),
        duration=Duration(seconds=1, nanos=500_000_000),
    )


async def test_what_is_left_out_has_the_defaults(rig: Rig, profiler: FakeProfiler) -> None:
    call = asked(rig)
    await call.read()
    ((_, options, _),) = profiler.begun
    assert (options.steps, options.timeout_s) == (100, 60.0)
    call.cancel()


async def test_the_files_come_as_parts_of_a_zip(
    rig: Rig, profiler: FakeProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "CHUNK_BYTES", 100)
    call = asked(rig, include_data=True)
    await call.read()
    profiler.end(steps=1)
    kinds, data = [], b""
    for reply in await rest(call):
        kinds.append(reply.WhichOneof("event"))
        assert len(reply.chunk.data) <= 100
        data += reply.chunk.data
    assert kinds == ["finished"] + ["chunk"] * (len(kinds) - 1)
    assert len(kinds) > 2
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == FILES


async def test_files_that_a_later_profile_has_removed_are_told_to_be_missing(
    rig: Rig, profiler: FakeProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty zip would look as if all had gone well."""
    zipped = control_module._zipped

    def removed(folder: Path) -> Any:
        shutil.rmtree(folder)
        return zipped(folder)

    monkeypatch.setattr(control_module, "_zipped", removed)
    call = asked(rig, include_data=True)
    await call.read()
    profiler.end(steps=1)
    assert (await call.read()).HasField("finished")
    failure = await failure_of(call.read())
    assert (failure.code.name, failure.reason) == ("INTERNAL", "PROFILE_FAILED")


async def test_there_is_one_at_a_time(rig: Rig, profiler: FakeProfiler) -> None:
    first = asked(rig)
    await first.read()
    failure = await failure_of(asked(rig).read())
    assert (failure.code.name, failure.reason) == ("ABORTED", "PROFILE_UNDER_WAY")
    assert profiler.is_recording
    profiler.end(steps=1)
    assert len(await rest(first)) == 1
    again = asked(rig)
    assert (await again.read()).HasField("started")
    again.cancel()


async def test_a_caller_that_goes_away_ends_it(rig: Rig, profiler: FakeProfiler) -> None:
    call = asked(rig)
    await call.read()
    call.cancel()
    await until(lambda: profiler.num_ended == 1)


async def test_a_caller_that_goes_away_before_it_has_begun_ends_it_too(
    rig: Rig, profiler: FakeProfiler
) -> None:
    profiler.before_start.clear()
    call = asked(rig)
    reading = asyncio.ensure_future(call.read())
    await until(lambda: profiler.num_asked == 1)
    call.cancel()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await reading
    profiler.before_start.set()
    await until(lambda: profiler.num_ended == 1)
    assert not profiler.is_recording


async def test_a_server_that_stops_ends_it(engine: FakeEngine, tmp_path: Path) -> None:
    async with serving(engine, profile_dir=tmp_path) as rig:
        call = asked(rig)
        await call.read()
        stopping = asyncio.ensure_future(rig.server.stop())
        failure = await failure_of(call.read())
        assert (failure.code.name, failure.reason) == ("UNAVAILABLE", "DRAINING")
        assert await stopping
    assert engine.profiler.num_ended == 1


@pytest.mark.parametrize(
    ("fields", "violations"),
    [
        ({"steps": 0}, {"steps"}),
        ({"steps": 1001, "timeout": {"nanos": 1}}, {"steps", "timeout"}),
        ({"timeout": {"seconds": 301}}, {"timeout"}),
        ({"timeout": {"seconds": 1, "nanos": -1}}, {"timeout"}),
    ],
)
async def test_values_out_of_range(rig: Rig, fields: dict[str, Any], violations: set[str]) -> None:
    failure = await failure_of(asked(rig, **fields).read())
    assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert set(failure.violations) == violations


async def test_a_server_without_a_folder_refuses_it() -> None:
    async with serving(fake()) as rig:
        failure = await failure_of(asked(rig).read())
        assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
        assert "--profile-dir" in failure.message
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_PROFILE not in info.features


async def test_a_profile_that_fails(rig: Rig, profiler: FakeProfiler) -> None:
    info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert control_pb2.FEATURE_PROFILE in info.features
    profiler.failure = ProfileFailed("the disk is full")
    failure = await failure_of(asked(rig).read())
    assert (failure.code.name, failure.reason) == ("INTERNAL", "PROFILE_FAILED")
    assert "the disk is full" in failure.message


def test_options_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"profile_keep: must be at least 1.*profile_dir: .*file is no dir"):
        ServerOptions(profile_dir=tmp_path / "file" / "below", profile_keep=0)
    assert ServerOptions(profile_dir=tmp_path / "to" / "be" / "made").profile_keep == 5
