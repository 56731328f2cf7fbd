"""The profiler without an engine: JAX's recorder is real, and the test itself ends the steps."""

from __future__ import annotations

import gzip
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from penstock.runtime.errors import Draining, InvalidRequest, ProfileFailed, ProfileUnderWay
from penstock.runtime.loop.guard import StepWatch
from penstock.runtime.profiling import profiler as profiler_module
from penstock.runtime.profiling import trace_writing
from penstock.runtime.profiling.profile import Profile, ProfileOptions
from penstock.runtime.profiling.profiler import Profiler

pytestmark = pytest.mark.ci

WAIT_S = 60.0
LONG = ProfileOptions(steps=1000, timeout_s=300.0)


class Steps:
    """A loop whose steps the test ends."""

    def __init__(self) -> None:
        self.watch: StepWatch | None = None

    def watch_steps(self, watch: StepWatch | None) -> None:
        self.watch = watch

    def end(self, num_steps: int = 1, *, began_ns: int | None = None) -> None:
        if self.watch is not None:
            self.watch(time.monotonic_ns() if began_ns is None else began_ns, num_steps)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def profiler(steps: Steps) -> Iterator[Profiler]:
    made = Profiler(steps)
    yield made
    made.close()


def names_in(profile: Profile) -> set[str]:
    trace = json.loads(gzip.decompress(profile.trace.read_bytes()))
    return {event["name"] for event in trace["traceEvents"]}


def test_a_profile_ends_after_its_steps(profiler: Profiler, steps: Steps, tmp_path: Path) -> None:
    before_ns = time.monotonic_ns()
    run = profiler.start(tmp_path, ProfileOptions(steps=4))
    steps.end(
        began_ns=before_ns
    )  # it was in flight when the recording began, so only a part of it is recorded
    with jax.profiler.TraceAnnotation("mark-of-the-test"):
        steps.end()
    steps.end(2)  # a window
    assert not run.future.done()
    steps.end(3)
    steps.end()  # too late to count
    profile = run.result(WAIT_S)
    assert (profile.folder, profile.steps) == (run.folder, 6)
    assert "mark-of-the-test" in names_in(profile)
    assert profile.num_bytes == sum(f.stat().st_size for f in profile.folder.rglob("*") if f.is_file())
    assert len(list(profile.folder.glob("plugins/profile/*/*.xplane.pb"))) == 1
    assert 0 < profile.duration_s < WAIT_S
    assert steps.watch is None


def test_it_ends_without_steps_at_the_timeout_or_when_it_is_told(profiler: Profiler, tmp_path: Path) -> None:
    assert profiler.start(tmp_path, ProfileOptions(timeout_s=0.1)).result(WAIT_S).steps == 0
    run = profiler.start(tmp_path, LONG)
    run.stop()
    assert run.result(WAIT_S).trace.is_file()
    assert not run.future.cancel()


def test_there_is_one_profile_at_a_time_and_only_the_newest_stay(profiler: Profiler, tmp_path: Path) -> None:
    """Also when another engine of the process makes it. The next one may begin once the result is there."""
    other = Profiler(Steps())
    made = []
    for one in (profiler, other, profiler):
        run = one.start(tmp_path, LONG, 2)
        for another in (profiler, other):
            with pytest.raises(ProfileUnderWay):
                another.start(tmp_path, LONG, 2)
        run.stop()
        made.append(run.result(WAIT_S).folder)
    assert sorted(tmp_path.iterdir()) == made[1:]  # nothing is left of those that were refused


def test_a_profile_that_cannot_be_written_leaves_nothing_and_the_next_one_can(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileFailed, match="the folder for profiles cannot be written"):
        profiler.start(tmp_path / "file", LONG)
    folder = tmp_path / "profiles"

    def broken(path: Path, given_up: threading.Event) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(profiler_module, "improve_trace", broken)
        run = profiler.start(folder, LONG)
        run.stop()
        with pytest.raises(ProfileFailed, match="no space left"):
            run.result(WAIT_S)
    assert list(folder.iterdir()) == []
    run = profiler.start(folder, LONG)
    run.stop()
    assert run.result(WAIT_S).trace.is_file()


def test_the_process_that_writes_the_trace_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ProfileFailed, match="MalformedTrace: the profiler has written 0 files"):
        trace_writing.improve_trace(tmp_path, threading.Event())


def test_writing_the_trace_can_be_given_up_and_takes_no_longer_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that imports JAX stands in for one that takes long."""
    monkeypatch.setattr(trace_writing, "_PROCESS", "penstock.runtime.engine")
    given_up = threading.Event()
    with pytest.raises(ProfileFailed, match="took longer than 0 s"):
        trace_writing.improve_trace(tmp_path, given_up, 0.0)
    given_up.set()
    with pytest.raises(ProfileFailed, match="the engine was shut down"):
        trace_writing.improve_trace(tmp_path, given_up)


def test_closing_does_not_wait_for_long(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()

    def slow(path: Path, given_up: threading.Event) -> None:
        began.set()
        assert given_up.wait(WAIT_S)
        ended.set()
        raise ProfileFailed("given up")

    monkeypatch.setattr(profiler_module, "improve_trace", slow)
    monkeypatch.setattr(profiler_module, "_LAST_S", 0.01)
    profiler = Profiler(steps)
    run = profiler.start(tmp_path, LONG)
    run.stop()
    assert began.wait(WAIT_S)
    profiler.close()
    with pytest.raises(ProfileFailed, match="given up"):
        run.result(WAIT_S)
    assert ended.is_set()
    assert list(tmp_path.iterdir()) == []


def test_closing_ends_the_profile_and_refuses_others(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the machine is, the profile's last part is waited for.
    monkeypatch.setattr(profiler_module, "_LAST_S", WAIT_S)
    profiler = Profiler(steps)
    run = profiler.start(tmp_path, LONG)
    closing = [threading.Thread(target=profiler.close) for _ in range(2)]
    for thread in closing:
        thread.start()
    assert run.result(WAIT_S).trace.is_file()
    for thread in closing:
        thread.join(WAIT_S)
    with pytest.raises(Draining):
        profiler.start(tmp_path, LONG)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"steps": 0}, ["steps"]),
        ({"steps": 1001, "timeout_s": 0.0}, ["steps", "timeout"]),
        ({"timeout_s": 300.5}, ["timeout"]),
        ({"timeout_s": math.nan}, ["timeout"]),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, float], fields: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ProfileOptions(**options)  # type: ignore[arg-type]
    assert [violation.field for violation in refusal.value.violations] == fields
