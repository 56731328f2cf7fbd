"""Flags that become request options: how the table in flag_table.py is read, offered and checked."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.client import Choice, RequestOptions

MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. Its value becomes the request option `to`, by default the option that has the flag's name."""

    name: str
    help: str
    metavar: str = ""
    parse: Callable[[str], Any] | None = None
    """None makes the flag a switch that sets `value`."""
    to: str = ""
    value: Any = True
    repeated: bool = False
    choices: Sequence[str] | None = None
    unset: str = ""
    """What leaving the flag out means, if --help should say so."""
    sent: bool = True
    """Whether it is a request option; otherwise the command itself reads it."""

    @property
    def option(self) -> str:
        return self.to or self.name.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, slots=True)
class Group:
    """Flags under one title of --help."""

    title: str
    flags: tuple[Flag, ...]
    note: str | None = None
    exclusive: bool = False
    """Whether at most one of the flags may be given."""


def add_groups(parser: argparse.ArgumentParser, groups: Sequence[Group], **defaults: Any) -> None:
    """Add the flags of these groups. `defaults` are by option; options without one are left to the server."""
    for group in groups:
        holder: argparse._ActionsContainer = parser.add_argument_group(group.title, group.note)
        if group.exclusive:
            holder = holder.add_mutually_exclusive_group()
        for flag in group.flags:
            _add(holder, flag, defaults.get(flag.option))


def _add(holder: argparse._ActionsContainer, flag: Flag, default: Any) -> None:
    meant = flag.unset if default is None else str(default)
    text = f"{flag.help}; default: {meant}" if meant else flag.help
    if flag.parse is None:
        holder.add_argument(
            flag.name, dest=flag.option, action="store_const", const=flag.value, default=default, help=text
        )
    else:
        holder.add_argument(
            flag.name,
            dest=flag.option,
            action="append" if flag.repeated else "store",
            type=flag.parse,
            choices=flag.choices,
            metavar=flag.metavar or None,
            default=default,
            help=text,
        )


def options_of(args: argparse.Namespace, groups: Sequence[Group]) -> RequestOptions:
    """Return the request options that were given."""
    given: dict[str, Any] = {flag.option: getattr(args, flag.option) for flag in _sent(groups)}
    if given.get("logit_bias") is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    if isinstance(given.get("constraint"), list):  # of --choice
        given["constraint"] = Choice(given["constraint"])
    return cast(RequestOptions, given)


def _sent(groups: Sequence[Group]) -> Iterator[Flag]:
    return (flag for group in groups for flag in group.flags if flag.sent)


def given_flags(args: argparse.Namespace, group: Group) -> list[str]:
    """List the names of the flags that were given."""
    return [flag.name for flag in group.flags if getattr(args, flag.option) is not None]


def problem_of(args: argparse.Namespace) -> str | None:
    """Say what is wrong with flags that are right by themselves, and what to do; None if nothing is."""
    names = [tool.name for tool in args.tools or ()]
    choice = args.tool_choice
    if choice not in (None, "auto", "none", *names) and not (choice == "required" and names):
        if not names:
            return (
                f"--tool-choice {choice} needs --tools, a JSON file of the functions that the model may call"
            )
        return f"--tool-choice {choice} names no tool of --tools, which has {', '.join(names)}"
    if args.min_tokens is not None and args.max_tokens is not None and args.min_tokens > args.max_tokens:
        return (
            f"--min-tokens {args.min_tokens} is above --max-tokens {args.max_tokens}; "
            "raise --max-tokens or lower --min-tokens"
        )
    if len(args.stop or ()) > MAX_STOPS:
        return f"--stop was given {len(args.stop)} times; at most {MAX_STOPS} are allowed"
    return None
