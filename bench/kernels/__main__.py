"""Measures the native kernels alone, beside the limits of this machine.

    python -m bench.kernels
    python -m bench.kernels --only products --shapes 0.6B --rows 1 16 512 --formats bfloat16
    python -m bench.kernels --only decode prefill --contexts 2048 --out bench/out/kernels.jsonl
    python -m bench.kernels --from bench/out/kernels.jsonl --layers --plot bench/kernels.svg

Products are the four of a layer, as a model calls them (with norm, activation and residual), in the shapes of
Qwen3-0.6B, 4B and 8B; "layer" is all four. Decode attention has rows of one token each; prefill attention one
row of 512 tokens, which end at the context. Each runs over so many layers that no cache holds their weights
or keys and values. The instruction sets of the machine take turns in every round, and medians count.

The limit is what the machine could do: all threads read memory at GB/s, or multiply out of registers with the
best instruction of the set, whichever takes longer. Both are measured before each line
(bench/measures/limits.c), because some machines change their speed from minute to minute. The share of the
limit is the time that it allows by the time that was taken.

Each line is appended to `--out`, and printed to standard error, as soon as it is measured. The table at the
end has them in order.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.kernels import turns
from bench.kernels.lines import CHUNK, CODES, SHAPES, Result
from bench.kernels.picture import drawing
from bench.kernels.results import HEAD, from_record, latest, record, results, row, table, with_layers
from bench.kernels.rival import OneDNN
from bench.measures import record as records
from bench.measures.limits import Limits, told
from penstock.runtime.ops.native import library

ROWS, DECODE_ROWS = (1, 4, 16, 64, 128, 512, 2048), (1, 4, 16, 64)
CONTEXTS, PREFILL_CONTEXTS = (256, 1024, 8192), (512, 2048, 8192)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    args = _arguments(arguments)
    if args.read:
        found = latest(from_record(line) for file in args.read for line in records.read_lines(file))
    elif not library.available():
        print("no native kernels on this machine", file=sys.stderr)
        return 1
    else:
        found = _measure(args)
    found = with_layers(found)
    print(table(result for result in found if not args.layers or result.line.part in ("layer", "attention")))
    if args.plot is not None:
        try:
            args.plot.write_text(drawing(found), encoding="utf-8")
        except (OSError, ValueError) as error:
            print(f"bench.kernels: {error}", file=sys.stderr)
            return 1
    return 0


def _measure(args: argparse.Namespace) -> list[Result]:
    wanted = turns.Wanted(
        kinds=args.only,
        shapes=args.shapes,
        formats=args.formats,
        rows=args.rows or ROWS,
        decode_rows=args.rows or DECODE_ROWS,
        contexts=args.contexts or CONTEXTS,
        prefill_contexts=args.contexts or PREFILL_CONTEXTS,
        rounds=args.rounds,
    )
    rival = OneDNN(args.rival) if args.rival else None
    about = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": records.commit(),
        "machine": records.machine(),
        "rival": rival.about if rival is not None else None,
    }
    found: list[Result] = []
    limits: list[Limits] = []
    print(HEAD, file=sys.stderr)
    try:
        for each in turns.measure(wanted, rival):
            if isinstance(each, Limits):
                limits.append(each)
                continue
            for result in results(each, limits[-1]):
                found.append(result)
                print(row(result), file=sys.stderr, flush=True)
                if args.out is not None:
                    records.write_line(args.out, record(result) | about)
    finally:
        if rival is not None:
            rival.close()
    print(told(limits))
    print()
    return found


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.read:
        measuring = ("only", "shapes", "formats", "rows", "contexts", "rounds", "rival", "out")
        for name in measuring:
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name} is for measuring; --from shows all records as they are")
    elif "prefill" in args.only and args.contexts and min(args.contexts) < CHUNK:
        parser.error(f"--contexts: prefill has chunks of {CHUNK} tokens; leave it out with --only")
    elif args.contexts and not {"decode", "prefill"} & set(args.only):
        parser.error("--contexts: only attention has them, which is not asked for")
    elif args.rows and not {"products", "decode"} & set(args.only):
        parser.error("--rows: prefill attention has one row, and nothing else is asked for")
    elif args.rival and not ("products" in args.only and "bfloat16" in args.formats):
        parser.error("--rival: it computes the products of --formats bfloat16, which are not asked for")
    elif args.rival and not (python := args.rival / "bin" / "python").exists():
        parser.error(
            f"--rival: {python} is not there; `python -m bench.rivals transformers --install-only` makes one"
        )
    return args


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = ("products", "decode", "prefill")
    parser.add_argument("--only", choices=kinds, nargs="+", default=kinds, help="default: all three")
    parser.add_argument(
        "--shapes", choices=SHAPES, nargs="+", default=tuple(SHAPES), help="default: all three"
    )
    parser.add_argument(
        "--formats",
        choices=("bfloat16", "int8", *CODES),
        nargs="+",
        default=("bfloat16", "int8"),
        help="of weights, and of caches, which have the default alone; default: bfloat16 and int8",
    )
    parser.add_argument(
        "--rows",
        type=_count,
        nargs="+",
        metavar="N",
        help=f"of products and of decode attention; default: {ROWS} and {DECODE_ROWS}",
    )
    parser.add_argument(
        "--contexts",
        type=_count,
        nargs="+",
        metavar="N",
        help=f"of decode and prefill attention; default: {CONTEXTS} and {PREFILL_CONTEXTS}",
    )
    parser.add_argument(
        "--rounds", type=_count, default=7, metavar="N", help="default: 7; long lines have fewer"
    )
    parser.add_argument(
        "--rival",
        type=Path,
        metavar="DIR",
        help="an environment with PyTorch (of bench.rivals, say), whose oneDNN takes turns with our products",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append records, as JSON lines")
    parser.add_argument(
        "--from", dest="read", type=Path, nargs="+", metavar="FILE", help="read records instead of measuring"
    )
    parser.add_argument("--layers", action="store_true", help="leave out single products in the table")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the roofline")
    return parser


if __name__ == "__main__":
    sys.exit(main())
