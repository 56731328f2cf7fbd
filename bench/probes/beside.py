"""Measures how much slower rows without a grammar get when a row with a grammar runs beside them.

    python -m bench.probes.beside --checkpoint bench/out/model

One engine runs two kinds of batch in turns: one in which all rows are plain, and one in which one row of as
many has a grammar. The figure is the pace of the plain rows. The grammar's vocabulary is made up, because the
checkpoint has no tokenizer.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from statistics import median

from bench.drivers import options
from bench.drivers.inprocess import Collector, InProcess
from bench.probes.features import made_up_vocabulary
from penstock.runtime.grammar.compile.compiler import GrammarCompiler
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling

PATTERN = "[a-z ]{100000}"
"""Matches longer texts than any measurement generates, so its row stays until the end."""
_PROMPT, _SEED = 128, 7


def pace(arrivals: Sequence[tuple[float, int]], after: float) -> float:
    """Tokens per second of one request, counted from its first message at or after `after`."""
    times = [(when, count) for when, count in arrivals if when >= after]
    tokens = sum(count for _, count in times[1:])
    return tokens / (times[-1][0] - times[0][0])


def plain_pace(
    driver: InProcess, name: str, args: argparse.Namespace, constraint: TokenConstraint | None
) -> float:
    """The median pace of the plain rows, in tokens per second, from when every row has generated tokens."""
    rng = random.Random(_SEED)
    ids = [f"{name}-{i}" for i in range(args.rows)]
    sink = Collector(ids)
    for i, request_id in enumerate(ids):
        last = i == len(ids) - 1
        driver.engine.submit(
            Request(
                request_id,
                tuple(rng.randrange(args.num_words) for _ in range(_PROMPT)),
                ResolvedSampling(temperature=0.0),
                # The last row runs until the others have ended.
                StoppingParams(max_tokens=args.tokens * 4 if last else args.tokens, ignore_eos=True),
                constraint=constraint if last else None,
            ),
            sink,
        )
    plain = ids[:-1]
    sink.wait_for_tokens(ids, 2)
    sink.wait_for_tokens(plain, args.tokens)
    driver.engine.abort(all_requests=True)
    sink.wait_for_end()
    if sink.errors:
        raise ValueError(f"{name}: {next(iter(sink.errors.values()))}")
    began = max(sink.arrivals[i][0][0] for i in ids)
    return median(pace(sink.arrivals[i], began) for i in plain)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.probes.beside", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="see bench.checkpoint")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=96, metavar="N", help="tokens of each plain row; default: %(default)s"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--num-words", type=int, default=150_000, metavar="N", help="prompts use ids below this"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine option")
    args = parser.parse_args()
    driver = InProcess(
        args.checkpoint, options.engine_config({**options.DEFAULTS, **options.parse(args.set)}), observe=False
    )
    try:
        compiler = GrammarCompiler(made_up_vocabulary(driver.engine.info.vocab_size))
        compiled = compiler.compile(Grammar.regex(PATTERN))
        pairs = []
        for repeat in range(-1, args.repeats):
            alone = plain_pace(driver, f"plain/{repeat}", args, None)
            beside = plain_pace(driver, f"beside/{repeat}", args, compiled.constraint())
            if repeat >= 0:
                pairs.append((alone, beside))
                print(f"round {repeat}: {alone:.2f} and {beside:.2f} tok/s, {beside / alone - 1:+.1%}")
        print(
            f"{args.rows - 1} plain rows beside one without and with a grammar: median "
            f"{median(beside / alone for alone, beside in pairs) - 1:+.1%}"
        )
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
