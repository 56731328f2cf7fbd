"""One update from its first tensor until it is live."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

import jax

from penstock.runtime.errors import GenerationChanged, WeightsError
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.device.device_state import DeviceState
from penstock.runtime.loading.leaves import LeafMaker
from penstock.runtime.loop.changes.changes import Changes
from penstock.runtime.loop.interface import Applied, InFlightPolicy, InFlightReport, WeightsVersion
from penstock.runtime.measuring.update_meters import UpdateMeters
from penstock.runtime.models.load_rules import LoadRules
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.interface import Staging, UpdateOptions, UpdateOutcome, UpdateReport
from penstock.runtime.updating.new_leaves import LeavesBeside, LeavesInPlace
from penstock.runtime.updating.new_weights import NewWeights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What updates change: a model on its device, and the loop that runs it."""

    changes: Changes
    device: DeviceState
    rules: LoadRules
    backend: Backend
    meters: UpdateMeters
    threads: int
    """How many threads make leaves, besides the one that checks tensors."""


def check_generation(options: UpdateOptions, current: WeightsVersion) -> None:
    """Raises GenerationChanged unless the generation serves that the caller expects, if it expects one."""
    expected = options.expected_generation
    if expected is not None and expected != current.generation:
        raise GenerationChanged(expected, current.generation)


class OneUpdate:
    """An update under way. It ends with `go_live` or `drop`."""

    def __init__(
        self, target: Target, options: UpdateOptions, sent: Sequence[SentTensor], *, field: str
    ) -> None:
        """sent: the tensors, which `manifest.check` has taken. field: what the caller calls their source.

        An update in place asks the engine to stand still, and waits for that when it has the first leaf.
        """
        self.options = options
        self._changes = target.changes
        self._meters = target.meters
        self._began = time.monotonic()
        self._num_tensors = len(sent)
        self._staged_s, self._digest, self._num_bytes = 0.0, b"", 0
        self._hold: Future[InFlightReport] | None = None
        self._in_place: LeavesInPlace | None = None
        leaves: LeavesBeside | LeavesInPlace
        if options.staging is Staging.IN_PLACE:
            leaves = self._in_place = LeavesInPlace(
                target.device, wait=self._stand_still, use_huge_pages=target.backend.use_huge_pages
            )
        else:
            is_on_host = target.backend.host_memory is None  # then leaves need not be moved
            leaves = LeavesBeside(
                target.device,
                on_device=is_on_host or options.staging is Staging.DEVICE,
                use_huge_pages=target.backend.use_huge_pages,
                break_weights=self._changes.break_weights,
            )
        maker = LeafMaker(
            target.rules.rules,
            {tensor.name for tensor in sent},
            # Not the leaves themselves, because they are to be free once they are replaced.
            {
                path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                for path, leaf in target.device.leaves_by_path.items()
            },
            leaves.take,
            threads=target.threads,
            old=leaves.old,
            in_background=True,
        )
        self.new = NewWeights(
            target.rules, sent, maker, leaves, field=field, refuse_non_finite=options.refuse_non_finite
        )
        """Takes the tensors."""
        if self._in_place is not None:
            self._hold = self._changes.hold_for_update(
                options.in_flight, drain_timeout_s=options.drain_timeout_s, whole=not options.partial
            )

    def received(self, num_bytes: int) -> None:
        """Counts bytes of tensors that have come."""
        self._meters.received(num_bytes)

    def finish(self, num_bytes: int) -> None:
        """Waits until all leaves are complete; `num_bytes` were sent. Raises as `NewWeights.finish`."""
        self._digest = self.new.finish()
        self._num_bytes = num_bytes
        self._staged_s = time.monotonic() - self._began
        self._meters.staged(self._staged_s)

    def go_live(self, policy: InFlightPolicy, drain_timeout_s: float | None) -> Future[Applied]:
        """Makes the new weights those that serve, between two steps. The future may hold GenerationChanged,
        and what `Changes.update` says; an update in place is live when this returns, or raises.
        """
        if self._in_place is None:
            return self._changes.update(
                self._install,
                self.options.label,
                policy,
                drain_timeout_s=drain_timeout_s,
                whole=not self.options.partial,
            )
        self._stand_still()
        self.new.install()
        live: Future[Applied] = Future()
        live.set_result(self._changes.release_hold(self.options.label))
        self._hold = None
        return live

    def stop_waiting(self) -> None:
        """Ends the wait for the engine to stand still, if there is one. Any thread may call this, and must
        call `drop` then.
        """
        hold = self._hold  # another thread may end the hold meanwhile
        if hold is not None:
            hold.cancel()

    def drop(self) -> None:
        """Lets go of everything. May be called twice. If leaves were replaced in place, and the update is not
        live, the weights cannot serve any more.
        """
        hold, self._hold = self._hold, None
        self.new.drop()
        if hold is None or self._in_place is None:
            return
        if self._in_place.has_replaced:
            self._changes.break_weights(f"the update {self.options.update_id!r} ended before it was complete")
        elif not hold.cancel() and hold.exception() is None:
            self._changes.drop_hold()

    def _stand_still(self) -> None:
        """Waits until the engine stands still. Raises what the future of `Changes.hold_for_update` may hold,
        GenerationChanged if another update went live before, and WeightsError if this one was taken back.
        """
        assert self._hold is not None, "an update in place is not live yet"
        try:
            self._hold.result()
        except CancelledError:
            raise WeightsError("the update was taken back before the engine stood still") from None
        check_generation(self.options, self._changes.weights)

    def report(
        self, outcome: UpdateOutcome, current: WeightsVersion, applied: Applied | None = None
    ) -> UpdateReport:
        """What has come of the update. `applied`: if it is live."""
        report = UpdateReport(
            outcome=outcome,
            current=current,
            previous=current,
            num_tensors=self._num_tensors,
            num_bytes=self._num_bytes,
            staged_s=self._staged_s,
            digest=self._digest,
        )
        if applied is None:
            return report
        return dataclasses.replace(
            report,
            previous=applied.previous,
            paused_s=applied.paused_ns / 1e9,
            in_flight=applied.in_flight,
        )

    def _install(self) -> None:
        """Called on the engine's thread."""
        check_generation(self.options, self._changes.weights)
        self.new.install()


class PendingReport(Future[UpdateReport]):
    """The report of an update that waits for its turn. Cancelling it takes the update back, unless its turn
    has come.
    """

    def __init__(self, applied: Future[Applied]) -> None:
        super().__init__()
        self._applied = applied

    def cancel(self) -> bool:
        """Takes the update back. False if its turn has come."""
        return self._applied.cancel()

    def end(self, outcome: UpdateReport | BaseException) -> None:
        """Sets the result, or the error."""
        if isinstance(outcome, CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        elif isinstance(outcome, BaseException):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)
