"""`penstock generate`: one prompt, one answer, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from penstock.cli.common import add_addr, add_generation, complain, options_of, print_json, with_client, write
from penstock.client import ChatMessage, Client, Generation, RequestOptions

if TYPE_CHECKING:
    from penstock.cli.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt, streaming to the terminal",
        description="Continue a prompt. The text streams to stdout; on a terminal, stderr says how it ended.",
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; left out or '-': read it from stdin")
    add_addr(parser)
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; implies --chat")
    parser.add_argument(
        "--json", action="store_true", help="print the whole reply as JSON once it is complete"
    )
    parser.add_argument("--no-stream", action="store_true", help="wait for the whole answer (the unary RPC)")
    parser.add_argument(
        "--logprobs", type=int, metavar="K", help="with --json: log-probabilities and K candidates"
    )
    parser.add_argument("--request-id", metavar="ID")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after this many seconds")
    add_generation(parser, max_tokens=256)


def run(args: argparse.Namespace) -> int:
    prompt = args.prompt
    if prompt in (None, "-"):
        if sys.stdin.isatty() and prompt is None:
            complain(
                args.command, 'give a prompt, e.g. `penstock generate "Once upon a time"`, or pipe one in'
            )
            return 2
        prompt = sys.stdin.read()
    return with_client(args, lambda client: _generate(client, args, prompt))


def _generate(client: Client, args: argparse.Namespace, prompt: str) -> int:
    options = options_of(args)
    options["request_id"] = args.request_id
    options["logprobs"] = args.logprobs
    text: str | None = prompt
    if args.chat or args.system is not None:
        system = [ChatMessage("system", args.system)] if args.system is not None else []
        options["messages"] = [*system, ChatMessage("user", prompt)]
        text = None
    if args.no_stream:
        answer = client.generate(text, timeout=args.timeout, **options)
        if not args.json:
            write(answer.text)
    else:
        answer = _stream(client, args, text, options)
    if args.json:
        print_json(answer)
    else:
        write("\n")
        if sys.stderr.isatty():
            print(_ending(answer), file=sys.stderr)
    return 0


def _stream(
    client: Client, args: argparse.Namespace, prompt: str | None, options: RequestOptions
) -> Generation:
    """The same through the streaming RPC, writing text as it comes, unless JSON was asked for."""
    with client.stream(prompt, timeout=args.timeout, **options) as stream:
        try:
            for event in stream:
                if not args.json and event.delta:
                    write(event.delta)
        except BaseException:  # Ctrl-C too; raised on
            if not args.json and stream.text():
                write("\n")  # so that the error starts on its own line
            raise
        return stream.result()


def _ending(answer: Generation) -> str:
    made, total = answer.usage.completion_tokens, answer.timing.total
    rate = f", {made / total:.1f} tokens/s" if total > 0 else ""
    found = answer.usage.cached_prompt_tokens
    cached = f"; {found} of {answer.usage.prompt_tokens} prompt tokens cached" if found else ""
    return f"[{answer.finish.reason.value}: {made} tokens in {total:.2f} s{rate}{cached}]"
