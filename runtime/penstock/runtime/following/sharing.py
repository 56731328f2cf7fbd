"""Weight updates of a group. Every process makes the same update of what its own devices have: the leader
sends tensors, or the name of the files that have them, and the call INSTALL_WEIGHTS when all processes are
ready.

Of a tensor that is sent, a follower gets the regions that its own devices need (`regions`). It hashes what it
gets, so that all processes are known to have the same tensors before one of them serves any.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.runtime.errors import PenstockError, TensorsRefused, WeightsError
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.following.interface import (
    Call,
    DispatchLog,
    Kind,
    Piece,
    Prepared,
    Taken,
    UpdateBegin,
    UpdateEnd,
    UpdateOver,
    UpdateRecord,
)
from penstock.runtime.following.regions import KeptRegions, PartsOfTensor, Regions, values_in
from penstock.runtime.loading.dtypes import DTYPES, name_of, num_bytes
from penstock.runtime.loading.own_rules import devices_of, own_devices
from penstock.runtime.machine.background import BackgroundThread
from penstock.runtime.models.load_rules import LoadRules, RulesFor
from penstock.runtime.models.stages import Stage
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.files import UpdateFiles
from penstock.runtime.updating.incoming import IncomingTensor, digest_of
from penstock.runtime.updating.interface import Staging
from penstock.runtime.updating.update import (
    LeavesBeside,
    LeavesInPlace,
    NewLeaves,
    NewWeights,
    NoOthers,
    Share,
    leaf_maker,
)


class SharedUpdate:
    """The leader's side of one update. See `Others`."""

    def __init__(
        self,
        log: DispatchLog,
        kept: Mapping[int, KeptRegions],
        staging: Staging,
        tensors: Sequence[SentTensor],
        uri: str,
        ready: Callable[[], None],
        rules: LoadRules,
    ) -> None:
        """`kept`: the regions that each follower needs, by its number. The others: see `Share`."""
        self._log, self._ready = log, ready
        self._number = log.open_update()
        # Checksums are looked at by the leader alone.
        self._sent = {tensor.name: replace(tensor, crc32c=0, sha256=b"") for tensor in tensors}
        self._indices = {name: index for index, name in enumerate(self._sent)}
        self._begin = UpdateBegin(self._number, tuple(self._sent.values()), staging, uri)
        self._regions = {
            process: {} if uri else regions.of(rules, self._begin.tensors)
            for process, regions in kept.items()
        }
        self._hashes: dict[int, dict[str, bytes]] = {process: {} for process in self._regions}
        """Of what each follower gets of each tensor."""
        self._is_given_up = threading.Event()
        self.has_begun = False
        """See `Others`."""

    def put(self, sent: SentTensor, values: npt.NDArray[Any], sha256: bytes) -> None:
        """See `Others`."""
        self._begun()
        if self._begin.uri:
            for hashes in self._hashes.values():
                hashes[sent.name] = sha256
            return
        sending = [self._send(process, sent.name, values) for process in self._regions]
        for _ in zip_longest(*sending):  # a piece to each in turn, so that none waits for all of another's
            pass

    def _send(self, process: int, name: str, values: npt.NDArray[Any]) -> Iterator[None]:
        """Send a follower what it needs of a tensor, piece after piece."""
        whole, index = hashlib.sha256(), self._indices[name]
        regions = self._regions[process][name]
        for part in [values_in(region, values) for region in regions] or [np.zeros(0, np.uint8)]:
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            whole.update(data)
            self._log.tell(Piece(self._number, index, data), process)
            yield
        self._hashes[process][name] = whole.digest()

    def finish(self) -> Mapping[str, np.dtype[Any]]:
        """See `Others`."""
        self._begun()
        self._log.tell(UpdateEnd(self._number))
        found = self._log.prepared(self._number)
        too_large = {name: DTYPES[dtype] for each in found.values() for name, dtype in each.too_large.items()}
        if too_large:
            return too_large
        for process, each in found.items():
            hashes = self._hashes[process].items()
            if each.digest != digest_of((self._sent[name], sha256) for name, sha256 in hashes):
                raise WeightsError(f"process {process} of the group has other tensors than the leader")
        return too_large

    def install(self) -> None:
        """See `Others`."""
        self._log.append(Call(Kind.INSTALL_WEIGHTS, str(self._number)))

    def stop_waiting(self) -> None:
        """See `Others`."""
        self._is_given_up.set()
        self._log.give_up_update(self._number)

    def drop(self) -> None:
        """See `Others`."""
        self._log.close_update(self._number)

    def _begun(self) -> None:
        """Tell the followers of the update, before its first tensor."""
        if not self.has_begun:
            self._ready()
            self.has_begun = True
            self._log.tell(self._begin)
            if self._is_given_up.is_set():  # perhaps before the log knew of the update
                raise WeightsError("the update was taken back")


def sharing(log: DispatchLog, backend: Backend, stages: Sequence[Stage]) -> Share:
    """Say that the followers make an update, too, of a model on this backend, which has these stages."""
    return partial(SharedUpdate, log, _kept_by_followers(backend, stages))


def _kept_by_followers(backend: Backend, stages: Sequence[Stage]) -> dict[int, KeptRegions]:
    """Return the regions that each follower needs, by its number."""
    if backend.own_stage is not None:
        of_stages = zip(backend.stages, stages, strict=True)
        return {
            mesh.devices.flat[0].process_index: KeptRegions(range(mesh.size), mesh.size, stage)
            for mesh, stage in of_stages
            if stage.number != backend.own_stage
        }
    mesh = backend.mesh
    processes = 1 + max(device.process_index for device in mesh.devices.flat)
    return {number: KeptRegions(devices_of(mesh, number), mesh.size) for number in range(1, processes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedModel:
    """What a follower's updates change."""

    device: DeviceState
    backend: Backend
    rules_for: RulesFor
    stage: Stage | None
    """The stage that this process has; None: it has a part of the whole model."""
    threads: int
    """How many threads make leaves."""
    roots: Sequence[Path]
    """Where files of weights may lie."""


class FollowedUpdates:
    """A follower's side of all updates. Methods are called on the thread that makes the leader's calls, and
    wait for nothing; the work is done on a thread of low priority.
    """

    def __init__(self, model: FollowedModel, report: Callable[[Taken | Prepared], None]) -> None:
        self._model, self._report = model, report
        mesh = model.backend.mesh
        self._kept = KeptRegions(own_devices(mesh), mesh.size, model.stage)
        self._updates: dict[int, _FollowedUpdate] = {}
        self._thread = BackgroundThread("penstock-update")

    def take(self, record: UpdateRecord) -> None:
        """Take what the leader tells. ValueError for an update that it has not begun."""
        if isinstance(record, UpdateBegin):
            self._updates[record.number] = _FollowedUpdate(record, self._model, self._kept)
        update = self._of(record.number)
        if isinstance(record, UpdateOver):
            del self._updates[record.number]
            update.is_over.set()
        self._thread.start(self._work, update, record)

    def install(self, number: int) -> None:
        """Make an update's leaves those that serve. ValueError for one that is not prepared."""
        self._of(number).install()

    def _of(self, number: int) -> _FollowedUpdate:
        if number not in self._updates:
            raise ValueError(f"there is no weight update with the number {number}")
        return self._updates[number]

    def _work(self, update: _FollowedUpdate, record: UpdateRecord) -> None:
        prepared = update.work(record)
        if isinstance(record, Piece):
            self._report(Taken(len(record.data)))
        if prepared is not None:
            self._report(prepared)


class _FollowedUpdate:
    """One update. All but `install` is done on the updates' thread."""

    def __init__(self, begin: UpdateBegin, model: FollowedModel, kept: KeptRegions) -> None:
        """`kept`: the regions that this process needs."""
        self._begin, self._model, self._kept = begin, model, kept
        self.is_over = threading.Event()
        """Set as soon as the leader is known to have ended it."""
        self._is_prepared = self._has_failed = False
        self._new: NewWeights | None = None
        self._too_large: Mapping[str, np.dtype[Any]] = {}
        self._regions: Regions = {}
        self._incoming: PartsOfTensor | None = None

    def work(self, record: UpdateRecord) -> Prepared | None:
        """Do the next thing. Returns what is to be told: that the leaves are ready, or that something has
        failed, after which nothing more is done.
        """
        if isinstance(record, UpdateOver):
            self._incoming = None
            if self._new is not None:
                self._new.drop()
            return None
        if self._has_failed or self.is_over.is_set():
            return None
        try:
            match record:
                case UpdateBegin():
                    self._start()
                case Piece():
                    self._take(record)
                case UpdateEnd():
                    return self._prepared()
        except Exception as error:  # noqa: BLE001 -- whatever it is, the leader is told
            self._has_failed = True
            problem = str(error) if isinstance(error, PenstockError) else repr(error)
            return Prepared(record.number, problem=problem)
        return None

    def install(self) -> None:
        """See `FollowedUpdates.install`."""
        if self._new is None or not self._is_prepared:
            raise ValueError(f"the weight update {self._begin.number} is not prepared")
        self._new.install()

    def _start(self) -> None:
        begin, model = self._begin, self._model
        names = {tensor.name for tensor in begin.tensors}
        rules = model.rules_for(names)
        leaves: NewLeaves
        if begin.staging is Staging.IN_PLACE:
            # The leader stands still, and has told so by beginning.
            leaves = LeavesInPlace(
                model.device, wait=lambda: None, use_huge_pages=model.backend.use_huge_pages
            )
        else:
            leaves = LeavesBeside(
                model.device,
                on_device=model.backend.host_memory is None or begin.staging is Staging.DEVICE,
                use_huge_pages=model.backend.use_huge_pages,
                break_weights=lambda reason: None,  # what is raised then ends the group
            )
        maker = leaf_maker(rules, names, model.device, model.backend, leaves, threads=model.threads)
        self._too_large = maker.too_large
        self._new = NewWeights(
            rules, begin.tensors, maker, leaves, others=NoOthers(), field="group", refuse_non_finite=False
        )
        if begin.uri:
            self._read(names, rules.folders)
        else:
            self._regions = self._kept.of(rules, begin.tensors)

    def _read(self, names: set[str], folders: Sequence[str]) -> None:
        """Read all tensors from the files."""
        files = UpdateFiles(self._begin.uri, self._model.roots, folders)
        try:
            found = [tensor for tensor in files.tensors if tensor.name in names]
            if sorted(found, key=_name) != sorted(self._begin.tensors, key=_name):
                raise WeightsError(f"{self._begin.uri} has other tensors here than in the leader")
            tensor: IncomingTensor | None = None
            for index, _, data in files.pieces():
                if self.is_over.is_set():
                    return
                sent = files.tensors[index]
                if sent.name in names:
                    tensor = IncomingTensor(sent, keep=True) if tensor is None else tensor
                    tensor.append(data)
                    tensor = None if self._is_put(sent, tensor) else tensor
            for sent in found:
                if num_bytes(sent) == 0:
                    self._is_put(sent, IncomingTensor(sent, keep=True))
        finally:
            files.close()

    def _take(self, piece: Piece) -> None:
        """Take what comes next of a tensor."""
        sent = self._begin.tensors[piece.tensor_index]
        if self._incoming is None:
            self._incoming = PartsOfTensor(sent, self._regions[sent.name])
        self._incoming.append(bytes(piece.data))
        if self._is_put(sent, self._incoming):
            self._incoming = None

    def _is_put(self, sent: SentTensor, tensor: IncomingTensor | PartsOfTensor) -> bool:
        """Hand a tensor over if it is whole. Returns whether it is."""
        assert self._new is not None, "an update begins before it has tensors"
        if tensor.is_complete:
            self._new.put(sent.name, tensor.values, tensor.sha256)
        return tensor.is_complete

    def _prepared(self) -> Prepared:
        assert self._new is not None, "an update begins before it ends"
        try:
            digest = self._new.finish()
        except TensorsRefused:
            if not self._too_large:
                raise
            too_large = {name: name_of(dtype) for name, dtype in self._too_large.items()}
            return Prepared(self._begin.number, too_large=too_large)
        self._is_prepared = True
        return Prepared(self._begin.number, digest)


def _name(tensor: SentTensor) -> str:
    return tensor.name
