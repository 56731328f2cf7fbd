"""Profile over gRPC, with the real profiler on the fake engine. What JAX would record stands in FILES."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import threading
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.profiling import profiler as profiler_module
from penstock.runtime.profiling.profile import ProfileOptions
from penstock.service.options import ServerOptions
from penstock.service.servicers import control as control_module
from penstock.v1 import control_pb2, telemetry_pb2
from tests.service.rig import Rig, failure_of, fake, generate, serving, until

FILES = {
    "perfetto_trace.json.gz": b"trace" * 1000,
    "plugins/profile/now/host.xplane.pb": bytes(range(256)) * 9,
}
NUM_BYTES = sum(map(len, FILES.values()))


class Recorder:
    """Stands in for JAX's profiler."""

    def __init__(self) -> None:
        self.num_asked = self.num_stopped = 0
        self.may_start = threading.Event()
        """`start` waits for it."""
        self.may_start.set()

    def start(self, folder: Path) -> None:
        self.num_asked += 1
        assert self.may_start.wait(20)
        self._folder = folder

    def stop(self) -> None:
        for name, data in FILES.items():
            file = self._folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        self.num_stopped += 1


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(profiler_module, "recorder", made)
    monkeypatch.setattr(profiler_module, "improve_trace", lambda folder, given_up: None)
    return made


@pytest.fixture
async def rig(recorder: Recorder, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(fake(), profile_dir=tmp_path, profile_keep=3) as rig:
        yield rig


def asked(rig: Rig, **fields: Any) -> Any:
    return rig.control.Profile(telemetry_pb2.ProfileRequest(**fields), timeout=60)


async def rest(call: Any) -> list[telemetry_pb2.ProfileResponse]:
    """Return what is left of the answer."""
    replies = []
    while (reply := await call.read()) is not grpc.aio.EOF:
        replies.append(reply)
    return replies


async def test_it_says_when_it_begins_and_what_was_written(rig: Rig, tmp_path: Path) -> None:
    """It ends after its steps, of which a token needs one."""
    call = asked(rig, steps=7)
    started = (await call.read()).started
    await rig.inference.Generate(generate("a", stopping={"max_tokens": 8}))
    (reply,) = await rest(call)
    assert reply.WhichOneof("event") == "finished"
    finished = reply.finished
    assert (finished.path, finished.steps, finished.bytes) == (started.path, 7, NUM_BYTES)
    assert 0 < finished.duration.ToNanoseconds() < 60 * 10**9
    assert Path(finished.path).parent == tmp_path
    assert {name: (Path(finished.path) / name).read_bytes() for name in FILES} == FILES


async def test_it_ends_at_its_time_if_there_are_too_few_steps(rig: Rig) -> None:
    (finished,) = [reply async for reply in asked(rig, timeout={"nanos": 100_000_000})][1:]
    assert finished.finished.steps == 0
    assert finished.finished.duration.ToNanoseconds() >= 10**8


async def test_only_the_newest_profiles_stay(rig: Rig, tmp_path: Path) -> None:
    paths = []
    for _ in range(4):
        call = asked(rig)
        paths.append(Path((await call.read()).started.path))
        rig.engine.profiler.stop()
        await rest(call)
    assert set(os.listdir(tmp_path)) == {path.name for path in paths[1:]}


async def test_what_is_left_out_has_the_defaults(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ProfileOptions] = []
    start = rig.engine.profiler.start

    def start_seen(folder: Path, options: ProfileOptions, keep: int | None = None) -> Any:
        seen.append(options)
        return start(folder, options, keep)

    monkeypatch.setattr(rig.engine.profiler, "start", start_seen)
    for fields in ({}, {"steps": 7, "timeout": {"seconds": 2, "nanos": 500_000_000}}):
        call = asked(rig, **fields)
        await call.read()
        rig.engine.profiler.stop()
        await rest(call)
    assert [(options.steps, options.timeout_s) for options in seen] == [(100, 60.0), (7, 2.5)]


async def test_the_files_come_as_parts_of_a_zip(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "CHUNK_BYTES", 100)
    call = asked(rig, include_data=True)
    await call.read()
    rig.engine.profiler.stop()
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
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty zip would look as if all had gone well."""
    zipped = control_module._zipped

    def removed(folder: Path) -> Any:
        shutil.rmtree(folder)
        return zipped(folder)

    monkeypatch.setattr(control_module, "_zipped", removed)
    call = asked(rig, include_data=True)
    await call.read()
    rig.engine.profiler.stop()
    assert (await call.read()).HasField("finished")
    failure = await failure_of(call.read())
    assert (failure.code.name, failure.reason) == ("INTERNAL", "PROFILE_FAILED")


async def test_there_is_one_at_a_time(rig: Rig, recorder: Recorder) -> None:
    first = asked(rig)
    await first.read()
    failure = await failure_of(asked(rig).read())
    assert (failure.code.name, failure.reason) == ("ABORTED", "PROFILE_UNDER_WAY")
    assert recorder.num_stopped == 0
    rig.engine.profiler.stop()
    assert len(await rest(first)) == 1
    again = asked(rig)
    assert (await again.read()).HasField("started")
    again.cancel()


async def test_a_caller_that_goes_away_ends_it(rig: Rig, recorder: Recorder) -> None:
    call = asked(rig)
    await call.read()
    call.cancel()
    await until(lambda: recorder.num_stopped == 1)


async def test_a_caller_that_goes_away_before_it_has_begun_ends_it_too(rig: Rig, recorder: Recorder) -> None:
    recorder.may_start.clear()
    call = asked(rig)
    reading = asyncio.ensure_future(call.read())
    await until(lambda: recorder.num_asked == 1)
    call.cancel()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await reading
    recorder.may_start.set()
    await until(lambda: recorder.num_stopped == 1)


async def test_a_server_that_stops_ends_it(recorder: Recorder, tmp_path: Path) -> None:
    async with serving(fake(), profile_dir=tmp_path) as rig:
        call = asked(rig)
        await call.read()
        stopping = asyncio.ensure_future(rig.server.stop())
        failure = await failure_of(call.read())
        assert (failure.code.name, failure.reason) == ("UNAVAILABLE", "DRAINING")
        assert await stopping
        await until(lambda: recorder.num_stopped == 1)


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


async def test_a_profile_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    async with serving(fake(), profile_dir=folder) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_PROFILE in info.features
        folder.write_text("in its place")
        failure = await failure_of(asked(rig).read())
        assert (failure.code.name, failure.reason) == ("INTERNAL", "PROFILE_FAILED")
        assert "the folder for profiles cannot be written" in failure.message


def test_options_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"profile_keep: must be at least 1.*profile_dir: .*file is no dir"):
        ServerOptions(profile_dir=tmp_path / "file" / "below", profile_keep=0)
    assert ServerOptions(profile_dir=tmp_path / "to" / "be" / "made").profile_keep == 5
