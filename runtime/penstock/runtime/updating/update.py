"""One update, from its first tensor until it is live: `OneUpdate` is its life, and `NewWeights` its tensors.
Whole tensors go in, in any order, and come out as leaves, which lie beside those that serve (`LeavesBeside`)
or in their place (`LeavesInPlace`).

Leaves that lie beside need the memory of one more checkpoint, and the old one's goes back before the update
is reported. They are made on threads of the lowest priority, half of `--threads`; the engine's thread only
exchanges references.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

from penstock.runtime.errors import (
    ChecksumMismatch,
    GenerationChanged,
    InvalidRequest,
    TensorsRefused,
    Violation,
    WeightsError,
)
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.leaves import LeafMaker, Parts
from penstock.runtime.loading.own_rules import own_devices, own_rules, own_shapes, rules_of_leaves
from penstock.runtime.loop.changes import Changes
from penstock.runtime.loop.interface import Applied, InFlightPolicy, InFlightReport, WeightsVersion
from penstock.runtime.machine import host_memory
from penstock.runtime.measuring.update_meters import UpdateMeters
from penstock.runtime.models.load_rules import LoadRules, ParamPath
from penstock.runtime.ops.device_arrays import own_values
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason
from penstock.runtime.updating.incoming import digest_of, is_finite
from penstock.runtime.updating.interface import Staging, UpdateOptions, UpdateOutcome, UpdateReport

UseHugePages = Callable[[Sequence[jax.Array]], object]


class NewLeaves(Protocol):
    """Takes leaves on the update's thread, and makes them those that serve on the engine's."""

    def old(self, path: ParamPath) -> npt.NDArray[Any]:
        """Return the leaf that serves, to be copied where an update has only parts of it."""
        ...

    def take(self, path: ParamPath, leaf: npt.NDArray[Any], parts: Parts) -> None:
        """Take a complete leaf, of which `parts` are new."""
        ...

    def install(self) -> None:
        """Make all leaves those that serve; called between two steps. If it raises, nothing has changed,
        unless `break_weights` was called.
        """
        ...

    def drop(self) -> None:
        """Let go of what is not installed, and of what was replaced. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class _Staged:
    """A leaf that waits, on the device or in host memory."""

    value: jax.Array | npt.NDArray[Any]
    parts: Parts


class Others(Protocol):
    """The other processes of a group, each of which makes the same update of what its own devices have.
    GroupEnded is raised if the group has ended.
    """

    def put(self, sent: SentTensor, values: npt.NDArray[Any], sha256: bytes) -> None:
        """Let them have a whole tensor, with the digest of its bytes. Waits until they can take it.
        WeightsError if one cannot make the update.
        """
        ...

    def finish(self) -> Mapping[str, np.dtype[Any]]:
        """Wait until all of them have whole leaves. Returns the tensors with values beyond the range of a
        dtype, and that dtype. WeightsError if one cannot make the update, or has got other values.
        """
        ...

    @property
    def has_begun(self) -> bool:
        """Whether they have got a tensor, and so may have replaced leaves in place."""
        ...

    def install(self) -> None:
        """Have them make their leaves those that serve, between the same two steps."""
        ...

    def stop_waiting(self) -> None:
        """Let `put` and `finish`, if they wait, raise WeightsError soon. Any thread may call this."""
        ...

    def drop(self) -> None:
        """Have them let go of the update. May be called twice. Raises nothing."""
        ...


class NoOthers:
    """A process that has all devices of its model."""

    def put(self, sent: SentTensor, values: npt.NDArray[Any], sha256: bytes) -> None:
        """See `Others`."""

    def finish(self) -> Mapping[str, np.dtype[Any]]:
        """See `Others`."""
        return {}

    @property
    def has_begun(self) -> bool:
        """See `Others`."""
        return False

    def install(self) -> None:
        """See `Others`."""

    def stop_waiting(self) -> None:
        """See `Others`."""

    def drop(self) -> None:
        """See `Others`."""


class Share(Protocol):
    """Says which other processes make an update."""

    def __call__(
        self,
        staging: Staging,
        tensors: Sequence[SentTensor],
        uri: str,
        ready: Callable[[], None],
        rules: LoadRules,
    ) -> Others:
        """Make the others, which get the tensors, too. `tensors`: those that the model reads. `uri`: the
        files that have them, if they are read from files. `ready`: waits until leaves may be replaced.
        `rules`: what is made of the tensors, on all devices.
        """
        ...


def alone(
    staging: Staging,
    tensors: Sequence[SentTensor],
    uri: str,
    ready: Callable[[], None],
    rules: LoadRules,
) -> Others:
    """See `Share`, for a process without others."""
    return NoOthers()


class LeavesBeside:
    """Leaves that wait beside those that serve until all are complete."""

    def __init__(
        self,
        device: DeviceState,
        *,
        on_device: bool,
        use_huge_pages: UseHugePages,
        break_weights: Callable[[str], None],
    ) -> None:
        """on_device: whether leaves are placed at once. break_weights: called with what failed if only some
        of the leaves could be replaced.
        """
        self._device, self._on_device = device, on_device
        self._use_huge_pages, self._break_weights = use_huge_pages, break_weights
        self._leaves: dict[ParamPath, _Staged] = {}
        self._seen: dict[ParamPath, weakref.ref[jax.Array]] = {}
        self._replaced: list[jax.Array] = []

    def old(self, path: ParamPath) -> npt.NDArray[Any]:
        """See `NewLeaves`."""
        leaf = self._device.leaves_by_path[path]
        self._seen[path] = weakref.ref(leaf)
        return own_values(leaf)

    def take(self, path: ParamPath, leaf: npt.NDArray[Any], parts: Parts) -> None:
        """See `NewLeaves`."""
        if not self._on_device:
            self._leaves[path] = _Staged(leaf, parts)
            return
        placed = _placed(self._device, path, leaf)
        self._use_huge_pages([placed])
        self._leaves[path] = _Staged(placed, parts)

    def install(self) -> None:
        """See `NewLeaves`. What was replaced is kept until `drop`, which takes time, if it lies in memory
        beside the new leaves anyway.
        """
        live = self._device.leaves_by_path
        new = {path: self._up_to_date(path, leaf, live[path]) for path, leaf in self._leaves.items()}
        self._leaves.clear()
        if self._on_device:
            self._device.replace_leaves(new)
            self._replaced = [live[path] for path in new]
            return
        # The largest leaf is the first, because once there was room for it there is room for all others.
        order = sorted(new, key=lambda path: live[path].nbytes, reverse=True)
        live.clear()
        for path in order:
            try:
                placed = _placed(self._device, path, np.asarray(new.pop(path)))
                self._device.replace_leaves({path: placed})
            except BaseException as error:
                if path != order[0]:
                    self._break_weights(str(error))
                raise

    def drop(self) -> None:
        """See `NewLeaves`."""
        self._leaves.clear()
        self._replaced.clear()
        host_memory.let_go()

    def _up_to_date(self, path: ParamPath, leaf: _Staged, live: jax.Array) -> jax.Array | npt.NDArray[Any]:
        """Return the leaf to install. Another update may have gone live since this one was staged, and what
        it changed must stay changed. So if only parts of the leaf are new, they are put into the live leaf.
        That is made on the host, because nothing may be compiled while requests run.
        """
        if leaf.parts is None or self._seen[path]() is live:
            return leaf.value
        old, new = own_values(live), leaf.value
        merged = host_memory.zeros(old.shape, old.dtype)
        merged[...] = old
        for part in leaf.parts:
            merged[part] = (own_values(new) if isinstance(new, jax.Array) else new)[part]
        return _placed(self._device, path, merged) if self._on_device else merged


class LeavesInPlace:
    """Leaves that replace the old ones at once, while the engine stands still. So the old leaf's memory is
    free before the next one is made.
    """

    def __init__(
        self, device: DeviceState, *, wait: Callable[[], None], use_huge_pages: UseHugePages
    ) -> None:
        """wait: called before a leaf is read or replaced; returns when the engine stands still."""
        self._device, self._wait, self._use_huge_pages = device, wait, use_huge_pages
        self.has_replaced = False
        """Whether some of the old weights are gone."""

    def old(self, path: ParamPath) -> npt.NDArray[Any]:
        """See `NewLeaves`."""
        self._wait()
        return own_values(self._device.leaves_by_path[path])

    def take(self, path: ParamPath, leaf: npt.NDArray[Any], parts: Parts) -> None:
        """See `NewLeaves`."""
        self._wait()
        value = _placed(self._device, path, leaf)
        self._use_huge_pages([value])
        self.has_replaced = True
        self._device.replace_leaves({path: value})

    def install(self) -> None:
        """Do nothing: all leaves are in their places already."""

    def drop(self) -> None:
        """Do nothing: nothing waits."""


def _placed(device: DeviceState, path: ParamPath, leaf: npt.NDArray[Any]) -> jax.Array:
    """Put the leaf on the device. Raises WeightsError if there is no room for it."""
    try:
        placed: jax.Array = jax.block_until_ready(device.place(path, leaf))
        return placed
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise WeightsError(f"the leaf {path} could not be placed on the device: {error}") from error


class NewWeights:
    """Tensors are put in by one thread at a time. Nothing is refused before all have been looked at, so that
    the error lists every bad one; but no more leaves are kept once there is one.
    """

    def __init__(
        self,
        rules: LoadRules,
        sent: Sequence[SentTensor],
        maker: LeafMaker,
        leaves: NewLeaves,
        *,
        others: Others,
        field: str,
        refuse_non_finite: bool,
    ) -> None:
        """sent: all tensors of the update, as `check_manifest` takes them. maker: made for them, and to hand
        its leaves to `leaves`. others: they get the tensors, too. field: what the caller calls the source of
        the tensors, for errors.
        """
        self._rules, self._field, self._refuse_non_finite = rules, field, refuse_non_finite
        self._specs = {spec.name: spec for spec in rules.tensors}
        self._sent = {tensor.name: tensor for tensor in sent}
        self._maker, self._leaves, self._others = maker, leaves, others
        self._hashes: dict[str, bytes] = {}
        self._problems: dict[str, TensorProblem] = {}
        self.is_spent = False
        """Whether the leaves are gone, because `install` or `drop` was called."""

    def needs(self, name: str) -> bool:
        """Say whether the values of a tensor are needed, and not only its checksums."""
        return name in self._specs

    def put(
        self, name: str, values: npt.NDArray[Any] | None, sha256: bytes, *, is_intact: bool = True
    ) -> None:
        """Take a whole tensor, of which the values must not change any more; they are contiguous, and None
        if they are not needed. sha256: of its bytes. is_intact: whether they have the sender's checksums. May
        block while others are converted.
        """
        self._hashes[name] = sha256
        sent = self._sent[name]
        if not is_intact:
            self._note(TensorProblem(name, TensorReason.CHECKSUM, sent, sent, "does not have its checksum"))
        elif self._refuse_non_finite and values is not None and not is_finite(sent.dtype, values):
            self._note(TensorProblem(name, TensorReason.NON_FINITE, sent, sent, "has NaN or infinity"))
        if values is not None:
            if not self._problems:
                self._others.put(sent, values, sha256)
            self._maker.add(name, values)
        if self._maker.too_large and not self._problems:
            self._leaves.drop()

    def finish(self) -> bytes:
        """Wait until all leaves are complete, and return the digest of the update.

        Raises TensorsRefused with every tensor that has not come or is bad: ChecksumMismatch if one does not
        have its checksum. Raises InvalidRequest if a tensor that is to be a copy of another is none, and
        WeightsError if another process cannot make the update.
        """
        for name, sent in self._sent.items():
            if name not in self._hashes:
                why = "has fewer bytes than its shape needs"
                self._note(TensorProblem(name, TensorReason.INCOMPLETE, sent, sent, why))
        too_large: Mapping[str, np.dtype[Any]] = {}
        if len(self._hashes) == len(self._sent):
            self._maker.finish()
            too_large = {**({} if self._problems else self._others.finish()), **self._maker.too_large}
        for name, dtype in too_large.items():
            expected = SentTensor(name, name_of(dtype), self._sent[name].shape)
            why = f"has values beyond the range of {expected.dtype}"
            self._note(TensorProblem(name, TensorReason.DTYPE, expected, self._sent[name], why))
        if self._problems:
            problems = sorted(self._problems.values(), key=lambda problem: problem.name)
            is_damaged = any(problem.reason is TensorReason.CHECKSUM for problem in problems)
            raise (ChecksumMismatch if is_damaged else TensorsRefused)(problems)
        self._check_copies()
        self._maker.close()
        host_memory.give_back()
        return digest_of((tensor, self._hashes[name]) for name, tensor in self._sent.items())

    def install(self) -> None:
        """Make the new leaves those that serve, see `NewLeaves.install`."""
        self.is_spent = True
        self._leaves.install()
        self._others.install()  # after our own, which may fail: followers that fail end the group

    def drop(self) -> None:
        """Let go of all tensors and leaves. May be called twice."""
        self.is_spent = True
        self._others.drop()
        self._maker.close()
        self._leaves.drop()

    def _note(self, problem: TensorProblem) -> None:
        """Keep the first problem of each tensor."""
        if not self._problems:
            self._maker.is_refused = True
            self._leaves.drop()
        self._problems.setdefault(problem.name, problem)

    def _check_copies(self) -> None:
        """Compare by hashes, so that neither tensor need be kept until the other has come."""
        wrong = [
            f"{name} differs from {other}, though config.json ties them"
            for name, other in self._rules.copies.items()
            if name in self._sent and name not in self._specs and self._hashes[name] != self._hashes[other]
        ]
        if wrong:
            raise InvalidRequest([Violation(self._field, "; ".join(wrong))])


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
    share: Share
    """Says which other processes make updates, too."""


def update_threads(threads: int | None) -> int:
    """Tell how many of an engine's threads make leaves; the others compute steps meanwhile."""
    return max(1, (threads or 1) // 2)


def leaf_maker(
    rules: LoadRules,
    names: Collection[str],
    device: DeviceState,
    backend: Backend,
    leaves: NewLeaves,
    *,
    threads: int,
) -> LeafMaker:
    """Make what fills the leaves of this process's devices. `rules`: those of all devices."""
    own, devices = own_devices(backend.mesh), backend.mesh.size
    # Not the leaves themselves, because they are to be free once they are replaced.
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in device.leaves_by_path.items()
    }
    own_leaves = own_rules(rules, own, devices)
    if backend.own_stage is not None:
        own_leaves = rules_of_leaves(own_leaves, shapes.__contains__)
    return LeafMaker(
        own_leaves.rules,
        names,
        own_shapes(shapes, own, devices),
        leaves.take,
        threads=threads,
        old=leaves.old,
        in_background=True,
    )


def check_generation(options: UpdateOptions, current: WeightsVersion) -> None:
    """Raise GenerationChanged unless the generation serves that the caller expects, if it expects one."""
    expected = options.expected_generation
    if expected is not None and expected != current.generation:
        raise GenerationChanged(expected, current.generation)


class OneUpdate:
    """An update under way. It ends with `go_live` or `drop`."""

    def __init__(
        self,
        target: Target,
        options: UpdateOptions,
        sent: Sequence[SentTensor],
        *,
        field: str,
        uri: str = "",
    ) -> None:
        """sent: the tensors, which `check_manifest` has taken. field: what the caller calls their source.
        uri: the files that they are read from.

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
        names = {tensor.name for tensor in sent}
        maker = leaf_maker(target.rules, names, target.device, target.backend, leaves, threads=target.threads)
        read = {spec.name for spec in target.rules.tensors}
        self._others = target.share(
            options.staging,
            [tensor for tensor in sent if tensor.name in read],
            uri,
            self._stand_still if self._in_place else _at_once,
            target.rules,
        )
        self.new = NewWeights(
            target.rules,
            sent,
            maker,
            leaves,
            others=self._others,
            field=field,
            refuse_non_finite=options.refuse_non_finite,
        )
        """Takes the tensors."""
        if self._in_place is not None:
            self._hold = self._changes.hold_for_update(
                options.in_flight, drain_timeout_s=options.drain_timeout_s, whole=not options.partial
            )

    def received(self, num_bytes: int) -> None:
        """Count bytes of tensors that have come."""
        self._meters.received(num_bytes)

    def finish(self, num_bytes: int) -> None:
        """Wait until all leaves are complete; `num_bytes` were sent. Raises as `NewWeights.finish`."""
        self._digest = self.new.finish()
        self._num_bytes = num_bytes
        self._staged_s = time.monotonic() - self._began
        self._meters.staged(self._staged_s)

    def go_live(self, policy: InFlightPolicy, drain_timeout_s: float | None) -> Future[Applied]:
        """Make the new weights those that serve, between two steps. The future may hold GenerationChanged,
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
        """End the wait for the engine to stand still, or for other processes, if there is one. Any thread may
        call this, and must call `drop` then.
        """
        hold = self._hold  # another thread may end the hold meanwhile
        if hold is not None:
            hold.cancel()
        self._others.stop_waiting()

    def drop(self) -> None:
        """Let go of everything. May be called twice. If leaves were replaced in place, and the update is not
        live, the weights cannot serve any more.
        """
        hold, self._hold = self._hold, None
        self.new.drop()
        if hold is None or self._in_place is None:
            return
        if self._in_place.has_replaced or self._others.has_begun:
            self._changes.break_weights(f"the update {self.options.update_id!r} ended before it was complete")
        elif not hold.cancel() and hold.exception() is None:
            self._changes.drop_hold()

    def _stand_still(self) -> None:
        """Wait until the engine stands still. Raises what the future of `Changes.hold_for_update` may hold,
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
        """Report what has come of the update. `applied`: if it is live."""
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
        """Install the update, on the engine's thread."""
        check_generation(self.options, self._changes.weights)
        self.new.install()


def _at_once() -> None:
    """Do nothing: leaves beside those that serve may be made at any time."""


class PendingReport(Future[UpdateReport]):
    """The report of an update that waits for its turn. Cancelling it takes the update back, unless its turn
    has come.
    """

    def __init__(self, applied: Future[Applied]) -> None:
        super().__init__()
        self._applied = applied

    def cancel(self) -> bool:
        """Take the update back. False if its turn has come."""
        return self._applied.cancel()

    def end(self, outcome: UpdateReport | BaseException) -> None:
        """Set the result, or the error."""
        if isinstance(outcome, CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        elif isinstance(outcome, BaseException):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)
