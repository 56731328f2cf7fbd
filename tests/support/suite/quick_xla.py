"""How XLA is told to compile quickly, in environment variables that processes inherit. It loads no JAX.

XLA leaves out most of its optimizations. It makes the code of a program in one piece, because each piece
has a cost of its own, and the programs of tests are small: this takes a fifth less processor time. Where XLA
still has an older generator of code for fused operations, it uses that, which takes half of the processor
time of the newer one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata


def has_older() -> bool:
    """Say whether this jaxlib has the older generator. Others end the process for an option that they do not
    know. The client is tested where there is no jaxlib.
    """
    try:
        version = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) < (0, 11)


_OLDER = {"xla_cpu_use_fusion_emitters": (False, True)} if has_older() else {}
_OPTIONS: Mapping[str, tuple[int, int]] = {"xla_cpu_parallel_codegen_split_count": (1, 32), **_OLDER}
"""The value of each option for programs that are compiled quickly, and XLA's default, which users have."""
USERS = {name: users for name, (_, users) in _OPTIONS.items()}

_QUICK = [f"--{name}={str(quick).lower()}" for name, (quick, _) in _OPTIONS.items()]
_OTHERS = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in _QUICK]
"""What the suite was started with; workers inherit it, and what was added."""


def environment(*, users: bool) -> Mapping[str, str]:
    """Return the variables by which a process compiles as users compile, or quickly."""
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0" if users else "1",
        "XLA_FLAGS": " ".join(_OTHERS if users else [*_OTHERS, *_QUICK]),
    }
