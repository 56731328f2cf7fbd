"""What the handwritten server answers to Profile, and what clients make of it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.duration_pb2 import Duration

from penstock.client import Profile
from penstock.v1 import telemetry_pb2

FILES = {"perfetto_trace.json.gz": b"trace" * 100, "plugins/profile/now/host.xplane.pb": bytes(range(256))}
NUM_BYTES = sum(map(len, FILES.values()))
PATH = "/var/profiles/profile-20261122T120000-000"


def expected(folder: Path | None = None) -> Profile:
    """Return what a client returns, whose files are in `folder`."""
    return Profile(path=PATH, steps=7, num_bytes=NUM_BYTES, duration=1.25, folder=folder)


def zipped(files: Mapping[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


class FakeProfile:
    """Answers each call with the same profile."""

    def __init__(self) -> None:
        self.path = PATH
        self.data = zipped(FILES)
        self.finishes = True
        """Whether it says what was written."""
        self.steps = 7

    def handle(self, request: telemetry_pb2.ProfileRequest) -> Iterator[telemetry_pb2.ProfileResponse]:
        yield telemetry_pb2.ProfileResponse(started=telemetry_pb2.ProfileStarted(path=self.path))
        if not self.finishes:
            return
        yield telemetry_pb2.ProfileResponse(
            finished=telemetry_pb2.ProfileFinished(
                path=self.path,
                steps=self.steps,
                bytes=NUM_BYTES,
                duration=Duration(seconds=1, nanos=250_000_000),
            )
        )
        for at in range(0, len(self.data) if request.include_data else 0, 100):
            chunk = telemetry_pb2.ProfileChunk(data=self.data[at : at + 100])
            yield telemetry_pb2.ProfileResponse(chunk=chunk)
