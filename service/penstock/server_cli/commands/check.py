"""`penstock check`: says whether a checkpoint would serve, and how much memory it takes. Loads no weights."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from penstock.cli.calling.common import complain
from penstock.runtime.chat.parser import HARMONY, choose_forms
from penstock.runtime.config import NATIVE, EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import choose_backend
from penstock.runtime.loading.gguf.file import is_gguf
from penstock.runtime.loading.hub import DEMO, resolve_model
from penstock.runtime.loading.inspection import (
    Inspection,
    QuantisedForm,
    StageSizes,
    inspect_checkpoint,
    inspect_config,
)
from penstock.runtime.machine import host_memory
from penstock.runtime.machine.resident import resident_bytes
from penstock.server_cli.commands.model_options import add_model_options

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = """\
examples:
  penstock check ./Qwen3-0.6B
  penstock check ./Qwen3-30B-A3B --quantization int8 --max-model-len 32768 --max-num-seqs 8
  penstock check ./gemma-3-4b --json
  penstock check ./gemma-3-4b-Q4_K_M.gguf
  penstock check ./DeepSeek-V3/config.json --tensor-parallel-size 8 --expert-parallel

It reads all that `penstock serve` reads at its start, but of files with weights only the headers. Of a
config.json alone it says what memory the model would take, before you download it. With
--tensor-parallel-size all sizes are those of one device; with --pipeline-parallel-size of a device of each
stage together, beside those of each. Exit codes: 0 the checkpoint would serve; 1 it would not, and what is
wrong is named, with its file.
"""
_DEFAULTS = EngineConfig()
_PROGRAM_BYTES = 100 * 2**20
"""About what programs take, with the memory in which they compute: 50 to 100 MiB for small models."""
_ROWS = 16


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "check",
        help="say whether a checkpoint would serve, and how much memory it takes",
        description="Say whether a checkpoint would serve, with what, and how much memory it takes. Its "
        "weights are not loaded.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help='the folder with config.json and *.safetensors, a .gguf file, a config.json alone, or "demo"',
    )
    add_model_options(parser)
    parser.add_argument(
        "--native",
        default=_DEFAULTS.native,
        choices=NATIVE,
        help="the kernels, as with `penstock serve`; default: %(default)s",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="devices over which the model would be cut; default: %(default)s",
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="stages into which its layers would be cut, each with devices of its own; default: %(default)s",
    )
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="deal the experts of a mixture to these devices instead of cutting each",
    )
    parser.add_argument(
        "--context-parallel",
        action="store_true",
        help="deal the cache of latent attention to these devices by pages; otherwise each has all of it",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest request for which the KV cache is computed; default: the model's context",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=_ROWS,
        metavar="N",
        help="how many such requests at once; default: %(default)s",
    )
    defaults = EngineConfig()
    parser.add_argument(
        "--max-adapters",
        type=int,
        default=defaults.max_adapters,
        metavar="N",
        help="places for LoRA adapters on the device; default: none",
    )
    parser.add_argument(
        "--max-adapter-rank",
        type=int,
        default=defaults.max_adapter_rank,
        metavar="N",
        help="largest rank of an adapter, for which each place has room; default: %(default)s",
    )
    parser.add_argument(
        "--adapter-experts",
        action="store_true",
        help="let adapters change experts; each place then has room for the matrices of all experts",
    )
    parser.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="the model that would guess, as with `penstock serve`; default: none",
    )
    parser.add_argument(
        "--speculation",
        choices=("off", "heads"),
        default="off",
        help="heads: with the layer of the checkpoint that guesses, as with `penstock serve`; default: off",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print what the checkpoint is. Returns 1 if it would not serve."""
    interpreter = resident_bytes() or 0  # with all libraries that a server has, and no model
    try:
        with _quiet():
            found = _inspect(args)
    except ConfigError as error:
        if args.json:
            print(json.dumps({"would_serve": False, "problem": str(error)}))
        else:
            complain("check", f"{args.model} would not serve: {error}")
        return 1
    host_memory.give_back()
    facts = _facts(found, args.max_num_seqs) | _process(found, interpreter)
    if args.json:
        json.dump(facts, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(_lines(found, facts)))
    return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep our own notes out of the output. Afterwards they are logged as before, for whoever calls `run`
    from a program that goes on.
    """
    logger = logging.getLogger("penstock")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _inspect(args: argparse.Namespace) -> Inspection:
    path = Path(args.model)
    is_config = path.is_file() and not is_gguf(path)
    if args.model != DEMO and not path.exists():
        raise ConfigError(
            f"{args.model} is not there; give a folder that holds config.json and *.safetensors, a file that "
            "ends in .gguf, or a config.json"
        )
    if args.max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs: must be at least 1, not {args.max_num_seqs}")
    options = EngineConfig(
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        native=args.native,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        expert_parallel=args.expert_parallel,
        context_parallel=args.context_parallel,
        max_adapters=args.max_adapters,
        max_cached_adapters=max(args.max_adapters, EngineConfig().max_cached_adapters),
        max_adapter_rank=args.max_adapter_rank,
        adapter_experts=args.adapter_experts,
        speculation="draft"
        if args.draft_model is not None and args.speculation == "off"
        else args.speculation,
        draft_model=args.draft_model,
    )
    # There need not be so many devices here.
    on_one = dataclasses.replace(options, tensor_parallel_size=1, pipeline_parallel_size=1)
    backend = choose_backend(on_one, jax.devices()[0])
    if is_config:
        return inspect_config(Path(args.model), options, backend)
    return inspect_checkpoint(resolve_model(args.model), options, backend)


def _facts(found: Inspection, num_seqs: int) -> dict[str, Any]:
    """Return everything that is printed, as JSON values."""
    text, tools, reasoning = found.text, None, None
    if text is not None and text.has_chat_template:
        forms = choose_forms(text.chat_template, text.added_tokens)
        tools = HARMONY if forms.is_harmony else forms.tools and forms.tools.name
        reasoning = HARMONY if forms.is_harmony else forms.reasoning and forms.reasoning.name
    request = found.request_bytes(found.max_model_len)
    return {
        "would_serve": True if found.has_weights else None,
        "architecture": found.architecture,
        "dtype": found.dtype.name,
        "layers": found.num_layers,
        "parameters": found.num_parameters,
        "quantised": [
            {
                "form": form.form,
                "kept": form.is_kept,
                "weights": form.num_weights,
                "parameters": form.num_parameters,
                "bits_per_parameter": round(form.bits_per_parameter, 3),
            }
            for form in found.quantised
        ],
        "devices": found.devices,
        "stages": [
            {
                "layers": [stage.begin, stage.end],
                "weight_bytes": stage.weight_bytes,
                "kv_bytes_per_page": stage.page_bytes,
                "state_bytes_per_request": stage.state_bytes,
            }
            for stage in found.stages
        ],
        "stored": found.stored,
        "weight_bytes": found.weight_bytes,
        "packed": found.is_packed,
        "native": found.is_native,
        "generates": found.reader is None,
        "classes": _classes(found),
        "context_tokens": found.max_model_len,
        "kv_cache_dtype": found.kv_dtype.name,
        "kv_page_tokens": found.page_size,
        "kv_bytes_per_page": found.page_bytes,
        "kv_bytes_per_token": found.token_bytes,
        "kv_bytes_per_token_in_window": {str(window): n for window, n in found.window_bytes.items()},
        "state_bytes_per_request": found.cache.slot_bytes,
        "state_bytes_per_snapshot": found.cache.snapshot_bytes,
        "images": found.has_image_processor,
        "image_bytes_per_token": found.image_token_bytes,
        "request_bytes": request,
        "requests": num_seqs,
        "adapter_bytes": found.adapter_bytes,
        "draft_bytes": found.draft_bytes,
        "total_bytes": found.weight_bytes + found.adapter_bytes + found.draft_bytes + num_seqs * request,
        "end_token_ids": list(found.eos_token_ids),
        "tokenizer": text is not None,
        "chat_template": text is not None and text.has_chat_template,
        "tool_calls": tools,
        "reasoning": reasoning,
    }


def _process(found: Inspection, interpreter: int) -> dict[str, Any]:
    """Say what a server's process takes by default, in bytes; nothing of it where that cannot be told."""
    cache = found.served_cache_bytes
    if cache is None or not interpreter:
        return {"process_bytes": None}
    parts = {
        "cache_bytes": cache + found.sampling_bytes,
        "program_bytes": _PROGRAM_BYTES,
        "tokenizer_bytes": max(0, (resident_bytes() or 0) - interpreter),
        "interpreter_bytes": interpreter,
    }
    whole = found.weight_bytes + found.adapter_bytes + found.draft_bytes + sum(parts.values())
    return parts | {"process_bytes": whole}


def _lines(found: Inspection, facts: dict[str, Any]) -> list[str]:
    """Write what a person reads."""
    if found.is_native:
        computed = "by the native CPU kernels"
    elif found.is_packed:
        computed = "by the native CPU kernels in part, else by XLA"
    else:
        computed = "by XLA"
    if found.kernels_dtype is not None:
        computed += (
            f"; with --dtype {found.kernels_dtype} by the native CPU kernels, in a fraction of the time"
        )
    kv = [f"{found.token_bytes:,} bytes for each token"] if found.token_bytes else []
    kv += [
        f"{per_token:,} bytes for each of the latest {window:,} tokens"
        for window, per_token in found.window_bytes.items()
    ]
    if kv:
        kv[0] = f"in {found.kv_dtype.name}: {kv[0]}"
        kv.append(f"{found.page_bytes:,} for a page of {found.page_size} tokens")
    if found.cache.slot_bytes:
        kv.append(f"{found.cache.slot_bytes:,} bytes of state")
        kv.append(f"{found.cache.snapshot_bytes:,} for each snapshot of it")
    ends = ", ".join(map(str, found.eos_token_ids)) or "none: outputs end at max_tokens only"
    if not facts["tokenizer"]:
        text = "no tokenizer: prompts and outputs are token ids only"
    elif not facts["chat_template"]:
        text = "a tokenizer without a chat template: no conversations"
    else:
        tools, reasoning = facts["tool_calls"] or "none", facts["reasoning"] or "none"
        text = f"tokenizer and chat template; tool calls: {tools}; reasoning: {reasoning}"
    of_all = f" in all {len(found.stages)} stages" if found.stages else ""
    cut = of_all + (f" on each of {found.devices} devices" if found.devices > 1 else "")
    rows = [
        ("weights", f"{_size(found.weight_bytes)}{cut}: {found.num_parameters:,} parameters"),
        *(("stages" if stage is found.stages[0] else "", _stage(stage, found)) for stage in found.stages),
        *(("quantised" if form is found.quantised[0] else "", _quantised(form)) for form in found.quantised),
        ("stored", found.stored),
        ("computed", f"in {found.dtype.name}, {computed}"),
        *_reader_row(found),
        ("context", f"{found.max_model_len:,} tokens"),
        ("KV cache", "; ".join(kv) or "none"),
        ("", f"{_size(facts['request_bytes'])} for a request of the whole context"),
        *([("adapters", _size(found.adapter_bytes))] if found.adapter_bytes else []),
        *([("draft", f"{_size(found.draft_bytes)} of weights")] if found.draft_bytes else []),
        (
            "memory",
            f"{_size(facts['total_bytes'])}{cut} for the weights and {facts['requests']} such requests",
        ),
        *_process_row(facts),
    ]
    said = f"{found.architecture} with {found.num_layers} layers"
    if found.has_weights:
        rows += [("end tokens", ends), ("text", text), ("images", _images(found))]
        head = f"{said} would serve."
    else:
        head = f"{said}, by its config.json alone; what its other files say was not checked."
    return [head, *(f"  {name:<12}{value}" for name, value in rows)]


def _classes(found: Inspection) -> list[str]:
    """Return the names of the model's classes."""
    reader = found.reader
    return [] if reader is None or reader.classes is None else list(reader.classes.labels)


def _reader_row(found: Inspection) -> list[tuple[str, str]]:
    if found.reader is None:
        return []
    classes = ", ".join(_classes(found))
    made = f"embeddings and classes: {classes}" if classes else "embeddings"
    return [("generates", f"nothing: it is {found.reader.kind}, for {made}")]


def _process_row(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if facts["process_bytes"] is None:
        return []
    parts = ", ".join(
        f"{name} {_size(facts[of])}"
        for name, of in (
            ("weights", "weight_bytes"),
            ("cache and state", "cache_bytes"),
            ("tokenizer and configuration", "tokenizer_bytes"),
            ("interpreter and libraries", "interpreter_bytes"),
        )
    )
    whole, programs = _size(facts["process_bytes"]), _size(facts["program_bytes"])
    return [("process", f"{whole} by default: {parts}, programs about {programs}")]


def _stage(stage: StageSizes, found: Inspection) -> str:
    state = f", {stage.state_bytes:,} bytes of state for each request" if stage.state_bytes else ""
    return (
        f"layers {stage.begin} to {stage.end - 1}: {_size(stage.weight_bytes)} of weights, "
        f"{stage.page_bytes:,} bytes for a page of {found.page_size} tokens{state}"
    )


def _quantised(form: QuantisedForm) -> str:
    return (
        f"{form.num_weights} weights in the files as {form.form}: {form.bits_per_parameter:.2f} bits for "
        f"each of {form.num_parameters:,} parameters; {'kept so' if form.is_kept else 'made floats'}"
    )


def _images(found: Inspection) -> str:
    if not found.image_token_bytes:
        return "none: the model reads text only"
    if not found.has_image_processor:
        return "none: the files of the model do not say how images are made ready for it"
    return f"{found.image_token_bytes:,} bytes for each token of an image whose embeddings are kept"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
