"""`penstock embed`: the vectors of texts, as lines of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from penstock.cli.calling.common import NotText, add_addr, complain, stdin_lines, with_client
from penstock.cli.calling.flag_values import words
from penstock.client import Client, EmbedOptions, Pooling, Truncation

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

AT_ONCE = 32
"""How many texts one call has: the server bounds how many of them may wait."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "embed",
        usage="%(prog)s [options] [text ...]",
        help="make vectors of texts",
        description="Make a vector of each text, and print it as a line of JSON: the text's number, its "
        "tokens, and the vector.",
    )
    parser.add_argument("texts", nargs="*", metavar="text", help="a text; left out: the lines of stdin")
    add_addr(parser)
    parser.add_argument(
        "--pooling",
        choices=[member.value for member in Pooling],
        help="what a vector is made of (default: what the model is made for)",
    )
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N numbers of each vector")
    parser.add_argument("--no-normalize", action="store_true", help="do not divide vectors by their length")
    parser.add_argument(
        "--truncation",
        choices=[member.value for member in Truncation],
        help="which tokens of a text that is too long are dropped (default: the server's)",
    )
    parser.add_argument("--model", type=words(256), metavar="NAME", help="refuse to ask any other model")


def run(args: argparse.Namespace) -> int:
    if not args.texts and sys.stdin.isatty():
        complain(args.command, 'give a text, e.g. `penstock embed "Once upon a time"`, or pipe lines in')
        return 2
    options = EmbedOptions(
        pooling=args.pooling,
        dimensions=args.dimensions,
        normalize=False if args.no_normalize else None,
        truncation=args.truncation,
        model=args.model,
    )
    return with_client(args, lambda client: _embed(client, args, options))


def _embed(client: Client, args: argparse.Namespace, options: EmbedOptions) -> int:
    number = 0
    try:
        for texts in in_parts(args.texts or stdin_lines()):
            for one in client.embed(texts, **options).embeddings:
                line = {"index": number, "tokens": one.token_count, "embedding": one.numbers}
                print(json.dumps(line), flush=True)
                number += 1
    except NotText as error:
        complain(args.command, str(error))
        return 2
    return 0


def in_parts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Divide the texts into parts of at most AT_ONCE."""
    remaining = iter(texts)
    while part := list(islice(remaining, AT_ONCE)):
        yield part
