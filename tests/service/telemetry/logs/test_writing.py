"""How lines reach stderr or a file: rotation, formats, and what happens when they cannot be written."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.logs.writing import LogOptions, open_logs
from penstock.shared.logs import JsonLines, QueuedLog

WAIT_S = 60


@pytest.fixture
def restored() -> Iterator[None]:
    """Put the process's logging back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)


class Held(logging.Handler):
    """A target that writes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reached.set()
        assert self.go_on.wait(WAIT_S)
        self.lines.append(self.format(record))


def record(message: str, *args: Any, **more: Any) -> logging.LogRecord:
    return logging.LogRecord("some.logger", logging.INFO, __file__, 1, message, args, None, **more)


def test_who_logs_does_not_wait_and_what_is_too_much_is_counted() -> None:
    target = Held()
    queued = QueuedLog(target, most_waiting=3)
    queued.handle(record("first"))
    assert target.reached.wait(WAIT_S)
    for number in range(5):  # of these, three can wait
        queued.handle(record("line %d", number))
    target.go_on.set()
    queued.flush()
    queued.handle(record("and on"))
    queued.close()
    assert target.lines == [
        "first",
        "line 0",
        "line 1",
        "line 2",
        "2 lines came faster than they could be written, and were left out",
        "and on",
    ]


def test_a_message_is_what_it_was_when_it_was_logged() -> None:
    target = Held()
    queued, changing = QueuedLog(target), [1]
    queued.handle(record("first"))
    queued.handle(record("%s", changing))
    changing.append(2)
    target.go_on.set()
    queued.close()
    assert target.lines == ["first", "[1]"]


def test_an_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.shared.logs.FLUSH_S", 0.05)
    target = Held()
    queued = QueuedLog(target)
    queued.handle(record("held"))
    assert target.reached.wait(WAIT_S)
    queued.flush()
    queued.close()
    assert target.lines == []
    target.go_on.set()


def test_a_file_takes_the_place_of_stderr(restored: None, tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "log"
    open_logs(LogOptions(log_file=path, log_level="warning"))
    log = logging.getLogger("penstock.test")
    log.info("too little")
    log.warning("forged\nline \x1b[2J %s", "\u2028")
    logging.getLogger().handlers[0].close()
    assert capfd.readouterr() == ("", "")
    (line,) = path.read_text().splitlines()
    assert line.endswith("WARNING penstock.test: forged\\nline \\x1b[2J \\u2028")


def test_without_a_file_lines_go_to_stderr(restored: None, capfd: Any) -> None:
    open_logs(LogOptions())
    logging.getLogger("penstock.test").info("hello")
    logging.getLogger().handlers[0].close()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith("INFO    penstock.test: hello\n")


def test_a_file_is_rotated_and_so_many_are_kept(restored: None, tmp_path: Path) -> None:
    path = tmp_path / "log"
    open_logs(LogOptions(log_file=path, log_file_bytes=64 * 1024, log_file_count=2))
    for number in range(400):
        logging.getLogger("penstock.test").info("%d %s", number, "x" * 1000)
    logging.getLogger().handlers[0].close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    assert all(0 < file.stat().st_size <= 64 * 1024 for file in tmp_path.iterdir())
    lines = "".join((tmp_path / name).read_text() for name in ("log.2", "log.1", "log")).splitlines()
    numbers = [int(line.split(": ")[1].split()[0]) for line in lines]
    assert numbers == list(range(400 - len(numbers), 400)), "nothing is missing among those kept"


def test_a_file_that_another_program_renames_is_opened_again(restored: None, tmp_path: Path) -> None:
    path = tmp_path / "log"
    open_logs(LogOptions(log_file=path, log_file_bytes=0))
    log = logging.getLogger("penstock.test")
    log.info("before")
    logging.getLogger().handlers[0].flush()
    path.rename(tmp_path / "moved")
    log.info("after")
    logging.getLogger().handlers[0].close()
    assert "before" in (tmp_path / "moved").read_text()
    assert "after" in path.read_text()


def test_a_disk_that_is_full_is_told_once_and_holds_up_nothing(restored: None, capfd: Any) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    open_logs(LogOptions(log_file=Path("/dev/full"), log_file_bytes=0))
    for _ in range(5):
        logging.getLogger("penstock.test").info("hello")
    logging.getLogger().handlers[0].flush()
    err = capfd.readouterr().err
    assert err.count("penstock: the log cannot be written: OSError") == 1
    assert "Traceback" not in err


def test_a_file_that_cannot_be_opened_again_is_tried_for_each_line(
    restored: None, tmp_path: Path, capfd: Any
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    open_logs(LogOptions(log_file=folder / "log", log_file_bytes=0))
    log = logging.getLogger("penstock.test")
    log.info("first")
    logging.getLogger().handlers[0].flush()
    shutil.rmtree(folder)
    log.info("lost")
    logging.getLogger().handlers[0].flush()
    folder.mkdir()
    log.info("last")
    logging.getLogger().handlers[0].close()
    assert (folder / "log").read_text().endswith("penstock.test: last\n")
    assert capfd.readouterr().err.count("penstock: the log cannot be written: FileNotFoundError") == 1


def test_json_lines_hold_what_text_says() -> None:
    formatter = JsonLines()
    made = record("two\nlines \x9b %s", "\udc80é")
    made.created = 1_700_000_000.25
    line = formatter.format(made)
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": "2023-11-14T22:13:20.250000Z",
        "level": "INFO",
        "logger": "some.logger",
        "message": "two\nlines \x9b \udc80é",
    }


def test_errors_keep_their_traceback_in_both_formats(restored: None, tmp_path: Path) -> None:
    said = {}
    for log_format in ("text", "json"):
        path = tmp_path / log_format
        open_logs(LogOptions(log_file=path, log_format=log_format))
        try:
            raise ValueError("forged\x1b[2J")
        except ValueError:
            logging.getLogger("penstock.test").exception("it %s", "failed")
        logging.getLogger().handlers[0].close()
        said[log_format] = path.read_text()
    assert "it failed\nTraceback (most recent call last):" in said["text"]
    assert "ValueError: forged\\x1b[2J" in said["text"]
    (line,) = said["json"].splitlines()
    assert json.loads(line)["message"] == "it failed"
    assert json.loads(line)["exception"].endswith("ValueError: forged\x1b[2J")


def test_warnings_of_python_are_lines_too(restored: None, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        logging.captureWarnings(False)  # another test may have left it on
        open_logs(LogOptions(log_file=tmp_path / "log", log_format="json"))
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    logging.getLogger().handlers[0].close()
    assert "old" in json.loads((tmp_path / "log").read_text())["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_format": "xml"}, "log_format: must be text or json, not 'xml'"),
        ({"log_level": "loud"}, "log_level: must be one of debug, info, warning, error, not 'loud'"),
        ({"log_file_bytes": 5, "log_file": Path("x")}, "log_file_bytes: must be 0 or at least 65536, not 5"),
        ({"log_file_count": 0, "log_file": Path("x")}, "log_file_count: must be from 1 to 1000, not 0"),
        ({"log_file_count": 7}, "log_file_count: needs log_file"),
        ({"log_file_bytes": 2**20}, "log_file_bytes: needs log_file"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LogOptions(**options)
    assert str(refused.value) == message


def test_a_file_that_cannot_be_opened_is_refused(restored: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log_file: .*/none/log cannot be written: No such file"):
        open_logs(LogOptions(log_file=tmp_path / "none" / "log"))
