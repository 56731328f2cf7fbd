"""JAX's profiler, of which there is one in a process."""

from __future__ import annotations

from pathlib import Path

import jax

from penstock.runtime.errors import ProfileFailed, ProfileUnderWay


def start(folder: Path) -> None:
    """Begin to record. ProfileUnderWay if this program records already, ProfileFailed if JAX cannot.

    The functions of Python are not recorded: with many threads that costs much, and says little that the
    annotations do not say. Any thread may call this, and none is held up by it.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        if "already been started" in str(error):
            raise ProfileUnderWay() from None
        raise ProfileFailed(f"JAX cannot record: {error}") from error


def stop() -> None:
    """Stop recording, and write the files below the folder. Takes seconds where much was recorded, without
    Python's global lock. ProfileFailed.
    """
    try:
        jax.profiler.stop_trace()
    except Exception as error:
        raise ProfileFailed(f"JAX cannot write what it has recorded: {error}") from error
