"""The flags of a command as tables, made from its own parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path


def page(parser: argparse.ArgumentParser) -> str:
    """Write a table for each group of flags that --help shows."""
    return "\n".join(line for group in parser._action_groups for line in _group(parser, group))


def _group(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> Iterator[str]:
    actions = [action for action in group._group_actions if action.dest != "help"]
    if not actions:
        return
    yield from (f"## {(group.title or '').capitalize()}", "")
    if group.description:
        yield from (f"{group.description.capitalize()}.", "")
    yield from ("| flag | what it does |", "|---|---|")
    for action in actions:
        text = parser._get_formatter()._expand_help(action).replace(str(Path.home()), "~")
        yield f"| {_name(action)} | {text.replace('|', chr(92) + '|').replace('<', '&lt;')} |"
    yield ""


def _name(action: argparse.Action) -> str:
    """Name a flag as --help shows it: all spellings, and what stands behind them."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    values = "" if action.nargs == 0 else f" {action.metavar or _choices(action)}"
    return f"`{', '.join(action.option_strings)}{values}`"


def _choices(action: argparse.Action) -> str:
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()
