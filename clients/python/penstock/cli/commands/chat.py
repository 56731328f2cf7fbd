"""`penstock chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import os
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
from penstock.cli.calling.flag_values import image
from penstock.cli.calling.flags import add_groups, options_of, problem_of
from penstock.cli.calling.show import AnswerView, describe, tell_unseen
from penstock.client import (
    Busy,
    ChatMessage,
    Client,
    FinishReason,
    Generation,
    Image,
    PenstockClientError,
    QueueFull,
    RateLimited,
    RequestOptions,
    ToolCall,
    UnavailableError,
)

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

with contextlib.suppress(ImportError):  # some builds of Python have no readline; input() works without it
    import readline  # noqa: F401 - importing it gives input() line editing and history

_PASSING = (QueueFull, Busy, RateLimited)
"""Refusals after which this server may answer the next question."""

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message and start over; without TEXT: none
/image FILE    send an image with the next question
/result TEXT   send the result of a pending tool call (with --tools)
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
    """The conversation so far. Each question is sent together with all of it."""

    def __init__(
        self, client: Client, addr: str, options: RequestOptions, system: str | None, numbered: bool = False
    ) -> None:
        self._client = client
        self._addr = addr
        self._options = options
        self._system = system
        self._numbered = numbered
        self._turns: list[ChatMessage] = []
        self._images: list[Image] = []
        """Images that go with the next question."""
        self._calls: list[ToolCall] = []
        """Tool calls of the last answer that have no result yet."""
        self._results: list[ChatMessage] = []
        """Results of earlier calls of that answer, which are not sent yet."""
        self.failed = False

    def reset(self) -> None:
        self._turns.clear()
        self._images.clear()
        self._calls, self._results = [], []

    def set_system(self, text: str) -> None:
        self._system = text or None
        self.reset()

    def show(self, image: Image) -> None:
        """Send the image with the next question, before its words."""
        self._images.append(image)

    def answer(self, line: str) -> bool:
        """Ask, and show the answer while it comes. Returns false if the server is gone, so that nothing more
        can be asked.

        An interrupted answer stays in the conversation as far as it came; a refused question does not, nor do
        its images. Results of tool calls that were given so far are sent, too.
        """
        images, self._images = self._images, []
        content: str | list[str | Image] = [*images, line] if images else line
        return self._ask([*self._results, ChatMessage("user", content)], self._options)

    def result(self, text: str) -> bool:
        """Give a result to the first tool call that waits for one. After the last result the
        model continues.
        """
        if not self._calls:
            print("no tool call is waiting for a result")
            return True
        results = [*self._results, self._calls[0].result(text)]
        if len(self._calls) == 1:
            options = self._options.copy()
            if options.get("tool_choice") not in ("auto", "none"):
                options["tool_choice"] = None  # with a forced call again, the model would call for ever
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
                    said = ChatMessage(
                        "assistant", stream.text(), stream.tool_calls(), reasoning=stream.reasoning()
                    )
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
    """Say on a terminal why an answer ended, if the model did not end it."""
    if sys.stdout.isatty() and answer.finish.reason not in (FinishReason.EOS, FinishReason.STOP):
        write(f"[{answer.finish.reason.value}]\n")
    tell_unseen("chat", answer)


def run(args: argparse.Namespace) -> int:
    """Hold a conversation. Returns 1 if the server went away, or if an answer failed and stdin is no
    terminal.
    """
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
        for shown in args.images or ():
            chat.show(shown)
        try:
            went_away = not _loop(chat, _prompt if interactive else _read)
        except NotText as error:
            complain(args.command, str(error))
            return 2
    return int(went_away or (chat.failed and not interactive))


def _show(chat: Chat, name: str) -> None:
    if not name:
        print("/image needs the name of a file")
        return
    try:
        chat.show(image(os.path.expanduser(name)))
    except argparse.ArgumentTypeError as error:
        print(error)


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
    """Read commands and questions until the end of input or /quit. Returns false if the server went away."""
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
            case "/image":
                _show(chat, rest.strip())
            case "/result":
                if not chat.result(rest.strip()):
                    return False
            case "/help":
                print(HELP)
            case _ if command.startswith("/"):
                print(f"there is no command {command}; /help lists the commands")
            case _:
                if not chat.answer(line):
                    return False
    return True
