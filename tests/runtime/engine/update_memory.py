"""Measures the memory of weight updates, in a process of its own.

    python -m tests.runtime.engine.update_memory DIRECTORY COMPILATION_CACHE

Prints JSON with a measurement while serving, and one for each kind of update of all weights, see `UPDATES`.
Each has the bytes that are resident after a request, the peak, and the tokens of that
request; for an update also the bytes that are resident right after it, before the request.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.runtime import Engine, EngineConfig, StoppingParams
from penstock.runtime.errors import TensorsRefused
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.interface import Staging, UpdateOptions
from tests.support.collector import GREEDY_PARAMS


class Lazy(Mapping[str, Any]):
    """The tensors of a checkpoint, each mapped when it is asked for. The tensor `bad` has a value that
    bfloat16 cannot hold.
    """

    def __init__(self, directory: Path, bad: str = "") -> None:
        self._entries, self._bad = find_tensors(directory), bad

    def __getitem__(self, name: str) -> Any:
        tensor = self._entries[name].map()
        if name == self._bad:
            tensor = np.array(tensor, np.float32)
            tensor.flat[-1] = 3.4e38
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def arrays(engine: Engine, directory: Path, bad: str = "") -> None:
    with contextlib.suppress(TensorsRefused):  # from the refused update
        engine.update_weights(Lazy(directory, bad), label="arrays").result(60)


class Pieces:
    """An upload, and the pieces of its tensors, read when they are sent."""

    def __init__(self, engine: Engine, directory: Path, **options: Any) -> None:
        self.entries = list(find_tensors(directory).items())
        sent = [SentTensor(name, name_of(entry.dtype), entry.shape) for name, entry in self.entries]
        self.upload = engine.updater.begin(UpdateOptions(update_id="", label="chunks", **options), sent)
        self._descriptor = os.open(directory / "model.safetensors", os.O_RDONLY)
        self.total = 0

    def send(self, index: int, begin: int, end: int) -> None:
        entry = self.entries[index][1]
        for at in range(begin, end, 1 << 20):
            data = os.pread(self._descriptor, min(1 << 20, end - at), entry.offset + at)
            self.upload.write(index, at, data)
            self.total += len(data)

    def send_all(self) -> None:
        for index, (_, entry) in enumerate(self.entries):
            self.send(index, 0, entry.num_bytes)

    def close(self) -> None:
        self.upload.close()
        os.close(self._descriptor)


def chunks(engine: Engine, directory: Path, **options: Any) -> None:
    pieces = Pieces(engine, directory, **options)
    pieces.send_all()
    pieces.upload.commit(pieces.total).result(60)
    pieces.close()


def interleaved(engine: Engine, directory: Path) -> None:
    """No tensor is complete before the last round."""
    pieces = Pieces(engine, directory)
    for part in range(4):
        for index, (_, entry) in enumerate(pieces.entries):
            quarter = entry.num_bytes // 4
            pieces.send(index, part * quarter, entry.num_bytes if part == 3 else (part + 1) * quarter)
    pieces.upload.commit(pieces.total).result(60)
    pieces.close()


def abandoned(engine: Engine, directory: Path) -> None:
    """All has come but the last tensor's end."""
    pieces = Pieces(engine, directory)
    for index, (_, entry) in enumerate(pieces.entries):
        pieces.send(index, 0, entry.num_bytes - (index == len(pieces.entries) - 1))
    pieces.close()


def discarded(engine: Engine, directory: Path) -> None:
    pieces = Pieces(engine, directory, stage_only=True)
    pieces.send_all()
    pieces.upload.stage(pieces.total)
    pieces.close()
    assert engine.updater.discard("")


def from_files(engine: Engine, directory: Path) -> None:
    upload = engine.updater.open_uri(
        UpdateOptions(update_id="", label="files"), directory.as_uri(), roots=[directory]
    )
    upload.read()
    upload.commit(0).result(60)
    upload.close()


UPDATES: dict[str, Callable[[Engine, Path], None]] = {
    "refused": partial(arrays, bad="model.norm.weight"),
    "arrays": arrays,
    "chunks": chunks,
    "interleaved": interleaved,
    "abandoned": abandoned,
    "discarded": discarded,
    "files": from_files,
    "in place": partial(chunks, staging=Staging.IN_PLACE),
}


def resident(field: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measured(engine: Engine) -> dict[str, Any]:
    answer = engine.generate([5, 6, 7], sampling=GREEDY_PARAMS, stopping=StoppingParams(max_tokens=4))
    return {"peak": resident("VmHWM"), "bytes": resident(), "tokens": answer.token_ids}


def main(directory: Path, cache: Path) -> None:
    gc.disable()  # memory must be given back without a collection, which may come at any time
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # each thread holds some rows
    config = EngineConfig(
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=64,
        max_decode_steps=1,
        compilation_cache=cache,
        show_progress=False,
    )
    engine = Engine.from_pretrained(str(directory), config)
    engine.start()
    found = {"serving": measured(engine)}
    for name, update in UPDATES.items():
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        update(engine, directory)
        idle = resident()  # before a request runs, which might give memory back
        found[name] = measured(engine) | {"idle": idle, "generation": engine.weights.generation}
    engine.shutdown()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
