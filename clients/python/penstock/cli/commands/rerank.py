"""`penstock rerank`: documents by their relevance to a query, as lines of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from penstock.cli.calling.common import NotText, add_addr, complain, stdin_lines, with_client
from penstock.cli.calling.flag_values import words
from penstock.client import Client, RerankMethod, RerankOptions

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "rerank",
        usage="%(prog)s [options] query [document ...]",
        help="sort documents by their relevance to a query",
        description="Sort documents by their relevance to a query, and print each as a line of JSON, the "
        "most relevant first: the document's number, its relevance, and the document.",
    )
    parser.add_argument("query", help="what is looked for")
    parser.add_argument(
        "documents", nargs="*", metavar="document", help="a document; left out: the lines of stdin"
    )
    add_addr(parser)
    parser.add_argument(
        "--method",
        choices=[member.value for member in RerankMethod],
        help="what relevance is computed from (default: what the model is made for)",
    )
    parser.add_argument("--top", type=int, metavar="N", help="print the N most relevant documents only")
    parser.add_argument(
        "--instruction", metavar="TEXT", help="what the model judges by, if it is asked for yes or no"
    )
    parser.add_argument(
        "--max-document-tokens", type=int, metavar="N", help="keep the first N tokens of each document"
    )
    parser.add_argument("--model", type=words(256), metavar="NAME", help="refuse to ask any other model")


def run(args: argparse.Namespace) -> int:
    if not args.documents and sys.stdin.isatty():
        complain(args.command, 'give documents, e.g. `penstock rerank "Paris" "a city"`, or pipe lines in')
        return 2
    options = RerankOptions(
        method=args.method,
        top_n=args.top,
        instruction=args.instruction,
        max_document_tokens=args.max_document_tokens,
        model=args.model,
    )
    return with_client(args, lambda client: _rerank(client, args, options))


def _rerank(client: Client, args: argparse.Namespace, options: RerankOptions) -> int:
    try:
        documents = args.documents or list(stdin_lines())
    except NotText as error:
        complain(args.command, str(error))
        return 2
    for one in client.rerank(args.query, documents, **options).results:
        line = {"index": one.index, "relevance": one.relevance, "document": documents[one.index]}
        print(json.dumps(line, ensure_ascii=False), flush=True)
    return 0
