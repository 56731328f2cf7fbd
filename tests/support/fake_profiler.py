"""Profiles of the fake engine, which end when the test says so."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

from penstock.runtime.errors import ProfileUnderWay
from penstock.runtime.profiling.profile import Profile, ProfileOptions, ProfileRun

FILES = {
    "perfetto_trace.json.gz": b"trace" * 1000,
    "plugins/profile/now/host.xplane.pb": bytes(range(256)) * 9,
}


class FakeProfiler:
    """One profile at a time, of which `end` writes FILES."""

    def __init__(self) -> None:
        self.begun: list[tuple[Path, ProfileOptions, int | None]] = []
        self.num_asked = 0
        self.num_ended = 0
        self.failure: Exception | None = None
        """What `start` raises."""
        self.before_start = threading.Event()
        """`start` waits for it."""
        self.before_start.set()
        self.ends_at_once = False
        """Whether the steps end without the test."""
        self._run: ProfileRun | None = None

    def start(self, folder: Path, options: ProfileOptions, keep: int | None = None) -> ProfileRun:
        self.num_asked += 1
        assert self.before_start.wait(20)
        if self.failure is not None:
            raise self.failure
        if self._run is not None:
            raise ProfileUnderWay()
        self.begun.append((folder, options, keep))
        future: Future[Profile] = Future()
        future.set_running_or_notify_cancel()
        run = ProfileRun(folder / f"profile-{len(self.begun)}", future, lambda: self._ended(run, steps=0))
        self._run = run
        if self.ends_at_once:
            self._ended(run, options.steps)
        return run

    @property
    def is_recording(self) -> bool:
        return self._run is not None

    def end(self, steps: int) -> None:
        """Note that the steps have ended."""
        assert self._run is not None
        self._ended(self._run, steps)

    def _ended(self, run: ProfileRun, steps: int) -> None:
        if run.future.done():
            return
        for name, data in FILES.items():
            file = run.folder / name
            file.parent.mkdir(parents=True)
            file.write_bytes(data)
        self._run = None
        self.num_ended += 1
        run.future.set_result(
            Profile(
                folder=run.folder,
                trace=run.folder / "perfetto_trace.json.gz",
                steps=steps,
                num_bytes=sum(map(len, FILES.values())),
                duration_s=1.5,
            )
        )
