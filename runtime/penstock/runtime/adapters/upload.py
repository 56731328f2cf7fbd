"""Adapters whose tensors come in chunks. No jax."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.runtime.adapters.interface import AdapterInfo, AdapterTensors
from penstock.runtime.errors import ChecksumMismatch, InvalidRequest, TensorsRefused, Violation
from penstock.runtime.loading.dtypes import DTYPES, num_bytes
from penstock.runtime.machine import host_memory
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason
from penstock.runtime.updating.incoming import IncomingTensor, check_total, tensor_at

MAX_UPLOAD_BYTES = 2 * 1024**3
"""The most bytes of all tensors of an adapter that comes in chunks."""

_ALIGNMENT = 64
"""In bytes. Each tensor begins at a line of the processor's cache."""


class AdapterUpload:
    """An adapter whose tensors come in chunks: those of one tensor in order, tensors in any order and
    interleaved. Methods are called on any thread, one at a time, and `close` at any time.
    """

    def __init__(
        self,
        load: Callable[[AdapterTensors], AdapterInfo],
        check: Callable[[Mapping[str, Any], Sequence[SentTensor]], None],
        config: Mapping[str, Any],
        sent: Sequence[SentTensor],
    ) -> None:
        """`load` takes the adapter when all of it is there, and `check` raises where its tensors cannot be
        the model's. `config`: what adapter_config.json holds. Raises TensorsRefused for tensors that no
        adapter can have, InvalidRequest for a name that comes twice and for more than MAX_UPLOAD_BYTES, and
        what `check` raises.
        """
        bad = [
            TensorProblem(one.name, TensorReason.DTYPE, None, one, f"cannot be {one.dtype} in an adapter")
            for one in sent
            if one.dtype not in DTYPES
        ]
        if bad:
            raise TensorsRefused(bad)
        if len({one.name for one in sent}) < len(sent):
            raise InvalidRequest([Violation("begin.manifest.tensors", "has one name twice")])
        total = sum(num_bytes(one) or 0 for one in sent)
        if total > MAX_UPLOAD_BYTES:
            described = f"has {total} bytes; at most {MAX_UPLOAD_BYTES}"
            raise InvalidRequest([Violation("begin.manifest.tensors", described)])
        check(config, sent)
        self._load, self._config = load, config
        # All of them in one piece of memory, of huge pages: hundreds of small ones take longer to get.
        sizes = [-(-(num_bytes(one) or 0) // _ALIGNMENT) * _ALIGNMENT for one in sent]
        memory, begin = host_memory.zeros((sum(sizes),), np.uint8), 0
        self._tensors: list[IncomingTensor] = []
        for one, size in zip(sent, sizes, strict=True):
            own = memory[begin : begin + (num_bytes(one) or 0)].view(np.uint8)
            self._tensors.append(IncomingTensor(one, keep=True, memory=own, is_hashed=False))
            begin += size
        self._sent = sent
        self._received = 0
        self._lock = threading.Lock()
        self._is_ended = False

    def write(self, tensor_index: int, offset: int, data: bytes) -> None:
        """Take the next bytes of a tensor. Raises InvalidRequest for an index that the manifest has not and
        for bytes that are not the next ones, and TensorsRefused for more bytes than the tensor has.
        """
        with self._lock:
            self._check_open()
            tensor_at(self._sent, tensor_index)
            self._tensors[tensor_index].take(offset, data)
            self._received += len(data)

    def commit(self, total_bytes: int) -> AdapterInfo:
        """Have the adapter loaded. `total_bytes`: how many were sent. Blocks until requests may name it.

        Raises TensorsRefused with every tensor that is not complete, ChecksumMismatch where bytes changed on
        the way, InvalidRequest for another total, and what `AdapterRegistry.load` refuses.
        """
        with self._lock:
            self._check_open()
            self._check_whole()
            check_total(total_bytes, self._received)
            tensors = [
                (sent.name, values)
                for sent, tensor in zip(self._sent, self._tensors, strict=True)
                if (values := tensor.values) is not None
            ]
            self._is_ended = True
            self._tensors = []
        return self._load(AdapterTensors(self._config, tensors))

    def close(self) -> None:
        """End the upload, and free what has come. May be called twice."""
        with self._lock:
            self._is_ended = True
            self._tensors = []

    def _check_whole(self) -> None:
        pairs = list(zip(self._sent, self._tensors, strict=True))
        bad = [
            TensorProblem(
                sent.name,
                TensorReason.INCOMPLETE,
                sent,
                sent,
                f"has {tensor.received} of {tensor.received + tensor.missing} bytes",
            )
            for sent, tensor in pairs
            if not tensor.is_complete
        ]
        if bad:
            raise TensorsRefused(bad)
        lost = [
            TensorProblem(sent.name, TensorReason.CHECKSUM, sent, sent, "has another checksum")
            for sent, tensor in pairs
            if not tensor.is_intact
        ]
        if lost:
            raise ChecksumMismatch(lost)

    def _check_open(self) -> None:
        if self._is_ended:
            raise RuntimeError("the upload has ended")
