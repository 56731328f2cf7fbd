"""Compiles every program before serving, in parallel, with a progress bar and a cache on disk; and counts
compilations after that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

import jax
from tqdm import tqdm

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


def use_compilation_cache(folder: Path | None) -> None:
    """Make JAX keep compiled programs in `folder` (made if absent); None leaves JAX's own setting as it is.

    JAX has this setting once per process. Programs of any size and compile time are kept, since a start needs
    them all.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compilation cache is off: cannot make %s (%s)", folder, error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompileCounter:
    """Counts the XLA compilations of one thread, the one that runs steps. A hit in the cache on disk counts
    too.
    """

    def __init__(self) -> None:
        self.count = 0
        self._thread = 0
        self._listening = False

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _BACKEND_COMPILE and threading.get_ident() == self._thread:
            self.count += 1

    def start(self) -> None:
        """Begin to count what the calling thread compiles, from zero."""
        self.count = 0
        self._thread = threading.get_ident()
        if not self._listening:
            jax.monitoring.register_event_duration_secs_listener(self._on_duration)
            self._listening = True

    def stop(self) -> None:
        """Stop counting; `count` keeps its value."""
        if self._listening:
            jax.monitoring.unregister_event_duration_listener(self._on_duration)
            self._listening = False


def compile_all(
    jobs: Mapping[Key, Callable[[], jax.stages.Compiled]], *, threads: int, show_progress: bool
) -> dict[Key, jax.stages.Compiled]:
    """Run every job, in their order, on up to 8 of `threads` threads (XLA compiles without the interpreter's
    lock).
    """
    programs: dict[Key, jax.stages.Compiled] = {}
    started = time.monotonic()
    workers = max(1, min(threads, 8, len(jobs)))
    bar = tqdm(
        total=len(jobs),
        desc="Compiling programs",
        unit="program",
        disable=not show_progress or None,  # None: hidden where stderr is not a terminal
        bar_format="{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}, about {remaining} left",
    )
    with bar, ThreadPoolExecutor(workers, thread_name_prefix="penstock-compile") as pool:
        pending = {pool.submit(job): key for key, job in jobs.items()}
        try:
            for done in as_completed(pending):
                programs[pending[done]] = done.result()
                bar.update()
                if bar.disable:  # there is no bar in a log file, so the log shows progress
                    log.info("compiled %d of %d programs", len(programs), len(jobs))
        except BaseException:  # also Ctrl-C: the process must not wait for compilations that have not begun
            pool.shutdown(cancel_futures=True)
            raise
    log.info("compiled %d programs in %.1f s", len(programs), time.monotonic() - started)
    return programs


def lower_program(
    program: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = (), name: str = ""
) -> jax.stages.Lowered:
    """Lower a program for the shapes and shardings of the arguments (arrays or ShapeDtypeStructs). Profiles
    show the program as "jit_" and its `name`; empty: that of the function. Programs of the same function need
    names of their own, because profiles find the operations of a program by it.

    A program returns what replaces its donated arguments before anything else. JAX gives the memory of a
    donated array to the first result of its shape and dtype. If that result replaces something else, XLA
    copies both in every call.
    """
    program.__name__ = name or program.__name__
    return jax.jit(program, donate_argnums=donate).lower(*arguments)


def compile_program(
    program: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    name: str = "",
    options: Mapping[str, str | bool] | None = None,
) -> jax.stages.Compiled:
    """Lower and compile a program. `options`: see `compile_lowered`; the others: see `lower_program`."""
    return compile_lowered(lower_program(program, *arguments, donate=donate, name=name), options)


def compile_lowered(
    lowered: jax.stages.Lowered, options: Mapping[str, str | bool] | None
) -> jax.stages.Compiled:
    """Have XLA compile a program. `options` are XLA's; those that are not given keep XLA's defaults."""
    return lowered.compile(dict(options) if options else None)
