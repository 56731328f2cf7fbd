"""What to do with whatever is raised where it must not end a thread that serves others. No jax.

Python code raises an `Exception`. But a panic of an extension written in Rust comes as a `BaseException`,
which `except Exception` lets pass, and so do SystemExit and KeyboardInterrupt. Python delivers signals to the
main thread only, so on the engine's thread any of these was raised by code that was called there, and is
treated like every other error of that code.
"""

from __future__ import annotations

import traceback

from penstock.runtime.errors import EngineFailure, GenerationError, GroupEnded


def describe(error: BaseException) -> str:
    """Write type and text of an error on one line, even if the error cannot be printed."""
    return "".join(traceback.format_exception_only(error)).strip()


def as_exception(error: BaseException) -> Exception:
    """Return the error itself or, if raising it would end the thread or event loop of its reader, a
    GenerationError that has it as its cause.
    """
    if isinstance(error, Exception):
        return error
    wrapped = GenerationError(f"the request cannot go on: {describe(error)}")
    wrapped.__cause__ = error
    return wrapped


def engine_failure(error: BaseException) -> EngineFailure:
    """Make the error that is given to every request of an engine that died of `error`.

    The frames of the error's traceback let go of their variables, because some of them hold arrays on the
    device, which would otherwise live as long as the failure. So `error` must have been raised on this thread
    only: clearing a frame in which another thread waits, as in a coroutine, would end that.
    """
    if isinstance(error, GroupEnded):
        traceback.clear_frames(error.__traceback__)
        return error
    failure = EngineFailure(f"the engine failed: {describe(error)}")
    failure.__cause__ = error
    traceback.clear_frames(error.__traceback__)
    return failure
