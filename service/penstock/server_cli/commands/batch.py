"""`penstock batch`: runs a file of requests in OpenAI's form, and writes a file of answers."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from starlette.types import ASGIApp
from tqdm import tqdm

from penstock.cli.calling.common import add_addr, complain, explain
from penstock.cli.calling.connection import WrongConnection, connection
from penstock.cli.calling.flag_values import number, whole
from penstock.client import PenstockClientError
from penstock.openai.app import create_app
from penstock.openai.batches.lines import (
    Checked,
    Counts,
    Ids,
    Terms,
    WrongLine,
    WrongOutput,
    check,
    pending,
    take_in,
)
from penstock.openai.batches.running import TRY_AGAIN, Done, NotTaken, run_lines
from penstock.openai.calls import make_call
from penstock.openai.failures import of_client_error
from penstock.openai.front import Front
from penstock.openai.settings import Settings
from penstock.server_cli.serving.flags import size, size_text

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

STOPPED: Final = 3
"""The exit code of a run that ended before its last line."""
_MOST_CONCURRENCY: Final = 4096
_PAUSE_S: Final = 0.5
_DESCRIPTION: Final = """\
Run the requests in the file IN, and write their answers to the file OUT. Both have a line of JSON for each,
in the form of OpenAI's batches. A line of IN is such as

  {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "Hi"}}

The url is /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses. The body is read as the
OpenAI front reads it. No front needs to run: the command calls the server itself.
"""
_EPILOG: Final = """\
All lines are checked first. If one is no such request, has the custom_id of another, or names another model,
nothing is run, and such lines are told. An error of a single request is the answer of its line.

Answers come in the order in which they are made; custom_id says whose they are. Run the same command again
after it was stopped or killed: it leaves out the lines that have an answer in OUT. To run failed lines again,
take their answers out of OUT.

On a server with --scheduling-policy priority everybody else's requests go first, but for lines whose body has
a priority of its own. Lines that the server refuses for the moment, because it is full or the key has used
its rate, are tried again when it says. If it does not take the key any more, the run is given up.

exit codes: 0 if all lines have answers that are no errors, 1 if some answers are errors, 2 if nothing was run
because of flags or files, 3 if the run was given up before its end, 130 if it was interrupted
"""


class _Cannot(Exception):
    """Nothing can be run. The message says why."""


class _GivenUp(Exception):
    """The run ends before its last line. The message says why."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "batch",
        help="run a file of requests in OpenAI's form, behind everybody else's",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", metavar="IN", type=Path, help="the requests, one on each line")
    parser.add_argument(
        "output", metavar="OUT", type=Path, help="where the answers go; a file that exists is added to"
    )
    parser.add_argument(
        "--concurrency",
        type=whole(1, _MOST_CONCURRENCY),
        default=64,
        metavar="N",
        help="run so many lines at a time; default: %(default)s",
    )
    parser.add_argument(
        "--give-up-after",
        type=number(above=0),
        default=600.0,
        metavar="S",
        help="end the run if the server refuses a line for so many seconds; default: %(default)g",
    )
    parser.add_argument(
        "--request-timeout",
        type=number(above=0),
        default=Settings().request_timeout_s,
        metavar="S",
        help="a line may take this long at the server; default: %(default)g",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=size,
        default=Settings().max_body_bytes,
        metavar="SIZE",
        help=f"the body of a line; default: {size_text(Settings().max_body_bytes)}",
    )
    add_addr(parser, timeout=False, retries=False)


def run(args: argparse.Namespace) -> int:
    """Run the file. Returns the exit code that --help tells."""
    return asyncio.run(run_async(args))


async def run_async(args: argparse.Namespace) -> int:
    """Run the file on the running event loop. Returns the exit code."""
    try:
        _check_files(args.input, args.output)
        return await _run(args, _settings(args))
    except (WrongConnection, ValueError, _Cannot) as error:
        complain("batch", str(error))
        return 2
    except _GivenUp as error:
        why = str(error)
    except OSError as error:  # of a file that could be used at the beginning, such as a full disk
        why = f"{error.filename or args.output}: {error.strerror}"
    complain("batch", f"{why}; the same command goes on where this run ended")
    return STOPPED


def _check_files(given: Path, output: Path) -> None:
    """Raise _Cannot for what cannot be read twice, or what the answers cannot be added to."""
    if not given.is_file():
        raise _Cannot(f"{given}: {'is no file' if given.exists() else 'there is no such file'}")
    if output.exists() and not output.is_file():
        raise _Cannot(f"{output}: is no file")
    if output.exists() and output.samefile(given):
        raise _Cannot(f"{output}: is the file of the requests")


def _settings(args: argparse.Namespace) -> Settings:
    server = connection(args)
    return Settings(
        addr=args.addr,
        tls=server["tls"],
        token=server["token"],
        insecure=args.insecure or server["token"] is None,  # without a key none can be read on the way
        request_timeout_s=args.request_timeout,
        max_body_bytes=args.max_body_bytes,
        max_waiting_body_bytes=args.concurrency * args.max_body_bytes,
        access_log=False,
    )


async def _run(args: argparse.Namespace, settings: Settings) -> int:
    front = Front.made(settings)
    try:
        terms = await _terms(front, args)
        with Ids() as ids:
            found = _checked(args.input, terms, ids)
            with _opened(args.output) as output:
                before = Counts()
                try:
                    take_in(output, ids, before)
                except WrongOutput as wrong:
                    raise _Cannot(f"{args.output}: {wrong}; give the answers another file") from None
                return await _answer(args, create_app(front), terms, ids, output, found, before)
    finally:
        await front.backend.close()


async def _terms(front: Front, args: argparse.Namespace) -> Terms:
    """Ask the server what lines may be. Raises _Cannot if it refuses the caller, and _GivenUp if it takes no
    calls.
    """
    give_up_at = time.monotonic() + args.give_up_after
    while True:
        try:
            facts = await front.backend.facts(make_call({"headers": []}, 0))
            break
        except PenstockClientError as error:
            told = of_client_error(error, {})
            if told.status not in TRY_AGAIN:
                raise _Cannot(explain(error, args.addr)) from None
            pause_s = max(_PAUSE_S, told.retry_after or 0.0)
            if time.monotonic() + pause_s > give_up_at:
                raise _GivenUp(explain(error, args.addr)) from None
        await asyncio.sleep(pause_s)
    has_priority = "priority" in facts.features
    if not has_priority:
        print(
            "penstock batch: the server does not schedule by priority, so these requests take turns with "
            "everybody else's; see --scheduling-policy of penstock serve",
            file=sys.stderr,
        )
    return Terms(model=facts.only_model, max_body_bytes=args.max_body_bytes, has_priority=has_priority)


def _opened(path: Path) -> IO[bytes]:
    """Open the file of answers, which no other run may write to. Raises _Cannot."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as error:
        raise _Cannot(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise _Cannot(f"{path}: another run writes to it") from None
    return file


def _checked(path: Path, terms: Terms, ids: Ids) -> Checked:
    """Check the input. Raises _Cannot if it has problems, and tells them on stderr."""
    try:
        found = check(path, terms, ids)
    except OSError as error:
        raise _Cannot(f"{path}: {error.strerror}") from None
    if found.problems:
        for problem in found.problems:
            complain("batch", f"{path}: {problem}")
        if found.num_problems > len(found.problems):
            complain("batch", f"and {found.num_problems - len(found.problems)} more")
        raise _Cannot("nothing was run")
    return found


async def _answer(
    args: argparse.Namespace,
    app: ASGIApp,
    terms: Terms,
    ids: Ids,
    output: IO[bytes],
    found: Checked,
    before: Counts,
) -> int:
    """Run the lines that have no answer, tell what came of them, and return the exit code."""
    began, counts = time.monotonic(), Counts()
    bar: Any = tqdm(
        total=found.total,
        initial=before.ended,
        unit="line",
        disable=not sys.stderr.isatty(),
        leave=False,
    )

    async def write(done: Done) -> None:
        output.write(done.written())
        output.flush()
        counts.add(is_ok=done.is_ok)
        bar.update()

    try:
        await run_lines(
            app,
            pending(args.input, terms, ids),
            write,
            key="",
            concurrency=args.concurrency,
            patience_s=args.give_up_after,
        )
    except NotTaken as error:
        raise _GivenUp(f"the server takes no more lines: {error.message}") from None
    except WrongLine as error:
        raise _GivenUp(f"{args.input} was changed meanwhile: {error}") from None
    finally:
        bar.close()
        _tell(found.total, before, counts, time.monotonic() - began)
    return 1 if before.failed + counts.failed else 0


def _tell(total: int, before: Counts, counts: Counts, seconds: float) -> None:
    """Print what came of the lines."""
    parts = [f"{before.completed + counts.completed} answered", f"{before.failed + counts.failed} failed"]
    if left := total - before.ended - counts.ended:
        parts.append(f"{left} not run")
    earlier = f", {before.ended} of them by earlier runs" if before.ended else ""
    print(f"{total} lines: {', '.join(parts)}{earlier}; {seconds:.1f} s")
