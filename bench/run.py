"""Measures Penstock on the workloads of `bench.workloads`.

python -m bench.run --checkpoint DIR --mode inprocess --out bench/out/penstock.jsonl
python -m bench.run --checkpoint DIR --mode grpc --workloads W1,W5 --set max_num_seqs=16
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.drivers import options
from bench.drivers.inprocess import InProcess
from bench.drivers.over_grpc import OverGrpc
from bench.drivers.session import Session, add_arguments, all_ran, chosen, measure
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.gguf.file import is_gguf
from penstock.runtime.loading.gguf.model import read_model
from penstock.runtime.loading.hub import resolve_model

PACKAGES = ("penstock", "jax", "jaxlib", "flax", "numpy", "grpcio", "protobuf")
_LOG = Path("bench/out/server.log")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Measure Penstock.")
    add_arguments(parser)
    parser.add_argument("--mode", choices=("inprocess", "grpc"), default="inprocess")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"an option of EngineConfig; bench's own defaults: {dict(options.DEFAULTS)}",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="compile everything, in a compilation cache that is deleted afterwards",
    )
    parser.add_argument("--no-steps", action="store_true", help="do not take the engine's step records")
    parser.add_argument(
        "--log", type=Path, default=_LOG, metavar="FILE", help="the server's log; default: %(default)s"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    try:
        workloads = chosen(args)
        given = dict(options.DEFAULTS) | options.parse(args.set)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            if args.cold:
                given["compilation_cache"] = folder
            driver = start(args, given)
            try:
                session = Session(
                    engine=args.label or f"penstock {args.mode}",
                    options=given,
                    startup=driver.startup,
                    packages=PACKAGES,
                    workloads=workloads,
                    repeats=args.repeats,
                    num_words=min(args.num_words, vocabulary_size(args.checkpoint)),
                    output=args.out,
                )
                return 0 if all_ran(measure(driver, session), session) else 1
            finally:
                driver.close()
    except (ConfigError, TypeError, ValueError, RuntimeError) as error:
        print(f"bench.run: {error}", file=sys.stderr)
        return 1


def vocabulary_size(checkpoint: str) -> int:
    """Read the number of token ids of the checkpoint's model. Raises ConfigError if it cannot be read."""
    path = resolve_model(checkpoint)
    return (read_model(path).config if is_gguf(path) else load_config(path)).vocab_size


def start(args: argparse.Namespace, given: Mapping[str, Any]) -> InProcess | OverGrpc:
    """Start the engine in the chosen mode."""
    if args.mode == "grpc":
        return OverGrpc(args.checkpoint, given, args.log)
    return InProcess(args.checkpoint, options.engine_config(given), observe=not args.no_steps)


if __name__ == "__main__":
    sys.exit(main())
