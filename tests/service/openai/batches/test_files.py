"""/v1/files as OpenAI's client and others use it: what it stores, for whom, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.openai.batches import storing
from penstock.openai.batches.runner import opened_folder
from penstock.openai.routes import files as routes
from penstock.openai.settings import Settings, SettingsError
from tests.service.key_rig import key, write
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import until

LINE = b'{"custom_id": "1"}\n'


@contextlib.asynccontextmanager
async def filing(folder: Path, **settings: Any) -> AsyncIterator[FrontRig]:
    async with front_rig(settings={"files": folder} | settings) as rig:
        yield rig


def form(*parts: tuple[str, str], end: str = "--x--\r\n") -> dict[str, Any]:
    """Make a form of these headers and contents."""
    told = "".join(f"--x\r\nContent-Disposition: {head}\r\n\r\n{content}\r\n" for head, content in parts)
    return {"content": told + end, "headers": {"content-type": "multipart/form-data; boundary=x"}}


PURPOSE = ('form-data; name="purpose"', "batch")
FILE = ('form-data; name="file"; filename="a.jsonl"', "some")


async def test_a_file_is_stored_told_of_given_back_and_removed(tmp_path: Path) -> None:
    content = os.urandom(300_000)  # which comes in many parts, with line ends of all kinds
    async with filing(tmp_path) as rig:
        files = rig.openai.files
        made = await files.create(
            file=("räume.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (made.object, made.bytes, made.filename, made.purpose, made.status) == (
            "file",
            300_000,
            "räume.jsonl",
            "batch",
            "processed",
        )
        assert made.expires_at == made.created_at + 3600
        assert await files.retrieve(made.id) == made
        assert (await files.content(made.id)).content == content
        assert (await files.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await files.retrieve(made.id)
        assert not list((tmp_path / "contents").iterdir())


async def test_lists_have_pages(tmp_path: Path) -> None:
    async with filing(tmp_path) as rig:
        files = rig.openai.files
        made = [(await files.create(file=(f"{i}", LINE), purpose="batch")).id for i in range(5)]
        assert [file.id async for file in files.list(limit=2)] == made[::-1]
        assert [file.id async for file in files.list(limit=2, order="asc")] == made
        page = await files.list(limit=2, order="asc", after=made[2])
        assert ([file.id for file in page.data], page.has_more) == (made[3:], False)
        assert (await files.list(purpose="batch_output")).data == []


async def test_each_key_has_its_own_files_and_a_key_is_needed(tmp_path: Path) -> None:
    keys, folder = write(tmp_path / "keys.json", [key("one"), key("two")]), tmp_path / "files"
    async with front_rig(settings={"files": folder}, key="psk_one", keys=keys) as rig:
        made = await rig.openai.files.create(file=("a", LINE), purpose="batch")
        others = rig.openai.with_options(api_key="psk_two").files
        assert (await others.list()).data == []
        for ask in (others.retrieve, others.content, others.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        with pytest.raises(openai.AuthenticationError):
            await rig.openai.with_options(api_key="wrong").files.create(file=("a", LINE), purpose="batch")
        assert (await rig.openai.files.retrieve(made.id)).id == made.id
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert b"psk_one" not in path.read_bytes()


@pytest.mark.parametrize(
    ("sent", "status", "param", "code"),
    [
        (form(FILE), 400, "purpose", "missing_required_parameter"),
        (form(PURPOSE), 400, "file", "missing_required_parameter"),
        (form(PURPOSE, (FILE[0], "")), 400, "file", "invalid_value"),
        (form(PURPOSE, FILE, FILE), 400, "file", "invalid_value"),
        (form(PURPOSE, PURPOSE, FILE), 400, "purpose", "invalid_value"),
        (form((PURPOSE[0], "fine-tune"), FILE), 400, "purpose", "unsupported_value"),
        (form((PURPOSE[0], "x" * 2000), FILE), 400, "purpose", "invalid_value"),
        (form(('form-data; name="more"', "1"), FILE), 400, "more", "unknown_parameter"),
        (
            form(PURPOSE, ('form-data; name="expires_after[seconds]"', "9000"), FILE),
            400,
            "expires_after[anchor]",
            "unsupported_value",
        ),
        (form(PURPOSE, FILE, end=""), 400, None, "invalid_form"),
        (
            {"content": "--y", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            400,
            None,
            "invalid_form",
        ),
        ({"content": "", "headers": {"content-type": "multipart/form-data"}}, 400, None, "invalid_form"),
        ({"json": {}}, 415, None, "unsupported_media_type"),
        (form(PURPOSE, (FILE[0], "x" * 100_001)), 413, "file", "body_too_large"),
    ],
)
async def test_wrong_uploads_are_refused_and_leave_nothing(
    sent: Any, status: int, param: str | None, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MOST_FILE", 100_000)
    async with filing(tmp_path) as rig:
        reply = await rig.http.post("/v1/files", **sent)
        assert (await rig.openai.files.list()).data == []
        assert not list((tmp_path / "contents").iterdir())
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (status, param, code), error


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("https://chat.example", 200),
        ("http://127.0.0.1:{port}", 200),
    ],
)
async def test_pages_of_other_origins_upload_nothing(origin: str, status: int, tmp_path: Path) -> None:
    async with filing(tmp_path, cors_origins=("https://chat.example",)) as rig:
        sent = form(PURPOSE, FILE)
        sent["headers"]["origin"] = origin.format(port=rig.address[1])
        assert (await rig.http.post("/v1/files", **sent)).status_code == status
        assert len(list((tmp_path / "contents").iterdir())) == (status == 200)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("order=up", "order"),
        ("purpose=vision", "purpose"),
        ("after=file-x", "after"),
        ("before=file-x", "before"),
        ("limit=1&limit=2", "limit"),
    ],
)
async def test_wrong_queries_are_refused(query: str, param: str, tmp_path: Path) -> None:
    async with filing(tmp_path) as rig:
        reply = await rig.http.get(f"/v1/files?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_the_folder_is_bounded_and_has_room_again_after_a_removal(tmp_path: Path) -> None:
    most = 1 << 20
    async with filing(tmp_path, files_max_bytes=most) as rig:
        files = rig.openai.files
        first = await files.create(file=("a", b"x" * 600_000), purpose="batch")
        with pytest.raises(openai.APIStatusError) as refused:
            await files.create(file=("b", b"x" * 600_000), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (413, "files_full")
        assert sum(path.stat().st_size for path in (tmp_path / "contents").iterdir()) <= most
        await files.delete(first.id)
        assert (await files.create(file=("b", b"x" * 600_000), purpose="batch")).bytes == 600_000


async def test_small_files_count_so_that_their_number_is_bounded(tmp_path: Path) -> None:
    folder = storing.Folder(tmp_path, 10 * storing.LEAST_FILE, 1.0)
    for _ in range(10):
        folder.begin_file("caller", "batch", "a")
    with pytest.raises(storing.FolderFull):
        folder.begin_file("caller", "batch", "a")
    folder.close()


async def test_what_is_old_or_was_left_by_a_killed_worker_is_removed(tmp_path: Path) -> None:
    now = 1_000_000.0
    folder = storing.Folder(tmp_path, 1 << 30, 1.0, clock=lambda: now)

    def made(is_whole: bool) -> str:
        file_id = folder.begin_file("caller", "batch", "a")
        with storing.Growing(folder, file_id) as file:
            file.write(LINE)
            if is_whole:
                file.finish()
        return file_id

    old, left = made(True), made(False)
    now += 3600
    young = made(True)
    (tmp_path / "contents" / "file-unknown").write_bytes(b"x")
    now += 24 * 3600 - 3600 + 1
    assert folder.file("caller", old) is None  # also before it is swept
    folder.sweep()
    assert [path.name for path in (tmp_path / "contents").iterdir()] == [young]
    assert folder.file("caller", young) is not None
    assert left != young
    folder.close()


async def test_a_method_that_a_path_does_not_take_is_answered_with_all_that_it_takes() -> None:
    async with front_rig() as rig:
        reply = await rig.http.put("/v1/files/file-x")
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")
    assert {name.strip() for name in reply.headers["allow"].split(",")} == {"GET", "HEAD", "DELETE"}


async def test_without_a_folder_the_endpoints_say_which_option_is_lacking() -> None:
    async with front_rig() as rig:
        for ask in (rig.openai.files.list, rig.openai.batches.list):
            with pytest.raises(openai.APIStatusError) as refused:
                await ask()
            assert refused.value.status_code == 501
            assert refused.value.code == "unsupported_endpoint"
            assert "--files FOLDER" in refused.value.message


@pytest.mark.parametrize("goes_away", [True, False])
async def test_an_upload_that_stops_halfway_leaves_nothing(goes_away: bool, tmp_path: Path) -> None:
    async with filing(tmp_path, receive_limit_s=0.5) as rig:
        reader, writer = await asyncio.open_connection(*rig.address)
        whole = form(PURPOSE, (FILE[0], "x" * 5000))["content"].encode()
        head = "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        writer.write(f"{head}Content-Length: {len(whole)}\r\n\r\n".encode() + whole[:-1000])
        await until(lambda: any(path.stat().st_size for path in (tmp_path / "contents").iterdir()))
        if not goes_away:
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await until(lambda: not list((tmp_path / "contents").iterdir()))
        assert (await rig.openai.files.list()).data == []


def test_only_the_fronts_user_may_read_the_folder(tmp_path: Path) -> None:
    folder = opened_folder(Settings(files=tmp_path))  # which exists, and which everybody may enter
    assert folder is not None
    open_to_others = [path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o077]
    assert open_to_others == []
    folder.close()


@pytest.mark.parametrize("broken", ["file", "version", "database"])
def test_a_folder_that_cannot_be_used_is_told_by_its_option(broken: str, tmp_path: Path) -> None:
    folder, database = tmp_path / "files", tmp_path / "files" / "files.sqlite"
    if broken == "file":
        folder.write_text("x")
    else:
        folder.mkdir()
        if broken == "database":
            database.write_text("no database" * 1000)
        else:
            with contextlib.closing(sqlite3.connect(database)) as made:
                made.execute("PRAGMA user_version = 99")
    with pytest.raises(SettingsError, match=r"^files: "):
        opened_folder(Settings(files=folder))


@pytest.mark.parametrize(
    "wrong", [{"files_max_bytes": 1000}, {"files_days": 0.0}, {"batch_concurrency": 0}], ids=str
)
def test_bounds_that_keep_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"^{next(iter(wrong))}: "):
        Settings(**wrong)


async def test_an_upload_that_is_given_up_closes_its_file_after_the_last_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_closed = storing.Growing.write, []

    def slow(self: storing.Growing, data: bytes) -> None:
        time.sleep(1.0)
        is_closed.append(self.content.closed)
        write(self, data)

    monkeypatch.setattr(storing.Growing, "write", slow)
    monkeypatch.setattr(routes, "UPLOAD_S", 0.3)
    async with filing(tmp_path) as rig:
        assert (await rig.http.post("/v1/files", **form(PURPOSE, FILE))).status_code == 408
        await until(lambda: bool(is_closed))
        assert not list((tmp_path / "contents").iterdir())
    assert is_closed == [False]


def test_a_file_that_is_closed_while_it_is_written_does_not_write_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = storing.Folder(tmp_path / "files", 1 << 30, 1.0), tmp_path / "other"
    file = storing.Growing(folder, folder.begin_file("caller", "batch", "a"))
    with contextlib.ExitStack() as opened:

        def reserve(file_id: str, size: int) -> None:
            file.content.close()
            opened.enter_context(other.open("ab"))  # it gets the number of the descriptor

        monkeypatch.setattr(folder, "reserve", reserve)
        with pytest.raises(ValueError, match="closed"):
            file.write(LINE)
    assert not other.stat().st_size
    folder.close()


async def test_what_is_left_of_an_upload_is_removed_beside_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop, at = storing.Folder.drop_file, []

    def noting(self: storing.Folder, file_id: str) -> None:
        at.append(threading.current_thread())
        drop(self, file_id)

    monkeypatch.setattr(storing.Folder, "drop_file", noting)
    async with filing(tmp_path) as rig:
        assert (await rig.http.post("/v1/files", **form(FILE))).status_code == 400
    assert threading.main_thread() not in at
    assert len(at) == 1


async def test_a_file_that_is_deleted_while_it_is_asked_for_is_told_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = storing.Folder.file

    def deleting(self: storing.Folder, caller: str, file_id: str) -> storing.StoredFile | None:
        found = look_up(self, caller, file_id)
        self.drop_file(file_id)
        return found

    async with filing(tmp_path) as rig:
        made = await rig.openai.files.create(file=("a", LINE), purpose="batch")
        monkeypatch.setattr(storing.Folder, "file", deleting)
        with pytest.raises(openai.NotFoundError) as refused:
            await rig.openai.files.content(made.id)
    assert (refused.value.code, refused.value.param) == ("not_found", "file_id")


@pytest.mark.parametrize("ended_after_s", [10, 30 * 3600])
def test_a_batch_is_kept_for_as_long_as_files_after_its_end(ended_after_s: int, tmp_path: Path) -> None:
    now = 1_000_000
    folder = storing.Folder(tmp_path, 1 << 30, 1.0, clock=lambda: now)
    made = folder.begin_batch("caller", False, "/v1/completions", "file-x", None, None)
    now += ended_after_s
    folder.move(made.id, "cancelling", of=storing.UNFINISHED)
    folder.move(made.id, "cancelled", of=storing.UNFINISHED)
    now += folder.keep_s
    folder.sweep()
    assert folder.batch(made.id) is not None
    now += 1
    folder.sweep()
    assert folder.batch(made.id) is None
    folder.close()
