"""`penstock quantize`: writes a checkpoint whose weights are codes of 4 or 8 bits. Needs no server."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.calling.common import complain
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.hub import resolve_model
from penstock.runtime.quantising.options import FORMATS, GROUPS, METHODS, QuantiseOptions
from penstock.runtime.quantising.quantise import Report, quantise

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DEFAULTS = QuantiseOptions()
_EPILOG = """\
examples:
  penstock quantize ./Qwen3-0.6B ./Qwen3-0.6B-int4
  penstock quantize ./Qwen3-0.6B ./Qwen3-0.6B-int4 --group 128 --calibration our-prompts.txt
  penstock quantize ./Qwen3-0.6B ./Qwen3-0.6B-int8 --format int8 --method rtn

methods:
  rtn   rounds each weight to the nearest value. It takes the least time and loses most.
  gptq  has the weights that are rounded later make up for those rounded before, on texts that it computes.
        It loses least.
  awq   moves the weights that matter most on these texts into a finer part of the range, and changes norms.

It computes the model layer by layer, with the weights of one layer in memory at a time. Embeddings, the head,
and layers that do not fit stay as they are. OUT is in the form of compressed-tensors (pack-quantized).
In the end it says what was lost: perplexity, and KL divergence from the floats, on the
reference of the Python language (pydoc_data.topics), which calibration has not seen.
Exit codes: 0 OUT is whole; 1 it is not there, and what was wrong is named;
129, 130 and 143 a signal ended it, and nothing is left.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a checkpoint with weights of 4 or 8 bits",
        description="Write a checkpoint with weights of 4 or 8 bits, and say what it cost in quality.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help='the folder with config.json and *.safetensors in floats, an id of Hugging Face, or "demo"',
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make; it must not be there")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=_DEFAULTS.format,
        help="what weights become; default: %(default)s",
    )
    parser.add_argument(
        "--group",
        type=int,
        choices=GROUPS,
        default=_DEFAULTS.group,
        help="inputs that share a scale: fewer lose less and take more memory; default: %(default)s",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default=_DEFAULTS.method,
        help="how codes are chosen, see below; default: %(default)s",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="a text in UTF-8 like those that the model will see, for gptq and awq; default: the docstrings "
        "of Python's standard library",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        default=_DEFAULTS.calibration_tokens,
        metavar="N",
        help="about how many tokens of it are computed; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print the report. Returns 1 if it could not be made."""
    try:
        options = QuantiseOptions(
            format=args.format,
            group=args.group,
            method=args.method,
            calibration=args.calibration,
            calibration_tokens=args.calibration_tokens,
        )
        report = quantise(resolve_model(args.model), args.out, options)
    except ConfigError as error:
        complain("quantize", str(error))
        return 1
    facts = _facts(report)
    if args.json:
        json.dump(facts, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(_lines(args.out, report)))
    return 0


def _facts(report: Report) -> dict[str, Any]:
    """Write the report as JSON values."""
    return {
        "quantised_weights": report.num_quantised,
        "kept_layers": list(report.kept),
        "old_bytes": report.old_bytes,
        "new_bytes": report.new_bytes,
        "positions": report.num_positions,
        "perplexity": report.score.perplexity,
        "quantised_perplexity": report.score.other_perplexity,
        "kl_nats": report.score.kl,
        "agreement": report.score.agreement,
    }


def _lines(out: Path, report: Report) -> list[str]:
    """Write the report for a person."""
    score = report.score
    change = score.other_perplexity / score.perplexity - 1
    kept = f"; {len(report.kept)} layers stay as they were: {', '.join(report.kept)}" if report.kept else ""
    changed = f"{score.perplexity:.3f} became {score.other_perplexity:.3f} ({change:+.1%})"
    rows = (
        ("weights", f"{report.num_quantised} are in codes{kept}"),
        ("size", f"{report.old_bytes / 1e6:,.1f} MB became {report.new_bytes / 1e6:,.1f} MB"),
        ("perplexity", f"{changed}, on {report.num_positions:,} tokens"),
        ("KL", f"{score.kl:.5f} nats from the weights in floats"),
        ("agreement", f"the likeliest token is the same at {score.agreement:.1%} of these"),
    )
    return [f"{out} is written.", *(f"  {name:<12}{value}" for name, value in rows)]
