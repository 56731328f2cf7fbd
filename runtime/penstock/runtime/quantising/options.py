"""What a caller of `quantise` may choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np

from penstock.runtime.errors import ConfigError

Format = Literal["int4", "int8"]
Method = Literal["rtn", "gptq", "awq"]
FORMATS: tuple[Format, ...] = get_args(Format)
METHODS: tuple[Method, ...] = get_args(Method)
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseOptions:
    """How weights become codes.

    format: codes of 4 bits with a zero for each group, or of 8 bits around 0. group: how many inputs share a
    scale. method: `rtn` rounds each weight to the nearest value; `gptq` and `awq` watch the inputs of every
    layer on texts. calibration: a file with such a text; None: the documentation in Python's standard
    library. calibration_tokens: about how many tokens of it are computed.
    """

    format: Format = "int4"
    group: int = 32
    method: Method = "gptq"
    calibration: Path | None = None
    calibration_tokens: int = 32_768

    def __post_init__(self) -> None:
        """Raise ConfigError for values that mean nothing."""
        for name, value, known in (
            ("format", self.format, FORMATS),
            ("group", self.group, GROUPS),
            ("method", self.method, METHODS),
        ):
            if value not in known:
                raise ConfigError(f"{name}: must be one of {', '.join(map(str, known))}, not {value!r}")
        if self.calibration_tokens < 1:
            raise ConfigError(f"calibration_tokens: must be at least 1, not {self.calibration_tokens}")
        if self.calibration is not None and self.method == "rtn":
            raise ConfigError("calibration: method rtn uses no text; leave it out, or choose gptq or awq")

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.format == "int4" else 8


@dataclass(frozen=True, slots=True)
class Scheme:
    """The codes of a checkpoint: value = scale * (code - zero)."""

    bits: int
    group: int
    zeros: bool
    """Whether each group has a zero of its own; else it is 0."""
    scale_dtype: np.dtype[Any]
    """In which scales are stored: codes are chosen for the scales that will be read."""

    @classmethod
    def of(cls, options: QuantiseOptions, dtype: str | None) -> Scheme:
        """Choose the scheme for a checkpoint in this dtype. Four bits need zeros: on small models they take
        off a third of the error. Eight bits gain nothing by them.
        """
        scales = np.dtype(np.float16) if dtype == "float16" else np.dtype(ml_dtypes.bfloat16)
        return cls(options.bits, options.group, options.bits == 4, scales)

    @property
    def lowest(self) -> int:
        """The least code. With 8 bits around 0 it is -127, so that codes are as many on both sides."""
        return -(1 << (self.bits - 1)) + (not self.zeros)

    @property
    def highest(self) -> int:
        """The greatest code."""
        return (1 << (self.bits - 1)) - 1
