"""`penstock push-weights`: replaces the weights of a running server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, get_args

from penstock.cli.calling.changes import add_policy, outcome, sent
from penstock.cli.calling.common import add_addr, complain, print_json, visible, with_client
from penstock.cli.calling.flag_values import whole, words
from penstock.client import Client, Staging, UpdateOptions

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


_MAX_GENERATION = 2**64 - 1
_EPILOG = """\
The server goes on serving while it takes the weights, and swaps them between two steps. If the command fails,
the old weights stay in use (but see in_place above). If its answer is lost, run it again with the --update-id
that the message names: no update is applied twice. The key, if the server wants one, needs the role control.

examples:
  penstock push-weights out/step-17 --label step-17
  penstock push-weights out/step-17/model.safetensors --label step-17 --policy keep --expected-generation 16
  penstock push-weights file:///models/step-17 --label step-17
  penstock push-weights out/step-17 --label step-17 --validate-only
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "push-weights",
        usage="%(prog)s SOURCE --label LABEL [options]",
        help="replace the weights of a running server",
        description="Replace the weights of a running server by those of safetensors files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a safetensors file, or a directory of them, which is sent; or file:///PATH, which the server "
        "reads itself, below one of its --weights-root",
    )
    parser.add_argument("--label", type=words(), required=True, help="the label of the new weights")
    parser.add_argument(
        "--partial",
        action="store_true",
        help="tensors that are not in SOURCE keep their value; default: all must be there",
    )
    parser.add_argument(
        "--staging",
        choices=get_args(Staging),
        help="where the new weights wait until they are complete: in host memory, on the device, or nowhere: "
        "with in_place nothing runs meanwhile, and a failure leaves the server not ready until another "
        "update; default: host",
    )
    parser.add_argument(
        "--expected-generation",
        type=whole(0, _MAX_GENERATION),
        metavar="N",
        help="push only if the weights in use have this generation",
    )
    parser.add_argument(
        "--refuse-non-finite", action="store_true", help="refuse tensors that hold NaN or infinity"
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--stage-only", action="store_true", help="leave the swap to `penstock commit-weights`")
    end.add_argument(
        "--validate-only",
        action="store_true",
        help="ask whether names, dtypes and shapes fit; send no tensor",
    )
    parser.add_argument(
        "--update-id", type=words(), metavar="ID", help="the id of the update; default: a new one"
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_policy(parser, "wait")
    add_addr(parser)


def run(args: argparse.Namespace) -> int:
    """Push, and print what came of it. Returns 2 for a source that cannot be read."""
    return with_client(args, lambda client: _push(client, args))


def _push(client: Client, args: argparse.Namespace) -> int:
    is_uri = "://" in args.source
    options = UpdateOptions(
        label=args.label,
        policy=args.policy,
        drain_timeout_s=args.drain_timeout,
        partial=args.partial or None,
        staging=args.staging,
        expected_generation=args.expected_generation,
        stage_only=args.stage_only or None,
        validate_only=args.validate_only or None,
        refuse_non_finite=args.refuse_non_finite or None,
        update_id=args.update_id,
        progress=not args.no_progress,
    )
    try:
        update = client.update_weights(
            None if is_uri else args.source, uri=args.source if is_uri else None, **options
        )
    except OSError as error:
        why = error.strerror or str(error)
        complain(args.command, f"cannot read {error.filename or args.source}: {why}")
        return 2
    if args.json:
        print_json(update)
        return 0
    for line in (*outcome(update).splitlines(), sent(update)):
        if line:
            print(visible(line))
    return 0
