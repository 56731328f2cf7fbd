"""Updater: new weights for a model that serves, asked for on any thread.

One update at a time has the `UpdatePlace`. `check_manifest` refuses tensors that do not fit the model.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TypeVar

from penstock.runtime.errors import (
    InvalidRequest,
    TensorsRefused,
    UnknownUpdate,
    UnsupportedFeature,
    UpdateUnderWay,
    Violation,
    WeightsIncomplete,
)
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.loading.tensor_checks import problems_of
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import Applied, InFlightPolicy, WeightsVersion
from penstock.runtime.machine.background import BackgroundThread
from penstock.runtime.measuring.update_meters import UpdateMeters
from penstock.runtime.models.load_rules import LoadRules, RulesFor
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.files import FIELD, UpdateFiles
from penstock.runtime.updating.interface import Staging, UpdateOptions, UpdateOutcome, UpdateReport
from penstock.runtime.updating.update import OneUpdate, PendingReport, Share, Target, alone, check_generation
from penstock.runtime.updating.upload import Arrays, FileUpload, Upload, described, put_all

_MOST_REMEMBERED = 1000
"""Ids of updates that went live."""


@dataclasses.dataclass(slots=True)
class _Holder:
    """The update that has the place; `update` is None while it is being made."""

    update_id: str
    update: OneUpdate | None = None
    is_staged: bool = False


class UpdatePlace:
    """Any thread may call any method at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: _Holder | None = None
        self._committed: OrderedDict[str, UpdateReport] = OrderedDict()
        self.digest = b""
        """The digest of the update that serves; empty for the weights of the start."""

    @property
    def staged_update_id(self) -> str:
        """The id of the update that is staged; empty if none is."""
        holder = self._holder
        return holder.update_id if holder is not None and holder.is_staged else ""

    def reserve(self, update_id: str) -> None:
        """Take the place for an update that is about to be made. Raises UpdateUnderWay if it is taken, or
        if an update of this id has gone live: who asks again will be told so.
        """
        with self._lock:
            if self._holder is not None:
                raise UpdateUnderWay(self._holder.update_id, staged=self._holder.is_staged)
            if update_id in self._committed:
                raise UpdateUnderWay(update_id, staged=False)
            self._holder = _Holder(update_id)

    def occupy(self, update: OneUpdate) -> None:
        """Give the reserved place to its update."""
        with self._lock:
            assert self._holder is not None
            self._holder.update = update

    def stage(self, update: OneUpdate) -> None:
        """Note that the update that has the place waits to be committed."""
        with self._lock:
            assert self._holder is not None
            assert self._holder.update is update
            self._holder.is_staged = True

    def take_staged(self, update_id: str) -> OneUpdate:
        """Take the staged update of this id. It is staged no more, but keeps the place. Raises UpdateUnderWay
        if it is not staged yet, or not any more because it is about to go live; UnknownUpdate for another id.
        """
        with self._lock:
            holder = self._holder
            if holder is None or holder.update_id != update_id:
                raise UnknownUpdate(update_id)
            if holder.update is None or not holder.is_staged:
                raise UpdateUnderWay(update_id, staged=False)
            holder.is_staged = False
            return holder.update

    def free(self, update: OneUpdate | None) -> None:
        """Free the place if this update has it; None: if it is reserved and not occupied."""
        with self._lock:
            if self._holder is not None and self._holder.update is update:
                self._holder = None

    def remember(self, update_id: str, report: UpdateReport) -> None:
        """Note that an update is live; an empty id is not remembered."""
        with self._lock:
            self.digest = report.digest
            if update_id:
                self._committed[update_id] = report
            if len(self._committed) > _MOST_REMEMBERED:
                self._committed.popitem(last=False)

    def known(self, update_id: str, current: WeightsVersion) -> UpdateReport | None:
        """Report what came of an update that went live or is staged; None for any other. `current`: what
        serves.

        An update that has gone live and still has the place, because its memory is not free yet, is not known
        yet: who is told that it is live may begin the next one.
        """
        with self._lock:
            holder = self._holder
            if update_id in self._committed and (holder is None or holder.update_id != update_id):
                return dataclasses.replace(
                    self._committed[update_id],
                    outcome=UpdateOutcome.ALREADY_COMMITTED,
                    current=current,
                    previous=current,
                )
            if (
                holder is None
                or holder.update is None
                or not holder.is_staged
                or holder.update_id != update_id
            ):
                return None
            return holder.update.report(UpdateOutcome.STAGED, current)


_MOST_VIOLATIONS = 100


def check_manifest(rules: LoadRules, sent: Sequence[SentTensor], *, partial: bool, field: str) -> None:
    """Raise InvalidRequest if the list itself is wrong, and TensorsRefused with every tensor that does not
    fit the model. `field`: what the caller calls the list.
    """
    counts = Counter(tensor.name for tensor in sent)
    violations = [
        Violation(f"{field}.tensors", f"the name {name!r} is there {count} times")
        for name, count in counts.items()
        if count > 1
    ]
    violations += [
        Violation(f"{field}.tensors[{i}].sha256", f"has {len(tensor.sha256)} bytes; SHA-256 has 32")
        for i, tensor in enumerate(sent)
        if len(tensor.sha256) not in (0, 32)
    ]
    if violations:
        raise InvalidRequest(violations[:_MOST_VIOLATIONS])
    problems = problems_of(rules, sent, partial=partial)
    if problems:
        raise TensorsRefused(problems)


UploadT = TypeVar("UploadT", bound=Upload)
_MANIFEST = "begin.manifest"
_NOT_STAGED = Violation("begin.staging", "an update in place cannot wait for a commit")


class Updater:
    """Takes one update at a time by `begin` or `open_uri`, and besides them updates that a program makes of
    its own arrays by `update`. Methods that look at tensors block.
    """

    def __init__(
        self,
        core: EngineCore,
        device: DeviceState,
        rules: LoadRules | None,
        *,
        rules_for: RulesFor | None = None,
        backend: Backend,
        meters: UpdateMeters,
        threads: int,
        share: Share = alone,
    ) -> None:
        """rules: what the model makes of tensors; None: it takes no updates. rules_for: the same for tensors
        whose names may begin otherwise; None: `rules`. meters: what counts updates. threads: how many make
        leaves. share: says which other processes make the updates, too.
        """
        self._core, self._device, self._rules, self._rules_for = core, device, rules, rules_for
        self._backend, self._threads = backend, threads
        self._meters, self._share = meters, share
        # An upload in place may wait there for the engine, which others should not wait for.
        self._uploads = BackgroundThread("penstock-upload")
        self._thread = BackgroundThread("penstock-update")
        self._place = UpdatePlace()

    # -- state --

    @property
    def digest(self) -> bytes:
        """The digest of the update that serves; empty for the weights of the start."""
        return self._place.digest

    @property
    def staged_update_id(self) -> str:
        """The update that waits for `commit_staged` or `discard`; empty: none does."""
        return self._place.staged_update_id

    def already_committed(self, update_id: str) -> UpdateReport | None:
        """Report what came of an update that went live (the last 1,000 are known) or is staged now. None:
        there is nothing to tell, so it may begin.
        """
        return self._place.known(update_id, self._core.weights)

    @property
    def _folders(self) -> tuple[str, ...]:
        return () if self._rules is None else self._rules.folders

    # -- one update at a time --

    def validate(self, options: UpdateOptions, sent: Sequence[SentTensor]) -> None:
        """Raise what `begin` would, but for UpdateUnderWay: another update may be under way."""
        self._check(options, sent, _MANIFEST)

    def validate_uri(self, options: UpdateOptions, uri: str, *, roots: Sequence[Path]) -> None:
        """Raise what `open_uri` would, but for UpdateUnderWay."""
        files = UpdateFiles(uri, roots, self._folders)
        try:
            self._check(options, files.tensors, FIELD)
        finally:
            files.close()

    def begin(self, options: UpdateOptions, sent: Sequence[SentTensor]) -> Upload:
        """Begin an update whose tensors come in chunks.

        Raises InvalidRequest for a list that is wrong in itself, TensorsRefused with every tensor that does
        not fit the model, GenerationChanged, UpdateUnderWay, WeightsIncomplete if the weights cannot serve
        and the update has not all of them, UnsupportedFeature if the model takes no updates, NotReady,
        Draining or EngineDead.
        """
        rules = self._check(options, sent, _MANIFEST)
        return self._begun(
            rules, options, sent, _MANIFEST, lambda update: Upload(self, self._uploads, update, sent)
        )

    def open_uri(self, options: UpdateOptions, uri: str, *, roots: Sequence[Path]) -> FileUpload:
        """Begin an update whose tensors are read from files below `roots`, see `UpdateFiles`; `read` of what
        is returned reads them. Raises as `begin`.
        """
        files = UpdateFiles(uri, roots, self._folders)
        try:
            rules = self._check(options, files.tensors, FIELD)
            return self._begun(
                rules,
                options,
                files.tensors,
                FIELD,
                lambda update: FileUpload(self, self._uploads, update, files),
                uri,
            )
        except BaseException:  # whatever it is, no file stays open
            files.close()
            raise

    def commit_staged(
        self,
        update_id: str,
        *,
        in_flight: InFlightPolicy | None = None,
        drain_timeout_s: float | None = None,
    ) -> Future[UpdateReport]:
        """Have a staged update go live. in_flight, drain_timeout_s: instead of those that the update began
        with. The report of an update that is live already says so.

        Raises UnknownUpdate, UpdateUnderWay if the update is not complete yet or is about to go live, and
        InvalidRequest for a time under a policy that does not wait. The future may hold what that of
        `Upload.commit` may; then the update stays staged.
        """
        try:
            update = self._place.take_staged(update_id)
        except UnknownUpdate:
            report = self.already_committed(update_id)
            if report is None:
                raise
            known: Future[UpdateReport] = Future()
            known.set_result(report)
            return known
        policy = update.options.in_flight if in_flight is None else in_flight
        timeout_s = update.options.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        try:
            if drain_timeout_s is not None and policy is not InFlightPolicy.WAIT:
                described = f"the policy {policy.value!r} does not wait"
                raise InvalidRequest([Violation("drain_timeout", described)])
            return self._live(update, policy, timeout_s, was_staged=True)
        except BaseException:  # whatever it is, the update can be committed again
            self._place.stage(update)
            raise

    def discard(self, update_id: str) -> bool:
        """Let go of a staged update. Return false if no such update is staged."""
        try:
            update = self._place.take_staged(update_id)
        except (UnknownUpdate, UpdateUnderWay):
            return False
        self._meters.discarded()
        self._thread.run(self._let_go, update)
        return True

    # -- updates that a program makes of its own arrays --

    def update(self, options: UpdateOptions, tensors: Arrays) -> Future[UpdateReport]:
        """Stage arrays by their names in a checkpoint, and have them go live. Such an update waits for no
        other to end: each is made beside the weights that serve, and all go live in order.

        `tensors` may be lazy: each is asked for twice, to be checked and to be taken, and not held on to.
        Raises as `begin` and `Upload.commit`.
        """
        sent = described(tensors)
        update = OneUpdate(
            self._target(self._check(options, sent, "tensors")), options, sent, field="tensors"
        )
        try:
            num_bytes = put_all(self._thread, update.new, sent, tensors)
            update.received(num_bytes)
            self._thread.run(update.finish, num_bytes)
            return self._live(update, options.in_flight, options.drain_timeout_s)
        except BaseException:  # also Ctrl-C while it waits: the memory of the new weights must not stay taken
            self._meters.failed()
            self._thread.run(update.drop)
            raise

    def close(self) -> None:
        """Let go of a staged update. To be called when the engine has ended."""
        self.discard(self.staged_update_id)  # does nothing if none is staged
        self._uploads.close()
        self._thread.close()

    # -- the place, for uploads --

    def go_live(self, update: OneUpdate) -> Future[UpdateReport]:
        """See `upload.Place`."""
        return self._live(update, update.options.in_flight, update.options.drain_timeout_s)

    def keep_staged(self, update: OneUpdate) -> UpdateReport:
        """See `upload.Place`."""
        if update.options.staging is Staging.IN_PLACE:
            raise InvalidRequest([_NOT_STAGED])
        self._place.stage(update)
        return update.report(UpdateOutcome.STAGED, self._core.weights)

    def give_up(self, update: OneUpdate) -> None:
        """See `upload.Place`."""
        self._meters.failed()
        self._let_go(update)

    # -- how it is done --

    def _check(self, options: UpdateOptions, sent: Sequence[SentTensor], field: str) -> LoadRules:
        """Check everything that can be told before the first byte. Return the model's rules for these
        tensors.
        """
        if self._rules is None:
            raise UnsupportedFeature(["UpdateWeights"])
        if options.stage_only and options.staging is Staging.IN_PLACE:
            raise InvalidRequest([_NOT_STAGED])
        self._core.check_running()
        problem = self._core.changes.weights_problem
        if problem is not None and options.partial:
            raise WeightsIncomplete(problem)
        rules = self._rules if self._rules_for is None else self._rules_for({tensor.name for tensor in sent})
        check_manifest(rules, sent, partial=options.partial, field=field)
        check_generation(options, self._core.weights)
        return rules

    def _target(self, rules: LoadRules) -> Target:
        return Target(
            changes=self._core.changes,
            device=self._device,
            rules=rules,
            backend=self._backend,
            meters=self._meters,
            threads=self._threads,
            share=self._share,
        )

    def _begun(
        self,
        rules: LoadRules,
        options: UpdateOptions,
        sent: Sequence[SentTensor],
        field: str,
        upload_of: Callable[[OneUpdate], UploadT],
        uri: str = "",
    ) -> UploadT:
        """Take the place for an update, and make what takes its tensors."""
        self._place.reserve(options.update_id)
        try:
            update = OneUpdate(self._target(rules), options, sent, field=field, uri=uri)
        except BaseException:  # whatever it is, the next update must find the place free
            self._place.free(None)
            raise
        self._place.occupy(update)
        try:
            return upload_of(update)
        except BaseException:  # whatever it is, the next update must find the place free
            self.give_up(update)
            raise

    def _live(
        self, update: OneUpdate, policy: InFlightPolicy, timeout_s: float | None, *, was_staged: bool = False
    ) -> Future[UpdateReport]:
        applied = update.go_live(policy, timeout_s)
        pending = PendingReport(applied)
        applied.add_done_callback(lambda done: self._settle(update, done, pending, was_staged))
        return pending

    def _settle(
        self, update: OneUpdate, applied: Future[Applied], pending: PendingReport, was_staged: bool
    ) -> None:
        """Settle an update that is live, refused or taken back: on the engine's thread, or on that of who
        took it back.
        """
        outcome: UpdateReport | BaseException
        try:
            done = applied.result()
        except BaseException as error:  # noqa: BLE001  it is told to whoever waits
            outcome = error
            if was_staged and not update.new.is_spent:
                self._place.stage(update)
                pending.end(outcome)
                return
            self._meters.failed()
        else:
            self._meters.applied(done.paused_ns / 1e9)
            outcome = update.report(UpdateOutcome.COMMITTED, done.version, done)
            self._place.remember(update.options.update_id, outcome)
        if isinstance(outcome, CancelledError):
            self._end(update, pending, outcome)
        else:  # to free memory takes time, for which the engine need not wait
            self._thread.start(self._end, update, pending, outcome)

    def _end(self, update: OneUpdate, pending: PendingReport, outcome: UpdateReport | BaseException) -> None:
        """Tell what has come of an update when the memory that it needed is free."""
        self._let_go(update)
        pending.end(outcome)

    def _let_go(self, update: OneUpdate) -> None:
        """Free the memory that an update needed, and its place if it has one."""
        update.drop()
        self._place.free(update)
