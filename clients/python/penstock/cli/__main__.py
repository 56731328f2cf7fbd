"""`penstock`: one program with one module for each command.

Only the chosen command's module is imported, so that `penstock --help` is fast and no command of the client
loads JAX. The module of a command has `add_parser(subparsers)` and `run(args) -> int`.

The distribution penstock-client has this program and the commands that call a server. The distribution
penstock adds the commands that need the engine; without it they say what to install.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

COMMANDS = {
    "demo": "start the built-in demo model, show one answer, and stay up",
    "serve": "serve a model over gRPC",
    "check": "say whether a checkpoint would serve, and how much memory it takes",
    "plan": "say on which chips a model fits, and how fast it can be there",
    "quantize": "write a checkpoint with weights of 4 or 8 bits",
    "compile": "compile a model's programs for a chip that is not here",
    "generate": "continue a prompt, streaming to the terminal",
    "chat": "talk to a model in the terminal",
    "embed": "make vectors of texts",
    "classify": "tell the classes of texts",
    "rerank": "sort documents by their relevance to a query",
    "info": "show a server's model, limits and load",
    "top": "watch a server's load, latencies and requests",
    "health": "say whether a server takes requests, or wait until it does",
    "bench": "measure a server's latency and throughput",
    "openai": "speak OpenAI's HTTP API, as a client of a server",
    "batch": "run a file of requests in OpenAI's form, behind everybody else's",
    "keys": "make, list and revoke the keys of a server",
    "usage": "show what every key used",
    "push-weights": "replace the weights of a running server",
    "commit-weights": "swap in weights that were pushed with --stage-only",
    "discard-weights": "drop weights that were pushed with --stage-only",
    "adapters": "list, load, push, pin and unload LoRA adapters",
    "pause": "stop a server from making tokens",
    "resume": "let a paused server go on",
    "flush-cache": "forget all cached prompt prefixes",
    "trace": "change how much a server traces, or show it",
    "profile": "record what a server's engine does in its next steps",
}
"""From the name of a command to its line in `penstock --help`. Its module has the same name, with
underscores.
"""
_SERVER = {"demo", "serve", "check", "plan", "compile", "quantize", "openai", "batch", "keys", "usage"}
"""Commands whose modules come with the engine, in `penstock.server_cli.commands`."""


def version() -> str:
    """Return the version of the installed distributions; both have the same."""
    try:
        return metadata.version("penstock-client")
    except metadata.PackageNotFoundError:  # the source tree was not installed
        return "unknown"


def _module_of(command: str) -> str:
    folder = "penstock.cli.commands"
    if command in _SERVER:
        folder = "penstock.server_cli.commands"
    return f"{folder}.{command.replace('-', '_')}"


def _imported(command: str) -> ModuleType:
    """Import the module of a command, while Python does not look for garbage: what an import makes stays, and
    looking takes a tenth of the import's processor time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(_module_of(command))
    finally:
        if was_enabled:
            gc.enable()


def _lacking(command: str | None, module: str | None) -> str:
    """Say what to do where `module` cannot be imported, which `command` needs.

    No index has Penstock, and on PyPI the name `penstock` is another project's, so it names no package.
    """
    if module is not None and module.startswith("penstock."):
        lacking = "the engine, which is not installed here"
        advice = "penstock-client only calls servers. Install the distribution penstock too,"
    else:
        lacking = f"the Python module {module}, which is not installed here"
        advice = f"Install the distribution {'penstock' if command in _SERVER else 'penstock-client'} again,"
    return (
        f"penstock {command}: it needs {lacking}. {advice} from a clone of Penstock "
        "(pip install ./clients/python .) or from the wheels that `make wheel` builds there"
    )


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated flags: a script that used one could break when a flag is added.

    argparse makes the parsers of commands of the same class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})


class _CommandList(argparse.HelpFormatter):
    """Leaves room for the indent of commands, which argparse forgets: their lines would begin below longer
    names.
    """

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        self._action_max_length += self._indent_increment


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (2: wrong usage, 130: interrupted)."""
    # Otherwise transformers warns that there is no PyTorch. That is intended here, and would worry people.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    # Our own messages say what goes wrong with a connection. gRPC's core also writes to stderr, and quotes
    # what peers send, so it is silenced. It reads this variable once, when a command's module imports it
    # below.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    parser = Parser(
        prog="penstock", description="A gRPC server for language models.", formatter_class=_CommandList
    )
    parser.add_argument("--version", action="version", version=f"penstock {version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    modules = {}
    try:
        for name, line in COMMANDS.items():
            if name == chosen:
                modules[name] = _imported(name)
                modules[name].add_parser(subparsers)
            else:
                subparsers.add_parser(name, help=line)
        args, unknown = parser.parse_known_args(arguments)
        # reported by the command's parser, because its usage helps; argparse itself would show that of all
        # commands
        if unknown:
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
        print(_lacking(chosen, error.name), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
