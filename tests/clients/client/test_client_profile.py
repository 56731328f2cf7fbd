"""Profiles with both clients, against the handwritten server."""

from __future__ import annotations

import asyncio
import zipfile

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.client import (
    AsyncClient,
    Client,
    InvalidRequest,
    ProfileUnderWay,
    ProtocolError,
    ServerError,
    Unsupported,
)
from penstock.v1 import telemetry_pb2
from tests.clients.failing import Failure
from tests.clients.profiling import FILES, expected, zipped


def profile_sync(addr, **options):
    with Client(addr) as client:
        return client.profile(**options)


def profile_async(addr, **options):
    async def go():
        async with AsyncClient(addr) as client:
            return await client.profile(**options)

    return asyncio.run(go())


@pytest.fixture(params=[profile_sync, profile_async], ids=["sync", "async"])
def profile(request, server):
    return lambda **options: request.param(server.addr, **options)


def files_in(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_profile_stays_at_the_server(profile, server):
    assert profile() == expected()
    assert profile(steps=20, max_time=2.5) == expected()
    assert server.calls == [
        telemetry_pb2.ProfileRequest(),
        telemetry_pb2.ProfileRequest(steps=20, timeout=Duration(seconds=2, nanos=500_000_000)),
    ]


def test_its_files_are_fetched_to_a_new_folder(profile, server, tmp_path):
    parent = tmp_path / "to" / "be" / "made"
    first = profile(folder=parent)
    assert first == expected(parent / "profile-20261122T120000-000")
    assert files_in(first.folder) == FILES
    second = profile(folder=str(parent))
    assert second == expected(parent / "profile-20261122T120000-000-2")
    assert files_in(second.folder) == FILES
    assert all(call.include_data for call in server.calls)


@pytest.mark.parametrize("path", ["", "/", "/var/..", r"C:\profiles\..", "/p/.hidden", "/p/a b\x1b[2J"])
def test_a_servers_path_cannot_choose_where_files_go(profile, server, tmp_path, path):
    server.profile.path = path
    folder = profile(folder=tmp_path / "out").folder
    assert folder.parent == tmp_path / "out"
    assert folder.name.isascii()
    assert folder.name.isprintable()
    assert not folder.name.startswith(".")
    assert files_in(tmp_path) == {f"out/{folder.name}/{name}": data for name, data in FILES.items()}


def test_names_in_the_zip_cannot_leave_the_folder(profile, server, tmp_path):
    server.profile.data = zipped({"../../outside": b"x", "/absolute": b"y"})
    folder = profile(folder=tmp_path / "out").folder
    assert {f"out/{folder.name}/{name}" for name in ("outside", "absolute")} == set(files_in(tmp_path))


def test_more_bytes_than_announced_are_refused(profile, server, tmp_path):
    server.profile.data = zipped({"large": bytes(10_000)})
    with pytest.raises(ProtocolError, match="more bytes than the server announced"):
        profile(folder=tmp_path)
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("end", [0, 20, -30])
def test_a_damaged_zip_is_refused(profile, server, tmp_path, end):
    server.profile.data = server.profile.data[:end]
    with pytest.raises(ProtocolError, match="damaged"):
        profile(folder=tmp_path)


def changed(kind: str) -> bytes:
    """Make a zip of one file that cannot be unpacked. It begins with the file's own header."""
    data = bytearray(zipped({"abc": b"x" * 50}))
    central = data.index(b"PK\x01\x02")
    if kind == "encrypted":
        data[6] |= 1
        data[central + 8] |= 1
    elif kind == "method":
        data[8] = data[central + 10] = 99
    elif kind == "deflate":  # its bytes are packed by no method
        data[8] = data[central + 10] = zipfile.ZIP_DEFLATED
    else:
        data[central + 9] |= 8  # the name is UTF-8
        data[central + 46] = 0xFF
    return bytes(data)


@pytest.mark.parametrize("kind", ["encrypted", "method", "deflate", "name"])
def test_a_zip_that_python_cannot_unpack_is_refused_and_nothing_is_left(profile, server, tmp_path, kind):
    server.profile.data = changed(kind)
    with pytest.raises(ProtocolError, match="damaged"):
        profile(folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_answer_without_its_end_is_refused(profile, server):
    server.profile.finishes = False
    with pytest.raises(ProtocolError, match="before the profile was finished"):
        profile()


def test_a_folder_that_cannot_be_made(profile, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        profile(folder=tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.ABORTED, "PROFILE_UNDER_WAY", ProfileUnderWay),
        (grpc.StatusCode.INTERNAL, "PROFILE_FAILED", ServerError),
        (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FEATURE", Unsupported),
    ],
)
def test_refusals(profile, server, code, reason, kind):
    server.failure = Failure(code, reason, "why")
    with pytest.raises(kind) as caught:
        profile()
    assert caught.value.reason == reason


def test_values_that_the_wire_cannot_carry(profile):
    with pytest.raises(InvalidRequest) as caught:
        profile(steps=-1, max_time=1e300)
    assert [violation.field for violation in caught.value.violations] == ["steps", "timeout"]
    with pytest.raises(TypeError, match="steps"):
        profile(steps="many")
