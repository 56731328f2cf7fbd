"""`penstock generate`: one prompt, one answer, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from penstock.cli.calling.common import NotText, add_addr, complain, print_json, read_stdin, with_client
from penstock.cli.calling.flag_table import CHAT, COMMON, REPORT
from penstock.cli.calling.flag_values import words
from penstock.cli.calling.flags import add_groups, given_flags, options_of, problem_of
from penstock.cli.calling.show import AnswerView, tell_unseen
from penstock.client import ChatMessage, Client, Generation, RequestOptions

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

GROUPS = (*COMMON, REPORT)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        usage="%(prog)s [options] [prompt]",
        help="continue a prompt, streaming to the terminal",
        description="Continue a prompt. The text streams to stdout; on a terminal, stderr says how it ended.",
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; left out or '-': read it from stdin")
    add_addr(parser)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send the prompt as the message of a user; the flags of the chat group imply this",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole reply as JSON once it is complete"
    )
    parser.add_argument("--no-stream", action="store_true", help="wait for the whole answer (the unary RPC)")
    parser.add_argument(
        "--request-id", type=words(128), metavar="ID", help="id of the request, for logs and to abort it"
    )
    add_groups(parser, GROUPS, max_tokens=256)


def run(args: argparse.Namespace) -> int:
    problem = problem_of(args)
    if problem is None and not args.json and (useless := given_flags(args, REPORT)):
        problem = f"{useless[0]} has an effect only with the whole reply; add --json"
    if problem is not None:
        complain(args.command, problem)
        return 2
    prompt = args.prompt
    if prompt in (None, "-"):
        if sys.stdin.isatty() and prompt is None:
            complain(
                args.command, 'give a prompt, e.g. `penstock generate "Once upon a time"`, or pipe one in'
            )
            return 2
        try:
            prompt = read_stdin()
        except NotText as error:
            complain(args.command, str(error))
            return 2
    return with_client(args, lambda client: _generate(client, args, prompt))


def _generate(client: Client, args: argparse.Namespace, prompt: str) -> int:
    options = options_of(args, GROUPS)
    options["request_id"] = args.request_id
    text: str | None = prompt
    if args.chat or given_flags(args, CHAT):
        system = [ChatMessage("system", args.system)] if args.system is not None else []
        content = (*args.images, prompt) if args.images else prompt
        options["messages"] = [*system, ChatMessage("user", content)]
        text = None
    view = None if args.json else AnswerView(numbered=(args.n or 1) > 1)
    if args.no_stream:
        answer = client.generate(text, **options)
        if view is not None:
            view.feed_all(answer)
    else:
        answer = _stream(client, text, options, view)
    if view is None:
        print_json(answer)
        return 0
    tell_unseen(args.command, answer)
    if sys.stderr.isatty():
        print(_ending(answer), file=sys.stderr)
    return 0


def _stream(
    client: Client,
    prompt: str | None,
    options: RequestOptions,
    view: AnswerView | None,
) -> Generation:
    """Use the streaming RPC, and show what comes if there is a view."""
    with client.stream(prompt, **options) as stream:
        try:
            for event in stream:
                if view is not None:
                    view.feed(event)
        except BaseException:  # also Ctrl-C; it is raised again
            if view is not None:
                view.interrupt()  # the error must start on a line of its own
            raise
        return stream.result()


def _ending(answer: Generation) -> str:
    made, total = answer.usage.completion_tokens, answer.timing.total
    reasons = ", ".join(output.finish.reason.value for output in answer.outputs)
    rate = f", {made / total:.1f} tokens/s" if total > 0 else ""
    found = answer.usage.cached_prompt_tokens
    cached = f"; {found} of {answer.usage.prompt_tokens} prompt tokens cached" if found else ""
    proposed = answer.usage.proposed_tokens
    accepted = f"; {answer.usage.accepted_tokens} of {proposed} proposed tokens accepted" if proposed else ""
    return f"[{reasons}: {made} tokens in {total:.2f} s{rate}{cached}{accepted}]"
