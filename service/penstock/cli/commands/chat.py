"""`penstock chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.cli.calling.common import (
    NotText,
    add_addr,
    complain,
    connected,
    explain,
    read_stdin,
    visible,
    write,
)
from penstock.cli.calling.connection import WrongConnection
from penstock.cli.calling.flag_table import COMMON
from penstock.cli.calling.flags import add_groups, options_of, problem_of
from penstock.cli.calling.show import AnswerView, describe, tell_unseen
from penstock.client import (
    Busy,
    ChatMessage,
    Client,
    FinishReason,
    Generation,
    PenstockClientError,
    QueueFull,
    RateLimited,
    RequestOptions,
    ToolCall,
    UnavailableError,
)

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

with contextlib.suppress(ImportError):  # some builds of Python lack it; input() works without
    import readline  # noqa: F401 - importing it gives input() line editing and history

_PASSING = (QueueFull, Busy, RateLimited)
"""Refusals after which the same server may take the next question."""

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message and start over; without TEXT: none
/result TEXT   answer the tool call that waits (with --tools)
/help          this list
/quit          leave (also Ctrl-D)
Ctrl-C         stop the running answer"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "chat",
        usage="%(prog)s [options]",
        help="talk to a model in the terminal",
        description="A conversation with the model's chat template. Reasoning is shown dimmed.\n"
        "With --n, the conversation continues with output 0.",
        epilog=f"while it runs:\n{HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_addr(parser)
    add_groups(parser, COMMON)


class Chat:
    """The conversation so far; each answer is asked for with all of it."""

    def __init__(
        self, client: Client, addr: str, options: RequestOptions, system: str | None, numbered: bool = False
    ) -> None:
        self._client = client
        self._addr = addr
        self._options = options
        self._system = system
        self._numbered = numbered
        self._turns: list[ChatMessage] = []
        self._calls: list[ToolCall] = []
        """Calls of the last answer that have no result yet."""
        self._results: list[ChatMessage] = []
        """Given for calls before those, and not sent yet."""
        self.failed = False

    def reset(self) -> None:
        self._turns.clear()
        self._calls, self._results = [], []

    def set_system(self, text: str) -> None:
        self._system = text or None
        self.reset()

    def answer(self, line: str) -> bool:
        """Ask, and show the answer while it comes. False when going on makes no sense: nobody answers.

        An interrupted answer stays in the conversation as far as it came; a refused question leaves no trace.
        Results of calls that were given so far go along.
        """
        return self._ask([*self._results, ChatMessage("user", line)], self._options)

    def result(self, text: str) -> bool:
        """Answer the first call that waits; with the last result the model goes on."""
        if not self._calls:
            print("no tool call waits for a result")
            return True
        results = [*self._results, self._calls[0].result(text)]
        if len(self._calls) == 1:
            options = self._options.copy()
            if options.get("tool_choice") not in ("auto", "none"):
                options["tool_choice"] = None  # a call that is forced here too would be the answer for ever
            return self._ask(results, options)
        self._calls, self._results = self._calls[1:], results
        write(f"next: {describe(self._calls[0])}\n")
        return True

    def _ask(self, new: list[ChatMessage], options: RequestOptions) -> bool:
        system = [ChatMessage("system", self._system)] if self._system is not None else []
        options = options.copy()
        options["messages"] = [*system, *self._turns, *new]
        view = AnswerView(self._numbered)
        said = ChatMessage("assistant")
        try:
            with self._client.stream(**options) as stream:
                try:
                    for event in stream:
                        view.feed(event)
                    _tell_end(stream.result())
                except KeyboardInterrupt:
                    view.interrupt(" [stopped]")
                finally:
                    said = ChatMessage("assistant", stream.text(), stream.tool_calls())
        except PenstockClientError as error:
            view.interrupt()
            complain("chat", explain(error, self._addr))
            self.failed = True
            return isinstance(error, _PASSING) or not isinstance(error, UnavailableError)
        self._turns += [*new, said]
        self._calls, self._results = list(said.tool_calls), []
        if self._calls and sys.stdin.isatty():
            print("(/result TEXT answers the call)")
        return True


def _tell_end(answer: Generation) -> None:
    """On a terminal, say why an answer ended that the model did not end."""
    if sys.stdout.isatty() and answer.finish.reason not in (FinishReason.EOS, FinishReason.STOP):
        write(f"[{answer.finish.reason.value}]\n")
    tell_unseen("chat", answer)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when an answer failed and nobody sat there to see it, or the server went away."""
    if (problem := problem_of(args)) is not None:
        complain(args.command, problem)
        return 2
    interactive = sys.stdin.isatty()
    try:
        client = connected(args)
    except WrongConnection as error:
        complain(args.command, str(error))
        return 2
    with client:
        if interactive:
            try:
                model = visible(client.model_info().model)
            except PenstockClientError as error:
                complain(args.command, explain(error, args.addr))
                return 1
            print(f"{model} at {args.addr}; /help lists the commands, /quit leaves")
        chat = Chat(client, args.addr, options_of(args, COMMON), args.system, (args.n or 1) > 1)
        try:
            went_away = not _loop(chat, _prompt if interactive else _read)
        except NotText as error:
            complain(args.command, str(error))
            return 2
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
        except UnicodeDecodeError:
            print("(that was not UTF-8 text)")


def _read() -> str | None:
    return read_stdin(line=True) or None


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
            case "/result":
                if not chat.result(rest.strip()):
                    return False
            case "/help":
                print(HELP)
            case _ if command.startswith("/"):
                print(f"no command {command}; /help lists them")
            case _:
                if not chat.answer(line):
                    return False
    return True
