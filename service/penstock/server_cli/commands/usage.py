"""`penstock usage`: shows what every key used, from the file of `penstock serve --usage`. Needs no server."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.calling.common import complain
from penstock.runtime.errors import ConfigError
from penstock.service.usage.ledger import HOUR_S, Counts, Kind, read_usage
from penstock.service.usage.meter import Outcome

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = """\
examples:
  penstock usage usage.db
  penstock usage usage.db --since 2026-11-01 --until 2026-12-01
  penstock usage usage.db --by day --key alice
  penstock usage usage.db --by key --by reason --format csv > refusals.csv

A request is counted in the hour in which it ends (UTC), even if its client was gone. Tokens are all that the
server computed, whether or not they were read; cached tokens are those of the prompt that were found in the
prefix cache, and reasoning tokens those of the completion that the model thought with. "-" stands for all
callers of a server without keys.
"""
_GROUPS: Mapping[str, Callable[[Kind], str]] = {
    "key": lambda kind: kind.key or "-",
    "hour": lambda kind: _when(kind.hour).strftime("%Y-%m-%dT%H:00Z"),
    "day": lambda kind: _when(kind.hour).strftime("%Y-%m-%d"),
    "month": lambda kind: _when(kind.hour).strftime("%Y-%m"),
    "method": lambda kind: kind.method.rpartition("/")[2] or "-",
    "reason": lambda kind: kind.reason or "-",
}
_OUTCOMES = tuple(outcome.value for outcome in Outcome)
_TOKENS = ("prompt", "cached", "completion", "reasoning")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "usage",
        help="show what every key used",
        description="Show requests and tokens of every key, from the file of `penstock serve --usage FILE`.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="the file of --usage; a server may be writing it"
    )
    parser.add_argument(
        "--since", type=_time, metavar="TIME", help="from this time on: 2026-11-01 or 2026-11-01T12:00Z"
    )
    parser.add_argument(
        "--until", type=_time, metavar="TIME", help="before this time; both are rounded to whole hours"
    )
    parser.add_argument("--key", metavar="ID", help="count only this key")
    parser.add_argument(
        "--by",
        action="append",
        choices=tuple(_GROUPS),
        help="show one row for each of these; may be repeated; default: key",
    )
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Print the usage. Returns 1 if the file cannot be read."""
    try:
        found = read_usage(args.file, *_span(args.since, args.until))
    except ConfigError as error:
        complain(args.command, str(error))
        return 1
    groups = args.by or ["key"]
    table = rows_of(found, groups, args.key)
    if args.format == "json":
        print(json.dumps(table, indent=2))
    elif args.format == "csv":
        _write_csv(table, groups)
    elif table:
        _print_table(table, groups)
    else:
        print("no usage in that time")
    return 0


def rows_of(
    usage: Mapping[Kind, Counts], groups: Sequence[str], key: str | None = None
) -> list[dict[str, str | int]]:
    """Return one row for each combination of `groups`, in their order: requests, in all and by outcome, and
    tokens.
    """
    sums: dict[tuple[str, ...], dict[str, int]] = {}
    for kind, counts in usage.items():
        if key is not None and kind.key != key:
            continue
        name = tuple(_GROUPS[group](kind) for group in groups)
        row = sums.setdefault(name, dict.fromkeys(("requests", *_OUTCOMES, *_TOKENS), 0))
        row["requests"] += counts.requests
        row[kind.outcome.value] += counts.requests
        row["prompt"] += counts.prompt_tokens
        row["cached"] += counts.cached_prompt_tokens
        row["completion"] += counts.completion_tokens
        row["reasoning"] += counts.reasoning_tokens
    return [{**dict(zip(groups, name, strict=True)), **row} for name, row in sorted(sums.items())]


def _print_table(table: Sequence[Mapping[str, str | int]], groups: Sequence[str]) -> None:
    columns = list(table[0])
    total = {c: "" if c in groups else sum(int(row[c]) for row in table) for c in columns}
    total[columns[0]] = "total"
    cells = [[_cell(row[c]) for c in columns] for row in (dict.fromkeys(columns, ""), *table, total)]
    cells[0] = columns
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print(
            "  ".join(
                _aligned(c, t, w, groups) for c, t, w in zip(columns, row, widths, strict=True)
            ).rstrip()
        )


def _aligned(column: str, text: str, width: int, groups: Sequence[str]) -> str:
    return text.ljust(width) if column in groups else text.rjust(width)


def _cell(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _write_csv(table: Sequence[Mapping[str, str | int]], groups: Sequence[str]) -> None:
    writer = csv.DictWriter(sys.stdout, [*groups, "requests", *_OUTCOMES, *_TOKENS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)


def _when(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _time(text: str) -> datetime:
    """Parse a day or a moment; UTC unless it has another time zone."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write for example 2026-11-01") from error
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


def _span(since: datetime | None, until: datetime | None) -> tuple[int, int]:
    """Return the hours that overlap this time, in seconds since 1970."""
    first = 0 if since is None else int(since.timestamp()) // HOUR_S * HOUR_S
    last = _when(2**33) if until is None else until + timedelta(hours=1, microseconds=-1)
    return first, int(last.timestamp()) // HOUR_S * HOUR_S
