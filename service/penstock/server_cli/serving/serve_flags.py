"""The command line of `penstock serve`: its flags in the order of --help, and the options that they set."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.runtime.chat.parser import REASONING_PARSERS, TOOL_PARSERS
from penstock.runtime.config import (
    ACCELERATOR_SIZES,
    CPU_SIZES,
    DEFAULT_FEATURE_SLOTS,
    DEFAULT_PROPOSED_TOKENS,
    DEFAULT_TARGET_ITL_S,
    DTYPES,
    KV_CACHE_DTYPES,
    NATIVE,
    POOLED_IMAGES,
    QUANTIZATIONS,
    SMALL_BYTES,
    SMALL_SIZES,
    SPECULATIONS,
    EngineConfig,
)
from penstock.runtime.errors import ConfigError
from penstock.runtime.prompting.prompts import Truncation
from penstock.runtime.scheduling.scheduler_config import SCHEDULING_POLICIES
from penstock.server_cli.serving.flags import (
    AddFlag,
    Flags,
    count_or_auto,
    json_object,
    named_directory,
    octal,
    options_of,
    path,
    path_or_off,
    port,
    size,
    size_or_none,
    size_text,
)
from penstock.server_cli.serving.group_flags import GroupFlags, add_group
from penstock.service.limits.bounds import Bounds
from penstock.service.listening.connections import ConnectionOptions
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions
from penstock.service.replies.reply_budget import ReplyLimits
from penstock.service.requests.generate import Features
from penstock.service.telemetry.logs.writing import LOG_LEVELS, LogOptions
from penstock.service.telemetry.metrics.options import DEFAULT_HOST, METRICS_NAMES, MetricsOptions
from penstock.service.telemetry.options import OTLP_PROTOCOLS, TraceLevel, TracingOptions
from penstock.shared.logs import LOG_FORMATS

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = """\
examples:
  penstock serve demo
  penstock serve Qwen/Qwen3-0.6B --max-model-len 4096 --kv-cache-bytes 2G
  penstock serve Qwen/Qwen3-0.6B --openai-port 8000
  penstock serve ./my-checkpoint --served-model-name mine --otlp-endpoint http://127.0.0.1:4317
  penstock serve demo --host 0.0.0.0 --tls-cert server.pem --tls-key server.key --client-ca clients.pem

The server speaks penstock.v1 over gRPC, with health checks and reflection. SIGTERM or Ctrl-C ends it
gracefully: it takes no new requests, finishes the running ones within --grace, and exits 0. A second signal
ends it at once.
"""
_SWITCH = argparse.BooleanOptionalAction


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over gRPC",
        description="Load a model and serve it over gRPC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        help='"demo" (built in), a checkpoint directory, a .gguf file, or a Hugging Face id such as '
        "Qwen/Qwen3-0.6B",
    )
    flags = Flags(
        parser,
        ServerOptions(),
        ListenOptions(),
        ConnectionOptions(),
        Bounds(),
        EngineConfig(),
        ReplyLimits(),
        Features(),
        LogOptions(),
        TracingOptions(),
        MetricsOptions(),
        _Front(),
        _AtStart(),
        GroupFlags(),
    )
    _add_network(flags.group("network"))
    _add_openai(flags.group("OpenAI's API over HTTP"))
    _add_connections(flags.group("connections", "0 switches each of these off"))
    _add_bounds(
        flags.group(
            "bounds",
            "calls beyond a bound are refused as BUSY, with a time to come back; 0 switches a bound off",
        )
    )
    _add_callers(flags.group("callers"))
    _add_weights(flags.group("weight updates"))
    _add_adapters(flags.group("LoRA adapters"))
    add_engine(flags.group("engine"))
    add_group(flags.group("several processes", "all of them have the same flags, but for --process-id"))
    _add_requests(flags.group("requests"))
    _add_replies(flags.group("replies"))
    _add_telemetry(
        flags.group(
            "logs, traces and metrics",
            "OpenTelemetry's environment variables (OTEL_...) apply, too; a flag wins over a variable",
        )
    )
    parser.set_defaults(flags=flags.by_option)


@dataclasses.dataclass(frozen=True)
class _Front:
    """Where the process beside the server speaks OpenAI's API, see `processes.openai_front`."""

    openai_port: int | None = None
    openai_host: str | None = None
    openai_store: Path | None = None
    openai_adapter_updates: bool = False


@dataclasses.dataclass(frozen=True)
class _AtStart:
    """What is loaded before the server is ready."""

    adapters: tuple[tuple[str, Path], ...] = ()


def _add_network(flag: AddFlag) -> None:
    flag("host", "address to listen on; default: %(default)s, this machine only")
    flag("port", "0 lets the system choose; none: only the Unix socket", "N|none", type=port)
    flag(
        "unix_socket",
        "listen on this Unix socket, too; its address for clients is unix:/absolute/path; default: none",
        "PATH",
    )
    mode = ListenOptions().unix_socket_mode
    flag(
        "unix_socket_mode",
        "mode of the socket's file, in octal: whoever may write to it may connect; "
        f"default: {mode:o}, this user only",
        "MODE",
        type=octal,
    )
    flag(
        "control_port",
        "serve what changes the server for everybody (flush, pause, weights, adapters) at this port and not "
        "at --port; 0 lets the system choose; default: all at --port",
        "N",
    )
    flag("control_host", "host of the control port; default: that of --host", "HOST")
    flag(
        "front_processes",
        "so many further processes speak gRPC with the clients of --port, to send more messages "
        "a second than one process can; 0: the process of the engine does it",
        "N",
    )
    flag(
        "tls_cert",
        "certificate chain in PEM form: ports speak TLS; read again when it changes; default: no TLS",
        "FILE",
    )
    flag("tls_key", "private key of --tls-cert in PEM form", "FILE")
    flag(
        "client_ca",
        "authorities of clients' certificates in PEM form; clients without such a certificate are "
        "refused; default: clients need none",
        "FILE",
    )
    flag(
        "insecure",
        "allow listening where other machines can connect, without TLS or without keys or client "
        "certificates",
        action="store_true",
    )
    flag("stall_limit_s", "end a stream whose client reads nothing for this long")
    flag("grace_s", "how long running requests may go on after SIGTERM")
    flag(
        "drain_delay_s",
        "how long requests are still accepted after SIGTERM while health already says NOT_SERVING, so "
        "that load balancers notice; --grace begins afterwards",
    )
    flag("max_receive_bytes", "largest request message, such as 16M; default: 8M", "BYTES", type=size)
    flag(
        "max_held_image_bytes",
        "most memory for images of requests that wait or run, as the model takes them; default: 4G",
        "BYTES",
        type=size,
    )
    flag(
        "watchdog_s",
        "health says NOT_SERVING if the engine has work and does none of it for this long; must exceed "
        "the time of the longest step; a front process that does nothing for this long is replaced; 0: never",
    )


def _add_openai(flag: AddFlag) -> None:
    flag(
        "openai_port",
        "a process beside the server speaks OpenAI's HTTP API at this port, with the certificate of "
        "--tls-cert, and serves a web page; 0 lets the system choose; default: none",
        "N|none",
        type=port,
    )
    flag("openai_host", "host of that port; default: that of --host", "HOST")
    flag(
        "openai_store",
        "that process keeps responses of /v1/responses in this file, at most 1G of it and for 30 days; "
        "default: nothing is kept",
        "FILE",
    )
    flag(
        "openai_adapter_updates",
        "that process serves vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter, for keys with the "
        "role control; on a server without keys everybody may use them; default: off",
        action="store_true",
    )


def _add_connections(flag: AddFlag) -> None:
    flag(
        "handshake_timeout_s", "close a connection whose handshake (TLS, HTTP/2) is not done within this time"
    )
    flag("keepalive_s", "send a ping to a peer that has sent nothing for this long")
    flag("keepalive_timeout_s", "end the requests of a peer that does not answer a ping within this time")
    flag("max_connection_age_s", "close a connection this old once its RPCs have ended, to spread load again")
    flag("max_connection_age_grace_s", "how long RPCs of such a connection may go on; 0: until their end")
    flag("max_connection_idle_s", "close a connection that has had no RPC for this long")


def _add_bounds(flag: AddFlag) -> None:
    flag(
        "max_rpcs",
        "Generate, Stream, Embed, Score, Rerank, Classify, Tokenize and Detokenize calls at once, of all "
        "callers",
        "N",
    )
    flag(
        "max_rpcs_per_address",
        "such calls of one IPv4 address or IPv6 /64 network; a proxy is one address",
        "N",
    )
    flag("max_rpcs_per_connection", "such calls of one connection", "N")
    flag("max_tokenize_rpcs", "Tokenize and Detokenize calls at once", "N")
    flag(
        "max_control_rpcs",
        "other calls of penstock.v1 at once, such as Abort and GetLoad; half per address",
        "N",
    )
    flag(
        "max_update_rpcs",
        "UpdateWeights and PushAdapter calls at once, of which one updates; half per address",
        "N",
    )
    flag("max_watch_rpcs", "WatchLoad calls at once (penstock top); half per address", "N")
    flag("max_health_rpcs", "health checks and watches at once; half per address", "N")
    flag("max_reflection_rpcs", "calls of server reflection at once; half per address", "N")
    flag("max_receiving_rpcs", "messages that take over half a second to arrive; half per address", "N")
    flag("max_connections", "connections of one address; further ones are closed at once", "N")
    flag("receive_limit_s", "end a call whose message does not arrive within this time")
    flag(
        "update_stall_limit_s",
        "end an UpdateWeights or a PushAdapter whose next message does not arrive within this time; nothing "
        "has changed then",
    )


def _add_callers(flag: AddFlag) -> None:
    flag(
        "keys",
        "answer only callers with a key of this file, which `penstock keys` makes and which is read "
        "again on SIGHUP; default: everybody may do everything",
        "FILE",
    )
    flag(
        "usage_file",
        "count requests and tokens of every key in this SQLite file, which `penstock usage` shows; the "
        "last message of an answer is sent once it is counted; default: nothing is kept",
        "FILE",
        name="--usage",
    )


def _add_weights(flag: AddFlag) -> None:
    flag(
        "weights_roots",
        "let UpdateWeights read files below this directory, by file:// addresses; may be given several "
        "times; default: none",
        "DIR",
        name="--weights-root",
        action="append",
        type=path,
        default=[],
    )


def _add_adapters(flag: AddFlag) -> None:
    flag(
        "max_adapters",
        "LoRA adapters whose weights are on the device at a time; requests for others wait for a place; 0: "
        "adapters are off",
        "N",
    )
    flag("max_adapter_rank", "largest rank of an adapter, for which each place has room", "N")
    flag(
        "adapter_experts",
        "let adapters change the experts of a mixture, too; each place then has room for the matrices of all "
        "experts",
        action="store_true",
    )
    flag(
        "max_cached_adapters",
        "adapters in host memory, those on the device included; of those that requests had loaded from "
        "--adapter-dir the least recently used leave",
        "N",
    )
    flag(
        "adapters",
        "load the adapter in this directory, which PEFT wrote, before the server is ready; may be given "
        "several times; default: none",
        "NAME=DIR",
        name="--adapter",
        action="append",
        type=named_directory,
        default=[],
    )
    flag(
        "adapter_dir",
        "let requests name, and LoadAdapter read, the adapters in the folders of this directory; a name is "
        "never a path; default: none",
        "DIR",
        type=path,
    )


def add_engine(flag: AddFlag) -> None:
    """Add the flags of the engine's own options."""
    flag(
        "served_model_name",
        "name in requests and replies; default: the whole hub id, or the last part of a folder's path",
        "NAME",
    )
    flag("dtype", "auto: the checkpoint's", choices=DTYPES)
    flag(
        "quantization",
        "int8: weights of linear layers have 8 bits, and activations 8 or 16 where native kernels multiply "
        "them; int4: weights have 4, except embeddings and heads",
        choices=QUANTIZATIONS,
    )
    flag(
        "kv_cache_dtype",
        "what the KV cache is kept in; int8: 8 bits, with a scale for each token and head, so that the "
        "same memory holds nearly twice the tokens of bfloat16; auto: the dtype of activations; default: "
        "%(default)s",
        choices=KV_CACHE_DTYPES,
    )
    flag(
        "tensor_parallel_size",
        "devices over which the model is cut, so that each holds a part of the weights and of the KV cache; "
        "on CPU the server makes them itself; auto: as many as there are and the model can be cut over, on "
        "CPU one; default: %(default)s",
        "N|auto",
        type=count_or_auto,
    )
    flag(
        "pipeline_parallel_size",
        "stages into which the layers of the model are cut, each with --tensor-parallel-size devices of its "
        "own; with --processes each process has one of them; default: %(default)s",
        "N",
    )
    flag(
        "expert_parallel",
        "keep the experts of a mixture whole, so that each device has some of them instead of a part of each",
        action="store_true",
    )
    flag(
        "context_parallel",
        "deal the cache of latent attention (DeepSeek) over the devices by pages, so that it holds so many "
        "times more tokens; XLA computes the attention then",
        action="store_true",
    )
    flag(
        "native",
        "the kernels for CPUs, TPUs, Hopper GPUs, B200 and RTX 50; auto: where machine and model can use "
        "them; require: do not start without; off: XLA alone",
        choices=NATIVE,
    )
    flag(
        "native_folder",
        "where the library of those for CPUs is, and where it is compiled to if it is not there; default: "
        "the library that came with the wheel, or else ~/.cache/penstock/native",
        "DIR",
    )
    flag(
        "threads",
        "CPU threads that compute and compile programs; default: the processors that affinity mask and "
        "CPU quota leave",
        "N",
    )
    flag(
        "max_model_len",
        "prompt and output of a request together; default: the model's, at most what the KV cache holds",
        "TOKENS",
    )
    flag(
        "max_num_seqs",
        f"outputs that run together, each in a row of its own; default: {CPU_SIZES.num_seqs} on CPU, "
        f"{ACCELERATOR_SIZES.num_seqs} on an accelerator, {SMALL_SIZES.num_seqs} on one of which JAX may use "
        f"less than {SMALL_BYTES >> 30} GiB",
        "N",
    )
    flag(
        "feature_slots",
        "how many of the running requests may have penalties, a bias, allowed ids or banned words of "
        "one token; each of them takes 8 bytes per token of the vocabulary; default: as many as run "
        f"together, at most {DEFAULT_FEATURE_SLOTS} unless the served sampling defaults have penalties",
        "N",
    )
    flag(
        "max_num_batched_tokens",
        "tokens of one step, prompts and outputs together: it bounds how fast prompts are read, and how "
        f"long a step takes; default: {CPU_SIZES.num_tokens} on CPU, "
        f"{ACCELERATOR_SIZES.num_tokens} on an accelerator, {SMALL_SIZES.num_tokens} on one of which JAX may "
        f"use less than {SMALL_BYTES >> 30} GiB",
        "N",
    )
    flag(
        "max_prefill_chunk",
        "most prompt tokens of one request in a step, also when nothing else runs; lower values keep "
        "the tokens of running requests steady during long prompts, and delay the first tokens of these; "
        "default: no limit",
        "TOKENS",
    )
    flag(
        "target_itl_s",
        "how far apart the tokens of running requests should be while a prompt comes in; the server "
        "measures its steps and sizes them to that; lower values delay the first tokens of new requests; "
        "0: no target; default: "
        f"{DEFAULT_TARGET_ITL_S:g} where FEATURE_BATCH_INVARIANT holds, else 0",
    )
    flag(
        "scheduling_policy",
        "fcfs: in order of arrival; priority: the requests' priority first",
        choices=SCHEDULING_POLICIES,
    )
    flag(
        "prefix_cache_pages",
        "most KV pages kept for prefixes that no running request uses, in each group of layers (those "
        "without a sliding window, and those with one); 0: no prefix cache; default: all that are free",
        "N",
    )
    flag(
        "state_snapshots",
        "how many snapshots are kept of the state of recurrent layers, in models that have some, so "
        "that requests can share prefixes; 0: none, and no prefix cache; default: as many as --max-num-seqs, "
        "in at most half of the memory that the state itself leaves",
        "N",
    )
    flag(
        "overlap",
        "start the next step while the host processes the last one; turn it off only to debug; default: on",
        action=_SWITCH,
    )
    flag(
        "max_decode_steps",
        "run up to N decode steps per dispatch while no request is waiting: more throughput, but a "
        "newcomer waits for the dispatch that runs",
        "N",
    )
    flag(
        "decode_window_s",
        "longest duration of such a dispatch of several decode steps; constrained requests, which take "
        "turns with them, get a token within this time",
    )
    flag(
        "speculation",
        "who proposes the next tokens of an output, which the model then checks in one step; the tokens stay "
        "the same; lookup: what followed the same words earlier in the prompt, in the output, or in requests "
        "with the same cache salt; draft: a second, smaller model, see --draft-model; heads: a layer of the "
        "checkpoint that predicts the token after the next one (MTP); auto: draft with --draft-model, else "
        "lookup in the request's own tokens where no bit depends on a step's size, else off",
        choices=SPECULATIONS,
    )
    flag(
        "draft_model",
        "the model that guesses with --speculation draft or auto: a folder, a .gguf file or a hub id; its "
        "tokenizer is that of the model that is served; or the folder of an EAGLE-3 head of that model",
        "MODEL",
    )
    flag(
        "lookup_text",
        "a text file in UTF-8 that a lookup reads, too, for all requests: what outputs will look like; demo: "
        "the text that comes with the demo model",
        "FILE",
    )
    flag(
        "max_proposed_tokens",
        "most tokens that are proposed for an output in a step, with a --speculation other than off; a "
        f"request may lower that; default: {DEFAULT_PROPOSED_TOKENS}",
        "N",
    )
    flag(
        "switch_interval_s",
        "how long a thread keeps Python's interpreter while another waits for it; higher values delay "
        "tokens on their way out, much lower ones cost throughput",
    )
    flag("max_queued_requests", "requests that may wait; more are refused", "N")
    flag("page_size", "tokens of one KV page, a power of two", "TOKENS")
    flag(
        "kv_cache_bytes",
        "such as 512M or 2G, taken in full: what running requests do not need keeps prefixes; "
        "default: on an accelerator what --hbm-utilization leaves, on CPU what --max-num-seqs "
        "requests of the longest context can fill, at most 1G",
        "SIZE",
        type=size,
    )
    flag(
        "hbm_utilization",
        "share of what JAX may take of an accelerator's memory (95 %% unless "
        "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise), for weights, programs and KV",
        "SHARE",
    )
    flag("max_logprobs", "most log-probabilities a request may ask for per token", "N")
    flag("max_images", "most images of a request, for models that read images", "N")
    flag(
        "max_image_bytes",
        f"largest image as it is sent, such as 5M; default: {size_text(EngineConfig().max_image_bytes)}",
        "SIZE",
        type=size,
    )
    flag(
        "max_image_pixels",
        "most pixels of an image, as its header says: it is refused before it is decoded",
        "N",
    )
    flag(
        "max_image_tokens",
        "most tokens that an image stands for: larger ones are made smaller; programs are compiled for "
        f"up to so many; default: {CPU_SIZES.image_tokens} on CPU, {ACCELERATOR_SIZES.image_tokens} on an "
        f"accelerator, {SMALL_SIZES.image_tokens} on one of which JAX may use less than "
        f"{SMALL_BYTES >> 30} GiB",
        "TOKENS",
    )
    flag(
        "media_pool_tokens",
        "room on the device for the embeddings of images: of those that running requests need, and of "
        f"those that were used last; default: {POOLED_IMAGES} times --max-image-tokens",
        "TOKENS",
    )
    flag(
        "max_encode_patches",
        "most patches of images that are encoded in one step, though a single image may have more: "
        "lower values keep the tokens of running requests steady; default: as many as the largest image has",
        "N",
    )
    flag("compilation_cache", "where compiled programs are kept between starts", "DIR|off", type=path_or_off)
    flag(
        "compiled",
        "use the programs that `penstock compile` wrote into this folder, if all that they are made of "
        "agrees; else say what differs, and compile; they are machine code, so take only a folder of your "
        "own; default: none",
        "DIR",
    )


def _add_requests(flag: AddFlag) -> None:
    flag(
        "generation_config",
        "sampling defaults in place of the model's generation_config.json, such as "
        """'{"temperature": 0.6, "top_p": 0.95}'; requests may still set their own""",
        "JSON",
        name="--override-generation-config",
        type=json_object,
    )
    flag(
        "truncation",
        "what happens to a prompt that is too long, if the request does not say: reject refuses it, "
        "left drops the oldest tokens, right drops the newest, middle keeps both ends",
        default=ServerOptions().truncation.value,
        choices=[value.value for value in Truncation],
    )
    flag(
        "tool_call_parser",
        "format of the model's tool calls; auto: detected from its chat template",
        choices=TOOL_PARSERS,
    )
    flag(
        "reasoning_parser",
        "format of the model's reasoning; auto: detected from its chat template",
        choices=REASONING_PARSERS,
    )
    flag("grammar_time_limit_s", "refuse a constraint that takes longer to compile")
    flag(
        "constraints",
        "refuse constraints of any kind, and a tool_choice that requires a call",
        name="--no-constraints",
        action="store_false",
    )
    flag(
        "request_templates",
        "accept chat templates that come with a request: they are programs of the caller's, and run in "
        "processes without files or network; read docs/explanation/security.md first",
        name="--allow-request-templates",
        action="store_true",
    )
    flag(
        "vllm_service",
        "answer vLLM's gRPC service, too, for gateways that speak to vLLM: vllm.grpc.engine.VllmEngine",
        action="store_true",
    )


def _add_replies(flag: AddFlag) -> None:
    replies = ReplyLimits()
    flag(
        "max_response_bytes",
        "largest reply of Generate, and most bytes that may wait for one stream's reader; "
        f"default: {size_text(replies.max_response_bytes)}",
        "SIZE",
        type=size,
    )
    flag(
        "max_buffered_response_bytes",
        "most bytes of all replies; new requests are refused from 75 %% on; "
        f"default: {size_text(replies.max_buffered_response_bytes)}",
        "SIZE",
        type=size,
    )


def _add_telemetry(flag: AddFlag) -> None:
    flag("log_level", "", choices=LOG_LEVELS)
    flag("log_format", "text for people, or a JSON object on each line", choices=LOG_FORMATS)
    flag(
        "log_file",
        "write the log into this file in place of stderr; why the server cannot start still goes to stderr",
        "PATH",
    )
    flag(
        "log_file_bytes",
        "rename the log file when it is as large as this, or with `none` leave that to another program; "
        "default: 100M",
        "SIZE",
        type=size_or_none,
    )
    flag("log_file_count", "how many renamed log files are kept", "N")
    flag(
        "access_log",
        "leave out the line for each call of Generate and Stream that was not refused",
        name="--no-access-log",
        action="store_false",
    )
    flag(
        "metrics",
        "measure what the engine does, for the port, the collector and `penstock top`; default: on",
        action=_SWITCH,
    )
    flag(
        "otlp_endpoint",
        "send telemetry to this OpenTelemetry collector: https:// uses TLS, http:// is plaintext; "
        "default: OTEL_EXPORTER_OTLP_ENDPOINT, or none",
        "URL",
    )
    flag(
        "otlp_protocol",
        "how the collector is spoken to; default: OTEL_EXPORTER_OTLP_PROTOCOL, or grpc",
        choices=OTLP_PROTOCOLS,
    )
    flag(
        "trace_level",
        "how much of a request is traced: requests has its phases, steps also the engine's steps, "
        "detailed a span for each request and step; `penstock trace` changes it",
        default=TracingOptions().trace_level.name.lower(),
        choices=[level.name.lower() for level in TraceLevel],
    )
    flag(
        "trace_sample_ratio",
        "trace this share of the calls without a traceparent, from 0 to 1; default: "
        "OTEL_TRACES_SAMPLER, or all",
        "RATIO",
    )
    flag(
        "max_waiting_spans",
        "how many spans may wait for the collector; those beyond are dropped and counted",
        "N",
    )
    flag(
        "metrics_port",
        "serve metrics for Prometheus at this port, at /metrics in plain HTTP; 0 lets the system "
        "choose; default: none",
        "N",
    )
    flag(
        "metrics_host",
        f"address of that port: whoever reaches it reads the metrics; default: {DEFAULT_HOST}, this "
        "machine only",
        "HOST",
    )
    flag(
        "metrics_names",
        "vllm: the port shows the metrics under vLLM's names, too, for dashboards and gateways that "
        "know those",
        choices=METRICS_NAMES,
    )
    flag(
        "otlp_metrics_interval_s",
        "push metrics to the OpenTelemetry collector this often; 0: never; default: "
        "OTEL_METRIC_EXPORT_INTERVAL, or 15",
    )
    flag(
        "profile_dir",
        "let `penstock profile` record what the engine does, and keep the profiles in this folder; "
        "default: none are made",
        "DIR",
    )
    flag("profile_keep", "how many profiles stay in the folder; older ones are removed", "N")


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Make the server's options that the flags describe. Raises ConfigError."""
    return options_of(
        ServerOptions,
        args,
        weights_roots=tuple(args.weights_roots),
        truncation=Truncation(args.truncation),
        listen=options_of(ListenOptions, args),
        connections=options_of(ConnectionOptions, args),
        bounds=options_of(Bounds, args),
        replies=options_of(ReplyLimits, args),
        features=options_of(Features, args),
        metrics=metrics_options(args),
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Make the engine's options that the flags describe. Raises ConfigError."""
    config = options_of(EngineConfig, args)
    if args.adapters and not config.max_adapters:
        raise ConfigError(f"adapters: needs max_adapters of {len(args.adapters)} or more")
    if config.adapter_dir is not None and not config.adapter_dir.is_dir():
        raise ConfigError(f"adapter_dir: {config.adapter_dir} is no directory")
    names = [name for name, _ in args.adapters]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"adapters: names {min(twice)!r} twice")
    return config


def metrics_options(args: argparse.Namespace) -> MetricsOptions:
    """Make the options of metrics' ways out that the flags describe. Raises ConfigError."""
    options = options_of(MetricsOptions, args)
    if args.metrics:
        return options
    for name, value in (
        ("metrics_port", options.metrics_port is not None),
        ("otlp_metrics_interval_s", options.otlp_metrics_interval_s),
    ):
        if value:
            raise ConfigError(f"{name}: cannot stand beside --no-metrics")
    return dataclasses.replace(options, otlp_metrics_interval_s=0.0)


def log_options(args: argparse.Namespace) -> LogOptions:
    """Make the options of the log that the flags describe. Raises ConfigError."""
    return options_of(LogOptions, args)


def tracing_options(args: argparse.Namespace) -> TracingOptions:
    """Make the options of traces that the flags describe. Raises ConfigError."""
    return options_of(TracingOptions, args, trace_level=TraceLevel[args.trace_level.upper()])
