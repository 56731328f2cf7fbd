"""Updates from files: where they may lie, and what happens if they are cut or changed while they are read."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.runtime import Engine
from penstock.runtime.errors import InvalidRequest, TensorsRefused, UnsupportedFeature, WeightsError
from penstock.runtime.sent_tensors import TensorReason
from penstock.runtime.updating import files as files_module
from penstock.runtime.updating.files import UpdateFiles
from penstock.runtime.updating.interface import UpdateReport
from penstock.runtime.updating.upload import FileUpload
from tests.runtime.loading.conftest import shard
from tests.support.updating import Arrays, bits, changed, options

pytestmark = pytest.mark.ci

IDS = itertools.count()
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def uri_of(path: Path) -> str:
    return f"file://{quote(str(path))}"


def opened(engine: Engine, path: Path, root: Path, **changes: object) -> FileUpload:
    return engine.updater.open_uri(options(f"update {next(IDS)}", **changes), uri_of(path), roots=[root])


def updated(engine: Engine, path: Path, root: Path, **changes: object) -> UpdateReport:
    upload = opened(engine, path, root, **changes)
    try:
        upload.read()
        return upload.commit(0).result(60)
    finally:
        upload.close()


def refusal(uri: str, roots: list[Path]) -> str:
    """Return what is said of the URI, which must be the field that is refused."""
    with pytest.raises(InvalidRequest) as refused:
        UpdateFiles(uri, roots).close()
    (violation,) = refused.value.violations
    assert violation.field == "begin.uri"
    return violation.description


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("form", ["single file", "directory", "shards", "no index"])
def test_files_give_the_weights_that_the_tensors_give(
    engine: Engine, tensors: Arrays, root: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most tensors are read in several pieces."""
    monkeypatch.setattr(files_module, "_PIECE", 1000)
    before, num_files = bits(engine), num_open()
    new = changed(tensors)
    folder = root / "a folder %41"
    folder.mkdir()
    if form == "no index":
        for i in range(3):
            some = {name: new[name] for name in sorted(new)[i::3]}
            save_file(some, folder / f"part {i}.safetensors")
    else:
        save_file(new, folder / SINGLE)
    if form == "shards":
        shard(folder)
    report = updated(engine, folder / SINGLE if form == "single file" else folder, root)
    assert (report.num_tensors, report.num_bytes) == (len(new), sum(t.nbytes for t in new.values()))
    found = bits(engine)
    by_arrays = engine.update_weights(new, label="the same").result(60)
    assert bits(engine) == found != before
    assert by_arrays.digest == report.digest
    assert num_open() == num_files
    engine.update_weights(tensors, label="back").result(60)


def test_all_that_does_not_fit_is_told_before_the_files_are_read(
    engine: Engine, tensors: Arrays, root: Path
) -> None:
    bad = {**tensors, "ghost": np.ones((2, 2), np.float32)}
    del bad["model.norm.weight"]
    bad["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int64)
    save_file(bad, root / SINGLE)
    num_files = num_open()
    for check in (engine.updater.open_uri, engine.updater.validate_uri):
        with pytest.raises(TensorsRefused) as refused:
            check(options(), uri_of(root / SINGLE), roots=[root])
        assert {problem.name: problem.reason for problem in refused.value.problems} == {
            "ghost": TensorReason.UNKNOWN_NAME,
            "model.norm.weight": TensorReason.MISSING,
            "lm_head.weight": TensorReason.DTYPE,
        }
    save_file(dict(tensors), root / SINGLE)
    engine.updater.validate_uri(options(), uri_of(root), roots=[root])
    opened(engine, root, root).close()
    assert num_open() == num_files


def test_what_is_wrong_with_values_is_told_when_all_are_read(
    engine: Engine, tensors: Arrays, root: Path
) -> None:
    bad = {name: np.array(tensor) for name, tensor in tensors.items()}
    names = list(bad)[3:5]
    for name in names:
        bad[name].flat[0] = np.nan
    save_file(bad, root / SINGLE)
    with pytest.raises(TensorsRefused) as refused:
        updated(engine, root, root, refuse_non_finite=True)
    assert {problem.name for problem in refused.value.problems} == set(names)


@pytest.mark.parametrize("uri", ["", "/tmp/x", "x.safetensors", "http://host/x", "s3://bucket/x", "File"])
def test_only_the_scheme_file_is_known(uri: str, root: Path) -> None:
    with pytest.raises(UnsupportedFeature, match=r"begin\.uri"):
        UpdateFiles(uri, [root])


@pytest.mark.parametrize(
    "rest", ["host/x", "x", "", "/x?a=b", "/x#part", "//", "/%00", "[/x", "127.0.0.1/x", "user@/x"]
)
def test_uris_that_are_no_path(rest: str, root: Path) -> None:
    assert refusal(f"file://{rest}", [root])


def test_files_lie_below_a_root(tensors: Arrays, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "root-and-more"
    outside.mkdir()
    save_file(dict(tensors), outside / SINGLE)
    (root / "way out").symlink_to(outside)
    (root / "linked.safetensors").symlink_to(outside / SINGLE)
    (root / "mixed").mkdir()
    (root / "mixed" / SINGLE).symlink_to(outside / SINGLE)
    (root / "loop").symlink_to(root / "loop")
    texts = [
        refusal(uri, [root]).replace(str(path), "PATH")
        for path in (
            outside,
            outside / SINGLE,
            outside / "absent",
            root / ".." / outside.name / SINGLE,
            root / "way out",
            root / "way out" / SINGLE,
            root / "linked.safetensors",
            tmp_path,
            Path("/"),
            Path("/etc/passwd"),
            Path("/proc/self/mem"),
        )
        for uri in (f"file://{path}",)
    ]
    # Nobody learns from this what exists elsewhere.
    assert set(texts) == {"PATH is not below a directory from which this server takes weights"}
    assert "not below a directory" in refusal(f"file://{root}/mixed", [root])
    assert refusal(f"file://{root}/loop", [root])
    assert "not below" in refusal(f"file://{root}/%2e%2e/{outside.name}/{SINGLE}", [root])
    assert "not below" in refusal(uri_of(outside / SINGLE), [])
    UpdateFiles(uri_of(outside / SINGLE), [root, outside]).close()


def test_links_within_the_roots_are_followed(tensors: Arrays, root: Path, tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub. The root itself may be reached through a link too."""
    (root / "blobs").mkdir()
    (root / "snapshot").mkdir()
    save_file(dict(tensors), root / "blobs" / "0f3a")
    (root / "snapshot" / SINGLE).symlink_to("../blobs/0f3a")
    (tmp_path / "link").symlink_to(root)
    for path in (root / "snapshot", tmp_path / "link" / "snapshot"):
        files = UpdateFiles(uri_of(path), [tmp_path / "link"])
        assert len(files.tensors) == len(tensors)
        files.close()


def test_a_link_that_is_put_there_after_the_check_is_not_followed(
    tensors: Arrays, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(dict(tensors), tmp_path / SINGLE)
    for name in ("folder", "file"):
        (root / name).mkdir()
        save_file(dict(tensors), root / name / SINGLE)
    swap: Callable[[], None] = lambda: None
    real = os.open

    def late(path: str | Path, flags: int, *args: int, **options: int | None) -> int:
        if path == root.resolve():  # the first step of the way to the file
            swap()
        return real(path, flags, *args, **options)  # type: ignore[arg-type]

    def swap_file() -> None:
        (root / "file" / SINGLE).unlink()
        (root / "file" / SINGLE).symlink_to(tmp_path / SINGLE)

    def swap_folder() -> None:
        shutil.rmtree(root / "folder")
        (root / "folder").symlink_to(tmp_path)

    monkeypatch.setattr(os, "open", late)
    for name, swap in (("file", swap_file), ("folder", swap_folder)):  # noqa: B007
        assert "cannot be opened" in refusal(uri_of(root / name / SINGLE), [root])


def test_what_is_no_safetensors_file(root: Path) -> None:
    os.mkfifo(root / "pipe.safetensors")
    (root / "short.safetensors").write_bytes(b"\xff" * 5)
    (root / "empty").mkdir()
    (root / "bad index").mkdir()
    (root / "bad index" / INDEX).write_text("{}")
    (root / "deep").mkdir()
    (root / "deep" / INDEX).write_text("[" * 200_000)
    (root / "outside").mkdir()
    (root / "outside" / INDEX).write_text('{"weight_map": {"w": "../short.safetensors"}}')
    (root / "parent").mkdir()
    (root / "parent" / INDEX).write_text('{"weight_map": {"w": ".."}}')
    (root / "absent shard").mkdir()
    (root / "absent shard" / INDEX).write_text('{"weight_map": {"w": "a.safetensors"}}')
    num_files = num_open()
    for name, said in {
        "pipe.safetensors": "is not a file",
        "short.safetensors": "is not a complete safetensors file",
        "absent": "cannot be opened",
        "empty": "holds no safetensors files",
        "bad index": "is not a safetensors index",
        "deep": "is not a safetensors index",
        "outside": "names files outside its own directory",
        "parent": "names files outside its own directory",
        "absent shard": "cannot be opened",
    }.items():
        assert said in refusal(uri_of(root / name), [root])
    (root / "bad index" / INDEX).unlink()
    (root / "bad index" / SINGLE).mkdir()
    assert "is not a file" in refusal(uri_of(root / "bad index"), [root])
    bare = root / "parent" / INDEX  # a root that has become a file
    assert "is no file" in refusal(uri_of(bare), [bare])
    assert num_open() == num_files


def test_shards_that_contradict_their_index(tensors: Arrays, root: Path) -> None:
    save_file(dict(tensors), root / SINGLE)
    shard(root)
    shards = sorted(root.glob("*.safetensors"))
    shutil.copy(shards[0], shards[1])
    assert "is in both" in refusal(uri_of(root), [root])


@pytest.mark.parametrize("change", ["cut", "cut to nothing", "grown", "written", "touched"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    engine: Engine, tensors: Arrays, root: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory map of a file that is cut would end the process."""
    file = root / SINGLE
    save_file(changed(tensors), file)
    size = file.stat().st_size
    pieces = iter(range(1_000_000))
    monkeypatch.setattr(files_module, "_PIECE", 1000)
    read = os.pread

    def meanwhile(descriptor: int, count: int, offset: int) -> bytes:
        if count == 1000 and next(pieces) == 5:
            if change == "cut":
                os.truncate(file, size - 1)
            elif change == "cut to nothing":
                os.truncate(file, 0)
            elif change == "grown":
                with file.open("ab") as stream:
                    stream.write(b"x")
            elif change == "written":
                with file.open("r+b") as stream:
                    stream.seek(size - 8)
                    stream.write(b"x")
                os.utime(file, ns=(0, 0))
            else:
                os.utime(file, ns=(0, 0))
        return read(descriptor, count, offset)

    upload = opened(engine, file, root)
    num_files = num_open()
    monkeypatch.setattr(os, "pread", meanwhile)
    with pytest.raises(InvalidRequest, match=r"begin\.uri: .* was (cut|changed) while it was read"):
        upload.read()
    upload.close()
    assert num_open() == num_files - 1


def test_each_of_several_files_is_looked_at_when_it_has_been_read(
    engine: Engine, tensors: Arrays, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is changed just before its last tensor is read, and that is in one piece."""
    save_file(dict(tensors), root / SINGLE)
    files = list(shard(root).values())
    first = min(files)
    upload = opened(engine, root, root)
    read, before = os.pread, iter(range(files.count(first) - 1))

    def touched(descriptor: int, count: int, offset: int) -> bytes:
        if next(before, None) is None:
            os.utime(root / first, ns=(0, 0))
        return read(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", touched)
    with pytest.raises(InvalidRequest, match=rf"begin\.uri: .*{first} was changed while it was read"):
        upload.read()
    upload.close()


def test_a_file_that_is_replaced_meanwhile_is_read_to_its_end(
    engine: Engine, tensors: Arrays, root: Path
) -> None:
    file = root / SINGLE
    save_file(dict(tensors), file)
    before = bits(engine)
    upload = opened(engine, file, root)
    save_file(changed(tensors), root / "new")
    (root / "new").rename(file)
    upload.read()
    upload.commit(0).result(60)
    upload.close()
    assert bits(engine) == before


def test_a_commit_of_files_counts_no_bytes_and_comes_after_reading(
    engine: Engine, tensors: Arrays, root: Path
) -> None:
    save_file(dict(tensors), root / SINGLE)
    upload = opened(engine, root, root)
    with pytest.raises(TensorsRefused, match="fewer bytes"):
        upload.commit(0)
    upload.close()
    upload = opened(engine, root, root)
    upload.read()
    with pytest.raises(InvalidRequest, match=r"commit\.total_bytes: must be 0"):
        upload.commit(5)
    upload.commit(0).result(60)
    upload.close()


def test_closing_ends_a_read(
    engine: Engine, tensors: Arrays, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(dict(tensors), root / SINGLE)
    upload = opened(engine, root, root)
    reading, closing = threading.Event(), threading.Event()
    read = os.pread

    def slow(descriptor: int, count: int, offset: int) -> bytes:
        reading.set()
        assert closing.wait(60)
        return read(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", slow)
    errors: list[WeightsError] = []

    def reader() -> None:
        try:
            upload.read()
        except WeightsError as error:
            errors.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    assert reading.wait(60)
    stop = threading.Thread(target=upload.close)
    stop.start()
    while not upload._is_stopped.is_set():
        stop.join(0.01)
    closing.set()
    thread.join(60)
    stop.join(60)
    assert "taken back" in str(errors[0])
    opened(engine, root, root).close()  # the place is free
