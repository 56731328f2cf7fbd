"""The command line of `penstock serve`: its parser, and the server's options that its flags describe."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.runtime.chat.parser import REASONING_PARSERS, TOOL_PARSERS
from penstock.runtime.config import EngineConfig
from penstock.runtime.prompting.prompts import Truncation
from penstock.server_cli.serving.connection_flags import add_connection_flags
from penstock.server_cli.serving.engine_flags import add_engine_flags
from penstock.server_cli.serving.feature_flags import add_feature_flags
from penstock.server_cli.serving.flag_names import flags_of
from penstock.server_cli.serving.keys_flags import add_keys_flags
from penstock.server_cli.serving.limits_flags import add_limits_flags
from penstock.server_cli.serving.network_flags import add_listen_flags
from penstock.server_cli.serving.openai_flags import add_openai_flags
from penstock.server_cli.serving.option_values import json_object, options_of, path, size
from penstock.server_cli.serving.reply_flags import add_reply_flags
from penstock.server_cli.serving.telemetry_flags import add_telemetry_flags, metrics_options
from penstock.service.limits.bounds import Bounds
from penstock.service.listening.connections import ConnectionOptions
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions
from penstock.service.replies.reply_budget import ReplyLimits
from penstock.service.requests.generate import Features

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_CONFIG = EngineConfig()
_OPTIONS = ServerOptions()
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
        help='"demo" (built in), a checkpoint directory, or a Hugging Face id such as Qwen/Qwen3-0.6B',
    )
    net = parser.add_argument_group("network")
    add_listen_flags(net)
    net.add_argument(
        "--stall-limit",
        dest="stall_limit_s",
        type=float,
        default=_OPTIONS.stall_limit_s,
        metavar="SECONDS",
        help="end a stream whose client reads nothing for this long; default: %(default)g",
    )
    net.add_argument(
        "--grace",
        dest="grace_s",
        type=float,
        default=_OPTIONS.grace_s,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM; default: %(default)g",
    )
    net.add_argument(
        "--drain-delay",
        dest="drain_delay_s",
        type=float,
        default=_OPTIONS.drain_delay_s,
        metavar="SECONDS",
        help="how long requests are still accepted after SIGTERM while health already says NOT_SERVING, so "
        "that load balancers notice; --grace begins afterwards; default: %(default)g",
    )
    net.add_argument(
        "--max-receive-bytes",
        type=size,
        default=_OPTIONS.max_receive_bytes,
        metavar="BYTES",
        help="largest request message, such as 16M; default: 8M",
    )
    net.add_argument(
        "--max-held-image-bytes",
        type=size,
        default=_OPTIONS.max_held_image_bytes,
        metavar="BYTES",
        help="most memory for images of requests that wait or run, as the model takes them; default: 4G",
    )
    net.add_argument(
        "--watchdog",
        dest="watchdog_s",
        type=float,
        default=_OPTIONS.watchdog_s,
        metavar="SECONDS",
        help="health says NOT_SERVING if the engine has work and does none of it for this long; must exceed "
        "the time of the longest step; a front process that does nothing for this long is replaced; "
        "0: never; default: %(default)g",
    )
    add_openai_flags(parser)
    add_connection_flags(parser)
    add_limits_flags(parser)
    add_keys_flags(parser)
    _add_weights(parser)
    add_engine_flags(parser)
    _add_requests(parser)
    add_reply_flags(parser)
    add_telemetry_flags(parser)
    parser.set_defaults(flags=flags_of(parser))


def _add_weights(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("weight updates")
    group.add_argument(
        "--weights-root",
        dest="weights_roots",
        action="append",
        type=path,
        default=[],
        metavar="DIR",
        help="let UpdateWeights read files below this directory, by file:// addresses; may be given several "
        "times; default: none",
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--override-generation-config",
        dest="generation_config",
        type=json_object,
        metavar="JSON",
        help="sampling defaults in place of the model's generation_config.json, such as "
        """'{"temperature": 0.6, "top_p": 0.95}'; requests may still set their own""",
    )
    requests.add_argument(
        "--truncation",
        default=_OPTIONS.truncation.value,
        choices=[value.value for value in Truncation],
        help="what happens to a prompt that is too long, if the request does not say: reject refuses it, "
        "left drops the oldest tokens, right drops the newest, middle keeps both ends; default: %(default)s",
    )
    requests.add_argument(
        "--tool-call-parser",
        default=_CONFIG.tool_call_parser,
        choices=TOOL_PARSERS,
        help="format of the model's tool calls; auto: detected from its chat template; default: %(default)s",
    )
    requests.add_argument(
        "--reasoning-parser",
        default=_CONFIG.reasoning_parser,
        choices=REASONING_PARSERS,
        help="format of the model's reasoning; auto: detected from its chat template; default: %(default)s",
    )
    requests.add_argument(
        "--grammar-time-limit",
        dest="grammar_time_limit_s",
        type=float,
        default=_CONFIG.grammar_time_limit_s,
        metavar="SECONDS",
        help="refuse a constraint that takes longer to compile; default: %(default)g",
    )
    add_feature_flags(requests)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The server's options that the flags describe. Raises ConfigError."""
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
