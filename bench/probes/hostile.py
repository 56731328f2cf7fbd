"""Measures what a stream without a grammar loses while others send grammars that are costly to follow.

    python -m bench.hostile --checkpoint demo

One plain stream runs alone, then beside four requests of fifteen outputs each whose grammar is very
ambiguous, and then beside four whose single masks take long. The figures are the stream's pace, and its
longest and median gap.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from penstock.runtime.errors import PenstockError
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.requests.request import Request, StepOutput, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling

AMBIGUOUS = 'start: s\ns: s s s | s s | t\nt: /[a-z]/ | /[a-y]/ | /[ a-z]/ | ""\n'
_WIDE = range(60)
WIDE = (
    'start: "ab" s\ns: '
    + " | ".join(f"s{i}" for i in _WIDE)
    + "\n"
    + "".join(f"s{i}: s s{i} | s s s{i} | /[a-z]/\n" for i in _WIDE)
)
NUM_REQUESTS, NUM_OUTPUTS = 4, 15


class Times:
    """Records when each token of one request came, and when it ended."""

    def __init__(self) -> None:
        self.tokens: list[float] = []
        self.ended = threading.Event()

    def __call__(self, outputs: Sequence[StepOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            self.tokens += [now] * len(output.token_ids)
            if output.last:
                self.ended.set()


def attack(engine: Engine, text: str) -> int:
    """Submit the attacker's requests. Each has a different source, so that the compiler's memory of grammars
    does not help. Returns how many were refused before they ran.
    """
    assert engine.grammars is not None
    refused = 0
    for i in range(NUM_REQUESTS):
        try:
            compiled = engine.grammars.compile(Grammar.ebnf(f"{text}// {i} {time.time_ns()}\n"))
        except PenstockError:
            refused += 1
            continue
        for j, constraint in enumerate(_constraints(compiled)):
            stopping = StoppingParams(max_tokens=200, ignore_eos=True)
            sampling = ResolvedSampling(temperature=1.0, seed=i * NUM_OUTPUTS + j)
            name = f"hostile-{time.time_ns()}-{i}-{j}"
            engine.submit(Request(name, (5, 6, 7), sampling, stopping, constraint=constraint), lambda _: None)
    return refused


def _constraints(compiled: Any) -> list[Any]:
    """One constraint for each output. Older commits, which are measured, too, make them one by one."""
    if hasattr(compiled, "constraints"):
        return list(compiled.constraints(NUM_OUTPUTS))
    return [compiled.constraint() for _ in range(NUM_OUTPUTS)]


def measure(engine: Engine, name: str, text: str | None, num_tokens: int) -> str:
    """Measure and return one line of figures."""
    times = Times()
    stopping = StoppingParams(max_tokens=num_tokens, ignore_eos=True)
    engine.submit(Request(name, (1, 2, 3), ResolvedSampling(temperature=0.0), stopping), times)
    while len(times.tokens) < num_tokens // 10:
        time.sleep(0.001)
    if text is not None:
        attack(engine, text)
    began = time.perf_counter()
    while not times.ended.wait(0.05) and time.perf_counter() - began < 60:
        pass
    engine.abort(all_requests=True)
    after = [when for when in times.tokens if when >= began]
    gaps = sorted(b - a for a, b in pairwise(after))
    took = after[-1] - after[0]
    per_s = (len(after) - 1) / took
    gap = [g for g in gaps if g > 0]
    return (
        f"{name:10} {per_s:7.0f} tokens/s  median gap {median(gap) * 1e3:6.1f} ms  "
        f"longest {gaps[-1] * 1e3:7.1f} ms  {len(after)} tokens in {took:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.hostile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--checkpoint", default="demo", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=1500, metavar="N", help="tokens of the plain stream")
    args = parser.parse_args()
    config = EngineConfig(max_num_seqs=64, max_model_len=2048, show_progress=False)
    engine = Engine.from_pretrained(args.checkpoint, config)
    engine.start()
    assert engine.grammars is not None
    engine.grammars.warm_up()
    for name, text in (("alone", None), ("ambiguous", AMBIGUOUS), ("wide", WIDE), ("again", AMBIGUOUS)):
        print(measure(engine, name, text, args.tokens), flush=True)
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
