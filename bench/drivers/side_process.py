"""The process at the other end of `bench.side`. It runs an engine of whichever `penstock` is on PYTHONPATH.

python -m bench.side_process --checkpoint DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.child import own_output
from bench.drivers import options
from bench.drivers.inprocess import InProcess
from bench.drivers.over_grpc import OverGrpc
from bench.drivers.side import serve


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drivers.side_process", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument("--mode", choices=("inprocess", "grpc"), default="inprocess")
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help="fields of EngineConfig"
    )
    parser.add_argument("--log", type=Path, default=Path("bench/out/side.log"), help="the server's log")
    args = parser.parse_args()
    answers = own_output()
    # No step records are taken: they cost microseconds, and the two versions may record different things.
    driver = (
        OverGrpc(args.checkpoint, args.options, args.log)
        if args.mode == "grpc"
        else InProcess(args.checkpoint, options.engine_config(args.options), observe=False)
    )
    try:
        serve(driver, driver.startup, sys.stdin, answers)
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
