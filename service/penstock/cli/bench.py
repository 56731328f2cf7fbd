"""`penstock bench`: latency and throughput of a running server, as its clients see them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from penstock.cli import bench_load, bench_stats
from penstock.cli.common import add_addr, complain, explain, plain, print_json
from penstock.client import AsyncClient, PenstockClientError

if TYPE_CHECKING:
    from penstock.cli.common import Subparsers

DEFAULT_CONCURRENCY = 8


class ContextTooSmall(Exception):
    """Outputs would be cut short without a word, and the figures would be of another load than asked for."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a server's latency and throughput",
        description="Send random prompts and measure. Output lengths are fixed: end tokens are ignored.",
    )
    add_addr(parser)
    parser.add_argument("--requests", type=_count, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--concurrency",
        type=_count,
        metavar="N",
        help=f"requests in flight at most; default: {DEFAULT_CONCURRENCY}, or no limit with --request-rate",
    )
    parser.add_argument(
        "--request-rate",
        type=_rate,
        metavar="R",
        help="send at random (Poisson) times, R per second on average",
    )
    parser.add_argument("--prompt-tokens", type=_count, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=_count, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the model's own")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts, times and sampling")
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="requests before it counts; default: 1"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON (seconds, not ms)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON report to a file")


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _rate(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when any request failed."""
    try:
        report = asyncio.run(_measure(args))
    except ContextTooSmall as error:
        complain(args.command, str(error))
        return 1
    except PenstockClientError as error:
        complain(args.command, explain(error, args.addr))
        return 1
    settings = (
        "requests",
        "concurrency",
        "request_rate",
        "prompt_tokens",
        "max_tokens",
        "temperature",
        "seed",
    )
    document = {"settings": {name: getattr(args, name) for name in settings}, "report": plain(report)}
    if args.json:
        print_json(document)
    else:
        print(bench_stats.table(report))
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
        return 1
    return 0


async def _measure(args: argparse.Namespace) -> bench_stats.Report:
    async with AsyncClient(args.addr) as client:
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
            # Through the unary RPC, whose errors are raised: a request that is refused ends the run at once.
            await client.generate(
                token_ids=token_ids,
                max_tokens=load.max_tokens,
                ignore_eos=True,
                cache_salt=load.cache_salt,
            )
        with tqdm(total=args.requests, unit="request", disable=not sys.stderr.isatty(), leave=False) as bar:
            return bench_stats.report(await bench_load.drive(client, load, bar.update))
