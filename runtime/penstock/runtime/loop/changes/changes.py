"""What callers ask to be done between two steps: weight updates, pauses and resumes. No jax."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from penstock.runtime.errors import InvalidRequest, PauseTakenBack, Violation, WeightsIncomplete
from penstock.runtime.loop.changes.between_steps import BetweenSteps
from penstock.runtime.loop.changes.change import Change, ForRunning, Hold, Pause, Resume, Update, refuse
from penstock.runtime.loop.guard import Guard
from penstock.runtime.loop.interface import Applied, InFlightPolicy, InFlightReport, Paused, WeightsVersion
from penstock.runtime.loop.life import Life
from penstock.runtime.loop.live_requests import LiveRequests


class Changes:
    """Each change has a future, whose result comes when the engine's thread has made the change, and whose
    error says why it was not made. The future's callbacks run on the engine's thread, or on the thread of
    whoever ends the wait, and must not block.
    """

    def __init__(self, between: BetweenSteps, *, guard: Guard, life: Life, requests: LiveRequests) -> None:
        self._between = between
        self._guard = guard
        self._life = life
        self._requests = requests

    # -- state --

    @property
    def weights(self) -> WeightsVersion:
        """The weights that serve now."""
        return self._between.weights.version

    @property
    def weights_since(self) -> dt.datetime:
        """When these weights went live, in UTC."""
        return self._between.weights.since

    @property
    def weights_problem(self) -> str | None:
        """Why the weights cannot serve, after `break_weights`; None: they can."""
        return self._life.weights_problem

    def version_of(self, generation: int) -> WeightsVersion:
        """The version that has or had this generation. The newest few thousand are remembered; the label of
        any other is empty.
        """
        return self._between.weights.version_of(generation)

    @property
    def is_paused(self) -> bool:
        """Whether a pause is in force. Waits for no lock."""
        return self._between.is_paused

    # -- weights --

    def update(
        self,
        install: Callable[[], None],
        label: str,
        policy: InFlightPolicy,
        *,
        drain_timeout_s: float | None = None,
        whole: bool = True,
    ) -> Future[Applied]:
        """Runs `install`, which swaps the runner's weights, or raises and leaves them as they are, between
        two steps. `whole`: whether it replaces all weights.

        The future holds what `install` raised, DrainTimeout if the running requests did not end within
        `drain_timeout_s` under the policy WAIT, PausedWithRequests if they cannot because of a pause,
        WeightsIncomplete if the weights are broken and this update is not whole, or Draining or EngineFailure
        if the engine ended first; then nothing has changed. Cancelling the future before the update's turn
        takes the update back. InvalidRequest for a time that is none.
        """
        with self._asking(policy, drain_timeout_s) as running:
            update = Update(install=install, label=label, is_whole=whole, running=running)
            self._between.add(update)
        return update.done

    def hold_for_update(
        self, policy: InFlightPolicy, *, drain_timeout_s: float | None = None, whole: bool = True
    ) -> Future[InFlightReport]:
        """Stops between two steps, so that the caller can replace the runner's weights in place. Once the
        future has its result, no step is made before `release_hold`, `drop_hold` or `break_weights`, of which
        the caller must call one. `whole`: whether all weights are replaced. The future's errors are those of
        `update`.
        """
        with self._asking(policy, drain_timeout_s) as running:
            hold = Hold(is_whole=whole, running=running)
            self._between.add(hold)
        return hold.done

    def release_hold(self, label: str) -> Applied:
        """Ends a hold: the weights that the runner has now are whole, and go live. Raises EngineDead or
        Draining if the engine has ended meanwhile, and RuntimeError if no hold is in force.
        """
        with self._guard.lock, self._guard.changing():
            self._life.check_running()
            was_broken = self._life.weights_problem is not None
            applied = self._between.release(label)
        if applied is None:
            raise RuntimeError("no hold is in force")
        if was_broken:
            self._life.tell_ready()
        return applied

    def drop_hold(self) -> None:
        """Ends a hold, if there is one, before any weight was replaced."""
        with self._guard.lock, self._guard.changing():
            self._between.drop_hold()

    def break_weights(self, reason: str) -> None:
        """Says that the runner's weights are partly old and partly new: all requests end with
        WeightsIncomplete, and so does every new one, until an update that is whole goes live. This also ends
        a hold. `reason` says in a few words what failed.
        """
        with self._guard.lock, self._guard.changing():
            if self._life.is_dead or self._life.is_stopping:
                return
            self._between.break_weights(reason)
            self._requests.drop_cancelled()
            self._requests.fail_all(WeightsIncomplete(reason))
        self._life.tell_ready()

    # -- pauses --

    def pause(
        self,
        policy: InFlightPolicy,
        *,
        drain_timeout_s: float | None = None,
        free_kv_cache: bool = False,
        offload_weights: bool = False,
    ) -> Future[Paused]:
        """Stops between two steps until `resume`, and frees memory of the device if asked to. New requests
        queue up, and time limits go on. A paused engine can be paused again: that does to the requests which
        the first pause has kept what `policy` says, and frees more.

        The future holds DrainTimeout or PausedWithRequests, as that of `update`; PauseTakenBack if a resume
        came before the pause's turn; or what kept the memory from being freed. Then the engine is as paused
        as before, but requests may have ended or lost their KV. InvalidRequest for a time that is none, and
        for `free_kv_cache` with the policy KEEP.
        """
        if free_kv_cache and policy is InFlightPolicy.KEEP:
            described = "the requests that are kept need the cache"
            raise InvalidRequest([Violation("free_kv_cache", described)])
        with self._asking(policy, drain_timeout_s) as running:
            pause = Pause(running=running, free_kv_cache=free_kv_cache, offload_weights=offload_weights)
            self._between.add(pause)
        return pause.done

    def resume(self) -> Future[None]:
        """Takes back the pauses that wait for their turn, and ends the one in force, if there is one, after
        what it has freed was restored. If that fails, the future has the error, and the engine stays paused.
        """
        resume = Resume()
        with self._guard.lock:
            self._life.check_running()
            taken_back = self._between.take_pauses()
            self._between.add(resume)
            self._guard.doorbell.ring()
        refuse(taken_back, PauseTakenBack())
        return resume.done

    @contextlib.contextmanager
    def _asking(self, policy: InFlightPolicy, drain_timeout_s: float | None) -> Iterator[ForRunning]:
        """Holds the lock while a change is asked for."""
        if drain_timeout_s is not None and not (math.isfinite(drain_timeout_s) and drain_timeout_s >= 0):
            described = f"must be a time in seconds, not {drain_timeout_s}"
            raise InvalidRequest([Violation("drain_timeout", described)])
        with self._guard.lock, self._guard.changing():
            self._life.check_running()
            yield self._between.running(policy, drain_timeout_s)

    def take_all(self) -> Sequence[Change]:
        """Removes and returns all changes that wait; to be called with the engine's lock held."""
        return self._between.take_all()
