"""Options of the commands that say what a model would take."""

from __future__ import annotations

import argparse

from penstock.runtime.config import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig

_DEFAULTS = EngineConfig()


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add them, with the names, values and defaults of `penstock serve`."""
    parser.add_argument(
        "--dtype",
        default=_DEFAULTS.dtype,
        choices=DTYPES,
        help="auto: the checkpoint's; default: %(default)s",
    )
    parser.add_argument(
        "--quantization",
        default=_DEFAULTS.quantization,
        choices=QUANTIZATIONS,
        help="how weights would be stored; default: %(default)s",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default=_DEFAULTS.kv_cache_dtype,
        choices=KV_CACHE_DTYPES,
        help="what the KV cache would be kept in; default: %(default)s",
    )
