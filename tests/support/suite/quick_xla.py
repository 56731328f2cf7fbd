"""How XLA is told to compile quickly, in environment variables that processes inherit. It loads no JAX.

XLA leaves out most of its optimizations, and makes fused operations with its older generator of code, which
takes half of the processor time of the newer one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

OPTION = "xla_cpu_use_fusion_emitters"
"""The option that chooses the generator: false is the older one."""


_QUICK = f"--{OPTION}=false"
_OTHERS = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag != _QUICK]
"""What the suite was started with; workers inherit it, and what was added."""


def environment(*, users: bool) -> Mapping[str, str]:
    """The variables by which a process compiles as users compile, or quickly."""
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0" if users else "1",
        "XLA_FLAGS": " ".join(_OTHERS if users else [*_OTHERS, _QUICK]),
    }
