"""What the machine is, and how fast it copies, reads and multiplies: the limits of everything else.

A step of the run: `python -m tools.on_device.facts`. It imports nothing of the engine, so that it says what
it can even where that cannot be imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from bench.measures import record
from tools.on_device.steps import PLATFORM, Result

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "transformers",
    "tokenizers",
    "grpcio",
    "protobuf",
)
COPY = "copy, GB/s"
"""The name of the figure with bytes read and bytes written."""
PRODUCTS = "bf16 products, TFLOP/s"
_CALLS = 10


def main() -> None:
    result = Result()
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        result.add(driver=(done.stdout + done.stderr).strip().replace("\n", "; "))
    result.add(machine=record.machine(), versions=record.versions(PACKAGES), commit=record.commit())
    device = wanted_device()
    is_cpu = device.platform == "cpu"
    what = f"{device.platform}, {device.device_kind}"
    result.add(devices=[str(each) for each in jax.devices()], memory=device.memory_stats())
    result.say(what)
    few = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    error = float(abs(np.asarray(jax.jit(jnp.matmul)(few, few)) - few @ few).max())
    result.add(**{"error of a small product in float32": error})
    result.add(
        **{"calls of a tiny program, us each": 1e6 * seconds(jax.jit(lambda x: x + 1), jnp.asarray(few))}
    )
    many = jnp.ones(((64 if is_cpu else 1024) << 18,), jnp.float32)
    copied = 2 * many.nbytes / seconds(jax.jit(lambda x: x + 1), many) / 1e9
    result.add(**{COPY: copied})
    result.add(**{"read, GB/s": many.nbytes / seconds(jax.jit(jnp.sum), many) / 1e9})
    del many
    side = 512 if is_cpu else 8192
    left, right = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in (0, 1))
    rate = 2 * side**3 / seconds(jax.jit(jnp.matmul), left, right) / 1e12
    result.add(**{PRODUCTS: rate})
    result.say(f"{what}: copies {copied:.0f} GB/s, multiplies {rate:.3g} TFLOP/s in bf16")


def wanted_device() -> jax.Device:
    """Return the device of the platform for which the run was planned. RuntimeError for another: JAX computes
    on the CPU, and says nothing, where its part for CUDA is missing.
    """
    device: jax.Device = jax.devices()[0]
    planned = os.environ.get(PLATFORM, device.platform)
    if device.platform != {"cuda": "gpu"}.get(planned, planned):
        raise RuntimeError(
            f"the run is for {planned}, and JAX's first device is {device}, of {device.platform}"
        )
    return device


def seconds(program: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Measure the seconds of a call when several are under way at once; the median of three turns."""
    program(*arguments).block_until_ready()
    turns = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(_CALLS):
            last = program(*arguments)
        last.block_until_ready()
        turns.append((time.perf_counter() - began) / _CALLS)
    return median(turns)


if __name__ == "__main__":
    main()
