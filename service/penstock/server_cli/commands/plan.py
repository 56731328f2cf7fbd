"""`penstock plan`: says on which chips a model fits, what it can hold there, and how fast it is at most."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.calling.common import complain
from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import read_config
from penstock.runtime.loading.hub import DEMO, resolve_model
from penstock.runtime.loading.served_model import why_no_draft
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.planning import absent
from penstock.runtime.planning.chips import CHIPS, all_machines, read_machine
from penstock.runtime.planning.plan import Plan, Step, plan
from penstock.server_cli.commands.model_options import add_model_options

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = f"""\
examples:
  penstock plan ./Qwen3-8B --for tpu-v5e-4
  penstock plan ./Qwen3-30B-A3B --for h100 --quantization int8 --context 32768 --rows 8
  penstock plan ./Qwen3-8B --context 8192 --rows 32
  penstock plan ./DeepSeek-V3 --for h200-8 --expert-parallel --context-parallel

It reads only config.json. Without --for it shows all chips that it knows, as 1, 2, 4 and 8 devices, and names
the machine with the least memory that holds the rows. Times are the least that the chip's rates allow; no
engine reaches them. Chips: {", ".join(CHIPS)}.
Exit codes: 0 the rows fit on a machine; 1 they do not, or the model cannot be served.
"""
_ROWS = 16


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "plan",
        help="say on which chips a model fits, and how fast it can be there",
        description="Say on which chips a model fits, how many tokens they hold, and the least time of a "
        "step. No chip and no weights are needed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL_DIR", help='the folder with config.json, or "demo"')
    parser.add_argument(
        "--for",
        dest="machine",
        metavar="CHIP[-N]",
        help="the chip, and over how many devices the model is cut; default: all chips",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="the tokens of each row, prompt and output together; default: the model's context",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=_ROWS,
        metavar="N",
        help="requests that run at a time; default: %(default)s",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens of a step, as with `penstock serve`; default: that of the chip",
    )
    add_model_options(parser)
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="each device has some of the experts of a mixture instead of a part of each",
    )
    parser.add_argument(
        "--context-parallel",
        action="store_true",
        help="the cache of latent attention (DeepSeek) is dealt over the devices by pages",
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="stages to which the devices are dealt, each with some of the layers; default: %(default)s",
    )
    parser.add_argument(
        "--native",
        choices=("auto", "off"),
        default="auto",
        help="off: XLA computes all, as with `penstock serve --native off`. A step reads all experts then, "
        "and a GPU keeps a cache of int8 in other rows. Default: %(default)s",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="have XLA compile the largest programs for the chip of --for, which takes minutes, and report "
        "their scratch memory; by default it is estimated",
    )
    parser.add_argument(
        "--draft-model",
        metavar="MODEL_DIR",
        help="the folder with config.json of a draft model; default: none",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plans. Returns 1 if the rows fit on none of the machines."""
    absent.prepare()
    try:
        plans = _plans(args)
    except ConfigError as error:
        if args.json:
            print(json.dumps({"problem": str(error)}))
        else:
            complain("plan", str(error))
        return 1
    smallest = _smallest(plans)
    if args.json:
        chosen = None if smallest is None else smallest.machine.name
        json.dump({"smallest": chosen, "machines": [_facts(each) for each in plans]}, sys.stdout, indent=2)
        print()
    elif args.machine is None:
        print("\n".join(_table(plans, smallest)))
    else:
        print("\n".join(_lines(plans[0])))
    return 0 if smallest else 1


def _plans(args: argparse.Namespace) -> list[Plan]:
    if args.model != DEMO and not (Path(args.model) / "config.json").is_file():
        raise ConfigError(
            f"{args.model} is no folder that holds config.json; of a checkpoint nothing else is read"
        )
    if args.compile and args.machine is None:
        raise ConfigError("compile: say for which chip, with --for")
    if args.compile and args.pipeline_parallel_size > 1:
        raise ConfigError("compile: must be left out with stages, whose programs are compiled where they run")
    model = read_config(resolve_model(args.model))
    if not model.generates:
        raise ConfigError(
            f"{model.architecture} generates nothing, and plans are made of models that do; penstock check "
            "says what memory it takes"
        )
    draft = None if args.draft_model is None else _draft(args.draft_model, model)
    options = EngineConfig(
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.context,
        max_num_seqs=args.rows,
        max_num_batched_tokens=args.max_num_batched_tokens,
        expert_parallel=args.expert_parallel,
        context_parallel=args.context_parallel,
        native=args.native,
        pipeline_parallel_size=args.pipeline_parallel_size,
        speculation="off" if draft is None else "draft",
        draft_model=args.draft_model,
    )
    machines = all_machines() if args.machine is None else (read_machine(args.machine),)
    plans = [plan(model, machine, options, draft=draft) for machine in machines]
    if not args.compile or plans[0].decode is None:
        return plans
    temp = absent.compiled_temp_bytes(model, machines[0], options, draft)
    return [plan(model, machines[0], options, draft=draft, temp_bytes=temp)]


def _draft(folder: str, target: ModelConfig) -> ModelConfig:
    if folder != DEMO and not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"draft_model: {folder} is no folder that holds config.json")
    draft = read_config(resolve_model(folder), heads=True)
    if draft.eagle is not None:
        raise ConfigError(
            f"draft_model: {folder}: is an EAGLE head; penstock check says what memory it takes"
        )
    if problem := why_no_draft(draft, target):
        raise ConfigError(f"draft_model: {folder}: {problem}")
    return draft


def _smallest(plans: Sequence[Plan]) -> Plan | None:
    """Choose of the machines on which the rows fit the one with the least memory."""
    fitting = [each for each in plans if each.fits]
    return min(fitting, key=lambda each: each.machine.chip.memory_bytes * each.machine.devices, default=None)


def _facts(found: Plan) -> dict[str, Any]:
    """Write a plan as JSON values."""
    chip = found.machine.chip
    facts = {
        each.name: getattr(found, each.name)
        for each in dataclasses.fields(found)
        if each.name not in ("machine", "decode", "prefill")
    }
    return {
        "machine": found.machine.name,
        "devices": found.machine.devices,
        "memory_bytes": chip.memory_bytes,
        "bytes_per_s": chip.bytes_per_s,
        "flops_per_s": chip.flops_per_s,
        "source": chip.source,
        **facts,
        "decode": None if found.decode is None else dataclasses.asdict(found.decode),
        "prefill": None if found.prefill is None else dataclasses.asdict(found.prefill),
    }


def _lines(found: Plan) -> list[str]:
    """Write what a person reads of one machine."""
    machine = found.machine
    if found.decode is None or found.prefill is None:
        return [f"{machine.name}: {found.problem}"]
    chip, by = machine.chip, "as XLA reports" if found.is_temp_compiled else "estimated"
    rates = f"{chip.bytes_per_s / 1e9:,.0f} GB/s, {chip.flops_per_s / 1e12:,.0f} TFLOP/s in bfloat16"
    kept = f"{_size(found.kv_bytes)} of {_size(found.usable_bytes)}: {found.kv_tokens:,} tokens"
    rows = [
        ("chip", f"{_size(chip.memory_bytes)}, {rates} ({chip.source})"),
        ("weights", _size(found.weight_bytes)),
        ("state", f"{_size(found.state_bytes)} of recurrent layers and of sampling"),
        ("scratch", f"{_size(found.temp_bytes)}, {by}"),
        ("KV cache", kept if found.kv_tokens else "none is needed or left"),
        ("", f"{_size(found.kv_bytes_per_row)} for a row of {found.context:,} tokens"),
        ("decode", _step(found.decode)),
        ("prefill", _step(found.prefill)),
    ]
    fits = "fit" if found.fits else "do not fit"
    each = " Sizes are those of each device." if machine.devices > 1 else ""
    head = f"{found.rows} rows of {found.context:,} tokens {fits} on {machine.name}.{each}"
    why = [f"  {found.problem}"] if found.problem else []
    return [head, *why, *(f"  {name:<10}{value}" for name, value in rows)]


def _step(step: Step) -> str:
    bound = "memory" if step.is_bound_by_memory else "products"
    work = f"{step.bytes / 1e9:,.2f} GB and {step.operations / 1e12:,.3f} TFLOP"
    return f"{step.tokens:,} tokens: {work}, at least {step.least_s * 1e3:,.2f} ms, by {bound}"


def _table(plans: Sequence[Plan], smallest: Plan | None) -> list[str]:
    """Write what a person reads of all machines."""
    head = ("machine", "memory", "fits", "KV tokens", "decode ms", "prefill tokens/s")
    cells = [head]
    for each in plans:
        if each.decode is None or each.prefill is None:
            cells.append((each.machine.name, "", "cannot be cut", "", "", ""))
            continue
        cells.append(
            (
                each.machine.name,
                _size(each.machine.chip.memory_bytes * each.machine.devices),
                "yes" if each.fits else "no",
                f"{each.kv_tokens:,}",
                f"{each.decode.least_s * 1e3:,.2f}",
                f"{each.prefill.tokens / each.prefill.least_s:,.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    rows = f"{plans[0].rows} rows of {plans[0].context:,} tokens"
    if smallest is None:
        return [*lines, f"No machine of these holds {rows}."]
    return [*lines, f"The machine with the least memory that holds {rows}: {smallest.machine.name}."]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
