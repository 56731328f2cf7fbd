"""Measures llama.cpp through llama-cpp-python, on a GGUF file: --checkpoint is that file.

One request runs at a time, with greedy sampling by llama.cpp's own sampler, and without a prefix cache: each
request begins with an empty cache. Workloads with several requests at once cannot be run this way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import llama_cpp

from bench.rivals.stepped import run
from bench.workloads import Job

OPTIONS: dict[str, Any] = {
    "n_ctx": 2304,
    "n_batch": 512,
    "n_ubatch": 512,
    "n_threads": len(os.sched_getaffinity(0)),
    "n_threads_batch": len(os.sched_getaffinity(0)),
}
"""Arguments of `llama_cpp.Llama`."""


@dataclass(slots=True)
class _Running:
    """The request that runs."""

    number: int
    left: int
    """How many of its tokens are still to be made."""
    tokens: list[int] = field(default_factory=list)
    """What the model reads next: the prompt, and then the token that it made last."""


class LlamaCpp:
    def __init__(self, checkpoint: str, options: Mapping[str, Any]) -> None:
        self._llama = llama_cpp.Llama(checkpoint, verbose=False, **options)
        self._greedy = llama_cpp.llama_sampler_init_greedy()
        self._running: _Running | None = None

    def add(self, number: int, job: Job) -> None:
        if self._running is not None:
            self._running = None  # the workload ends here, and the next one begins afresh
            raise ValueError("llama.cpp runs one request at a time here: take W1, W3, L1 or C1")
        self._llama.reset()
        self._running = _Running(number, job.max_tokens, list(job.token_ids))

    def step(self) -> dict[int, int]:
        running = self._running
        if running is None:
            return {}
        self._llama.eval(running.tokens)
        running.tokens = [llama_cpp.llama_sampler_sample(self._greedy, self._llama.ctx, -1)]
        running.left -= 1
        if not running.left:
            self._running = None
        return {running.number: 1}


if __name__ == "__main__":
    sys.exit(run("llamacpp", ("llama-cpp-python",), OPTIONS, LlamaCpp))
