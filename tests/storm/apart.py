"""The honest callers in a process of their own, so that the attackers' event loop does not affect their
times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.storm.honest import Honest

LEARN, GO_ON, REST = "learn", "go on", "rest"
_LINE_BYTES = 64 * 2**20
"""The times of all answers of a storm come in one line."""
_LAST_ANSWERS_S = 330.0


@dataclass(frozen=True, slots=True)
class Answered:
    """What was answered between GO_ON and REST."""

    first_token_s: list[float]
    wrong: list[str]
    refused: Counter[str] = field(default_factory=Counter)


class Callers:
    """The process as its parent sees it: one command at a time, and one answer to each."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def learn(self) -> None:
        """See `Honest.learn`."""
        await self._say(LEARN)
        await self._heard()

    async def go_on(self) -> None:
        """Begin to ask, and go on until `rest`."""
        await self._say(GO_ON)

    async def rest(self) -> Answered:
        """Stop asking. Returns what was answered since `go_on`."""
        await self._say(REST)
        told = await self._heard()
        return Answered(told["first_token_s"], told["wrong"], Counter(told["refused"]))

    async def _say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        await self._process.stdin.drain()

    async def _heard(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(_LAST_ANSWERS_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the honest callers has ended")
        return json.loads(line)


@contextlib.asynccontextmanager
async def honest_callers(address: str, secret: str) -> AsyncIterator[Callers]:
    """Start them; they are ended with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.storm.apart"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps([address, secret]).encode() + b"\n")
        yield Callers(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _obey() -> None:
    """Run the process: read commands until there are no more."""
    address, secret = json.loads(await asyncio.to_thread(sys.stdin.readline))
    honest, until, asking = Honest(address, secret), asyncio.Event(), None
    while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if command == LEARN:
            await honest.learn()
            _tell("learned")
        elif command == GO_ON:
            honest.wrong.clear()
            honest.refused.clear()
            until.clear()
            asking = asyncio.create_task(honest.go_on(until))
        elif command == REST and asking is not None:
            until.set()
            await asking
            told = {name: getattr(honest, name) for name in ("first_token_s", "wrong", "refused")}
            _tell(told)


def _tell(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_obey())
