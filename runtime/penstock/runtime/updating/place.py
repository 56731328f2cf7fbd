"""The place for one update at a time, and the memory of those that went live."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict

from penstock.runtime.errors import UnknownUpdate, UpdateUnderWay
from penstock.runtime.loop.interface import WeightsVersion
from penstock.runtime.updating.interface import UpdateOutcome, UpdateReport
from penstock.runtime.updating.one_update import OneUpdate

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
        """Takes the place for an update that is about to be made. Raises UpdateUnderWay if it is taken, or
        if an update of this id has gone live: who asks again will be told so.
        """
        with self._lock:
            if self._holder is not None:
                raise UpdateUnderWay(self._holder.update_id, staged=self._holder.is_staged)
            if update_id in self._committed:
                raise UpdateUnderWay(update_id, staged=False)
            self._holder = _Holder(update_id)

    def occupy(self, update: OneUpdate) -> None:
        """Gives the reserved place to its update."""
        with self._lock:
            assert self._holder is not None
            self._holder.update = update

    def stage(self, update: OneUpdate) -> None:
        """Notes that the update that has the place waits to be committed."""
        with self._lock:
            assert self._holder is not None
            assert self._holder.update is update
            self._holder.is_staged = True

    def take_staged(self, update_id: str) -> OneUpdate:
        """The staged update of this id. It is staged no more, but keeps the place. Raises UpdateUnderWay if
        it is not staged yet, or not any more because it is about to go live; UnknownUpdate for another id.
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
        """Frees the place if this update has it; None: if it is reserved and not occupied."""
        with self._lock:
            if self._holder is not None and self._holder.update is update:
                self._holder = None

    def remember(self, update_id: str, report: UpdateReport) -> None:
        """Notes that an update is live; an empty id is not remembered."""
        with self._lock:
            self.digest = report.digest
            if update_id:
                self._committed[update_id] = report
            if len(self._committed) > _MOST_REMEMBERED:
                self._committed.popitem(last=False)

    def known(self, update_id: str, current: WeightsVersion) -> UpdateReport | None:
        """What came of an update that went live or is staged; None for any other. `current`: what serves.

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
