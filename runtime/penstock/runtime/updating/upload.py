"""Updates whose tensors come in chunks, are read from files, or are arrays that the program itself has."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
import numpy.typing as npt

from penstock.runtime.errors import InvalidRequest, Violation, WeightsError
from penstock.runtime.loading.dtypes import name_of, num_bytes
from penstock.runtime.machine.background import BackgroundThread
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.files import UpdateFiles
from penstock.runtime.updating.incoming import IncomingTensor, check_total, tensor_at, too_long
from penstock.runtime.updating.interface import UpdateReport
from penstock.runtime.updating.update import NewWeights, OneUpdate

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any] | jax.Array]


def described(tensors: Arrays) -> list[SentTensor]:
    """Return the arrays without their values, in their own order."""
    return [
        SentTensor(name, name_of(np.dtype(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def put_all(thread: BackgroundThread, new: NewWeights, sent: Sequence[SentTensor], tensors: Arrays) -> int:
    """Put all arrays into the new weights, on the thread, and return how many bytes they have. Each is
    asked for on the calling thread. InvalidRequest if one is not what it was before.
    """
    return sum(thread.run(_put, new, tensor, np.asarray(tensors[tensor.name])) for tensor in sent)


def _put(new: NewWeights, sent: SentTensor, values: npt.NDArray[Any]) -> int:
    if (name_of(values.dtype), values.shape) != (sent.dtype, sent.shape):
        found = f"{name_of(values.dtype)}{list(values.shape)}"
        why = f"is {found} now, and was {sent.dtype}{list(sent.shape)} when it was asked for first"
        raise InvalidRequest([Violation(f"tensors[{sent.name!r}]", why)])
    values = np.ascontiguousarray(values)
    sha256 = hashlib.sha256(values.reshape(-1).view(np.uint8).data).digest()
    new.put(sent.name, values if new.needs(sent.name) else None, sha256)
    return values.nbytes


class Place(Protocol):
    """The place for one update at a time, which an upload has until it ends."""

    def go_live(self, update: OneUpdate) -> Future[UpdateReport]:
        """Have a complete update go live."""
        ...

    def keep_staged(self, update: OneUpdate) -> UpdateReport:
        """Keep a complete update until it is committed or discarded."""
        ...

    def give_up(self, update: OneUpdate) -> None:
        """Let go of an update that is neither live, nor about to be, nor staged."""
        ...


class Upload:
    """An update whose tensors come in chunks: those of one tensor in order, tensors in any order and
    interleaved. Methods are called on any thread, one at a time, and `close` at any time; the work is done on
    a thread of low priority, for which they wait.
    """

    def __init__(
        self, place: Place, thread: BackgroundThread, update: OneUpdate, sent: Sequence[SentTensor]
    ) -> None:
        self._place, self._thread, self._update, self._sent = place, thread, update, sent
        self._incoming: dict[int, IncomingTensor] = {}
        self._complete: set[int] = set()
        self._received = 0
        self._is_ended = False
        self._pending: Future[UpdateReport] | None = None
        thread.run(self._take_empty)

    def write(self, tensor_index: int, offset: int, data: bytes) -> None:
        """Take the next bytes of a tensor. As soon as all tensors of a rule are there they become parts of
        leaves, and are let go.

        Raises InvalidRequest for an index that the manifest has not and for bytes that are not the next ones,
        and TensorsRefused for more bytes than the tensor has. What is wrong with the values of tensors is
        found out on the way and told by `commit` and `stage`, of all tensors together. An update in place
        waits for its first leaf until the engine stands still; then GenerationChanged, DrainTimeout or
        PausedWithRequests may be raised.
        """
        self._thread.run(self._write, tensor_index, offset, data)

    def commit(self, total_bytes: int) -> Future[UpdateReport]:
        """Have the update go live. `total_bytes`: how many were sent. Cancelling the future before the
        update's turn takes it back.

        Raises TensorsRefused with every tensor that is bad or not complete (ChecksumMismatch if data was lost
        on the way), and InvalidRequest for another total, or for a copy of a tensor that is none. The future
        may hold GenerationChanged, and whatever `Changes.update` says. Then nothing has changed, unless
        leaves were replaced in place.
        """
        return self._thread.run(self._commit, total_bytes)

    def stage(self, total_bytes: int) -> UpdateReport:
        """Keep the complete update until `Updater.commit_staged` or `discard`. Raises as `commit`, and
        InvalidRequest for an update in place.
        """
        return self._thread.run(self._stage, total_bytes)

    def close(self) -> None:
        """End the upload. Unless it is live or staged nothing has changed, and its memory is free: an update
        that is committed and waits for its turn is taken back. Another method that runs on another thread
        ends soon. May be called twice.

        An update in place that has replaced leaves, and is not committed, leaves weights that cannot serve.
        """
        self._update.stop_waiting()
        self._thread.run(self._close)

    def _take_empty(self) -> None:
        """Take tensors without a value, which have no chunk."""
        for index, sent in enumerate(self._sent):
            if num_bytes(sent) == 0:
                self._put(index, self._tensor(index))

    def _tensor(self, index: int) -> IncomingTensor:
        if index not in self._incoming:
            sent = self._sent[index]
            self._incoming[index] = IncomingTensor(sent, keep=self._update.new.needs(sent.name))
        return self._incoming[index]

    def _write(self, index: int, offset: int, data: bytes) -> None:
        self._check_open()
        sent = tensor_at(self._sent, index)
        if index in self._complete:
            raise too_long(sent)
        tensor = self._tensor(index)
        tensor.take(offset, data)
        self._received += len(data)
        self._update.received(len(data))
        if tensor.is_complete:
            self._put(index, tensor)

    def _put(self, index: int, tensor: IncomingTensor) -> None:
        del self._incoming[index]
        self._complete.add(index)
        name = self._sent[index].name
        self._update.new.put(name, tensor.values, tensor.sha256, is_intact=tensor.is_intact)

    def _finish(self, total_bytes: int) -> None:
        self._check_open()
        self._update.finish(self._received)
        check_total(total_bytes, self._received)

    def _commit(self, total_bytes: int) -> Future[UpdateReport]:
        self._finish(total_bytes)
        self._pending = self._place.go_live(self._update)
        self._is_ended = True
        return self._pending

    def _stage(self, total_bytes: int) -> UpdateReport:
        self._finish(total_bytes)
        report = self._place.keep_staged(self._update)
        self._is_ended = True
        return report

    def _close(self) -> None:
        self._incoming.clear()
        if self._pending is not None:
            self._pending.cancel()
        if not self._is_ended:
            self._is_ended = True
            self._place.give_up(self._update)

    def _check_open(self) -> None:
        if self._is_ended:
            raise RuntimeError("the upload has ended")


class FileUpload(Upload):
    """An update whose tensors are read from files by `read`, instead of `write`."""

    def __init__(self, place: Place, thread: BackgroundThread, update: OneUpdate, files: UpdateFiles) -> None:
        super().__init__(place, thread, update, files.tensors)
        self._files = files
        self._is_stopped = threading.Event()

    def read(self) -> None:
        """Read all tensors. Raises InvalidRequest if a file was changed since it was opened, and
        WeightsError if the upload is closed meanwhile.
        """
        self._thread.run(self._read)

    def close(self) -> None:
        """See `Upload.close`. A `read` on another thread ends soon."""
        self._is_stopped.set()
        super().close()

    def _read(self) -> None:
        for index, offset, data in self._files.pieces():
            if self._is_stopped.is_set():
                raise WeightsError("the update was taken back while its files were read")
            self._write(index, offset, data)

    def _finish(self, total_bytes: int) -> None:
        if total_bytes:
            raise InvalidRequest([Violation("commit.total_bytes", "must be 0 for an update from files")])
        super()._finish(self._received)

    def _close(self) -> None:
        super()._close()
        self._files.close()
