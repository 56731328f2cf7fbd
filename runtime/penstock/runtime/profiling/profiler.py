"""Profiler: records the next steps of an engine, one profile at a time.

The engine's thread only counts its steps for it. A thread of the profile's own stops JAX's profiler and
writes its files, and another process makes the trace that Perfetto reads.

To stop the profiler takes seconds of C++ without Python's global lock, and to make the trace takes seconds of
Python. Beside the count, the engine's thread only names its parts (`jax.profiler.TraceAnnotation`), which
takes 0.4 us each while nobody records. The programs in the profiler's own file tell which operation is the
model's, which the sampler's, and which native kernel a call runs (`operations`); for that each program has a
name of its own.
"""

from __future__ import annotations

import datetime as dt
import logging
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from penstock.runtime.errors import Draining, PenstockError, ProfileFailed, ProfileUnderWay
from penstock.runtime.loop.guard import StepWatch
from penstock.runtime.machine.background import lower_priority
from penstock.runtime.profiling import folders, recorder
from penstock.runtime.profiling.perfetto import TRACE_FILE
from penstock.runtime.profiling.profile import Profile, ProfileOptions, ProfileRun
from penstock.runtime.profiling.trace_writing import improve_trace

log = logging.getLogger(__name__)

_LAST_S = 2.0
"""How long `Profiler.close` waits until the files are written."""


class StepSource(Protocol):
    """What a profiler asks of the engine's loop; `EngineCore` is one."""

    def watch_steps(self, watch: StepWatch | None) -> None:
        """Tell `watch` of the end of every step from now on, on the engine's thread; None: nobody."""
        ...


class StepCount:
    """Counts the steps that began after this was made, until there are enough or somebody ends it."""

    def __init__(self, wanted: int) -> None:
        self.steps = 0
        self.began_ns = time.monotonic_ns()
        self._wanted = wanted
        self._over = threading.Event()

    def __call__(self, started_ns: int, num_steps: int) -> None:
        """Count steps, as a `StepWatch`."""
        if started_ns >= self.began_ns and not self._over.is_set():
            self.steps += num_steps
            if self.steps >= self._wanted:
                self._over.set()

    def end(self) -> None:
        """Count no more steps. Any thread may call this at any time."""
        self._over.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until the counting has ended; end it after `timeout_s` seconds."""
        self._over.wait(timeout_s)
        self._over.set()


class Profiler:
    """Makes the profiles of one engine. Any thread may use it."""

    def __init__(self, source: StepSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._count: StepCount | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._given_up = threading.Event()
        """Set when nobody waits for the files any more."""

    def start(self, folder: Path, options: ProfileOptions, keep: int | None = None) -> ProfileRun:
        """Return when the recording has begun. The files will be in a folder of their own in `folder`, of
        which the newest `keep` stay; None: all.

        Raises ProfileUnderWay, Draining when the engine was shut down, or ProfileFailed where the folder
        cannot be written or JAX cannot record. May take seconds on some devices the first time.
        """
        with self._lock:
            if self._is_closed:
                raise Draining()
            if self._count is not None:
                raise ProfileUnderWay()
            unfinished = _new_folder(folder)
            try:
                recorder.start(unfinished)
            except BaseException:  # whatever ended it, no empty folder stays
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            self._count = count = StepCount(options.steps)
            run = ProfileRun(folders.final_path(unfinished), Future(), count.end)
            run.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
            self._source.watch_steps(count)
            self._thread = threading.Thread(
                target=self._finish, args=(run, count, unfinished, options, keep), name="penstock-profile"
            )
            self._thread.start()
            return run

    def stop(self) -> None:
        """End the recording, if there is one. What was recorded is written. Waits for nothing."""
        count = self._count
        if count is not None:
            count.end()

    def close(self) -> None:
        """End the recording, and refuse others. What was recorded is written, unless that takes longer than
        a moment: nobody should wait for it when the engine ends. May be called twice.
        """
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self.stop()
        if thread is not None:
            thread.join(_LAST_S)
            self._given_up.set()

    def _finish(
        self, run: ProfileRun, count: StepCount, unfinished: Path, options: ProfileOptions, keep: int | None
    ) -> None:
        """Do what the profile's thread does while it is recorded and after."""
        lower_priority()
        count.wait(options.timeout_s)
        duration_s = (time.monotonic_ns() - count.began_ns) / 1e9
        self._source.watch_steps(None)
        profile: Profile | None = None
        failure: Exception | None = None
        try:
            profile = _write(unfinished, count.steps, duration_s, self._given_up)
            if keep is not None:
                folders.keep_newest(profile.folder, keep)
        except Exception as error:
            log.exception("a profile could not be written")
            shutil.rmtree(unfinished, ignore_errors=True)
            failure = error if isinstance(error, PenstockError) else ProfileFailed(str(error))
        self._count = None  # before the caller knows, who may start the next one at once
        if profile is not None:
            log.info("wrote a profile of %d steps: %s", profile.steps, profile.folder)
            run.future.set_result(profile)
        else:
            run.future.set_exception(failure)


def _new_folder(parent: Path) -> Path:
    try:
        return folders.new_folder(parent.absolute(), dt.datetime.now(dt.UTC))
    except OSError as error:
        raise ProfileFailed(f"the folder for profiles cannot be written: {error}") from error


def _write(unfinished: Path, steps: int, duration_s: float, given_up: threading.Event) -> Profile:
    """Stop recording, and write everything."""
    recorder.stop()
    improve_trace(unfinished, given_up)
    folder = folders.finished(unfinished)
    return Profile(
        folder=folder,
        trace=folder / TRACE_FILE,
        steps=steps,
        num_bytes=folders.size_of(folder),
        duration_s=duration_s,
    )
