"""How XLA is told to compile quickly, in environment variables that processes inherit. It loads no JAX.

XLA leaves out most of its optimizations. Where it still has an older generator of code for fused operations,
it uses that, which takes half of the processor time of the newer one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata

OPTION = "xla_cpu_use_fusion_emitters"
"""The option that chooses the generator: false is the older one."""


def has_older() -> bool:
    """Say whether this jaxlib has it. Others end the process for an option that they do not know. The client
    is tested where there is none.
    """
    try:
        version = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) < (0, 11)


HAS_OLDER = has_older()

_QUICK = [f"--{OPTION}=false"] if HAS_OLDER else []
_OTHERS = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in _QUICK]
"""What the suite was started with; workers inherit it, and what was added."""


def environment(*, users: bool) -> Mapping[str, str]:
    """Return the variables by which a process compiles as users compile, or quickly."""
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0" if users else "1",
        "XLA_FLAGS": " ".join(_OTHERS if users else [*_OTHERS, *_QUICK]),
    }
