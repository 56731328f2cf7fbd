"""`penstock adapters`: lists, loads, sends, unloads and pins the LoRA adapters of a server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.cli.calling.common import add_addr, complain, print_json, visible, with_client
from penstock.cli.calling.flag_values import words
from penstock.client import Adapter, Client

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


_EPILOG = """\
A request names an adapter to use it: `penstock generate --adapter NAME`. Whoever may send requests may list
adapters; to change them needs a key with the role control, if the server has keys. The server must have been
started with --max-adapters.

examples:
  penstock adapters list
  penstock adapters push sql out/sql-lora
  penstock adapters load sql
  penstock adapters push sql out/sql-lora-2 --replace
  penstock adapters pin sql
  penstock adapters unload sql
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "adapters",
        help="list, load, push, pin and unload LoRA adapters",
        description="List, load, push, pin and unload the LoRA adapters of a server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser(
        "list",
        help="show the adapters in the server's memory",
        description="Show the adapters in the server's memory: where each is, its rank and size, how many "
        "outputs run on it, when it was used last, and the beginning of its digest, which is the same for "
        "the same adapter.",
    )
    _finish(listing)
    loading = actions.add_parser(
        "load",
        help="have the server read one from its own disk",
        description="Have the server read an adapter from its own disk, below its --adapter-dir. A request "
        "that names an adapter there loads it, too; this checks it before.",
    )
    _add_name(loading)
    loading.add_argument(
        "--uri",
        type=words(),
        metavar="URI",
        help="file:// and the path of the directory, as the server sees it; default: the directory NAME",
    )
    _add_loading(loading)
    pushing = actions.add_parser(
        "push",
        help="send one to the server",
        description="Send an adapter from this machine to the server, which needs no disk for it. Checksums "
        "are compared on the way. If the command fails, nothing has changed, and it can be run again.",
    )
    _add_name(pushing)
    pushing.add_argument(
        "directory",
        metavar="DIR",
        help="the directory that PEFT wrote, with adapter_config.json and adapter_model.safetensors",
    )
    _add_loading(pushing, progress=True)
    unloading = actions.add_parser(
        "unload",
        help="drop one",
        description="Drop an adapter. Requests that run on it finish; new ones do not find it.",
    )
    _add_name(unloading)
    _finish(unloading)
    for action, what in (
        ("pin", "Keep an adapter's place on the device, so that no request waits for it."),
        ("unpin", "Let a pinned adapter give its place to others again."),
    ):
        pinning = actions.add_parser(action, help=what[0].lower() + what[1:-1], description=what)
        _add_name(pinning)
        _finish(pinning)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", type=words(), help="what requests ask for the adapter by")


def _add_loading(parser: argparse.ArgumentParser, *, progress: bool = False) -> None:
    parser.add_argument(
        "--replace",
        action="store_true",
        help="take the place of another adapter of this name; requests that run finish on the old one",
    )
    parser.add_argument(
        "--pin",
        action="store_true",
        help="keep its place on the device, as `penstock adapters pin`",
    )
    if progress:
        parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    _finish(parser)


def _finish(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_addr(parser)


def run(args: argparse.Namespace) -> int:
    """Do the action. Returns 2 for a directory that cannot be read."""
    return with_client(args, lambda client: _ACTIONS[args.action](client, args))


def _list(client: Client, args: argparse.Namespace) -> int:
    adapters = client.list_adapters()
    if args.json:
        for adapter in adapters:
            print_json(adapter)
    elif adapters:
        print(table(adapters))
    return 0


def _load(client: Client, args: argparse.Namespace) -> int:
    return _show(client.load_adapter(args.name, uri=args.uri, pinned=args.pin, replace=args.replace), args)


def _push(client: Client, args: argparse.Namespace) -> int:
    try:
        adapter = client.push_adapter(
            args.name,
            args.directory,
            pinned=args.pin,
            replace=args.replace,
            progress=not args.no_progress,
        )
    except OSError as error:
        complain(
            "adapters push", f"cannot read {error.filename or args.directory}: {error.strerror or error}"
        )
        return 2
    return _show(adapter, args)


def _unload(client: Client, args: argparse.Namespace) -> int:
    running = client.unload_adapter(args.name)
    if args.json:
        print_json({"name": args.name, "running_requests": running})
    else:
        print(visible(f"{args.name} is unloaded") + (f"; {running} outputs finish on it" if running else ""))
    return 0


def _pin(client: Client, args: argparse.Namespace) -> int:
    return _show(client.pin_adapter(args.name, args.action == "pin"), args)


def _show(adapter: Adapter, args: argparse.Namespace) -> int:
    if args.json:
        print_json(adapter)
    else:
        print(table([adapter]))
    return 0


_ACTIONS: dict[str, Callable[[Client, argparse.Namespace], int]] = {
    "list": _list,
    "load": _load,
    "push": _push,
    "unload": _unload,
    "pin": _pin,
    "unpin": _pin,
}


def table(adapters: Sequence[Adapter]) -> str:
    """Format one line for each adapter, in columns."""
    head = ("NAME", "STATE", "RANK", "SIZE", "RUNNING", "LAST USED", "DIGEST", "ALSO")
    rows = [head, *map(_row, adapters)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(adapter: Adapter) -> tuple[str, ...]:
    also = [*(["pinned"] if adapter.pinned else []), *([f"from {adapter.source}"] if adapter.source else [])]
    return (
        visible(adapter.name),
        adapter.state,
        str(adapter.rank),
        f"{adapter.size_bytes / 2**20:.1f} MiB",
        str(adapter.running_requests),
        _moment(adapter.last_used),
        adapter.digest.hex()[:12],
        visible(", ".join(also)),
    )


def _moment(moment: datetime | None) -> str:
    return "never" if moment is None else moment.isoformat(timespec="seconds")
