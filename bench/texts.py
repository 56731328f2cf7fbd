"""The texts of the workloads on speculation, as token ids. Pure and without dependencies, as
`bench.workloads`.
"""

from __future__ import annotations

import functools
import re
import zlib
from pathlib import Path

_LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
"""English prose that never changes."""


@functools.cache
def words(num_words: int) -> tuple[int, ...]:
    """Read the license as token ids below `num_words`, one for each of its words and signs. A word has the
    same id wherever it stands, so that as much is repeated as in the text.
    """
    pieces = re.findall(r" ?\w+| ?[^\w\s]+|\s+", _LICENSE.read_text(encoding="utf-8"))
    return tuple(zlib.crc32(piece.encode()) % num_words for piece in pieces)


STORIES = (
    (818, 817, 262, 647, 11, 514, 319, 262, 777, 998, 544, 220),
    (464, 372, 11, 262, 983, 544, 220, 51, 256, 543, 318, 276),
    (330, 646, 319, 722, 293, 276, 1617, 607, 1382, 322, 13, 220),
    (658, 319, 262, 668, 1314, 603, 473, 332, 262, 515, 1270, 516),
)
"""How stories of the demo model begin, in its own tokens: "Once upon a time, there was a little girl named ",
"One day, a boy named Tim went to", "The sun was warm and the birds were singing. ", "There was a big dog who
lived in a small house near"."""
