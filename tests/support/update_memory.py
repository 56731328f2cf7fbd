"""Measures the memory of weight updates, in a process of its own.

    python -m tests.support.update_memory DIRECTORY COMPILATION_CACHE

Prints JSON with three measurements: while serving, for an update of all weights that is refused, and for one
that goes live. Each has the bytes that are resident after a request, the peak, and the tokens of that
request; for an update also the bytes that are resident right after it, before the request.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.runtime import Engine, EngineConfig, StoppingParams
from penstock.runtime.errors import TensorsRefused
from penstock.runtime.loading.safetensors_files import find_tensors
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
    for name, bad in (("refused", "model.norm.weight"), ("updated", "")):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        with contextlib.suppress(TensorsRefused):  # from the refused update
            engine.update_weights(Lazy(directory, bad), label=name).result(60)
        idle = resident()  # before a request runs, which might give memory back
        found[name] = measured(engine) | {"idle": idle, "generation": engine.weights.generation}
    engine.shutdown()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
