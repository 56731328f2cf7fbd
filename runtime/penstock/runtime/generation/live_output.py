"""One output that is being generated: from what the engine's steps made of it to what its reader gets."""

from __future__ import annotations

from collections.abc import Callable

from penstock.runtime.generation.interface import RequestQueue
from penstock.runtime.requests.request import StepOutput
from penstock.runtime.text.assembler import Assembler, Delta


class LiveOutput:
    """Makes deltas of one output, and ends the output in the engine when a stop string was found.

    It is used by one thread at a time.
    """

    def __init__(
        self,
        queue: RequestQueue,
        request_id: str,
        assembler: Assembler,
        *,
        holds_id: Callable[[], bool] = lambda: True,
    ) -> None:
        """`request_id` is the engine's, of this output. `holds_id` says whether the engine still knows this
        output by it: once another request has taken the id, that one must not be ended.
        """
        self.request_id = request_id
        self._queue = queue
        self._assembler = assembler
        self._holds_id = holds_id
        self._told_stop = False
        self.has_ended = False
        """Whether the engine has no more of it."""

    def add(self, output: StepOutput) -> Delta:
        """What a step added. Raises the error that the output ended with, and what its parsing raises."""
        self.has_ended = output.last
        delta = self._assembler.add(output)
        if self._assembler.stop is not None and not self.has_ended and not self._told_stop:
            self._told_stop = True
            if self._holds_id():
                self._queue.finish(self.request_id, self._assembler.stop)
        return delta
