"""`penstock`: one program, a module per command.

Only the chosen command's module is imported, so that `penstock --help` is instant and no command of the
client pays for JAX. A module of a command has `add_parser(subparsers)` and `run(args) -> int`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

COMMANDS = {
    "demo": "start the built-in demo model, show one answer, and stay up",
    "serve": "serve a model over gRPC",
    "generate": "continue a prompt, streaming to the terminal",
    "chat": "talk to a model in the terminal",
    "info": "show a server's model, limits and load",
    "health": "say whether a server takes requests, or wait until it does",
    "bench": "measure a server's latency and throughput",
    "keys": "make, list and revoke the keys of a server",
    "usage": "show what every key used",
}
"""Name of the command and of its module in penstock.cli.commands, and its line in `penstock --help`."""


def version() -> str:
    """Of the installed distribution."""
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations of flags: a script that used one would break with the next flag.

    Parsers of commands are of this class too, as argparse makes them of the class of the first.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: wrong usage, 130: interrupted)."""
    # transformers otherwise warns that there is no PyTorch, which is by design and would worry people.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    # What goes wrong with a connection is told in our words, and in them alone: gRPC's core writes to stderr
    # by itself, and quotes what peers send. It reads this once, when a command's module imports it below.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    parser = Parser(prog="penstock", description="A gRPC server for language models.")
    parser.add_argument("--version", action="version", version=f"penstock {version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    modules = {}
    try:
        for name, line in COMMANDS.items():
            if name == chosen:
                modules[name] = importlib.import_module(f"penstock.cli.commands.{name}")
                modules[name].add_parser(subparsers)
            else:
                subparsers.add_parser(name, help=line)
        args, unknown = parser.parse_known_args(arguments)
        if unknown:  # by the command's parser, whose usage helps; argparse itself would show the one of all
            subparsers.choices.get(args.command, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        code = modules[args.command].run(args)
        sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # e.g. `penstock generate ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        print(
            f"penstock {chosen}: it needs the Python module {error.name}, which is not installed here; "
            "pip install penstock",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
