"""The updater of the fake engine. Its weights are the bytes of the tensors that were sent last, in `serving`.

It takes the tensors `TENSORS`, and has the rules of the real one that the service can see, in the simplest
form: names, dtypes and shapes must be those, chunks come in order, a checksum that was given must fit,
nothing may be missing, and there is one update at a time. `events` tells what was called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import google_crc32c

from penstock.runtime.errors import (
    ChecksumMismatch,
    GenerationChanged,
    InvalidRequest,
    TensorsRefused,
    UnknownUpdate,
    UpdateUnderWay,
    Violation,
    WeightsIncomplete,
)
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import Applied, InFlightPolicy, InFlightReport
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason
from penstock.runtime.updating.interface import Staging, UpdateOptions, UpdateOutcome, UpdateReport
from tests.support.models.byte_text import VOCAB

TENSORS = {
    "model.embed_tokens.weight": SentTensor("model.embed_tokens.weight", "BF16", (VOCAB, 8)),
    "model.norm.weight": SentTensor("model.norm.weight", "F32", (8,)),
}
SIZES = {"BF16": 2, "F32": 4}


def num_bytes(sent: SentTensor) -> int:
    size = SIZES[sent.dtype]
    for dimension in sent.shape:
        size *= dimension
    return size


class FakeUpdater:
    """See the module's docstring."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.serving: dict[str, bytes] = {}
        self.digest = b""
        self.events: list[str] = []
        self.options: list[UpdateOptions] = []
        self.waits = threading.Event()
        """While this is not set, `begin` and `write` wait."""
        self.waits.set()
        self._lock = threading.Lock()
        self._open: FakeUpload | None = None
        self._staged: FakeUpload | None = None
        self._committed: dict[str, UpdateReport] = {}

    @property
    def staged_update_id(self) -> str:
        staged = self._staged
        return "" if staged is None else staged.options.update_id

    def tensor_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        dtypes = {"BF16": "bfloat16", "F32": "float32"}
        return [(name, dtypes[tensor.dtype], tensor.shape) for name, tensor in TENSORS.items()]

    def already_committed(self, update_id: str) -> UpdateReport | None:
        weights = self.engine.weights
        if update_id in self._committed:
            report, outcome = self._committed[update_id], UpdateOutcome.ALREADY_COMMITTED
            return replace(report, outcome=outcome, current=weights, previous=weights)
        if self._staged is not None and self._staged.options.update_id == update_id:
            return self._staged.report(UpdateOutcome.STAGED)
        return None

    def validate(self, options: UpdateOptions, sent: Sequence[SentTensor]) -> None:
        self.events.append("validate")
        self._check(options, sent)

    def validate_uri(self, options: UpdateOptions, uri: str, *, roots: Sequence[Path]) -> None:
        self.events.append("validate_uri")
        self._check(options, _read_file(uri, roots)[0])

    def begin(self, options: UpdateOptions, sent: Sequence[SentTensor]) -> FakeUpload:
        self.events.append("begin")
        self._check(options, sent)
        return self._take_place(FakeUpload(self, options, sent))

    def open_uri(self, options: UpdateOptions, uri: str, *, roots: Sequence[Path]) -> FakeUpload:
        self.events.append("open_uri")
        sent, data = _read_file(uri, roots)
        self._check(options, sent)
        return self._take_place(FakeUpload(self, options, sent, data))

    def _take_place(self, upload: FakeUpload) -> FakeUpload:
        with self._lock:
            if self._open is not None:
                raise UpdateUnderWay(self._open.options.update_id, staged=self._open is self._staged)
            self._open = upload
        options = upload.options
        self.options.append(options)
        if options.staging is Staging.IN_PLACE:
            upload.hold = self.engine.changes.hold_for_update(
                options.in_flight, drain_timeout_s=options.drain_timeout_s, whole=not options.partial
            )
        assert self.waits.wait(60)
        return upload

    def _check(self, options: UpdateOptions, sent: Sequence[SentTensor]) -> None:
        problem = self.engine.changes.weights_problem
        if problem is not None and options.partial:
            raise WeightsIncomplete(problem)
        self.check_generation(options)
        problems = []
        for tensor in sent:
            expected = TENSORS.get(tensor.name)
            if expected is None:
                problems.append(TensorProblem(tensor.name, TensorReason.UNKNOWN_NAME, None, tensor))
            elif expected.shape != tensor.shape:
                problems.append(TensorProblem(tensor.name, TensorReason.SHAPE, expected, tensor))
            elif expected.dtype != tensor.dtype:
                problems.append(TensorProblem(tensor.name, TensorReason.DTYPE, expected, tensor))
        names = {tensor.name for tensor in sent}
        missing = [] if options.partial else [TENSORS[name] for name in TENSORS if name not in names]
        problems += [TensorProblem(tensor.name, TensorReason.MISSING, tensor, None) for tensor in missing]
        if problems:
            raise TensorsRefused(problems)

    def check_generation(self, options: UpdateOptions) -> None:
        current = self.engine.weights.generation
        if options.expected_generation not in (None, current):
            raise GenerationChanged(options.expected_generation or 0, current)

    def commit_staged(
        self,
        update_id: str,
        *,
        in_flight: InFlightPolicy | None = None,
        drain_timeout_s: float | None = None,
    ) -> Future[UpdateReport]:
        self.events.append("commit_staged")
        staged = self._staged
        if staged is None or staged.options.update_id != update_id:
            raise UnknownUpdate(update_id)
        options = staged.options
        timeout_s = options.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        return self.go_live(staged, in_flight or options.in_flight, timeout_s)

    def discard(self, update_id: str) -> bool:
        self.events.append("discard")
        if self._staged is None or self._staged.options.update_id != update_id:
            return False
        self._staged = None
        self.free()
        return True

    # -- for uploads --

    def go_live(
        self, upload: FakeUpload, policy: InFlightPolicy, timeout_s: float | None
    ) -> Future[UpdateReport]:
        options = upload.options

        def install() -> None:
            self.check_generation(options)
            self.serving = self.serving | upload.tensors
            self.digest = upload.digest

        def committed(applied: Applied) -> UpdateReport:
            report = replace(
                upload.report(UpdateOutcome.COMMITTED),
                current=applied.version,
                previous=applied.previous,
                paused_s=applied.paused_ns / 1e9,
                in_flight=applied.in_flight,
            )
            self._committed[options.update_id] = report
            self._staged = None
            self.free()
            return report

        if upload.hold is not None:
            install()
            done: Future[Applied] = Future()
            done.set_result(self.engine.changes.release_hold(options.label))
            upload.hold = None
        else:
            whole = not options.partial
            done = self.engine.changes.update(
                install, options.label, policy, drain_timeout_s=timeout_s, whole=whole
            )
        return _Report(done, committed)

    def stage(self, upload: FakeUpload) -> None:
        self._staged = upload

    def free(self) -> None:
        with self._lock:
            self._open = None


class _Report(Future[UpdateReport]):
    """What becomes of a change. Cancelling it takes the change back."""

    def __init__(self, change: Future[Applied], committed: Callable[[Applied], UpdateReport]) -> None:
        super().__init__()
        self._change = change
        self._committed: Callable[[Applied], UpdateReport] | None = committed
        change.add_done_callback(self._settle)

    def _settle(self, change: Future[Applied]) -> None:
        committed, self._committed = self._committed, None  # it holds the upload
        assert committed is not None
        if change.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif (error := change.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(committed(change.result()))

    def cancel(self) -> bool:
        return self._change.cancel()


class FakeUpload:
    """An upload, of chunks or of a file."""

    def __init__(
        self,
        updater: FakeUpdater,
        options: UpdateOptions,
        sent: Sequence[SentTensor],
        data: Sequence[bytes] = (),
    ) -> None:
        self.options = options
        self._updater, self._sent, self._data = updater, sent, data
        self._parts = [bytearray() for _ in sent]
        self._future: Future[UpdateReport] | None = None
        self._is_kept = False
        self.hold: Future[InFlightReport] | None = None
        """Of an update in place: done when the engine stands still for it."""

    @property
    def tensors(self) -> dict[str, bytes]:
        return {tensor.name: bytes(part) for tensor, part in zip(self._sent, self._parts, strict=True)}

    @property
    def digest(self) -> bytes:
        return sha256(b"".join(self._parts)).digest()

    def report(self, outcome: UpdateOutcome) -> UpdateReport:
        weights = self._updater.engine.weights
        return UpdateReport(
            outcome=outcome,
            current=weights,
            previous=weights,
            num_tensors=len(self._sent),
            num_bytes=sum(map(len, self._parts)),
            staged_s=1.5,
            digest=self.digest,
        )

    def write(self, tensor_index: int, offset: int, data: bytes) -> None:
        assert self._updater.waits.wait(60)
        self._updater.events.append("write")
        if tensor_index >= len(self._parts):
            raise InvalidRequest([Violation("chunk.tensor_index", f"must be below {len(self._parts)}")])
        part = self._parts[tensor_index]
        if offset != len(part):
            raise InvalidRequest([Violation("chunk.offset", f"is {offset}; the next byte is {len(part)}")])
        if self.hold is not None:
            self.hold.result(60)
        part += data

    def read(self) -> None:
        self._updater.events.append("read")
        for part, data in zip(self._parts, self._data, strict=True):
            part += data

    def _check(self, total_bytes: int) -> None:
        reason, kind = None, TensorsRefused
        problems = []
        for sent, part in zip(self._sent, self._parts, strict=True):
            if len(part) != num_bytes(sent):
                reason = TensorReason.INCOMPLETE
            elif sent.crc32c not in (0, google_crc32c.value(bytes(part))):
                reason, kind = TensorReason.CHECKSUM, ChecksumMismatch
            else:
                continue
            problems.append(TensorProblem(sent.name, reason, sent, sent))
        if problems:
            raise kind(problems)
        received = sum(map(len, self._parts))
        if not self._data and total_bytes != received:
            described = f"is {total_bytes}; {received} bytes have come"
            raise InvalidRequest([Violation("commit.total_bytes", described)])

    def commit(self, total_bytes: int) -> Future[UpdateReport]:
        self._updater.events.append("commit")
        self._check(total_bytes)
        self._future = self._updater.go_live(self, self.options.in_flight, self.options.drain_timeout_s)
        return self._future

    def stage(self, total_bytes: int) -> UpdateReport:
        self._updater.events.append("stage")
        self._check(total_bytes)
        self._is_kept = True
        self._updater.stage(self)
        return self.report(UpdateOutcome.STAGED)

    def close(self) -> None:
        is_live = self._future is not None and self._future.done() and _went_live(self._future)
        if not self._is_kept and not is_live:
            if self.hold is not None:
                changes = self._updater.engine.changes
                if any(self._parts):
                    changes.break_weights(f"the update {self.options.update_id!r} ended early")
                elif not self.hold.cancel():
                    changes.drop_hold()
            self._updater.free()
        self._updater.events.append("close")


def _went_live(future: Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None


def _read_file(uri: str, roots: Sequence[Path]) -> tuple[list[SentTensor], list[bytes]]:
    """Read the file, which has the bytes of all tensors, in order."""
    path = Path(uri.removeprefix("file://"))
    if not any(root in path.parents for root in roots):
        raise InvalidRequest([Violation("begin.uri", "is not below a directory that is allowed")])
    data, rest = [], path.read_bytes()
    for tensor in TENSORS.values():
        data.append(rest[: num_bytes(tensor)])
        rest = rest[num_bytes(tensor) :]
    return list(TENSORS.values()), data
