"""The flags of `penstock serve` for the engine's options."""

from __future__ import annotations

import argparse

from penstock.runtime.config import (
    ACCELERATOR_SIZES,
    CPU_SIZES,
    DEFAULT_FEATURE_SLOTS,
    DEFAULT_TARGET_ITL_S,
    DTYPES,
    KV_CACHE_DTYPES,
    NATIVE,
    POOLED_IMAGES,
    QUANTIZATIONS,
    SMALL_BYTES,
    SMALL_SIZES,
    EngineConfig,
)
from penstock.runtime.scheduling.scheduler_config import SCHEDULING_POLICIES
from penstock.server_cli.serving.option_values import options_of, path, path_or_off, size

_CONFIG = EngineConfig()


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name in requests and replies; default: the whole hub id, or the last part of a folder's path",
    )
    engine.add_argument(
        "--dtype", default=_CONFIG.dtype, choices=DTYPES, help="auto: the checkpoint's; default: %(default)s"
    )
    engine.add_argument(
        "--quantization",
        default=_CONFIG.quantization,
        choices=QUANTIZATIONS,
        help="int8: weights and activations of linear layers have 8 bits; default: %(default)s",
    )
    engine.add_argument(
        "--kv-cache-dtype",
        default=_CONFIG.kv_cache_dtype,
        choices=KV_CACHE_DTYPES,
        help="what the KV cache is kept in; int8: 8 bits, with a scale for each token and head, so that the "
        "same memory holds nearly twice the tokens of bfloat16; auto: the dtype of activations; default: "
        "%(default)s",
    )
    engine.add_argument(
        "--native",
        default=_CONFIG.native,
        choices=NATIVE,
        help="the native CPU kernels; auto: where machine and model can use them; require: do not start "
        "without; off: XLA alone; default: %(default)s",
    )
    engine.add_argument(
        "--native-folder",
        type=path,
        metavar="DIR",
        help="where their library is, and where it is compiled to if it is not there; default: the library "
        "that came with the wheel, or else ~/.cache/penstock/native",
    )
    engine.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads that compute and compile programs; default: the processors that affinity mask and "
        "CPU quota leave",
    )
    engine.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="prompt and output of a request together; default: the model's, at most what the KV cache holds",
    )
    engine.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"outputs that run together, each in a row of its own; default: {CPU_SIZES.num_seqs} on CPU, "
        f"{ACCELERATOR_SIZES.num_seqs} on an accelerator, {SMALL_SIZES.num_seqs} on one of which JAX may use "
        f"less than {SMALL_BYTES >> 30} GiB",
    )
    engine.add_argument(
        "--feature-slots",
        type=int,
        metavar="N",
        help="how many of the running requests may have penalties, a bias, allowed ids or banned words of "
        "one token; each of them takes 8 bytes per token of the vocabulary; default: as many as run "
        f"together, at most {DEFAULT_FEATURE_SLOTS} unless the served sampling defaults have penalties",
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens of one step, prompts and outputs together: it bounds how fast prompts are read, and how "
        f"long a step takes; default: {CPU_SIZES.num_tokens} on CPU, "
        f"{ACCELERATOR_SIZES.num_tokens} on an accelerator, {SMALL_SIZES.num_tokens} on one of which JAX may "
        f"use less than {SMALL_BYTES >> 30} GiB",
    )
    engine.add_argument(
        "--max-prefill-chunk",
        type=int,
        metavar="TOKENS",
        help="most prompt tokens of one request in a step, also when nothing else runs; lower values keep "
        "the tokens of running requests steady during long prompts, and delay the first tokens of these; "
        "default: no limit",
    )
    engine.add_argument(
        "--target-itl",
        dest="target_itl_s",
        type=float,
        default=_CONFIG.target_itl_s,
        metavar="SECONDS",
        help="how far apart the tokens of running requests should be while a prompt comes in; the server "
        "measures its steps and sizes them to that; lower values delay the first tokens of new requests; "
        "0: no target; default: "
        f"{DEFAULT_TARGET_ITL_S:g} where FEATURE_BATCH_INVARIANT holds, else 0",
    )
    engine.add_argument(
        "--scheduling-policy",
        default=_CONFIG.scheduling_policy,
        choices=SCHEDULING_POLICIES,
        help="fcfs: in order of arrival; priority: the requests' priority first; default: %(default)s",
    )
    engine.add_argument(
        "--prefix-cache-pages",
        type=int,
        metavar="N",
        help="most KV pages kept for prefixes that no running request uses, in each group of layers (those "
        "without a sliding window, and those with one); 0: no prefix cache; default: all that are free",
    )
    engine.add_argument(
        "--state-snapshots",
        type=int,
        metavar="N",
        help="how many snapshots are kept of the state of recurrent layers, in models that have some, so "
        "that requests can share prefixes; 0: none, and no prefix cache; default: as many as --max-num-seqs, "
        "in at most half of the memory that the state itself leaves",
    )
    engine.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=_CONFIG.overlap,
        help="start the next step while the host processes the last one; turn it off only to debug; "
        "default: on",
    )
    engine.add_argument(
        "--max-decode-steps",
        type=int,
        default=_CONFIG.max_decode_steps,
        metavar="N",
        help="run up to N decode steps per dispatch while no request is waiting: more throughput, but a "
        "newcomer waits for the dispatch that runs; default: %(default)s",
    )
    engine.add_argument(
        "--decode-window",
        dest="decode_window_s",
        type=float,
        default=_CONFIG.decode_window_s,
        metavar="SECONDS",
        help="longest duration of such a dispatch of several decode steps; constrained requests, which take "
        "turns with them, get a token within this time; default: %(default)g",
    )
    engine.add_argument(
        "--switch-interval",
        dest="switch_interval_s",
        type=float,
        default=_CONFIG.switch_interval_s,
        metavar="SECONDS",
        help="how long a thread keeps Python's interpreter while another waits for it; higher values delay "
        "tokens on their way out, much lower ones cost throughput; default: %(default)g",
    )
    engine.add_argument(
        "--max-queued-requests",
        type=int,
        default=_CONFIG.max_queued_requests,
        metavar="N",
        help="requests that may wait; more are refused; default: %(default)s",
    )
    engine.add_argument(
        "--page-size",
        type=int,
        default=_CONFIG.page_size,
        metavar="TOKENS",
        help="tokens of one KV page, a power of two; default: %(default)s",
    )
    engine.add_argument(
        "--kv-cache-bytes",
        type=size,
        metavar="SIZE",
        help="such as 512M or 2G, taken in full: what running requests do not need keeps prefixes; "
        "default: on an accelerator what --hbm-utilization leaves, on CPU what --max-num-seqs "
        "requests of the longest context can fill, at most 1G",
    )
    engine.add_argument(
        "--hbm-utilization",
        type=float,
        default=_CONFIG.hbm_utilization,
        metavar="SHARE",
        help="share of what JAX may take of an accelerator's memory (95 %% unless "
        "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise), for weights, programs and KV; default: %(default)s",
    )
    engine.add_argument(
        "--max-logprobs",
        type=int,
        default=_CONFIG.max_logprobs,
        metavar="N",
        help="most log-probabilities a request may ask for per token; default: %(default)s",
    )
    _add_image_flags(engine)
    engine.add_argument(
        "--compilation-cache",
        type=path_or_off,
        default=_CONFIG.compilation_cache,
        metavar="DIR|off",
        help="where compiled programs are kept between starts; default: %(default)s",
    )


def _add_image_flags(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--max-images",
        type=int,
        default=_CONFIG.max_images,
        metavar="N",
        help="most images of a request, for models that read images; default: %(default)s",
    )
    engine.add_argument(
        "--max-image-bytes",
        type=size,
        default=_CONFIG.max_image_bytes,
        metavar="SIZE",
        help=f"largest image as it is sent, such as 5M; default: {_CONFIG.max_image_bytes >> 20}M",
    )
    engine.add_argument(
        "--max-image-pixels",
        type=int,
        default=_CONFIG.max_image_pixels,
        metavar="N",
        help="most pixels of an image, as its header says: it is refused before it is decoded; "
        "default: %(default)s",
    )
    engine.add_argument(
        "--max-image-tokens",
        type=int,
        metavar="TOKENS",
        help="most tokens that an image stands for: larger ones are made smaller; programs are compiled for "
        f"up to so many; default: {CPU_SIZES.image_tokens} on CPU, {ACCELERATOR_SIZES.image_tokens} on an "
        f"accelerator, {SMALL_SIZES.image_tokens} on one of which JAX may use less than "
        f"{SMALL_BYTES >> 30} GiB",
    )
    engine.add_argument(
        "--media-pool-tokens",
        type=int,
        metavar="TOKENS",
        help="room on the device for the embeddings of images: of those that running requests need, and of "
        f"those that were used last; default: {POOLED_IMAGES} times --max-image-tokens",
    )
    engine.add_argument(
        "--max-encode-patches",
        type=int,
        metavar="N",
        help="most patches of images that are encoded in one step, though a single image may have more: "
        "lower values keep the tokens of running requests steady; default: as many as the largest image has",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's options that the flags describe. Raises ConfigError."""
    return options_of(EngineConfig, args)
