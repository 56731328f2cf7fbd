"""`penstock classify`: the classes of texts, as lines of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from penstock.cli.calling.common import NotText, add_addr, complain, stdin_lines, with_client
from penstock.cli.calling.flag_values import words
from penstock.cli.commands.embed import in_parts
from penstock.client import ClassifyOptions, Client, Truncation

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "classify",
        usage="%(prog)s [options] [text ...]",
        help="tell the classes of texts",
        description="Tell the classes of each text as a line of JSON: the text's number, the likeliest "
        "class, and the probability of each class, or its number where the model makes numbers that "
        "are no classes.",
    )
    parser.add_argument("texts", nargs="*", metavar="text", help="a text; left out: the lines of stdin")
    add_addr(parser)
    parser.add_argument(
        "--truncation",
        choices=[member.value for member in Truncation],
        help="which tokens of a text that is too long are dropped (default: the server's)",
    )
    parser.add_argument("--model", type=words(256), metavar="NAME", help="refuse to ask any other model")
    parser.add_argument(
        "--adapter", type=words(), metavar="NAME", help="a LoRA adapter of the server, by name"
    )


def run(args: argparse.Namespace) -> int:
    if not args.texts and sys.stdin.isatty():
        complain(args.command, 'give a text, e.g. `penstock classify "I liked it"`, or pipe lines in')
        return 2
    options = ClassifyOptions(truncation=args.truncation, model=args.model, adapter=args.adapter)
    return with_client(args, lambda client: _classify(client, args, options))


def _classify(client: Client, args: argparse.Namespace, options: ClassifyOptions) -> int:
    number = 0
    try:
        for texts in in_parts(args.texts or stdin_lines()):
            made = client.classify(texts, **options)
            for one in made.results:
                values = dict(zip(made.labels, one.probabilities or one.logits, strict=True))
                print(json.dumps({"index": number, "label": one.label, "classes": values}), flush=True)
                number += 1
    except NotText as error:
        complain(args.command, str(error))
        return 2
    return 0
