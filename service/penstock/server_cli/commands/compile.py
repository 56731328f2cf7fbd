"""`penstock compile`: compiles all programs of a server on this machine, for a chip that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import jax

from penstock.cli.calling.common import complain
from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend, choose_backend
from penstock.runtime.execution.cpu_threads import start_backends
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.planning import absent
from penstock.runtime.planning.chips import CHIPS, read_machine
from penstock.server_cli.serving.flags import Flags, json_object, options_of, path, with_flags
from penstock.server_cli.serving.serve_flags import add_engine

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = f"""\
examples:
  penstock compile ./Qwen3-8B --for tpu-v5e-4 --kv-cache-bytes 8G --out ./for-v5e-4
  penstock compile demo --for cpu --out ./for-this-processor

Then `penstock serve ./Qwen3-8B --tensor-parallel-size 4 --kv-cache-bytes 8G --compiled ./for-v5e-4` starts
without compiling. Give both commands the same options. The server compares all that programs are made of, and
where something differs it says what, and compiles. A CPU must have as many processors and threads. The folder
holds machine code, so take only your own.
Chips: cpu, {", ".join(CHIPS)}.
Exit codes: 0 the folder is written; 1 it is not, and why is said.
"""
_OPTIONS = frozenset(
    {
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "expert_parallel",
        "context_parallel",
        "native",
        "native_folder",
        "threads",
        "max_model_len",
        "max_num_seqs",
        "feature_slots",
        "max_num_batched_tokens",
        "state_snapshots",
        "max_decode_steps",
        "speculation",
        "draft_model",
        "max_proposed_tokens",
        "page_size",
        "kv_cache_bytes",
        "max_logprobs",
    }
)
"""The engine's options on which programs depend, and those that say how they are compiled."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a model's programs for a chip that is not here",
        description="Compile all programs of a server for a chip, which need not be here, and write them "
        "into a folder for `penstock serve --compiled`.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help='"demo", a checkpoint directory, a .gguf file, or a Hugging Face id; of weights only the '
        "headers are read",
    )
    parser.add_argument(
        "--for",
        dest="machine",
        metavar="CHIP[-N]",
        required=True,
        help="the chip, and over how many devices the model is cut; cpu: the processor of this machine",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=path, required=True, help="where the programs are written to"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = Flags(parser, EngineConfig())
    flag = flags.group("engine", "as `penstock serve` will have them")

    def add(option: str, text: str, metavar: str | None = None, **more: Any) -> None:
        if option in _OPTIONS:
            flag(option, text, metavar, **more)

    add_engine(add)
    flag("max_adapters", "LoRA adapters whose weights are on the device at a time", "N")
    flag("max_adapter_rank", "largest rank of an adapter, for which each place has room", "N")
    flag(
        "adapter_experts",
        "let adapters change the experts of a mixture; each place has room for the matrices of all experts",
        action="store_true",
    )
    flag(
        "generation_config",
        "sampling defaults in place of the model's; programs depend on whether they have penalties; "
        "default: none",
        "JSON",
        name="--override-generation-config",
        type=json_object,
    )
    parser.set_defaults(flags=flags.by_option)


def run(args: argparse.Namespace) -> int:
    """Write the programs. Returns 1 if that cannot be done."""
    absent.prepare()
    # XLA cannot write a program that came from JAX's cache.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        options = options_of(
            EngineConfig, args, compilation_cache=None, max_cached_adapters=max(args.max_adapters, 1)
        )
        options, backend = _target(args.machine, options)
        builder = absent.checkpoint_programs(args.model, options, backend)
        num_bytes = builder.write(args.out)
    except ConfigError as error:
        message = with_flags(str(error), args.flags)
        if args.json:
            print(json.dumps({"problem": message}))
        else:
            complain("compile", message)
        return 1
    number = len(builder.jobs())
    if args.json:
        print(json.dumps({"out": str(args.out), "programs": number, "bytes": num_bytes}))
    else:
        print(f"{number} programs for {args.machine}, {num_bytes:,} bytes, are in {args.out}")
    return 0


def _target(name: str, options: EngineConfig) -> tuple[EngineConfig, Backend]:
    """Return the options for the devices of this name, and what an engine computes with there. ConfigError if
    there is no such chip, or if nothing here compiles for it.
    """
    if of_cpu := re.fullmatch(r"cpu(?:-([1-9][0-9]?))?", name):
        size = int(of_cpu[1] or 1)
        options = dataclasses.replace(options, tensor_parallel_size=size)
        devices = start_backends(options.threads or available_processors(), size)
        return options, choose_backend(options, *devices)
    machine = read_machine(name)
    if missing := absent.lacking(machine.chip):
        raise ConfigError(f"for: {missing} is not installed, which compiles for {name}; {absent.INSTALL}")
    options = dataclasses.replace(options, tensor_parallel_size=machine.devices)
    return options, absent.absent_backend(machine, options)
