"""`penstock keys add|list|revoke`: changes the file that `penstock serve --keys` reads. Needs no server."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.runtime.errors import ConfigError
from penstock.server_cli.processes.servers import reload_hint
from penstock.service.access.callers import Role
from penstock.service.access.key_file import ID_RULE, MAX_LIMIT, KeyEntry, is_key_id, parse_time
from penstock.service.access.key_store import change_keys, digest_of, exposed, new_secret, read_keys

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = """\
examples:
  penstock keys add alice --file keys.json --requests-per-minute 60 --tokens-per-minute 100000
  penstock keys add trainer --file keys.json --role infer --role control --expires-in 30
  penstock keys list --file keys.json
  penstock keys revoke alice --file keys.json

A key is "psk_ID_" and 256 random bits. `add` prints it once; the file keeps only its SHA-256, from which the
key cannot be computed. Callers send it as metadata, `authorization: Bearer KEY`. A running server reads the
file again on SIGHUP; each change prints the command for that.
"""
_DAY_S = 86_400
_LIMITS = {
    "--requests-per-minute": "calls of Generate, Stream, Embed, Score, Rerank, Classify, Tokenize and "
    "Detokenize together; a minute's worth may come at once after a pause",
    "--tokens-per-minute": "tokens of prompts and outputs together, counted as they are generated",
    "--max-parallel-requests": "such calls at once, waiting or running",
}


def add_parser(subparsers: Subparsers) -> None:
    """Describe the command's arguments."""
    parser = subparsers.add_parser(
        "keys",
        help="make, list and revoke the keys of a server",
        description="Make, list and revoke the keys that `penstock serve --keys FILE` asks callers for.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_adding(actions)
    listing = actions.add_parser(
        "list",
        help="show the keys, without secrets",
        description="Show every key's id, roles, limits and state. There are no secrets to show.",
    )
    _add_file(listing)
    revoking = actions.add_parser(
        "revoke",
        help="refuse a key from now on",
        description="Mark a key as revoked. Its entry stays, so that its id is not given to anybody else and "
        "logs and usage keep their meaning. Calls that are under way go on; a caller with the role control "
        "can end them with Abort.",
    )
    revoking.add_argument("id", metavar="ID", help="the key's id, as `penstock keys list` shows it")
    _add_file(revoking)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", type=Path, required=True, metavar="FILE", help="the file given to penstock serve --keys"
    )


def _add_adding(actions: Subparsers) -> None:
    adding = actions.add_parser(
        "add",
        help="make a key and print it, once",
        description="Make a key, add its SHA-256 to the file (which is created if it is missing) and print "
        "the key to stdout, alone on its line. It cannot be shown again. A limit that is not given does not "
        "apply.",
    )
    adding.add_argument("id", metavar="ID", help=f"names the caller in logs and usage: {ID_RULE}")
    _add_file(adding)
    adding.add_argument(
        "--role",
        action="append",
        choices=[role.value for role in Role],
        help="infer: generate, tokenize, look at model and load, abort one's own requests; control: all of "
        "that, and also change requests of others, caches, weights and adapters; may be repeated; default: "
        "infer",
    )
    for flag, what in _LIMITS.items():
        adding.add_argument(flag, type=_limit, metavar="N", help=what)
    adding.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        metavar="NAME",
        help="allow only this served model; may be repeated; default: any",
    )
    adding.add_argument(
        "--adapter",
        dest="adapters",
        action="append",
        default=[],
        metavar="NAME",
        help="allow only this adapter, beside the model without one; may be repeated; default: any",
    )
    until = adding.add_mutually_exclusive_group()
    until.add_argument(
        "--expires",
        type=_time,
        metavar="TIME",
        help="refuse the key from this time on, given with a time zone, such as 2027-01-31T00:00:00Z",
    )
    until.add_argument(
        "--expires-in", type=_days, metavar="DAYS", help="refuse the key DAYS days from now on"
    )
    adding.add_argument(
        "--certificate",
        dest="certificates",
        action="append",
        default=[],
        metavar="NAME",
        help="a client certificate with this CN or SAN stands for the key; may be repeated",
    )
    adding.add_argument(
        "--certificate-only", action="store_true", help="make no key: the id is only for the certificates"
    )
    adding.add_argument(
        "--private-cache",
        action="store_true",
        help="share no cached prefixes with other keys, so that their timing reveals nothing about prompts",
    )


def run(args: argparse.Namespace) -> int:
    """Run the action. Returns 0, or 1 with one line on stderr."""
    try:
        if args.action == "list":
            return _list(args.file)
        if args.action == "revoke":
            return _revoke(args.id, args.file)
        return _add(args)
    except ConfigError as error:
        print(f"penstock keys: {error}", file=sys.stderr)
        return 1


def _add(args: argparse.Namespace) -> int:
    key_id: str = args.id
    if not is_key_id(key_id):
        raise ConfigError(f"ID: must be {ID_RULE}, not {key_id!r}")
    if args.certificate_only and not args.certificates:
        raise ConfigError("--certificate-only needs a --certificate")
    secret = "" if args.certificate_only else new_secret(key_id)
    entry = KeyEntry(
        key_id,
        digest_of(secret) if secret else "",
        frozenset(map(Role, args.role or ["infer"])),
        args.requests_per_minute,
        args.tokens_per_minute,
        args.max_parallel_requests,
        tuple(dict.fromkeys(args.models)),
        adapters=tuple(dict.fromkeys(args.adapters)),
        expires=args.expires or args.expires_in,
        certificates=tuple(dict.fromkeys(args.certificates)),
        private_cache=args.private_cache,
    )

    def added(entries: tuple[KeyEntry, ...]) -> Sequence[KeyEntry]:
        for other in entries:
            if other.id == entry.id:
                state = "is revoked" if other.revoked else "exists"
                raise ConfigError(
                    f"{args.file} has a key {entry.id!r} already, which {state}; choose another ID"
                )
            if both := set(other.certificates).intersection(entry.certificates):
                raise ConfigError(f"the certificate {min(both)!r} stands for {other.id!r} already")
        return [*entries, entry]

    change_keys(args.file, added)
    if secret:
        print(secret, flush=True)
        _tell(
            f"added {key_id!r} to {args.file}; the key above is not kept anywhere and cannot be shown again"
        )
    else:
        _tell(f"added {key_id!r} to {args.file}, for its certificates only")
    _tell(reload_hint(args.file))
    return 0


def _revoke(key_id: str, file: Path) -> int:
    if not file.exists():
        raise ConfigError(f"{file} does not exist")
    revoked_before = False

    def revoked(entries: tuple[KeyEntry, ...]) -> Sequence[KeyEntry]:
        nonlocal revoked_before
        found = [entry for entry in entries if entry.id == key_id]
        if not found:
            raise ConfigError(f"{file} has no key {key_id!r}; `penstock keys list --file {file}` shows them")
        revoked_before = found[0].revoked
        return [dataclasses.replace(e, revoked=True) if e.id == key_id else e for e in entries]

    change_keys(file, revoked)
    _tell(f"{key_id!r} was revoked before" if revoked_before else f"revoked {key_id!r}")
    _tell(reload_hint(file))
    return 0


def _list(file: Path) -> int:
    entries = read_keys(file)
    if warning := exposed(file):
        _tell(f"warning: {warning}")
    print(table(entries, datetime.now(UTC)))
    return 0


def table(entries: Sequence[KeyEntry], now: datetime) -> str:
    """Format one line for each key, in columns."""
    head = ("ID", "STATE", "ROLES", "REQ/MIN", "TOKENS/MIN", "PARALLEL", "EXPIRES", "ALSO")
    rows = [head, *(_row(entry, now) for entry in entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(entry: KeyEntry, now: datetime) -> tuple[str, ...]:
    expired = entry.expires is not None and now >= entry.expires
    also = [
        *(["no key"] if not entry.sha256 else []),
        *(f"certificate {name!r}" for name in entry.certificates),
        *(f"model {name!r}" for name in entry.models),
        *(f"adapter {name!r}" for name in entry.adapters),
        *(["private cache"] if entry.private_cache else []),
    ]
    limits = (entry.requests_per_minute, entry.tokens_per_minute, entry.max_parallel_requests)
    return (
        entry.id,
        "revoked" if entry.revoked else "expired" if expired else "valid",
        ",".join(sorted(role.value for role in entry.roles)),
        *("any" if limit is None else str(limit) for limit in limits),
        "never" if entry.expires is None else entry.expires.isoformat(timespec="seconds"),
        ", ".join(also),
    )


def _tell(text: str) -> None:
    """Print to stderr: stdout has only what a script wants."""
    print(text, file=sys.stderr)


def _limit(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value <= MAX_LIMIT:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MAX_LIMIT}, not {text!r}")
    return value


def _time(text: str) -> datetime:
    try:
        return parse_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _days(text: str) -> datetime:
    """Return the moment that many days from now; fractions are allowed."""
    try:
        days = float(text)
        if not 0 < days < 100_000:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of days above 0, not {text!r}") from None
    return (datetime.now(UTC) + timedelta(seconds=days * _DAY_S)).replace(microsecond=0)
