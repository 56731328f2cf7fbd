"""`penstock bench`: measures latency and throughput of a running server, as its clients see them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from penstock.cli.calling.common import add_addr, complain, explain, plain, print_json
from penstock.cli.calling.connection import Connection, WrongConnection, connection
from penstock.cli.calling.flag_values import UINT32, number, whole
from penstock.cli.measuring import load as bench_load
from penstock.cli.measuring import stats
from penstock.client import AsyncClient, PenstockClientError

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

DEFAULT_CONCURRENCY = 8

_COUNT = whole(1, UINT32)
_SETTINGS = (
    "requests",
    "concurrency",
    "request_rate",
    "prompt_tokens",
    "max_tokens",
    "temperature",
    "seed",
)


class ContextTooSmall(Exception):
    """Prompt and output do not fit the context, so outputs would be cut short and the figures
    would mislead.
    """


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a server's latency and throughput",
        description="Send random prompts and measure. Output lengths are fixed: end tokens are ignored.",
    )
    add_addr(parser)
    parser.add_argument("--requests", type=_COUNT, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--concurrency",
        type=_COUNT,
        metavar="N",
        help=f"requests in flight at most; default: {DEFAULT_CONCURRENCY}, or no limit with --request-rate",
    )
    parser.add_argument(
        "--request-rate",
        type=number(above=0),
        metavar="R",
        help="send at random (Poisson) times, R requests per second on average",
    )
    parser.add_argument("--prompt-tokens", type=_COUNT, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=_COUNT, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=number(0, 100), metavar="T", help="default: the model's own")
    parser.add_argument(
        "--seed", type=whole(0, 2**63), default=0, metavar="N", help="seed of prompts, times and sampling"
    )
    parser.add_argument(
        "--warmup",
        type=whole(0, UINT32),
        default=1,
        metavar="N",
        help="requests that are sent before the measurement begins; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON (seconds, not ms)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON report to a file")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Returns 1 if any request failed, and 130 after Ctrl-C, which shows what was measured
    so far.
    """
    try:
        report, interrupted = asyncio.run(_measure(args, connection(args)))
    except ContextTooSmall as error:
        complain(args.command, str(error))
        return 1
    except WrongConnection as error:
        complain(args.command, str(error))
        return 2
    except PenstockClientError as error:
        complain(args.command, explain(error, args.addr))
        return 1
    settings = {name: getattr(args, name) for name in _SETTINGS}
    document = {"settings": settings, "interrupted": interrupted, "report": plain(report)}
    if args.json:
        print_json(document)
    else:
        print(stats.table(report))
    if args.output is not None:
        try:
            args.output.write_text(json.dumps(document, indent=2) + "\n")
        except OSError as error:
            complain(args.command, f"cannot write {args.output}: {error.strerror}")
            return 1
    if report.failed:
        complain(
            args.command, f"{report.failed} of {args.requests} requests failed; the figures leave them out"
        )
    if interrupted:
        done = report.completed + report.failed
        complain(args.command, f"interrupted: the figures are of {done} of {args.requests} requests")
        return 130
    return int(report.failed > 0)


async def _measure(args: argparse.Namespace, how: Connection) -> tuple[stats.Report, bool]:
    """Return the report, and whether Ctrl-C ended the run early."""
    try:
        made = AsyncClient(args.addr, **how)
    except ValueError as error:
        raise WrongConnection(str(error)) from None
    async with made as client:
        model = await client.model_info()
        if args.prompt_tokens + args.max_tokens > model.max_context_tokens:
            raise ContextTooSmall(
                f"{args.prompt_tokens} prompt tokens and {args.max_tokens} more do not fit "
                f"the context of {model.max_context_tokens} tokens; lower --prompt-tokens or --max-tokens"
            )
        load = bench_load.Workload(
            cache_salt=uuid.uuid4().hex,
            requests=args.requests,
            prompt_tokens=args.prompt_tokens,
            max_tokens=args.max_tokens,
            seed=args.seed,
            concurrency=args.concurrency or (None if args.request_rate else DEFAULT_CONCURRENCY),
            request_rate=args.request_rate,
            temperature=args.temperature,
            vocab_size=model.vocab_size,
            excluded_token_ids=model.eos_token_ids,
        )
        for token_ids in bench_load.prompts(load, args.warmup, args.seed - 1):
            # The unary RPC raises its errors, so a request that is refused ends the run at once.
            await client.generate(
                token_ids=token_ids,
                max_tokens=load.max_tokens,
                ignore_eos=True,
                cache_salt=load.cache_salt,
            )
        traces: list[stats.RequestTrace] = []
        with tqdm(total=args.requests, unit="request", disable=not sys.stderr.isatty(), leave=False) as bar:

            def note(trace: stats.RequestTrace) -> None:
                traces.append(trace)
                bar.update()

            try:
                await bench_load.drive(client, load, note)
            # asyncio.run reports Ctrl-C this way; a second Ctrl-C ends the run at once
            except asyncio.CancelledError:
                return stats.report(traces), True
        return stats.report(traces), False
