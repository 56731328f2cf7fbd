"""What `penstock serve --openai-port` tells its OpenAI front, and what it refuses."""

from __future__ import annotations

import argparse
import socket
import tempfile
from pathlib import Path

import pytest

from penstock.openai.settings import Settings
from penstock.runtime.errors import ConfigError
from penstock.server_cli.commands import openai, serve
from penstock.server_cli.processes.openai_front import front_settings, socket_for_the_front
from penstock.server_cli.serving.serve_flags import server_options


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", "demo", *arguments])


def told(*arguments: str) -> Settings | None:
    """Return what the front of a server with these flags is told."""
    args = parse(*arguments)
    with socket_for_the_front(args):
        return front_settings(args, server_options(args))


def test_there_is_no_front_unless_a_port_is_given() -> None:
    args = parse()
    with socket_for_the_front(args) as is_private:
        assert (front_settings(args, server_options(args)), is_private, args.unix_socket) == (
            None,
            False,
            None,
        )


def test_the_front_calls_the_server_through_a_socket_that_only_its_user_reaches() -> None:
    args = parse("--openai-port", "8000", "--port", "none")
    with socket_for_the_front(args) as is_private:
        options = server_options(args)
        settings = front_settings(args, options)
        folder = args.unix_socket.parent
        assert is_private
        assert folder.stat().st_mode & 0o777 == 0o700
        assert options.listen.unix_socket == args.unix_socket
    assert settings is not None
    assert (settings.addr, settings.host, settings.port) == (f"unix:{folder}/grpc", "127.0.0.1", 8000)
    assert not folder.exists()


def test_what_killed_servers_left_is_removed_and_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sockets = {}
    for name in ("penstock-front-killed", "penstock-front-lives", "another"):
        (tmp_path / name).mkdir()
        sockets[name] = socket.socket(socket.AF_UNIX)
        sockets[name].bind(str(tmp_path / name / "grpc"))
    sockets["penstock-front-lives"].listen()
    (tmp_path / "penstock-front-begins").mkdir()
    args = parse("--openai-port", "8000")
    with socket_for_the_front(args):
        left = {path.name for path in tmp_path.iterdir()} - {args.unix_socket.parent.name}
    for made in sockets.values():
        made.close()
    assert left == {"penstock-front-lives", "penstock-front-begins", "another"}


def test_a_socket_of_the_operator_serves_the_front_too(tmp_path: Path) -> None:
    args = parse("--openai-port", "0", "--unix-socket", str(tmp_path / "s"))
    with socket_for_the_front(args) as is_private:
        assert not is_private
    settings = front_settings(args, server_options(args))
    assert settings is not None
    assert settings.addr == f"unix:{tmp_path}/s"


def test_the_front_has_the_servers_certificates_times_and_bounds() -> None:
    tls = ["--tls-cert", "c.pem", "--tls-key", "c.key", "--client-ca", "ca.pem", "--openai-host", "0.0.0.0"]
    settings = told(
        *("--openai-port", "1", *tls, "--grace", "7", "--stall-limit", "3", "--no-access-log"),
        *("--openai-store", "kept.db"),
    )
    assert settings is not None
    assert (settings.tls_cert, settings.tls_key, settings.client_ca) == (
        Path("c.pem"),
        Path("c.key"),
        Path("ca.pem"),
    )
    assert settings.host == "0.0.0.0"
    assert settings.grace_s > 7
    assert settings.stall_limit_s == 3
    assert settings.store == Path("kept.db")
    assert not settings.access_log


def test_a_front_has_room_for_what_the_server_takes() -> None:
    """A prompt as JSON, with its escapes, is larger than the message that the server gets."""
    settings = told("--openai-port", "1", "--max-receive-bytes", "100M", "--max-connections", "0")
    assert settings is not None
    assert settings.max_body_bytes >= 200 << 20
    assert settings.max_connections > 4096
    assert told("--openai-port", "1", "--max-receive-bytes", "1", "--max-connections", "1") is not None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--openai-host", "::1"], "openai_host: needs an openai_port"),
        (["--openai-store", "kept.db"], "openai_store: needs an openai_port"),
        (["--openai-port", "65536"], "openai_port: must be from 0 to 65535, not 65536"),
        (["--openai-port", "1", "--openai-host", "[::1]"], "openai_host: must be a name or an IP address"),
        (
            ["--openai-port", "1", "--openai-host", "0.0.0.0"],
            "openai_host: 0.0.0.0 can be reached from other",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("[", r"\[")):
        told(*arguments)


def test_a_front_for_others_may_be_had_by_saying_so() -> None:
    settings = told("--openai-port", "1", "--openai-host", "0.0.0.0", "--insecure")
    assert settings is not None
    assert settings.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (("--addr", "192.0.2.1:5"), ("--addr: ", "use --tls,", "with --insecure")),
        (("--host", "0.0.0.0"), ("--host: ", "give --tls-cert,", "with --insecure")),
        (("--stall-limit", "0"), ("--stall-limit: ",)),
        (("--store-days", "0"), ("--store-days: ",)),
        (("--store", "/dev/null/kept.db"), ("--store: /dev/null/kept.db cannot be used",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_refusals_of_penstock_openai_name_flags(
    arguments: tuple[str, ...], flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    openai.add_parser(parser.add_subparsers())
    assert openai.run(parser.parse_args(["openai", *arguments])) == 2
    said = capsys.readouterr().err
    assert all(flag in said for flag in flags), said
