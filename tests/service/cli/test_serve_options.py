"""The arguments of `penstock serve`, without a process: the options that they become, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import runtime
from penstock.runtime.config import CPU_SIZES, EngineConfig, resolve
from penstock.runtime.errors import ConfigError
from penstock.runtime.prompting.prompts import Truncation
from penstock.server_cli.commands import serve
from penstock.server_cli.serving import flags, serve_flags
from penstock.service.limits.bounds import Bounds
from penstock.service.listening.connections import ConnectionOptions
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions
from penstock.service.replies.reply_budget import ReplyLimits
from penstock.service.requests.generate import Features
from penstock.service.telemetry.metrics.push import Collector
from penstock.service.telemetry.options import TracingOptions
from tests.service.adapters_rig import on_disk
from tests.service.fake import FakeEngine

OVERRIDE = "--override-generation-config"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run the command. Returns its exit code and what it wrote to stderr."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)

    def command(*arguments: str) -> tuple[int, str]:
        code = serve.run(parse(*arguments))
        return code, capsys.readouterr().err

    return command


def test_a_port_in_use_is_told_before_anything_is_loaded(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, errors = run("no-such-model", "--port", str(port))
    assert code == 1
    assert f"penstock serve: cannot listen on 127.0.0.1:{port}: Address already in use" in errors
    assert "--port" in errors
    assert "no-such-model" not in errors


@pytest.mark.parametrize(
    ("arguments", "complaint", "expected"),
    [
        (["./no-such-folder", "--port", "0"], "no-such-folder", 1),
        (["demo", "--page-size", "3"], "penstock serve: --page-size: must be a power of two", 2),
        (["demo", "--max-proposed-tokens", "17"], "--max-proposed-tokens: must be from 1 to 16, not 17", 2),
        (["demo", "--stall-limit", "0"], "--stall-limit: must be above 0", 2),
        (["demo", "--max-rpcs", "-1"], "--max-rpcs: must be from 0 (off) to ", 2),
        (["demo", "--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached from other machines, and", 2),
        (["demo", "--port", "none"], "--port: must be given if there is no --unix-socket:", 2),
        (["demo", "--tls-cert", "c.pem"], "--tls-key: is required with --tls-cert: TLS", 2),
        (["demo", "--tls-cert", "no.pem", "--tls-key", "no.key"], "--tls-cert: no.pem cannot be read", 1),
        (["demo", "--port", "0", "--unix-socket", "no-such-folder/s"], "no-such-folder/s cannot be made", 1),
        (
            ["demo", "--port", "none", "--unix-socket", "s", "--front-processes", "1"],
            "--front-processes: needs --port, because front processes serve no Unix socket",
            2,
        ),
        (
            ["demo", "--max-connections", "1", "--front-processes", "2"],
            "--max-connections: must be at least --front-processes, which is 2, not 1",
            2,
        ),
        (["demo", "--max-receive-bytes", "1G"], "--max-receive-bytes: must be from 1 to 1073741823", 2),
        (["demo", "--weights-root", "/no/such/folder"], "--weights-root: /no/such/folder is no directory", 2),
        (["demo", "--adapter", "a=x"], "--adapter: needs --max-adapters of 1 or more", 2),
        (["demo", "--max-adapters", "2", *["--adapter", "a=x"] * 2], "--adapter: names 'a' twice", 2),
        (["demo", "--adapter-dir", "."], "--adapter-dir: goes with --max-adapters above 0", 2),
        (
            ["demo", "--max-adapters", "1", "--adapter-dir", "/no/such/folder"],
            "--adapter-dir: /no/such/folder is no directory",
            2,
        ),
        (["demo", "--update-stall-limit", "-1"], "--update-stall-limit: must be at least 0 (off)", 2),
        (["demo", "--grammar-time-limit", "0"], "--grammar-time-limit: must be above 0", 2),
        (["demo", "--grammar-time-limit", "nan"], "--grammar-time-limit: must be above 0", 2),
        (
            ["demo", OVERRIDE, '{"temperature": -1}'],
            f"{OVERRIDE}: sampling.temperature: must be from 0 to 100",
            2,
        ),
        (["demo", OVERRIDE, '{"top_k": 1.5}'], "top_k: must be a whole number", 2),
        (
            ["demo", OVERRIDE, '{"max_new_tokens": 3}'],
            f"{OVERRIDE}: max_new_tokens cannot be set; there is temperature",
            2,
        ),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(
    run: Run, arguments: list[str], complaint: str, expected: int
) -> None:
    code, errors = run(*arguments)
    assert code == expected
    (line,) = [line for line in errors.splitlines() if line.startswith("penstock serve: ")]
    assert complaint in line
    assert "Traceback" not in errors


def test_an_adapter_that_cannot_be_loaded_ends_the_start_by_name_and_file(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, collects = FakeEngine(max_adapters=2), list[bool]()

    def load(*_: object, lead: object) -> FakeEngine:
        collects.append(gc.isenabled())
        return engine

    monkeypatch.setitem(vars(runtime), "Engine", SimpleNamespace(from_pretrained=load))
    good = on_disk(tmp_path, "good")
    flags = ["--adapter", f"sql={good}", "--adapter", f"law={tmp_path}/none"]
    code, errors = run("fake", "--port", "0", "--max-adapters", "2", *flags)
    assert code == 1
    assert f"penstock serve: --adapter: law={tmp_path}/none: " in errors
    assert engine.adapter_reader is not None
    assert engine.adapter_reader.read_from == [good]
    assert collects == [False]  # nothing looks for garbage among all that a load makes
    assert gc.isenabled()


def test_a_leader_that_waits_for_its_followers_collects_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may come after hours, and health is answered meanwhile."""

    def load(*_: object, lead: object) -> bool:
        return gc.isenabled()

    monkeypatch.setitem(vars(runtime), "Engine", SimpleNamespace(from_pretrained=load))
    wanted: Any = SimpleNamespace(group=SimpleNamespace(options=None), model="fake", config=None, adapters=())
    collects: Any = serve._load(wanted)
    assert collects is True


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "threads: must be from 1 to 4096, not 0; native: must be one of auto, off, not 'native'",
            "--threads: must be from 1 to 4096, not 0; --native: must be one of auto, off, not 'native'",
        ),
        (
            "max_num_batched_tokens: must be at least 16 and max_num_seqs (4), not 3",
            "--max-num-batched-tokens: must be at least 16 and --max-num-seqs (4), not 3",
        ),
        (
            "needs a port; raise it, or lower max_model_len.",
            "needs a port; raise it, or lower --max-model-len.",
        ),
        ("dtype: must be one of auto, not 'page_size'", "--dtype: must be one of auto, not 'page_size'"),
        ("unix_socket: /run/tls_key cannot be made", "--unix-socket: /run/tls_key cannot be made"),
        (
            "generation_config: temperature: must be a number",
            "--override-generation-config: temperature: must be a number",
        ),
        (
            "config.json cannot be served: layers: must be a number; dtype: is unknown",
            "config.json cannot be served: layers: must be a number; dtype: is unknown",
        ),
        (
            "generation_config.json: not JSON; max_num_seqs_x",
            "generation_config.json: not JSON; max_num_seqs_x",
        ),
    ],
)
def test_an_error_names_flags_where_it_means_options(message: str, told: str) -> None:
    """The message of an embedded engine names its fields. What only looks like one stays as it is: a word of
    the sentence, a part of a path, the name of a file, and a value.
    """
    assert flags.with_flags(message, parse("demo").flags) == told


def test_the_message_of_an_embedded_engine_names_fields() -> None:
    with pytest.raises(
        ConfigError, match=r"^max_num_batched_tokens: must be at least 16 and max_num_seqs \(64\)"
    ):
        EngineConfig(max_num_seqs=64, max_num_batched_tokens=17)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([OVERRIDE, "{"], "not JSON"),
        ([OVERRIDE, "[1]"], "must be a JSON object"),
        (["--native", "on"], "invalid choice: 'on'"),
        (["--speculation", "medusa"], "invalid choice: 'medusa' (choose from "),
        (["--truncation", "top"], "invalid choice: 'top'"),
        (["--tool-call-parser", "gpt"], "invalid choice: 'gpt'"),
        (["--reasoning-parser", "gpt"], "invalid choice: 'gpt'"),
        (["--grammar-time-limit", "soon"], "invalid float value"),
        (["--port", "some"], "'some' is neither a number nor none"),
        (["--unix-socket-mode", "rw"], "'rw' is not an octal number such as 660"),
    ],
)
def test_what_is_no_value_ends_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse("demo", *arguments)
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert complaint in errors
    assert arguments[0] in errors


# -- arguments, without a process --


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_flags.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *arguments])


def test_defaults_are_those_of_the_configurations() -> None:
    args = parse("demo")
    assert serve_flags.engine_config(args) == EngineConfig()
    assert (args.host, args.port) == (ServerOptions().host, ServerOptions().port)
    assert (args.stall_limit_s, args.grace_s) == (ServerOptions().stall_limit_s, ServerOptions().grace_s)
    assert serve_flags.server_options(args) == ServerOptions()


def test_every_option_of_the_server_arrives() -> None:
    given = {
        "--host": "::1",
        "--port": "7",
        "--front-processes": "3",
        "--unix-socket": "~/s",
        "--unix-socket-mode": "660",
        "--control-port": "8",
        "--control-host": "127.0.0.2",
        "--tls-cert": "~/cert.pem",
        "--tls-key": "~/key.pem",
        "--client-ca": "~/ca.pem",
        "--keys": "~/keys.json",
        "--stall-limit": "2.5",
        "--grace": "0",
        "--drain-delay": "4",
        "--watchdog": "4.5",
        "--keepalive": "5",
        "--keepalive-timeout": "6",
        "--handshake-timeout": "4.5",
        "--max-connection-age": "7",
        "--max-connection-age-grace": "8",
        "--max-connection-idle": "9.5",
        "--max-receive-bytes": "3M",
        "--max-held-image-bytes": "5G",
        "--truncation": "middle",
        "--weights-root": str(Path.home()),
    }
    switches = ("--no-constraints", "--allow-request-templates")
    assert serve_flags.server_options(
        parse("demo", *switches, *(x for pair in given.items() for x in pair))
    ) == ServerOptions(
        host="::1",
        port=7,
        front_processes=3,
        listen=ListenOptions(
            unix_socket=Path.home() / "s",
            unix_socket_mode=0o660,
            control_port=8,
            control_host="127.0.0.2",
            tls_cert=Path.home() / "cert.pem",
            tls_key=Path.home() / "key.pem",
            client_ca=Path.home() / "ca.pem",
        ),
        keys=Path.home() / "keys.json",
        stall_limit_s=2.5,
        grace_s=0,
        drain_delay_s=4,
        watchdog_s=4.5,
        connections=ConnectionOptions(
            keepalive_s=5,
            keepalive_timeout_s=6,
            handshake_timeout_s=4.5,
            max_connection_age_s=7,
            max_connection_age_grace_s=8,
            max_connection_idle_s=9.5,
        ),
        max_receive_bytes=3 * 2**20,
        max_held_image_bytes=5 * 2**30,
        truncation=Truncation.MIDDLE,
        weights_roots=(Path.home(),),
        features=Features(constraints=False, request_templates=True),
    )


def test_several_directories_of_weights(tmp_path: Path) -> None:
    arguments = ("--weights-root", "~", "--weights-root", str(tmp_path))
    options = serve_flags.server_options(parse("demo", *arguments))
    assert options.weights_roots == (Path.home(), tmp_path)


def test_every_bound_arrives() -> None:
    given = {
        "--max-rpcs": "11",
        "--max-rpcs-per-address": "12",
        "--max-rpcs-per-connection": "13",
        "--max-tokenize-rpcs": "14",
        "--max-control-rpcs": "15",
        "--max-health-rpcs": "16",
        "--max-reflection-rpcs": "17",
        "--max-receiving-rpcs": "18",
        "--max-connections": "0",
        "--receive-limit": "1.5",
        "--max-update-rpcs": "19",
        "--max-watch-rpcs": "119",
        "--update-stall-limit": "2.5",
    }
    options = serve_flags.server_options(parse("demo", *(x for pair in given.items() for x in pair)))
    assert options.bounds == Bounds(
        max_rpcs=11,
        max_rpcs_per_address=12,
        max_rpcs_per_connection=13,
        max_tokenize_rpcs=14,
        max_control_rpcs=15,
        max_health_rpcs=16,
        max_reflection_rpcs=17,
        max_receiving_rpcs=18,
        max_connections=0,
        receive_limit_s=1.5,
        max_update_rpcs=19,
        max_watch_rpcs=119,
        update_stall_limit_s=2.5,
    )


def test_switches_of_the_server_arrive() -> None:
    given = serve_flags.server_options(
        parse("demo", "--host", "0.0.0.0", "--port", "none", "--unix-socket", "s")
    )
    assert (given.port, given.listen) == (None, ListenOptions(unix_socket=Path("s")))
    given = serve_flags.server_options(parse("demo", "--host", "0.0.0.0", "--insecure"))
    assert given == ServerOptions(host="0.0.0.0", listen=ListenOptions(insecure=True))


def test_every_limit_of_replies_arrives() -> None:
    given = {"--max-response-bytes": "3M", "--max-buffered-response-bytes": "2G"}
    options = serve_flags.server_options(parse("demo", *(x for pair in given.items() for x in pair)))
    assert options.replies == ReplyLimits(max_response_bytes=3 * 2**20, max_buffered_response_bytes=2 * 2**30)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ReplyLimits)])
def test_a_limit_of_replies_is_a_number_of_bytes(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be from 1"):
        ReplyLimits(**{name: 0})


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_the_same_values_are_checked_when_embedded(name: str) -> None:
    options: dict[str, Any] = {name: "gpt"}
    with pytest.raises(ConfigError, match=f"{name}: must be one of auto, none, "):
        EngineConfig(**options)


def test_every_option_arrives(tmp_path: Path) -> None:
    given = {
        "--served-model-name": "m",
        "--dtype": "float16",
        "--quantization": "int8",
        "--kv-cache-dtype": "int8",
        "--native": "require",
        "--native-folder": str(tmp_path / "native"),
        "--threads": "3",
        "--max-model-len": "100",
        "--max-num-seqs": "3",
        "--feature-slots": "2",
        "--max-num-batched-tokens": "64",
        "--max-prefill-chunk": "32",
        "--target-itl": "0.25",
        "--scheduling-policy": "priority",
        "--prefix-cache-pages": "7",
        "--state-snapshots": "6",
        "--max-decode-steps": "5",
        "--decode-window": "0.5",
        "--speculation": "draft",
        "--draft-model": "small",
        "--max-proposed-tokens": "6",
        "--switch-interval": "0.001",
        "--max-queued-requests": "9",
        "--page-size": "8",
        "--kv-cache-bytes": "2G",
        "--hbm-utilization": "0.5",
        "--max-logprobs": "4",
        "--max-images": "3",
        "--max-image-bytes": "5M",
        "--max-image-pixels": "1000",
        "--max-image-tokens": "64",
        "--media-pool-tokens": "128",
        "--max-encode-patches": "256",
        OVERRIDE: '{"temperature": 0.5, "do_sample": true}',
        "--grammar-time-limit": "0.5",
        "--tool-call-parser": "pythonic",
        "--reasoning-parser": "none",
        "--compilation-cache": str(tmp_path),
        "--compiled": str(tmp_path / "compiled"),
    }
    config = serve_flags.engine_config(parse("demo", *(x for pair in given.items() for x in pair)))
    assert config == EngineConfig(
        served_model_name="m",
        dtype="float16",
        quantization="int8",
        kv_cache_dtype="int8",
        native="require",
        native_folder=tmp_path / "native",
        threads=3,
        max_model_len=100,
        max_num_seqs=3,
        feature_slots=2,
        max_num_batched_tokens=64,
        max_prefill_chunk=32,
        target_itl_s=0.25,
        scheduling_policy="priority",
        prefix_cache_pages=7,
        state_snapshots=6,
        max_decode_steps=5,
        decode_window_s=0.5,
        speculation="draft",
        draft_model="small",
        max_proposed_tokens=6,
        switch_interval_s=0.001,
        max_queued_requests=9,
        page_size=8,
        kv_cache_bytes=2 * 2**30,
        hbm_utilization=0.5,
        max_logprobs=4,
        max_images=3,
        max_image_bytes=5 * 2**20,
        max_image_pixels=1000,
        max_image_tokens=64,
        media_pool_tokens=128,
        max_encode_patches=256,
        generation_config={"temperature": 0.5, "do_sample": True},
        grammar_time_limit_s=0.5,
        tool_call_parser="pythonic",
        reasoning_parser="none",
        compilation_cache=tmp_path,
        compiled=tmp_path / "compiled",
    )
    assert serve_flags.engine_config(parse("demo", "--compilation-cache", "off")).compilation_cache is None
    assert not serve_flags.engine_config(parse("demo", "--no-overlap")).overlap
    in_stages = serve_flags.engine_config(parse("demo", "--pipeline-parallel-size", "3"))
    assert in_stages.pipeline_parallel_size == 3
    assert serve_flags.engine_config(parse("demo")).metrics
    assert not serve_flags.engine_config(parse("demo", "--no-metrics")).metrics


def test_every_option_of_the_engine_can_be_given() -> None:
    """An option that is added to EngineConfig fails here until the command has a flag for it."""
    offered = set(vars(parse("demo")))
    later = {"max_adapters", "max_cached_adapters", "max_adapter_rank", "adapter_dir", "adapter_experts"}
    assert {f.name for f in dataclasses.fields(EngineConfig)} - {"show_progress"} - later <= offered
    assert names_of(ServerOptions) <= offered


def names_of(options: Any) -> set[str]:
    """Return the names of its fields; a field that is a group of options stands for those of the group."""
    names: set[str] = set()
    for field in dataclasses.fields(options):
        group = field.default_factory if field.default is dataclasses.MISSING else field.default
        names |= names_of(group) if dataclasses.is_dataclass(group) else {field.name}
    return names


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, ["FakeForCausalLM, auto, vocabulary", "scheduling: fcfs; prefix cache: all free pages"]),
        (
            {"quantization": "int8", "scheduling_policy": "priority", "prefix_cache_pages": 7},
            ["FakeForCausalLM, auto with int8, vocabulary", "priority; prefix cache: at most 7 pages"],
        ),
        ({"prefix_cache_pages": 0}, ["prefix cache: off"]),
        ({"kv_cache_dtype": "int8"}, ["FakeForCausalLM, auto, KV cache in int8, vocabulary"]),
        ({"state_snapshots": 6}, ["prefix cache: all free pages, 6 snapshots of state"]),
    ],
)
def test_what_was_resolved_is_told(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], lines: list[str]
) -> None:
    engine: Any = FakeEngine(**options)
    with caplog.at_level(logging.INFO):
        serve._tell(engine)
    for line in lines:
        assert line in caplog.text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("512M", 512 * 2**20),
        ("2G", 2**31),
        ("2g", 2**31),
        ("1.5GiB", 3 * 2**29),
        ("4kb", 4096),
        ("7B", 7),
    ],
)
def test_size(text: str, value: int) -> None:
    assert flags.size(text) == value


@pytest.mark.parametrize("text", ["", "G", "2X", "-1", "0", "inf", "nan", "1e400G", "0.1", "2 G G"])
def test_bad_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        flags.size(text)


def test_help_has_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    for part in ("penstock serve demo", "default: 50051", "--kv-cache-bytes", "SIGTERM"):
        assert part in text


@pytest.mark.parametrize(("given", "connections"), [("7", 7), ("0", 65_536)])
def test_every_connection_may_have_a_file(
    run: Run, monkeypatch: pytest.MonkeyPatch, given: str, connections: int
) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(serve, "raise_limit", wanted.append)
    run("./no-such-folder", "--port", "0", "--max-connections", given)
    assert len(wanted) == 1
    assert wanted[0] > connections
    run("./no-such-folder", "--port", "0", "--control-port", "0", "--max-connections", given)
    assert wanted[1] - wanted[0] == connections, "each address has as many"


def test_traces_and_server_have_the_same_id(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def tracing(options: TracingOptions, *, version: str, instance_id: str) -> Any:
        told.append(instance_id)
        return argparse.Namespace(shutdown=lambda timeout_s: None)

    def server(
        options: ServerOptions, tracing: Any, *, collector: Collector, instance_id: str, **_: Any
    ) -> Any:
        told.extend([instance_id, str(collector.resource.attributes["service.instance.id"])])
        raise ConfigError("no server today")

    monkeypatch.setattr(serve, "open_tracing", tracing)
    monkeypatch.setattr(serve, "PenstockServer", server)
    code, errors = run("demo", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:1")
    assert (code, len(set(told)), len(told)) == (1, 1, 3), errors


@pytest.mark.parametrize(("given", "used"), [(None, "0.95"), ("0.5", "0.5")])
def test_jax_may_take_most_of_an_accelerator(
    run: Run, monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    """Unless the environment says how much."""
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setenv(name, given or "")  # so that it is as before when the test ends
    if given is None:
        monkeypatch.delenv(name)
    run("demo", "--page-size", "3")
    assert os.environ[name] == used


def test_a_bound_for_proposals_is_refused_where_nothing_is_proposed() -> None:
    assert {each.name: each.default for each in dataclasses.fields(EngineConfig)}["speculation"] == "auto"
    with pytest.raises(ConfigError, match="max_proposed_tokens: goes with a speculation other than off"):
        EngineConfig(speculation="off", max_proposed_tokens=3)
    for given, resolved in ((None, 4), (3, 3)):
        config = EngineConfig(speculation="lookup", max_proposed_tokens=given, max_num_seqs=2)
        assert resolve(config, CPU_SIZES).max_proposed_tokens == resolved
        assert resolve(config, CPU_SIZES).most_rows == 2 * (1 + resolved)
    assert resolve(EngineConfig(speculation="off", max_num_seqs=2), CPU_SIZES).most_rows == 2


def test_a_text_for_lookups_goes_with_auto() -> None:
    config = serve_flags.engine_config(parse("demo", "--speculation", "auto", "--lookup-text", "demo"))
    assert (config.speculation, config.lookup_text) == ("auto", "demo")
