"""Measures what sampling features cost for each decode step, against greedy sampling.

    python -m bench.features --checkpoint bench/out/model

One engine decodes 16 rows. Each feature is used by all rows, and the features take turns, so that a change of
the machine's speed affects all alike. Grammars are compiled for a made-up vocabulary of the model's size,
because the checkpoint has no tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.drivers import options
from bench.drivers.inprocess import Collector, InProcess
from penstock.runtime.grammar.compile.compiler import CompiledGrammar, GrammarCompiler
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.loop.interface import StepRecord
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "size": {"type": "number"},
        },
        "required": ["name", "tags", "size"],
        "additionalProperties": False,
    }
)
EOS = 151_645
_PROMPT, _SEED = 128, 7


def made_up_vocabulary(vocab_size: int) -> Vocabulary:
    """Return every byte, and distinct words of up to eight letters, half of them with a space before."""
    rng = random.Random(_SEED)
    words: dict[bytes, None] = {bytes([b]): None for b in range(256)}
    while len(words) < vocab_size:
        word = "".join(rng.choices(string.ascii_lowercase + '"{}[],:', k=rng.randint(2, 8)))
        words[(rng.choice(["", " "]) + word).encode()] = None
    tokens = list(words)
    tokens[EOS] = b"<|end|>"
    return Vocabulary(tuple(tokens), frozenset([EOS]), (EOS,))


def variants(compiled: CompiledGrammar | None) -> Mapping[str, Callable[[Request], Request]]:
    """Map the name of each feature to a function that adds it to a greedy request."""
    greedy = ResolvedSampling(temperature=0.0)
    drawn = ResolvedSampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05, seed=1)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    biased = {"logit_bias": tuple((i * 500, -1.0) for i in range(300))}

    def sampling(params: ResolvedSampling, **more: Any) -> Callable[[Request], Request]:
        return lambda request: dataclasses.replace(request, sampling=dataclasses.replace(params, **more))

    def constrained(request: Request) -> Request:
        assert compiled is not None
        return dataclasses.replace(request, constraint=compiled.constraint())

    def everything(request: Request) -> Request:
        request = sampling(drawn, **penalties, **biased)(dataclasses.replace(request, logprobs=20))
        return request if compiled is None else constrained(request)

    found = {
        "greedy": sampling(greedy),
        "temperature, top_k, top_p, min_p": sampling(drawn),
        "penalties": sampling(greedy, **penalties),
        "logit_bias": sampling(greedy, **biased),
        "logprobs 20": lambda request: dataclasses.replace(request, logprobs=20),
        "everything": everything,
    }
    return found if compiled is None else {**found, "grammar": constrained}


def step_ms(records: Sequence[StepRecord], num_rows: int) -> list[float]:
    """Return the milliseconds from one commit to the next for each decode step, while all rows decode."""
    full = [r for r in records if r.decode_only and r.num_rows == num_rows]
    return [
        (after.committed_ns - before.committed_ns) / 1e6 / after.num_steps
        for before, after in itertools.pairwise(full)
        if after.step_id == before.step_id + 1
    ]


def run(
    driver: InProcess, make: Callable[[Request], Request], name: str, args: argparse.Namespace
) -> list[float]:
    """Measure the decode-step times of one wave, in milliseconds."""
    rng = random.Random(_SEED)
    requests = [
        make(
            Request(
                f"{name}-{i}",
                tuple(rng.randrange(args.num_words) for _ in range(_PROMPT)),
                ResolvedSampling(temperature=0.0),
                StoppingParams(max_tokens=args.steps, ignore_eos=True),
            )
        )
        for i in range(args.rows)
    ]
    sink = Collector([request.request_id for request in requests])
    for request in requests:
        driver.engine.submit(request, sink)
    sink.wait_for_end()
    if sink.errors:
        raise ValueError(f"{name}: {next(iter(sink.errors.values()))}")
    return step_ms(driver.take_steps(), args.rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.features", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="see bench.checkpoint")
    parser.add_argument("--rows", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--num-words", type=int, default=150_000, metavar="N", help="prompts use ids below this"
    )
    parser.add_argument("--no-grammar", action="store_true", help="leave grammars out")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine option")
    args = parser.parse_args()
    driver = InProcess(
        args.checkpoint, options.engine_config({**options.DEFAULTS, **options.parse(args.set)})
    )
    try:
        compiled = None
        if not args.no_grammar:
            compiler = GrammarCompiler(made_up_vocabulary(driver.engine.info.vocab_size))
            compiled = compiler.compile(Grammar.json_schema(SCHEMA))
        times: dict[str, list[float]] = {}
        for repeat in range(-1, args.repeats):
            for name, make in variants(compiled).items():
                found = run(driver, make, f"{name}/{repeat}", args)
                if repeat >= 0:
                    times.setdefault(name, []).append(median(found))
        base = median(times["greedy"])
        print(
            f"{'milliseconds per step, ' + str(args.rows) + ' rows':<40}{'median':>9}{'against greedy':>16}"
        )
        for name, values in times.items():
            print(f"{name:<40}{median(values):>9.2f}{median(values) / base - 1:>+16.1%}")
        print(f"compiles after warm-up: {driver.engine.compiles_after_warmup}")
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
