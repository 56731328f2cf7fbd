"""Measures PyTorch through transformers' `generate`: one static batch per wave, left-padded, without a prefix
cache.

A request's tokens count until it has as many as it asked for. The batch goes on to its longest output, as
static batching does. Workloads with late jobs cannot be run this way.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from bench.drivers.session import Session, add_arguments, chosen, measure
from bench.measures import record
from bench.workloads import Job
from penstock.cli.measuring.stats import RequestTrace


class _Clock(StoppingCriteria):
    """Is called after each token of the batch. It records the time and never stops the batch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Transformers:
    def __init__(self, checkpoint: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self._model.requires_grad_(False)
        self._model.generation_config.eos_token_id = None

    def run_wave(self, jobs: Sequence[Job]) -> list[RequestTrace]:
        if any(job.after_tokens for job in jobs):
            raise ValueError("static batches take no late jobs")
        sent = time.perf_counter()
        width = max(len(job.token_ids) for job in jobs)
        pads = [width - len(job.token_ids) for job in jobs]
        ids = torch.tensor([[0] * pad + list(job.token_ids) for pad, job in zip(pads, jobs, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        clock = _Clock()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(job.max_tokens for job in jobs),
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        traces = []
        for job in jobs:
            times = clock.times[: job.max_tokens]
            arrivals = tuple((moment, 1) for moment in times)
            traces.append(RequestTrace(sent, arrivals, times[-1], len(job.token_ids)))
        return traces

    def about_repeat(self) -> Mapping[str, Any]:
        return {"peak_rss_bytes": record.peak_rss_bytes(os.getpid())}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rivals transformers")
    add_arguments(parser)
    args = parser.parse_args()
    began = time.perf_counter()
    driver = Transformers(args.checkpoint)
    session = Session(
        engine=args.label or "transformers",
        options={"dtype": "bfloat16", "threads": torch.get_num_threads()},
        startup={"ready_s": round(time.perf_counter() - began, 2)},
        packages=("transformers", "torch"),
        workloads=chosen(args),
        repeats=args.repeats,
        num_words=args.num_words,
        output=args.out,
    )
    return 0 if measure(driver, session) else 1


if __name__ == "__main__":
    sys.exit(main())
