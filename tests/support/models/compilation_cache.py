"""Where compiled programs are kept. It loads no JAX, because programs that only start servers use it, too."""

from __future__ import annotations

import tempfile
from pathlib import Path

TEST_CACHE = Path(tempfile.gettempdir()) / "penstock-tests-xla"
"""Where programs are kept, so that they are compiled once for all worker processes of the suite and for later
runs.
"""
