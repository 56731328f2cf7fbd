"""Draws docs/images/top.svg: what `penstock top` shows of a real server under load.

    python -m tools.site.top_picture

It starts a server of the demo model, has it write stories for three minutes, now few and now many at
a time, watches it meanwhile as `penstock top` does, and draws the last report.
"""

from __future__ import annotations

import io
import math
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from penstock.cli.watching.following import Found
from penstock.cli.watching.history import SPAN_S
from penstock.cli.watching.picture import Picture
from penstock.cli.watching.view import Screen, view
from penstock.client import Client
from tools.site.pictures import IMAGES, demo_server

COLUMNS, LINES = 110, 28
MOST_AT_ONCE = 56
WAVE_S = 72.0
"""The stories come in waves of this length; the last one is at its height when the picture is taken."""
SERVER_FLAGS = ("--max-num-seqs", "32", "--kv-cache-bytes", str(16 * 2**20))
"""Fewer rows than are wanted at times, so that some wait, and a cache that they fill for the most part."""
BEGINNING = (
    "Once upon a time there was a little girl named Lily. She lived in a small house near a big forest with "
    "her mom, her dad and her dog. Every day she went outside to play with her friends. They ran in the "
    "grass, they climbed the trees, and they made up stories about the animals that lived under the ground. "
)
"""Is common to all stories, so that the prefix cache has something to find."""
OPENINGS = ("One day she", "Her dog wanted to", "In the forest there was", "Then it began to rain, and")


def at_once(passed_s: float) -> int:
    """Tell how many stories are wanted at this time."""
    wave = (1 - math.cos(2 * math.pi * passed_s / WAVE_S)) / 2
    return round(6 + (MOST_AT_ONCE - 6) * wave * wave)


def write_stories(addr: str, number: int, began_s: float, ended: threading.Event) -> None:
    """Ask for one story after the other while so many are wanted."""
    chance = random.Random(number)
    with Client(addr) as client:
        for count in range(100_000):
            if ended.is_set():
                return
            if number >= at_once(time.monotonic() - began_s):
                ended.wait(0.2)
                continue
            client.generate(
                BEGINNING + chance.choice(OPENINGS),
                max_tokens=chance.randint(40, 220),
                seed=chance.randrange(2**31),
                request_id=f"story-{number:02d}-{count}",
            )


def watch(addr: str, seconds: float) -> Picture:
    """Return what a watcher of that long has seen."""
    picture = Picture(addr)
    with Client(addr) as client:
        picture.take(Found(client.model_info().model))
        ends = time.monotonic() + seconds
        with client.watch_load(interval=0.5, max_requests=50) as reports:
            for report in reports:
                picture.take(report)
                if time.monotonic() > ends and report.load.queued_requests:
                    return picture
    raise AssertionError("the server stopped")


def drawing(picture: Picture) -> str:
    """Draw the SVG, without the fonts that rich would have loaded from the network."""
    console = Console(
        record=True,
        width=COLUMNS,
        height=LINES,
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
    )
    console.print(view(picture.shown(), Screen(COLUMNS, LINES)))
    made = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="penstock top"), flags=re.DOTALL)
    return made.replace("Fira Code", "ui-monospace, Menlo, Consolas")


def main() -> None:
    ended = threading.Event()
    with demo_server(*SERVER_FLAGS) as addr, ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        began_s = time.monotonic()
        try:
            for number in range(MOST_AT_ONCE):
                pool.submit(write_stories, addr, number, began_s, ended)
            picture = watch(addr, SPAN_S)
        finally:
            ended.set()
    (IMAGES / "top.svg").write_text(drawing(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
