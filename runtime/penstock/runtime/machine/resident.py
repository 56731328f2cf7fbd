"""How much memory this process has."""

from __future__ import annotations

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Count the bytes of memory that this process has in use, those that it shares included; None where the
    operating system does not say so as Linux does.
    """
    try:
        num_pages = int(_STATM.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return num_pages * os.sysconf("SC_PAGE_SIZE")
