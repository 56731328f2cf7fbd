"""One of two processes between which a link passes an array.

    python -m tests.support.passing PROCESS COORDINATOR

Process 0 sends when it reads a line. Process 1 says that it has called the link, and then what it got.
"""

import json
import sys

import jax
import numpy as np

from penstock.runtime.execution.backend import mesh_of
from penstock.runtime.execution.buckets import Buckets
from penstock.runtime.execution.cpu_threads import start_backends
from penstock.runtime.execution.own_stage import Link
from penstock.runtime.execution.runner_config import RunnerConfig

ROWS, SIZE = 2, 3
CONFIG = RunnerConfig(
    buckets=Buckets((16,), (8,)),
    max_num_seqs=4,
    max_model_len=64,
    page_size=4,
    dtype=np.dtype(np.float32),
    kv_dtype=np.dtype(np.float32),
    vocab_size=50,
    eos_token_ids=(0,),
    show_progress=False,
)


def values() -> np.ndarray:
    return np.arange(ROWS * SIZE, dtype=np.float32).reshape(ROWS, SIZE)


def main() -> None:
    process = int(sys.argv[1])
    jax.distributed.initialize(
        sys.argv[2], 2, process, cluster_detection_method="deactivate", initialization_timeout=120
    )
    sender, receiver = ([device] for device in start_backends(1, 1))
    passed = jax.ShapeDtypeStruct((ROWS, SIZE), np.float32)
    link = Link(mesh_of(sender), mesh_of(receiver), passed, [ROWS], CONFIG)
    if process == 0:
        sys.stdin.readline()
        link.send(jax.device_put(values(), jax.local_devices()[0]))
    else:
        got = link.receive(ROWS)
        sys.stdout.write("called\n")
        sys.stdout.flush()
        sys.stdout.write(json.dumps(np.asarray(got).tolist()) + "\n")
    jax.distributed.shutdown()  # it waits for the other process


if __name__ == "__main__":
    main()
