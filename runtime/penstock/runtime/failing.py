"""What is raised where it must not end a thread that serves others. No jax.

Python code raises an `Exception`; but a panic of an extension in Rust comes as a `BaseException`, so that
`except Exception` lets it pass, and so do SystemExit and KeyboardInterrupt. Python delivers a signal to the
main thread only: on the engine's thread any of these was raised by what was called there, and is treated as
every other error of it.
"""

from __future__ import annotations

import traceback

from penstock.runtime.errors import EngineFailure, GenerationError


def describe(error: BaseException) -> str:
    """Type and text on one line, also of an error that cannot even be printed."""
    return "".join(traceback.format_exception_only(error)).strip()


def as_exception(error: BaseException) -> Exception:
    """The error itself, or where raising it would end its reader's thread or event loop, a GenerationError
    with it as the cause.
    """
    if isinstance(error, Exception):
        return error
    wrapped = GenerationError(f"the request cannot go on: {describe(error)}")
    wrapped.__cause__ = error
    return wrapped


def engine_failure(error: BaseException) -> EngineFailure:
    """What every request of an engine that died of `error` is told.

    The frames of the error's traceback let go of their variables: some hold arrays on the device, which
    would otherwise live as long as anybody keeps the failure. So `error` must have been raised on this thread
    alone: clearing a frame in which another thread waits, as in a coroutine, ends that.
    """
    failure = EngineFailure(f"the engine failed: {describe(error)}")
    failure.__cause__ = error
    traceback.clear_frames(error.__traceback__)
    return failure
