"""A process of a group whose devices add up and gather random arrays.

    python -m tests.support.group_sums PROCESS PROCESSES DEVICES COORDINATOR

It prints a JSON object: the collectives of each program, here and on TPUs, and the bits of what one device
has at the end, in hexadecimal, by the number of rows.
"""

import functools
import json
import re
import sys
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from penstock.runtime.execution.backend import mesh_of
from penstock.runtime.execution.cpu_threads import start_backends
from penstock.runtime.execution.on_mesh import CUT, on_mesh
from penstock.runtime.models.load_rules import AXIS
from penstock.runtime.ops.collectives import gathered, summed
from tests.support.mesh_goldens import collectives_of

ROWS = (1, 3, 16)
SIZE = 48


def values(devices: int) -> np.ndarray:
    """Return what each device has of each row: float32 [devices, rows, SIZE]."""
    drawn = np.random.default_rng(7).normal(size=(devices, max(ROWS), SIZE))
    return (drawn * 10.0 ** np.arange(devices)[:, None, None]).astype(np.float32)


def main() -> None:
    process, processes, devices = map(int, sys.argv[1:4])
    if processes > 1:
        jax.distributed.initialize(
            sys.argv[4], processes, process, cluster_detection_method="deactivate", initialization_timeout=120
        )
    mesh = mesh_of(start_backends(1, devices // processes))
    given, said = values(devices), dict[str, dict[Any, Any]]({"collectives": {}, "on TPUs": {}})
    for operation in (summed, gathered):
        for rows in ROWS:
            whole = given[:, :rows]
            array = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, CUT), whole.__getitem__)
            program = on_mesh(functools.partial(operation, axis=AXIS), mesh, (CUT,), CUT)
            traced = jax.jit(program).trace(array)
            compiled = traced.lower().compile()
            said["collectives"][operation.__name__] = collectives_of(compiled.as_text() or "")
            on_tpus = traced.lower(lowering_platforms=("tpu",)).as_text()
            said["on TPUs"][operation.__name__] = Counter(re.findall(r"stablehlo\.(all_\w+)", on_tpus))
            (first, *_) = compiled(array).addressable_shards
            said.setdefault(operation.__name__, {})[rows] = np.asarray(first.data).tobytes().hex()
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
