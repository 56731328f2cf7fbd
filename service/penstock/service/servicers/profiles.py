"""Profile: has the engine record its next steps, and sends what was written."""

from __future__ import annotations

import asyncio
import tempfile
import zipfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import IO

from google.protobuf.duration_pb2 import Duration

from penstock.runtime.errors import ProfileFailed, UnsupportedFeature
from penstock.runtime.profiling.profile import Profile, ProfileRun
from penstock.service.requests.convert_telemetry import to_profile
from penstock.service.servicers.serving import Serving
from penstock.service.servicers.uploads import Ended
from penstock.v1 import telemetry_pb2

CHUNK_BYTES = 1024 * 1024
"""The most bytes of a zip file that one message carries."""


class Profiles:
    """Makes the profiles of one server."""

    def __init__(self, serving: Serving, folder: Path | None, *, keep: int) -> None:
        """`folder` is where profiles are written, and the newest `keep` stay; None refuses them."""
        self._engine = serving.engine
        self._lanes = serving.lanes
        self._calls = serving.calls
        self._folder = folder
        self._keep = keep

    @property
    def are_on(self) -> bool:
        """Whether profiles are made."""
        return self._folder is not None

    async def profile(
        self, request: telemetry_pb2.ProfileRequest
    ) -> AsyncIterator[telemetry_pb2.ProfileResponse]:
        """Record the next steps: say when it has begun, then what was written, then send the files if they
        are wanted.

        However the RPC ends, so does the recording. Raises UnsupportedFeature, InvalidRequest,
        ProfileUnderWay, ProfileFailed and Draining.
        """
        if self._folder is None:
            raise UnsupportedFeature(["Profile"], "the server was started without --profile-dir")
        asked = to_profile(request)
        begin = partial(self._engine.profiler.start, self._folder, asked.options, self._keep)
        run: Ended[ProfileRun] = Ended(begin, lambda run: run.stop())
        try:
            async with self._calls.preparing():
                begun = await self._lanes.heavy(run.make)
            yield telemetry_pb2.ProfileResponse(started=telemetry_pb2.ProfileStarted(path=str(begun.folder)))
            async with self._calls.preparing():
                profile = await asyncio.wrap_future(begun.future)
        finally:
            run.end()
        yield telemetry_pb2.ProfileResponse(finished=_finished(profile))
        if asked.include_data:
            with await self._lanes.heavy(partial(_zipped, profile.folder)) as file:
                while data := await self._lanes.heavy(partial(file.read, CHUNK_BYTES)):
                    yield telemetry_pb2.ProfileResponse(chunk=telemetry_pb2.ProfileChunk(data=data))


def _finished(profile: Profile) -> telemetry_pb2.ProfileFinished:
    duration = Duration()
    duration.FromNanoseconds(int(profile.duration_s * 1e9))
    return telemetry_pb2.ProfileFinished(
        path=str(profile.folder), steps=profile.steps, bytes=profile.num_bytes, duration=duration
    )


def _zipped(folder: Path) -> IO[bytes]:
    """Put everything below a folder into a temporary zip file, which is at its beginning. Blocks. Raises
    ProfileFailed if there is nothing any more: a later profile may have taken the place of this one.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    try:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for path in _files(folder):
                archive.write(path, path.relative_to(folder))
        file.seek(0)
    except OSError as error:
        file.close()
        raise ProfileFailed(f"the files of the profile cannot be sent: {error}") from error
    except BaseException:
        file.close()
        raise
    return file


def _files(folder: Path) -> list[Path]:
    """All files below a folder. Raises OSError if there is none."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    if not files:
        raise FileNotFoundError(f"{folder} is not there any more")
    return files
