"""`penstock chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.cli.common import add_addr, add_generation, complain, explain, options_of, write
from penstock.client import ChatMessage, Client, PenstockClientError, RequestOptions, UnavailableError

if TYPE_CHECKING:
    from penstock.cli.common import Subparsers

with contextlib.suppress(ImportError):  # some builds of Python lack it; input() works without
    import readline  # noqa: F401 - importing it gives input() line editing and history

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message and start over; without TEXT: none
/help          this list
/quit          leave (also Ctrl-D)
Ctrl-C         stop the running answer"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="A conversation with the model's chat template.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_addr(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_generation(parser, max_tokens=None)


class Chat:
    """The conversation so far; each answer is asked for with all of it."""

    def __init__(self, client: Client, addr: str, options: RequestOptions, system: str | None) -> None:
        self._client = client
        self._addr = addr
        self._options = options
        self._system = system
        self._turns: list[ChatMessage] = []
        self.failed = False

    def reset(self) -> None:
        self._turns.clear()

    def set_system(self, text: str) -> None:
        self._system = text or None
        self.reset()

    def answer(self, line: str) -> bool:
        """Ask, and show the answer while it comes. False when going on makes no sense: nobody answers.

        An interrupted answer stays in the conversation as far as it came; a refused question leaves no trace.
        """
        question = ChatMessage("user", line)
        system = [ChatMessage("system", self._system)] if self._system is not None else []
        options = self._options.copy()
        options["messages"] = [*system, *self._turns, question]
        text = ""
        try:
            with self._client.stream(**options) as stream:
                try:
                    for event in stream:
                        write(event.delta)
                except KeyboardInterrupt:
                    write(" [stopped]")
                finally:
                    text = stream.text()
        except PenstockClientError as error:
            if text:
                write("\n")
            complain("chat", explain(error, self._addr))
            self.failed = True
            return not isinstance(error, UnavailableError)
        write("\n")
        self._turns += [question, ChatMessage("assistant", text)]
        return True


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when an answer failed and nobody sat there to see it, or the server went away."""
    interactive = sys.stdin.isatty()
    with Client(args.addr) as client:
        if interactive:
            try:
                print(f"{client.model_info().model} at {args.addr}; /help lists the commands, /quit leaves")
            except PenstockClientError as error:
                complain(args.command, explain(error, args.addr))
                return 1
        chat = Chat(client, args.addr, options_of(args), args.system)
        went_away = not _loop(chat, _prompt if interactive else _read)
    return int(went_away or (chat.failed and not interactive))


def _prompt() -> str | None:
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)")


def _read() -> str | None:
    return sys.stdin.readline() or None


def _loop(chat: Chat, read: Callable[[], str | None]) -> bool:
    """Until the end of input or /quit. False when the server went away."""
    while (line := read()) is not None:
        line = line.strip()
        command, _, rest = line.partition(" ")
        match command:
            case "":
                continue
            case "/quit" | "/exit":
                break
            case "/reset":
                chat.reset()
            case "/system":
                chat.set_system(rest.strip())
            case "/help":
                print(HELP)
            case _ if command.startswith("/"):
                print(f"no command {command}; /help lists them")
            case _:
                if not chat.answer(line):
                    return False
    return True
