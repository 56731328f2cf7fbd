"""Measures llama.cpp through llama-cpp-python, on a GGUF file: --checkpoint is that file.

One request runs at a time, with llama.cpp's own greedy sampler, and without a prefix cache: each request
begins with an empty cache. Workloads with several requests at once cannot be run this way.

With `--set lookup_tokens=N` each step also checks up to N tokens that llama-cpp-python's prompt lookup finds,
`LlamaPromptLookupDecoding`: what followed the first place where the last `lookup_ngram` tokens stand. The
tokens stay the same, because both are greedy.

On an Intel Xeon with AMX, release 0.3.36 ended with an illegal instruction in llama.cpp's code for AMX. There
`--set use_extra_bufts=false` keeps it from that code, and from repacked weights; a build without AMX does
without the former alone: `CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON
-DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"` before the first run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench.rivals.stepped import run
from bench.workloads import Job

_THREADS = len(os.sched_getaffinity(0))
OPTIONS: dict[str, Any] = {
    "n_ctx": 2304,
    "n_batch": 512,
    "n_ubatch": 512,
    "n_threads": _THREADS,
    "n_threads_batch": _THREADS,
    "use_extra_bufts": True,
    "lookup_tokens": 0,
    "lookup_ngram": 2,
}
"""Fields of llama_model_params and llama_context_params, and of the lookup."""


_SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)
"""Takes llama.cpp's log, of which there are hundreds of lines."""


@dataclass(slots=True)
class _Running:
    """The request that runs."""

    number: int
    left: int
    """How many of its tokens are still to be made."""
    tokens: list[int]
    """What the model reads next: the prompt, and then the token that it made last."""
    read: list[int]
    """What it has read, as far as that counts."""


class LlamaCpp:
    def __init__(self, checkpoint: str, options: Mapping[str, Any]) -> None:
        of_model, of_context = (
            llama_cpp.llama_model_default_params(),
            llama_cpp.llama_context_default_params(),
        )
        options = dict(options)
        self._most_guesses = int(options.pop("lookup_tokens"))
        self._lookup = LlamaPromptLookupDecoding(int(options.pop("lookup_ngram")), self._most_guesses)
        for name, value in options.items():
            fields = next((each for each in (of_model, of_context) if hasattr(each, name)), None)
            if fields is None:
                raise ValueError(f"--set {name}: no field of llama_model_params or llama_context_params")
            setattr(fields, name, value)
        llama_cpp.llama_log_set(_SILENT, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(checkpoint.encode(), of_model)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {checkpoint}")
        self._context = llama_cpp.llama_init_from_model(self._model, of_context)
        self._greedy = llama_cpp.llama_sampler_init_greedy()
        self._at_once: int = of_context.n_batch
        self._batch = llama_cpp.llama_batch_init(1 + self._most_guesses, 0, 1)
        self._running: _Running | None = None

    def add(self, number: int, job: Job) -> None:
        if self._running is not None:
            self._running = None  # the workload ends here, and the next one begins afresh
            raise ValueError("llama.cpp runs one request at a time here: take W1, W3, L1 or C1")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._running = _Running(number, job.max_tokens, list(job.token_ids), [])

    def step(self) -> dict[int, int]:
        running = self._running
        if running is None:
            return {}
        made = self._checked(running) if self._most_guesses and running.read else self._plain(running)
        running.tokens = made[-1:]
        running.left -= len(made)
        if not running.left:
            self._running = None
        return {running.number: len(made)}

    def _plain(self, running: _Running) -> list[int]:
        """Read the tokens of a request, and make the next one."""
        for begin in range(0, len(running.tokens), self._at_once):
            part = running.tokens[begin : begin + self._at_once]
            tokens = (llama_cpp.llama_token * len(part))(*part)  # a batch has only its address
            if code := llama_cpp.llama_decode(
                self._context, llama_cpp.llama_batch_get_one(tokens, len(part))
            ):
                raise ValueError(f"llama_decode returned {code}")
        running.read += running.tokens
        return [llama_cpp.llama_sampler_sample(self._greedy, self._context, -1)]

    def _checked(self, running: _Running) -> list[int]:
        """Read the last token of a request and what the lookup finds behind it, and return the tokens behind
        these, up to the first that the lookup did not find.
        """
        known = np.array(running.read + running.tokens, np.intc)
        guesses = self._lookup(known)[: running.left - 1].tolist()
        batch, inputs = self._batch, running.tokens + guesses
        batch.n_tokens = len(inputs)
        for i, token in enumerate(inputs):
            batch.token[i], batch.pos[i], batch.logits[i] = token, len(running.read) + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if code := llama_cpp.llama_decode(self._context, batch):
            raise ValueError(f"llama_decode returned {code}")
        made: list[int] = []
        for i in range(len(inputs)):
            made.append(llama_cpp.llama_sampler_sample(self._greedy, self._context, i))
            if i < len(guesses) and made[-1] != guesses[i]:
                break
        running.read += inputs[: len(made)]
        memory = llama_cpp.llama_get_memory(self._context)
        if not llama_cpp.llama_memory_seq_rm(memory, 0, len(running.read), -1):
            raise ValueError("llama.cpp cannot remove the end of a sequence of this model")
        return made


if __name__ == "__main__":
    sys.exit(run("llamacpp", ("llama-cpp-python",), OPTIONS, LlamaCpp))
